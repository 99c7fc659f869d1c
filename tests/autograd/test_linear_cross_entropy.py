"""A head's loss in chunks, against float64, the head and its loss one after the other, and one chunk."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import octavo
from octavo import E4M3, E5M2, Cast, Delayed, Dynamic, HigherOrderGradientError, PerBlock, PerRow, PerTensor, Recipe
from octavo.autograd import linear_cross_entropy as module
from octavo.autograd.linear_cross_entropy import join_scales
from octavo.granularity import PADDING
from octavo.nn import linear_cross_entropy
from octavo.nn.saved import saved_by_kind
from octavo.numerics import E8M0
from tests.support.casts import poisoned_memory
from tests.support.combinations import each_pair
from tests.support.freed import Fsdp, Zero3
from tests.support.helpers import FP8_RECIPES

E4M3_ROWS, SQUARES = Cast(E4M3, PerRow(), Dynamic()), Cast(E4M3, PerBlock(32, 32), Dynamic())
MIXED = {  # casts of grad_output by scales that need an amax and by others, and an input in E5M2
    "blocks forward, rows back": Recipe(
        output=(Cast(E4M3, PerBlock(128, 128), Dynamic()), E4M3_ROWS),
        grad_input=(Cast(E4M3, PerBlock(1, 32), Dynamic()), Cast(E4M3, PerRow(), Dynamic())),
        grad_weight=(E4M3_ROWS, E4M3_ROWS),
    ),
    "rows forward, blocks back": Recipe(
        output=(E4M3_ROWS, E4M3_ROWS),
        grad_input=(E4M3_ROWS, E4M3_ROWS),
        grad_weight=(Cast(E4M3, PerBlock(1, 128), Dynamic()), Cast(E4M3, PerBlock(1, 128), Dynamic())),
    ),
    "an input in E5M2": Recipe(
        output=(Cast(E5M2, PerTensor(), Delayed(4)), Cast(E4M3, PerTensor(), Dynamic())),
        grad_weight=(Cast(E4M3, PerTensor(), Dynamic()), Cast(E5M2, PerTensor(), Delayed(4))),
    ),
    "squares": Recipe((SQUARES, SQUARES), (SQUARES, SQUARES), (SQUARES, SQUARES)),
    "output alone": Recipe(output=(E4M3_ROWS, E4M3_ROWS)),
    "gradients alone": Recipe(
        grad_input=(Cast(E5M2, PerTensor(), Delayed(4)), Cast(E4M3, PerTensor(), Delayed(4))),
        grad_weight=(Cast(E5M2, PerTensor(), Delayed(4)), Cast(E4M3, PerTensor(), Delayed(4))),
    ),
}
ALL_RECIPES: dict[str, Any] = FP8_RECIPES | {"high_precision": octavo.recipes.high_precision}
ALL_RECIPES |= {name: (lambda recipe=recipe: recipe) for name, recipe in MIXED.items()}


def head_of(recipe: Recipe, dtype: torch.dtype = torch.float32, bias: bool = False) -> octavo.nn.Linear:
    return octavo.nn.Linear(48, 200, bias, dtype=dtype, recipe=recipe)


def batch(rows: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, 200, (rows,))
    target[::7] = -100
    return torch.randn(rows, 48, dtype=dtype), target


def step(loss: Any, head: octavo.nn.Linear, x: Tensor, target: Tensor, factor: float = 3.0) -> list[Tensor]:
    """Return (the loss, the gradients of x and of the head's parameters)."""
    x = x.detach().clone().requires_grad_()
    value = loss(x, head, target)
    return [value.detach(), *torch.autograd.grad(value * factor, [x, *head.parameters()])]


def apart(x: Tensor, head: octavo.nn.Linear, target: Tensor, **options: Any) -> Tensor:
    return octavo.nn.cross_entropy(head(x), target, **options)


def in_float64(x: Tensor, head: octavo.nn.Linear, target: Tensor, factor: float = 3.0, **options: Any) -> list[Tensor]:
    softcap = options.pop("softcap", None)
    tensors = [one.detach().double().requires_grad_() for one in (x, *head.parameters())]
    z = F.linear(*tensors)
    z = z if softcap is None else softcap * (z / softcap).tanh()
    loss = F.cross_entropy(z, target, **options)
    return [loss.detach(), *torch.autograd.grad(loss * factor, tensors)]


def lay_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay codes for products as on Hopper, transposed by themselves and padded."""
    for name in ("octavo.autograd.casts", "octavo.autograd.linear_cross_entropy", "octavo.kernels.layouts"):
        monkeypatch.setattr(f"{name}.needs_transposed_codes", lambda device: True)


def error(one: Tensor, true: Tensor) -> float:
    return float((one.double() - true).norm() / true.norm())


@each_pair(
    name=list(ALL_RECIPES),
    dtype=[torch.float32, torch.bfloat16],
    bias=[False, True],
    rows=[1 << 12, 128, 96],  # the last: chunks that blocks of 128 rows widen
    reduction=["mean", "sum"],
    softcap=[None, 3.0],
    smoothing=[0.0, 0.1],
    lays=[False, True],
)
def test_against_float64_and_beside_the_parts(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", case["rows"])
    if case["lays"]:
        lay_codes(monkeypatch)
    recipe = ALL_RECIPES[case["name"]]()
    head, (x, target) = head_of(recipe, case["dtype"], case["bias"]), batch(dtype=case["dtype"])
    options = {"reduction": case["reduction"], "label_smoothing": case["smoothing"], "softcap": case["softcap"]}
    twin = copy.deepcopy(head)
    ours = step(functools.partial(linear_cross_entropy, **options), head, x, target)
    parts = step(functools.partial(apart, **options), twin, x, target)
    true = in_float64(x, head, target, **options)
    torch.testing.assert_close(ours[0], parts[0], rtol=1e-6, atol=1e-6)
    for one, part, exact in zip(ours[1:], parts[1:], true[1:], strict=True):
        # E5M2's steps are twice E4M3's, in which some recipes cast grad_output
        assert one.dtype == part.dtype and error(one, exact) < 2 * error(part, exact) + 2.0**-21
    if case["dtype"] is torch.float32 and recipe.is_high_precision:
        assert all(error(one, exact) < 1e-6 for one, exact in zip(ours, true, strict=True))


@pytest.mark.parametrize("name", list(ALL_RECIPES))
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of chunks changes no bit, of numbers whose sums float32 has exactly."""
    head, (x, target) = head_of(ALL_RECIPES[name]()), batch()
    with torch.no_grad():
        for tensor in (x, head.weight):
            tensor.copy_((tensor * 2).round().clamp(-2, 2) / 2)
    results = []
    for rows in (1 << 12, 128):
        monkeypatch.setattr(module, "ROWS", rows)
        results.append(step(linear_cross_entropy, copy.deepcopy(head), x, target))
    one, several = results
    assert torch.equal(one[0], several[0]) and torch.equal(one[0], step(apart, head, x, target)[0])
    assert torch.equal(one[1], several[1])
    exact = head.recipe.grad_weight is not None  # else chunks are added up
    torch.testing.assert_close(one[2], several[2], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)


def test_rows_that_are_ignored_are_exact_zeros_all_of_them_too() -> None:
    for recipe in (octavo.recipes.dynamic(), octavo.recipes.high_precision()):
        head, (x, target) = head_of(recipe, bias=True), batch(9)
        _, dx, *_ = step(linear_cross_entropy, head, x, target)
        assert not dx[::7].any() and dx[1:7].any(1).all()
        loss, *grads = step(linear_cross_entropy, head, x, torch.full_like(target, -100))
        assert loss.isnan() and not any(grad.any() for grad in grads)


def test_the_history_advances_as_by_one_call_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 128)
    head = head_of(octavo.recipes.delayed(4))
    twin, optimizers = copy.deepcopy(head), []
    for one in (head, twin):
        optimizers.append(torch.optim.SGD(one.parameters(), lr=0.0))
    for _ in range(3):
        x, target = batch()
        before = copy.deepcopy(head.fp8.state)
        for one, loss, optimizer in zip((head, twin), (linear_cross_entropy, apart), optimizers, strict=True):
            value = loss(x.requires_grad_(), one, target)
            assert one is twin or all(map(torch.equal, head.fp8.state, before))  # forward writes nothing
            value.backward(retain_graph=True)
            if one is head:
                once = head.delayed_amax_history.clone()
                value.backward()  # again
                assert torch.equal(head.delayed_amax_history, once)
            optimizer.step()
        for ours, other in zip(head.fp8.state[:2], twin.fp8.state[:2], strict=True):
            assert torch.equal(ours[:2], other[:2])  # input and weight
            assert not ours[2].any() and other[2].any()  # no cast of grad_output read a history
    state, of_twin = octavo.nn.delayed_state_dict(head), octavo.nn.delayed_state_dict(twin)
    assert state.keys() == of_twin.keys() and all(one.shape == of_twin[name].shape for name, one in state.items())
    with torch.no_grad():
        linear_cross_entropy(x, head, target)
    assert torch.equal(octavo.nn.delayed_state_dict(head)["delayed_amax_history"], state["delayed_amax_history"])


