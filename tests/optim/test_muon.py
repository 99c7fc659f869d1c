"""Muon beside torch.optim.Muon, whose results it has bit for bit where nothing is rounded."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from octavo import E4M3, PerBlock, PerTensor, quantize
from octavo.kernels.reference.optimizer_state import pieces
from octavo.kernels.step_numbers import key_of, random_bits
from octavo.optim import E4M4, AdamW, Moment, Muon
from octavo.optim.muon import MAX_UPDATE, owners_of
from octavo.optim.state import for_kernel
from octavo.weights.stored import StoredWeight
from tests.optim.test_stored_experts import assert_trained_alike, together_and_apart
from tests.support.helpers import stepped
from tests.support.rounded_once import rounded_once
from tests.support.triton_kernels import TritonKernels, in_place_of_reference

SHAPES = [(40, 200), (200, 40), (64, 64), (1, 130), (130, 1)]


def matrices(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def steps(optimizer: Any, params: list[nn.Parameter], count: int, start: int = 0) -> None:
    for step in range(start, start + count):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def master_values(optimizer: Muon, weight: nn.Parameter) -> Tensor:
    state = optimizer.state[weight]
    master, _ = for_kernel(weight, weight.detach(), state, optimizer.settings.in_state(state))
    return master.read_all(master.weight)


def equal(ours: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.03125, "momentum": 0.3, "adjust_lr_fn": "original", "ns_steps": 3, "ns_coefficients": (2, -1.5, 0.5)},
    ],
    ids=["default", "matching AdamW", "other coefficients"],
)
def test_exact_moments_give_torchs_results_bit_for_bit(options: dict[str, Any]) -> None:
    params_of_kinds = []
    for kind, exact in ((Muon, {"moments": "fp32"}), (torch.optim.Muon, {})):
        params: list[nn.Parameter] = matrices()
        optimizer: Any = kind([{"params": params[:2]}, {"params": params[2:], "momentum": 0.9}], **options, **exact)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
        for step in range(3):
            optimizer.param_groups[1]["weight_decay"] = 0.25 * step
            steps(optimizer, params, 1, step)
            schedule.step()
        params_of_kinds.append(params)
    assert equal(*params_of_kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_in_codes_is_the_average_encoded_with_the_steps_random_bits(dtype: torch.dtype) -> None:
    (param,) = matrices(dtype, [(40, 200)])
    optimizer = Muon([param], moments="fp8", seed=5)
    moment, wide = optimizer.moments[0], torch.zeros(40, 200)
    expected = moment.new_state("momentum_buffer", param.shape, "cpu")
    stored = moment.for_kernel("momentum_buffer", expected)
    for step in range(4):
        steps(optimizer, [param], 1, step)
        wide = wide.lerp(param.grad.float(), 1 - 0.95)  # type: ignore[union-attr]
        for piece in pieces(40, 200):
            bits = random_bits(key_of(key_of(5, 0), step + 1), piece.index(torch.device("cpu")))
            stored.write(piece, piece.of(wide).clone(), bits)
        state = optimizer.state[param]
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        wide = moment.read_codes(state["momentum_buffer_codes"], state["momentum_buffer_scale_inv"])


def trained(prepare: Callable[[Muon], Any] = lambda optimizer: None, **options: Any) -> list[Tensor]:
    params = matrices(torch.bfloat16, [(9, 140), (4, 70), (3, 0), (2, 5, 130)])
    groups: Any = [{"params": [param], "algorithm": "muon"} for param in params]
    optimizer = Muon(groups, lr=torch.tensor(0.02), moments="fp8", **options)
    prepare(optimizer)
    for step in range(3):
        stepped(optimizer, torch.stack([(param.float() * (step + 1)).sin().sum() for param in params]).sum())
    return [value for param in params for value in (param.detach(), *optimizer.state[param].values())]


def test_the_triton_launches_do_what_the_reference_does(kernels: TritonKernels) -> None:
    with rounded_once():
        expected = trained(gradient_storage="fp8")
    with in_place_of_reference(kernels):
        params = trained(gradient_storage="fp8")
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@pytest.mark.parametrize("master", ["split16", "fp32"])
def test_weights_in_fp8_follow_float32_ones(master: str) -> None:
    weight = nn.Parameter(StoredWeight.cast(torch.randn(40, 200), PerTensor()))
    start = weight.detach().dequantize()
    plain, weight = nn.Parameter(start.clone()), nn.Parameter(StoredWeight.cast(start, PerTensor()))
    ours, other = Muon([weight], lr=0.02, moments="fp32", master=master), Muon([plain], lr=0.02, moments="fp32")
    for step in range(6):
        plain.grad = torch.randn(40, 200, generator=torch.Generator().manual_seed(step))
        weight.grad = plain.grad.clone()
        ours.step()
        other.step()
    apart = (master_values(ours, weight) - plain).norm() / (plain - start).norm()
    assert apart == 0 if master == "fp32" else apart < 0.05


def test_an_update_of_a_weight_in_fp8_is_bounded() -> None:
    weight = nn.Parameter(StoredWeight.cast(torch.zeros(1, 8), PerTensor()))
    optimizer = Muon([weight], lr=0.5, ns_coefficients=(3.0, 0.0, 0.0), master="fp32")
    weight.grad = torch.eye(8)[:1]
    optimizer.step()
    assert float(optimizer.state[weight]["master_rest"][0, 0]) == -0.5 * MAX_UPDATE


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4,), {}, r"shape \(4,\): .* vectors, convolutions"),
        ((4, 2, 2), {}, r"shape \(4, 2, 2\): stacked experts belong in a group with \"algorithm\": \"muon\""),
        ((4, 4), {"lr": -1.0}, r"lr=-1\.0"),
        ((4, 4), {"weight_decay": float("nan")}, "weight_decay=nan"),
        ((4, 4), {"eps": -1.0}, r"eps=-1\.0 must be at least 0"),
        ((4, 4), {"momentum": 3.0}, r"momentum=3\.0 must be below 1"),
        ((4, 4), {"adjust_lr_fn": "mine"}, "adjust_lr_fn='mine': use None, 'original'"),
        ((4, 4), {"ns_steps": 100}, "ns_steps=100: give three"),
        ((4, 4), {"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1\.0, 2\.0\)"),
        ((4, 4), {"moments": Moment(E4M4)}, "has no sign"),
        ((4, 4), {"directions": "fp16"}, "directions='fp16': use 'bf16' or 'fp8'"),
    ],
    ids=str,
)
def test_wrong_arguments(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(shape))], **options)


def test_three_moments_are_the_momentum_and_adamws_two() -> None:
    three = Moment("fp32"), Moment("bf16"), Moment(E4M4)
    assert Muon(matrices(), moments=three).settings.moments == three
    with pytest.raises(TypeError, match=r"use .*, a Moment, or three Moments"):
        Muon(matrices(), moments=three[:2])


def refused(mesh: Any) -> str:
    for shape in ((2, 4, 4), (4, 4)):
        param = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(1)]))
        with pytest.raises(ValueError, match=r'share by rows.*"algorithm": "adamw"') as caught:
            Muon([{"params": [param], "algorithm": "muon"}])
    return str(caught.value)


def test_columns_are_refused(pool: Any) -> None:
    assert all("weight (4, 4)" in message for message in pool.run(refused, (2,)))


EXPERTS = (3, 40, 256)


def stacked(groups: Any, **options: Any) -> Muon:
    return Muon([{"params": groups, "algorithm": "muon"}], lr=0.02, weight_decay=0.3, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [(EXPERTS, {}), ((2, 70, 30), {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}), ((0, 8, 8), {})],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_is_a_matrix_of_torchs(shape: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Experts move as torch's matrices; one in bf16 is half of its master, the float32 matrix that torch moves."""
    (experts,) = matrices(dtype, [shape])
    torchs = [nn.Parameter(one.float()) for one in experts.detach()] or [nn.Parameter(torch.ones(1, 1))]
    optimizer = stacked([experts], moments="fp32", **options)
    other = torch.optim.Muon(torchs, lr=0.02, weight_decay=0.3, **options)
    for step in range(3):
        experts.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        experts.grad[step % 2 :: 2] *= 1e4  # each is scaled by its own norm
        for one, grad in zip(torchs, experts.grad, strict=False):
            one.grad = grad.float()
        optimizer.step()
        other.step()
    values = master_values(optimizer, experts).view(shape)
    assert all(torch.equal(*pair) for pair in zip(values, torchs, strict=bool(shape[0])))


