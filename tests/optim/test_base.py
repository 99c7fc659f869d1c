import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.optim import SGD, Adam, AdamW, Muon
from octavo.optim.base import CompactOptimizer, PreparedUpdate, changes_since
from octavo.weights.stored import StoredWeight


def test_amsgrads_state_is_refused():
    weight = nn.Parameter(torch.ones(2))
    torchs = torch.optim.AdamW([weight], amsgrad=True)
    weight.grad = torch.ones(2)
    torchs.step()
    with pytest.raises(ValueError, match="amsgrad=True"):
        octavo.optim.AdamW([weight]).load_state_dict(torchs.state_dict())


KINDS = [octavo.optim.AdamW, octavo.optim.Adam, octavo.optim.SGD, octavo.optim.Muon]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def of(kind: type, **options: Any) -> tuple[list[nn.Parameter], CompactOptimizer]:
    """Equal weights and an optimizer of them, at each call."""
    generator = torch.Generator().manual_seed(3)
    shapes = {(5, 200): torch.bfloat16, (7, 1) if kind is Muon else (7,): torch.float32}
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in shapes.items()]
    options = {"lr": 0.1, **({"momentum": 0.9} if kind is octavo.optim.SGD else {}), **options}
    return params, kind(params, **options)


def fill(params: list[nn.Parameter], seed: int) -> None:
    """The gradients of a step."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def copies_of(params: list[nn.Parameter], optimizer: CompactOptimizer) -> list[Tensor]:
    """Copies of all weights and states."""
    states = [value for param in params for value in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*params, *states)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trained(steps: int, kind: type, **options: Any) -> list[Tensor]:
    """Return the parameters and the state after ``steps`` plain steps."""
    params, optimizer = of(kind, **options)
    for seed in range(steps):
        fill(params, seed)
        optimizer.step()
    return copies_of(params, optimizer)


@each_kind
def test_options_may_be_tensors_which_stay_as_they_are(kind: type) -> None:
    """Options may be tensors, as torch's may; they stay as they are."""
    options: dict[str, Any] = {"lr": 0.125, "weight_decay": 0.25}
    options |= {"momentum": 0.5, "dampening": 0.25} if kind is octavo.optim.SGD else {"eps": 2.0**-20}
    betas = {"betas": (0.5, 0.75)} if issubclass(kind, Adam) else {}
    as_tensors = {name: torch.tensor(value) for name, value in options.items()}
    as_tensors |= {name: tuple(map(torch.tensor, values)) for name, values in betas.items()}
    results = []
    for arguments in (options | betas, as_tensors):
        params, optimizer = of(kind, **arguments)
        for step in range(3):
            fill(params, step)
            optimizer.step()
        results.append(copies_of(params, optimizer))
        assert {name: optimizer.param_groups[0][name] for name in arguments} == options | betas
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_in_compiled_code_it_is_a_graph_break() -> None:
    params, optimizer = of(octavo.optim.AdamW)

    def step(x: Tensor) -> Tensor:
        y = x * 2
        optimizer.step()
        return y + params[1].sum()

    compiled = torch.compile(step, backend="aot_eager")
    for seed in (0, 1, 2):
        fill(params, seed)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0) + params[1].detach().sum())
    assert equal(copies_of(params, optimizer), trained(3, octavo.optim.AdamW))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(3))


def test_a_subclass_may_override_its_step() -> None:
    class Counting(octavo.optim.SGD):
        steps = 0

        def step(self, closure: Any) -> Any:
            self.steps += 1
            return super().step(closure)

    weight = nn.Parameter(torch.ones(4))
    optimizer = Counting([weight], lr=0.5)
    weight.grad = torch.ones(4)
    assert optimizer.step(lambda: 3.0) == 3.0 and optimizer.steps == 1
    assert torch.equal(weight.detach(), torch.full((4,), 0.5))


@each_kind
def test_a_grad_scaler_leaves_gradients_unscaled_unless_it_skips(kind: type) -> None:
    for storage in (None, "fp8"):
        weight = nn.Parameter(torch.ones(1, 300))
        optimizer = kind([weight], lr=0.1, gradient_storage=storage)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor, expected in ((1.0, 1.0), (math.inf, math.inf)):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            grad = weight.grad if storage is None else weight.grad.dequantize()  # type: ignore[union-attr]
            assert grad is not None and (not math.isfinite(expected) or float(grad[0, 0]) == expected)