def test_backward_twice_and_parts_of_it() -> None:
    for name in ("delayed", "blockwise", "high_precision"):
        head, (x, target) = head_of(ALL_RECIPES[name](), bias=True), batch()
        x.requires_grad_()
        loss = linear_cross_entropy(x, head, target)
        leaves = [x, *head.parameters()]
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert all(map(torch.equal, first, [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for leaf in leaves]))
        with pytest.raises(HigherOrderGradientError):
            torch.autograd.grad(loss, x, create_graph=True)
        frozen = linear_cross_entropy(x, head.requires_grad_(False), target)  # the input's gradient alone
        assert torch.equal(torch.autograd.grad(frozen, x)[0], first[0])
        head.requires_grad_(True)
        loss = linear_cross_entropy(x.detach(), head, target)  # the weight's alone
        assert torch.equal(torch.autograd.grad(loss, head.weight)[0], first[1])


@pytest.mark.parametrize("dtype", [torch.float32, E8M0])
def test_scales_of_chunks_lie_as_their_fake_says(dtype: torch.dtype) -> None:
    chunks = [torch.exp2(torch.arange(3 * columns).view(3, columns) % 7).to(dtype) for columns in (2, 1, 4)]
    joined = join_scales(chunks)
    assert torch.equal(joined.float(), torch.cat([chunk.float() for chunk in chunks], 1)) and joined.dtype == dtype
    with FakeTensorMode() as mode:
        fake = join_scales([mode.from_tensor(chunk) for chunk in chunks])
    assert (fake.shape, fake.stride(), fake.dtype) == (joined.shape, joined.stride(), dtype)