@pytest.mark.covering(1)
@pytest.mark.parametrize("master", ["fp32", "split16", None])
@pytest.mark.parametrize(("moments", "gradients"), [("fp32", None), ("fp8", "fp8")], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(128, 128)], ids=str)
def test_experts_in_fp8_are_stepped_as_weights_of_their_own(
    granularity: Any, moments: str, gradients: str | None, master: str | None
) -> None:
    weight, apart = together_and_apart(granularity, EXPERTS)
    options: Any = {"moments": moments, "master": master, "gradient_storage": gradients, "directions": "fp8"}
    assert_trained_alike(weight, apart, stacked([weight], **options), stacked(apart, **options))
    with pytest.raises(ValueError, match="a momentum in blocks"):
        stacked([weight], moments=Moment(E4M3, granularity=PerTensor()))


def test_owners_have_about_the_same_work() -> None:
    shapes = [torch.Size(shape) for shape in [(2, 2), (16, 16), (8, 8), (8, 8), (32, 4)]]
    assert owners_of(shapes, 2) == [1, 0, 1, 1, 1]
    assert owners_of(shapes, 1) == [0] * 5


@pytest.mark.parametrize("moments", ["fp32", "fp8"])
def test_what_is_no_matrix_is_updated_as_by_an_adamw_beside_it(moments: str) -> None:
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}
    both, apart = (matrices(shapes=[(40, 200), (64, 64), (200,), (3, 4, 5), (30, 64)]) for _ in range(2))

    def together() -> Muon:
        groups = [{"params": both[:4]}, {"params": both[4:], "algorithm": "adamw", "lr": 1e-2}]
        return Muon(groups, lr=0.02, moments=moments, adamw=options)

    optimizer = together()
    rates = [(group["algorithm"], group["lr"]) for group in optimizer.param_groups]
    assert rates == [("muon", 0.02), ("adamw", 3e-3), ("adamw", 1e-2)]
    muon = Muon(apart[:2], lr=0.02, moments=moments)
    others: list[dict[str, Any]] = [{"params": apart[2:4]}, {"params": apart[4:], "lr": 1e-2}]
    adamw: Any = torch.optim.AdamW(others, **options, foreach=False)
    if moments == "fp8":  # random bits depend on a weight's number among all of its optimizer
        adamw = AdamW([{"params": matrices(shapes=SHAPES[:2])}, *others], **options)
    for step in range(4):
        steps(optimizer, both, 1, step)
        for a, b in zip(apart, both, strict=True):
            a.grad = b.grad
        muon.step()
        adamw.step()
        if step == 1:
            saved, optimizer = optimizer.state_dict(), together()
            optimizer.load_state_dict(copy.deepcopy(saved))
        elif step == 2:
            optimizer = copy.deepcopy(optimizer)
            both = optimizer.all_params()
    assert equal(both, apart)