@each_kind
def test_float16_weights_are_their_own_masters(kind: type) -> None:
    weight = nn.Parameter(torch.randn(5, 200).half())
    wide = nn.Parameter(weight.detach().float())
    optimizer, exact = kind([weight], lr=0.01, moments="fp32"), kind([wide], lr=0.01, moments="fp32")
    for _ in range(3):
        weight.grad = torch.randn(5, 200).half()
        wide.grad = weight.grad.float()
        optimizer.step()
        exact.step()
    assert set(optimizer.state[weight]) <= {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert torch.allclose(weight.detach().float(), wide.detach(), rtol=0, atol=4 * 2.0**-10)


# Torch's own arguments stand in the signatures; those that octavo has no use for are refused, with a reason.
PAIRS = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam), (SGD, torch.optim.SGD), (Muon, torch.optim.Muon)]


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_the_signature_has_all_of_torchs(ours: Any, torchs: Any) -> None:
    ours_by_name, theirs = (inspect.signature(kind).parameters for kind in (ours, torchs))
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in ours_by_name.values())
    for name, parameter in theirs.items():
        assert (ours_by_name[name].default, ours_by_name[name].kind) == (parameter.default, parameter.kind)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_what_is_off_is_taken_and_what_is_on_refused(ours: Any, torchs: Any) -> None:
    p = nn.Parameter(torch.ones(2, 2))
    refused = inspect.signature(torchs).parameters.keys() & {
        *("amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
    }
    ours([p], **dict.fromkeys(refused, False))
    for name in refused:
        with pytest.raises(ValueError, match=f"{name}=True: .*; leave the argument out"):
            ours([p], **{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentums'"):
        ours([p], momentums="fp8")
    for params in ({p}, [{"params": {p}}]):
        with pytest.raises(TypeError, match=r"set|sets"):
            ours(params)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_gradient_that_torch_has_not_negated_yet_is_read_with_its_sign(kind: type) -> None:
    """Autograd leaves it so where it has one element."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    for number, weight in enumerate(weights):
        torch.complex(torch.ones(1), weight).conj().mul(1 + 2j).real.sum().backward()
        assert weight.grad is not None and weight.grad.is_neg() and weight.grad.item() == 2
        if number == 1:
            weight.grad = weight.grad.resolve_neg()
        kind([weight], lr=0.1).step()
    assert weights[0].item() == weights[1].item() < 1


def test_a_part_is_known_by_its_codes():
    """Codes in other memory, as FSDP2 makes when it loads shards, count as a write only if they differ."""
    part = StoredWeight.cast(torch.randn(8, 16)).shard(0, 4)
    held = part.qdata
    before = PreparedUpdate(None, held, held.data_ptr(), held._version, (), ())  # type: ignore[arg-type]
    assert changes_since(before, part, held) == (False, False)
    again = held.clone()
    assert changes_since(before, part, again) == (True, False)
    again.view(torch.uint8)[0, 0] ^= 1
    assert changes_since(before, part, again) == (True, True)
    held.view(torch.uint8).add_(0)
    assert changes_since(before, part, held) == (False, True)


def test_optimizers_of_one_weight_each_draw_other_bits_by_another_seed() -> None:
    def stepped(seed: int) -> Tensor:
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        weight.grad = torch.full_like(weight, 1e-3)
        AdamW([weight], lr=1e-3, master=None, seed=seed).step()
        return weight.detach()

    assert torch.equal(stepped(1), stepped(1))
    assert (stepped(1) != stepped(2)).float().mean() > 0.2


def facts_of(optimizer: CompactOptimizer) -> list[Any]:
    """Return what a refused group must leave as it was."""
    groups = [{**group, "params": [*map(id, group["params"])]} for group in optimizer.param_groups]
    hooked = [] if optimizer._gradients is None else [*map(id, optimizer._gradients.hooks.handles)]
    return [groups, optimizer.clip_update, optimizer.shared_options(), hooked]


MATRIX, VECTOR, EXPERTS = (2, 3), (3,), (2, 4, 4)


@pytest.mark.parametrize("storage", [None, "fp8"])
@pytest.mark.parametrize(
    ("kind", "arguments", "group", "error"),
    [
        (AdamW, {}, {}, ValueError),
        (Adam, {}, {"betas": (torch.ones(2), 0.9)}, RuntimeError),
        (SGD, {}, {}, ValueError),
        (Muon, {}, {"algorithm": "adamw"}, ValueError),
        (Muon, {"adamw": {}}, {}, ValueError),  # of the group that follows
        (Muon, {"moments": "fp8"}, {"params": [EXPERTS]}, ValueError),  # which name no algorithm
    ],
    ids=str,
)
def test_a_group_that_is_refused_changes_nothing(
    kind: type, arguments: Any, group: dict[str, Any], error: type[Exception], storage: Any
) -> None:
    params, optimizer = of(kind, **{"moments": "fp32", "gradient_storage": storage, **arguments})
    before, stored = facts_of(optimizer), nn.Parameter(StoredWeight.cast(torch.ones(MATRIX)))
    refused = nn.Parameter(torch.ones(VECTOR, dtype=torch.float64))
    others = [nn.Parameter(torch.ones(shape)) for shape in group.get("params", [MATRIX])]
    last = [] if "params" in group else [refused]
    with pytest.raises(error):
        optimizer.add_param_group({**group, "params": [stored, *others, *last]})
    assert facts_of(optimizer) == before and not stored.facts.awaited  # type: ignore[attr-defined]
    fill(params, 0)
    optimizer.step()