def test_no_rows() -> None:
    head = head_of(octavo.recipes.rowwise())
    for x, target in (batch(0), (torch.zeros(2, 0, 48), torch.zeros(2, 0).long())):
        loss, dx, dw = step(functools.partial(linear_cross_entropy, reduction="sum"), head, x, target)
        assert loss == 0 and dx.shape == x.shape and not dw.any()


@pytest.mark.parametrize(("name", "bytes_a_logit"), [("delayed", 1.0), ("blockwise", 1.0 + 4 / 128), ("rowwise", 1.0)])
def test_a_byte_a_logit_is_saved(name: str, bytes_a_logit: float) -> None:
    class Head(octavo.nn.Linear):
        def forward(self, x: Tensor, loss: Any = None) -> Any:
            if loss is None:
                return linear_cross_entropy(x, self, torch.zeros(len(x)).long())
            return super().forward(x, loss)

    rows, columns = 256, 1024
    head = Head(32, columns, bias=False, dtype=torch.bfloat16, recipe=ALL_RECIPES[name]())
    saved = saved_by_kind(head, (torch.randn(rows, 32, dtype=torch.bfloat16, requires_grad=True),))
    of_tokens = rows * 32 * (2 + 1 + 4 / 32)  # dx, and the input's codes with their scales
    assert abs(sum(saved.values()) - rows * columns * bytes_a_logit - of_tokens) < 2000 + rows * columns / 1000