def test_directions_in_fp8_are_rounded_before_they_are_orthogonalised() -> None:
    (rounded,), (exact,) = matrices(shapes=[(40, 200)]), matrices(shapes=[(40, 200)])
    optimizers = [Muon([rounded], directions="fp8", moments="fp32"), Muon([exact], moments="fp32", nesterov=False)]
    optimizers[0].param_groups[0]["nesterov"] = False
    steps(optimizers[0], [rounded], 1)
    assert rounded.grad is not None
    direction = 0.05 * rounded.grad  # the momentum of a first step
    exact.grad = quantize(direction, E4M3, PerBlock(1, 128), power_of_two=True).dequantize() / 0.05
    optimizers[1].step()
    torch.testing.assert_close(rounded, exact, rtol=1e-6, atol=1e-8)


def test_options_of_a_group_without_matrices_are_adamws() -> None:
    """Options of a group of biases and norms, which shall not decay, are AdamW's."""
    matrix, vector, scale = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    groups = [{"params": [matrix, vector], "weight_decay": 0.2}, {"params": [scale], "weight_decay": 0.0}]
    param_groups = Muon([*groups, {"params": []}], adamw={"weight_decay": 0.01}).param_groups
    decays = [(group["algorithm"], group["weight_decay"], len(group["params"])) for group in param_groups]
    assert decays == [("muon", 0.2, 1), ("adamw", 0.01, 1), ("adamw", 0.0, 1), ("muon", 0.1, 0)]


def test_what_adamws_groups_refuse() -> None:
    vector = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match='"algorithm": "adamw"'):
        Muon([vector])
    with pytest.raises(ValueError, match="momentum is none of lr, betas, eps, weight_decay"):
        Muon([vector], adamw={"momentum": 0.9})
    for wrong in ({"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"betas": (1.0, 0.9)}):
        with pytest.raises(ValueError, match="must be at least 0"):
            Muon([vector], adamw=wrong)
    with pytest.raises(TypeError, match=r"adamw=0\.1: give a dict of AdamW's options"):
        Muon([vector], adamw=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimize Tensors"):
        Muon([1], adamw={})
    with pytest.raises(ValueError, match="use 'muon' or 'adamw'"):
        Muon([{"params": [vector], "algorithm": "adam"}])
    with pytest.raises(TypeError, match="three Moments"):
        Muon([vector], moments=(Moment("fp32"), Moment("fp32")), adamw={})


def test_a_state_of_another_rounding_goes_on_as_it_is(recwarn: pytest.WarningsRecorder) -> None:
    weights = [nn.Parameter(torch.randn(8, 256)) for _ in range(2)]
    stochastic = Muon(weights[:1], moments=Moment(E4M3, rounding="stochastic"))
    by_name = Muon(weights[1:], moments="fp8")
    assert [moment.rounding for moment in by_name.settings.moments] == ["hybrid", "stochastic", "stochastic"]
    weights[0].grad = torch.randn(8, 256)
    stochastic.step()
    by_name.load_state_dict(stochastic.state_dict())
    loaded, saved = by_name.state[weights[1]], stochastic.state[weights[0]]
    names = "momentum_buffer_codes", "momentum_buffer_scale_inv"
    assert all(torch.equal(loaded[name], saved[name]) for name in names)
    assert by_name.settings.moments[0].rounding == "hybrid" and not recwarn.list