@pytest.mark.parametrize("engine", [Zero3, Fsdp])
@pytest.mark.parametrize("name", ["delayed", "high_precision", "output alone"])
def test_a_weight_that_others_free_between_forward_and_backward(name: str, engine: type[Zero3]) -> None:
    head, (x, target) = head_of(ALL_RECIPES[name](), bias=True), batch()
    expected = step(linear_cross_entropy, copy.deepcopy(head), x, target)
    freed = engine([head])
    x.requires_grad_()
    loss = linear_cross_entropy(x, head, target)
    assert head.weight.untyped_storage().nbytes() == 0
    (loss * 3.0).backward()
    freed.gather()
    assert all(map(torch.equal, [loss.detach(), x.grad, head.weight.grad, head.bias.grad], expected))


def test_inspect_sees_the_input(tmp_path: Path) -> None:
    net, (x, target) = nn.Sequential(head_of(octavo.recipes.delayed())), batch()
    with octavo.inspect.record(net, tmp_path, every=1) as recorder:
        linear_cross_entropy(x.requires_grad_(), net[0], target).backward()
        recorder.step()
    record = octavo.inspect.load(tmp_path)
    counted = dict(zip((row.role for row in record.rows), record.measures["elements"][0], strict=True))
    assert counted["input"] == x.numel() and not counted["grad_output"] > 0
    with octavo.inspect.trace_faults(net, raises=False) as trace:
        x = x.detach().clone()
        x[3, 5] = torch.nan
        linear_cross_entropy(x.requires_grad_(), net[0], target).backward()
        trace.step()
    assert trace.fault is not None and (trace.fault.role, trace.fault.share) == ("input", 1 / 300)


def test_logits_of_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 64)
    shapes: list[Any] = []
    real = module.kernels.cross_entropy
    monkeypatch.setattr(module.kernels, "cross_entropy", lambda z, *how: shapes.append(z.shape) or real(z, *how))
    head, (x, target) = head_of(octavo.recipes.dynamic()), batch(150)
    step(linear_cross_entropy, head, x, target)
    assert [tuple(shape) for shape in shapes] == [(64, 200), (64, 200), (22, 200)]


def test_the_padding_behind_the_last_chunk_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's rows are a multiple of PADDING, though ROWS is none: what lies behind the last's would be NaN."""
    lay_codes(monkeypatch)
    monkeypatch.setattr(module, "ROWS", PADDING + PADDING // 2)
    for recipe in (octavo.recipes.dynamic(), octavo.recipes.mx()):
        for rows in (1, module.ROWS - 1, 2 * module.ROWS - 1):
            head, (x, target) = head_of(recipe), batch(rows + 1)
            with poisoned_memory():
                ours = step(linear_cross_entropy, head, x[1:], target[1:])  # of the first row there is no target
            exact = in_float64(x[1:], head, target[1:])
            assert all(error(one, true) < 0.06 for one, true in zip(ours, exact, strict=True)), (recipe.name, rows)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["delayed", *(pytest.param(one, marks=pytest.mark.full) for one in ("mx", *MIXED))])
def test_compiled_in_one_graph(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 128)
    torch.compiler.reset()
    head, (x, target) = head_of(ALL_RECIPES[name]()), batch(200)
    twin = copy.deepcopy(head)
    compiled = torch.compile(linear_cross_entropy, backend=backend, fullgraph=True)
    for _ in range(2):
        ours, eager = (step(loss, one, x, target) for loss, one in ((compiled, twin), (linear_cross_entropy, head)))
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    states = [octavo.nn.delayed_state_dict(one) for one in (twin, head)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_checkpointed_and_under_autocast() -> None:
    for name in ("delayed", "rowwise", "high_precision"):
        head, (x, target) = head_of(ALL_RECIPES[name]()), batch()
        twin = copy.deepcopy(head)
        checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, linear_cross_entropy, use_reentrant=False)
        ours, plain = step(checkpoint, twin, x, target), step(linear_cross_entropy, head, x, target)
        assert all(map(torch.equal, ours, plain))
        with torch.autocast("cpu", torch.bfloat16):
            mixed, parts = (step(loss, head, x, target) for loss in (linear_cross_entropy, apart))
        assert [one.dtype for one in mixed] == [torch.float32] * 3
        torch.testing.assert_close(mixed[0], parts[0], rtol=1e-6, atol=1e-6)
        for one, part in zip(mixed[1:], parts[1:], strict=True):
            assert error(one, part.double()) < 0.09
