import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2
from octavo.formats import E4M4, Format
from octavo.kernels.layouts import blocks_of
from octavo.kernels.reference import optimizer_state
from octavo.kernels.reference.adam import AdamGroup
from octavo.kernels.reference.master_weights import Fp8Weight, MasterWeight
from octavo.kernels.reference.optimizer_state import MomentTensors
from octavo.kernels.reference.optimizer_step import WeightUpdate, optimizer_step
from octavo.kernels.step_numbers import adam_max_update, bound_after
from octavo.numerics import scale_from_amax

SHAPES = [(1, 1), (3, 31), (5, 128), (4, 300), (2, 1000)]


class Step(NamedTuple):
    number: int
    group: AdamGroup
    key: int


def step(number: int, key: int = 5, **changed: Any) -> Step:
    return Step(number, AdamGroup(0.01, 0.9, 0.99, 1e-8, 0.0, False, True, False)._replace(**changed), key)


def adam_update(
    master: MasterWeight, grad: Tensor, first: MomentTensors, second: MomentTensors, h: Step, **where: int
) -> None:
    done = torch.tensor(float(h.number - 1))
    update = WeightUpdate(master, (first, second), grad, done, h.key, 0, first_row=where.pop("first_row", 0), **where)
    optimizer_step([update], [h.group])


def codes(
    fmt: Format, shape: tuple[int, int], root: bool = False, rounding: bool = True, **options: object
) -> MomentTensors:
    scales = (1, 1) if options.get("per_tensor") else (shape[0], blocks_of(shape[1]))
    amax = torch.zeros(1, 1) if options.get("previous") else None
    return MomentTensors(torch.zeros(shape, dtype=torch.uint8), fmt, torch.ones(scales), amax, root, rounding)


def fp8(shape: tuple[int, int]) -> tuple[MomentTensors, MomentTensors]:
    return codes(E4M3, shape), codes(E4M4, shape, root=True)


def fp32(shape: tuple[int, int]) -> tuple[MomentTensors, MomentTensors]:
    return MomentTensors(torch.zeros(shape)), MomentTensors(torch.zeros(shape))


def values(moment: MomentTensors) -> Tensor:
    """All that is stored, as one piece a row-block."""
    found = torch.empty(moment.data.shape)
    for piece in optimizer_state.pieces(*moment.data.shape):
        piece.of(found).copy_(moment.read(piece))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("decay", "maximize"), [(0.0, False), (0.1, False), (0.1, True), (0.0, True)])
def test_float32_is_torchs_bit_for_bit(shape, decoupled, decay, maximize, monkeypatch):
    monkeypatch.setattr(optimizer_state, "PIECE", 512)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = torch.nn.Parameter(torch.randn(shape))
    options = {"betas": (0.9, 0.99), "weight_decay": decay, "maximize": maximize, "foreach": False}
    optimizer = kind([theirs], lr=0.01, **options)
    ours, moments = theirs.detach().clone(), fp32(shape)
    for number in range(1, 6):
        theirs.grad = torch.randn(shape)
        before = theirs.grad.clone()
        optimizer.step()
        h = step(number, weight_decay=decay, decoupled=decoupled, maximize=maximize)
        adam_update(MasterWeight(ours, "weight"), before, *moments, h)
        assert torch.equal(before, theirs.grad)
    assert torch.equal(ours, theirs)
    state = optimizer.state[theirs]
    assert torch.equal(moments[0].data, state["exp_avg"]) and torch.equal(moments[1].data, state["exp_avg_sq"])


@pytest.mark.parametrize(
    ("kind", "lr", "most"),
    [("split32", 1e-4, 0.0), ("split24", 1e-4, 0.01), ("stochastic", 1e-4, 0.15)],
)
def test_the_master_is_updated_and_the_weight_follows(kind, lr, most):
    shape = (3, 300)
    start = torch.randn(shape).bfloat16()
    exact, moments = start.float(), fp32(shape)
    rest = {"split32": torch.int16, "split24": torch.int8}.get(kind)
    master = MasterWeight(start.clone(), kind, None if rest is None else torch.zeros(shape, dtype=rest))
    own = fp32(shape)
    for number in range(1, 101):
        grad = torch.randn(shape) + 0.5
        adam_update(MasterWeight(exact, "weight"), grad, *moments, step(number, lr=lr, clip=True))
        adam_update(master, grad, *own, step(number, lr=lr, clip=True))
    found = torch.empty(shape)
    for piece in optimizer_state.pieces(*shape):
        piece.of(found).copy_(master.read(piece))
    moved, drift = (exact - start.float()).abs().mean(), (found - exact).mean().abs()
    assert moved > 30 * lr
    assert drift <= most * moved
    if kind == "split32":
        assert torch.equal(found, exact)
    assert ((master.weight.float() - found).abs() <= found.abs() * 2.0**-8).all()


@pytest.mark.parametrize("kind", ["weight", "split24", "stochastic"])
@pytest.mark.parametrize("cols", [1, 100, 300])
@pytest.mark.parametrize("cuts", [(0, 4, 7), (0, 1, 2, 7), (0, 0, 7)], ids=str)
def test_rows_split_over_ranks_are_as_the_whole(kind, cols, cuts, monkeypatch):
    shape = (7, cols)
    weight = torch.randn(shape).to(torch.float32 if kind == "weight" else torch.bfloat16)
    whole, moments = weight.clone(), fp8(shape)
    rest = torch.zeros(shape, dtype=torch.int8) if kind == "split24" else None
    gradients = [torch.randn(shape) for _ in range(4)]
    for number, grad in enumerate(gradients, 1):
        adam_update(MasterWeight(whole, kind, rest), grad, *moments, step(number))
    monkeypatch.setattr(optimizer_state, "PIECE", 256)  # nor do pieces matter
    for first, last in itertools.pairwise(cuts):
        part, own = weight[first:last].clone(), fp8((last - first, cols))
        left = torch.zeros(part.shape, dtype=torch.int8) if kind == "split24" else None
        for number, grad in enumerate(gradients, 1):
            adam_update(MasterWeight(part, kind, left), grad[first:last], *own, step(number), first_row=first)
        assert torch.equal(part, whole[first:last])
        for mine, all_of_it in zip(own, moments, strict=True):
            assert torch.equal(mine.data, all_of_it.data[first:last])
            assert torch.equal(mine.scale_inv, all_of_it.scale_inv[first:last])


@pytest.mark.parametrize("kind", ["weight", "split24", "stochastic"])
def test_columns_split_over_ranks_in_whole_blocks_are_as_the_whole(kind):
    shape, cut = (7, 300), (slice(2, 7), slice(128, 300))
    weight = torch.randn(shape).to(torch.float32 if kind == "weight" else torch.bfloat16)
    own, left = weight[cut].clone(), None
    moments, part, rest = fp8(shape), fp8(own.shape), None
    if kind == "split24":
        rest, left = (torch.zeros(w.shape, dtype=torch.int8) for w in (weight, own))
    where = {"first_row": 2, "first_col": 128, "row_length": 300}
    for number in range(1, 5):
        grad = torch.randn(shape)
        adam_update(MasterWeight(weight, kind, rest), grad, *moments, step(number))
        adam_update(MasterWeight(own, kind, left), grad[cut].contiguous(), *part, step(number), **where)
    assert torch.equal(own, weight[cut])
    for mine, all_of_it in zip(part, moments, strict=True):
        assert torch.equal(mine.data, all_of_it.data[cut])
        assert torch.equal(mine.scale_inv, all_of_it.scale_inv[2:7, 1:])


def test_random_bits_are_those_of_the_key_and_the_step():
    def moments_after(number: int, key: int) -> list[Tensor]:
        moments = fp8((3, 300))
        torch.manual_seed(1)
        adam_update(MasterWeight(torch.ones(3, 300), "weight"), torch.randn(3, 300), *moments, step(number, key=key))
        return [moment.data for moment in moments]

    again = zip(moments_after(1, 5), moments_after(1, 5), strict=True)
    assert all(torch.equal(a, b) for a, b in again)
    for other in (moments_after(2, 5), moments_after(1, 6)):
        assert all((a != b).sum() > 100 for a, b in zip(moments_after(1, 5), other, strict=True))


def test_moments_are_rounded_with_bits_of_their_own():
    # equal moments would be rounded equally by equal bits
    grad = torch.rand(3, 300) + 0.5
    first, second = codes(E4M3, (3, 300)), codes(E4M3, (3, 300))
    adam_update(MasterWeight(torch.ones(3, 300), "weight"), grad, first, second, step(1))
    ups = [(values(m) / c > grad**p).float() for m, c, p in ((first, 0.1, 1), (second, 0.01, 2))]
    assert abs(float(torch.corrcoef(torch.stack([u.flatten() for u in ups]))[0, 1])) < 0.15


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_one_scale_from_the_current_amax_is_as_by_hand(both, root, monkeypatch):
    monkeypatch.setattr(optimizer_state, "PIECE", 256)
    shape = (5, 300)
    first = codes(E5M2, shape, rounding=False, per_tensor=True) if both else MomentTensors(torch.zeros(shape))
    second = codes(E4M4, shape, root, rounding=False, per_tensor=True)
    weight = torch.zeros(shape)
    m, v = torch.zeros(shape), torch.zeros(shape)
    for number in range(1, 4):
        grad = torch.randn(shape) * 10.0**-number
        m, v = values(first).lerp(grad, 1 - 0.9), values(second).mul(0.99).addcmul(grad, grad, value=1 - 0.99)
        before = weight.clone()
        adam_update(MasterWeight(weight, "weight"), grad, first, second, step(number))
        denominator = v.sqrt().div((1 - 0.99**number) ** 0.5).add(1e-8)
        assert torch.equal(weight, before.addcdiv(m, denominator, value=-0.01 / (1 - 0.9**number)))
        for moment, wide in ((first, m), (second, v.sqrt() if root else v)):
            if moment.fmt is None:
                assert torch.equal(moment.data, wide)
                continue
            scale = scale_from_amax(wide.abs().max().view(1, 1), moment.fmt.max, False, 0)
            assert torch.equal(moment.scale_inv, scale.reciprocal())
            assert int((moment.data & 0x7F if moment.fmt.signed else moment.data).max()) == moment.fmt.nan_code - (
                4 if moment.fmt is E5M2 else 1
            )
            assert (
                (values(moment).pow(0.5 if root and moment is second else 1) - wide).abs()
                <= wide.abs() / 8 + 1e-4 * wide.abs().max()
            ).all()


def test_the_previous_amax_scales_the_next_step():
    shape = (5, 300)
    first, second = (
        codes(E4M3, shape, per_tensor=True, previous=True),
        codes(E5M2, shape, True, per_tensor=True, previous=True),
    )
    weight, m = torch.zeros(shape), torch.zeros(shape)
    for number in range(1, 30):
        grad = torch.randn(shape)
        before = first.amax.clone(), second.amax.clone()
        wide = values(first).lerp(grad, 1 - 0.9)
        m = m.lerp(grad, 1 - 0.9)
        adam_update(MasterWeight(weight, "weight"), grad, first, second, step(number))
        assert torch.equal(first.scale_inv, scale_from_amax(before[0], 448.0, False, 0).reciprocal())
        assert torch.equal(second.scale_inv, scale_from_amax(before[1], 57344.0, False, 0).reciprocal())
        assert torch.equal(first.amax, wide.abs().max().view(1, 1))
    assert float((values(first) - m).norm() / m.norm()) < 0.1


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9)], ids=str)
def test_an_update_is_clipped_to_the_bound(betas):
    shape, lr = (2, 200), 2.0**-4
    for number in (1, 2, 50):
        first, second = fp32(shape)
        first.data.copy_(torch.randn(shape) * 10)  # beside second moments of 0
        weight = torch.zeros(shape)
        h = step(number, lr=lr, beta1=betas[0], beta2=betas[1], clip=True)
        adam_update(MasterWeight(weight, "weight"), torch.zeros(shape), first, second, h)
        if betas[0]:
            assert torch.allclose(weight.abs(), torch.tensor(lr * adam_max_update(number, *betas)))
            assert torch.equal(weight.sign(), -first.data.sign())


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)], ids=str)
def test_clipping_does_not_change_exact_adam(betas):
    shape = (2, 200)
    clipped, free = torch.zeros(shape), torch.zeros(shape)
    moments, others = fp32(shape), fp32(shape)
    for number in range(1, 30):
        grad = torch.randn(shape) * torch.randn(shape).mul(4).exp()
        h = step(number, beta1=betas[0], beta2=betas[1], clip=True)
        adam_update(MasterWeight(clipped, "weight"), grad, *moments, h)
        adam_update(MasterWeight(free, "weight"), grad, *others, h._replace(group=h.group._replace(clip=False)))
    assert torch.allclose(clipped, free, rtol=1e-5, atol=1e-7)


def scaled_master(weight: Tensor) -> Fp8Weight:
    """A float16 master behind codes, whose scale is 128 times theirs."""
    amax = weight.abs().max().float().view(1, 1)
    scale = scale_from_amax(amax, E4M3.max, True, 0)
    codes = (weight * scale).to(E4M3.dtype).view(torch.uint8)
    return Fp8Weight(codes, "fp8_fp16", 1 / scale, (weight * scale * 128).half(), amax.clone())


@pytest.mark.parametrize("decay", [0.0, 0.5, 30.0])
def test_a_scaled_master_never_overflows(decay):
    # one element sees the gradients that move it most, the others none or any
    beta1, beta2, steps, lr = 0.9, 0.999, 60, 0.1
    master = scaled_master(torch.randn(2, 200) * 1e-3)
    moments = fp32((2, 200))
    for number in range(1, steps + 1):
        grad = torch.randn(2, 200)
        grad[0] = (beta1 / beta2) ** (steps - number)
        h = step(number, lr=lr, beta2=beta2, weight_decay=decay, clip=True)
        bound = float(bound_after(master.amax, lr, adam_max_update(number, beta1, beta2), decay))
        adam_update(master, grad, *moments, h)
        assert master.rest.isfinite().all()
        held = float((master.rest.float() * master.scale_inv / 128).abs().max())
        assert float(master.amax) == held <= bound * (1 + 2.0**-10)
    assert math.log2(float(master.scale_inv)) % 1 == 0


def test_a_scaled_master_that_was_rounded_up_does_not_overflow():
    # beside a large bound a weight is a subnormal float16, rounded up by 1 %; the next bound is small
    weight = torch.full((1, 200), 2.0**-50)
    for factor in torch.linspace(0.5, 1, 60).tolist():
        master = scaled_master(weight * factor)
        moments = fp32((1, 200))
        for number, lr in enumerate((1e-5, 0.0, 0.0), 1):
            adam_update(master, torch.zeros(1, 200), *moments, step(number, lr=lr, clip=True))
            assert master.rest.isfinite().all()


def test_gradients_of_other_dtypes_and_empty_ones():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        grad = torch.randn(3, 200).bfloat16()
        found = []
        for g in (grad.to(dtype), grad.float()):
            weight, moments = torch.zeros(3, 200), fp8((3, 200))
            adam_update(MasterWeight(weight, "weight"), g, *moments, step(1))
            found.append(weight)
        assert torch.equal(*found)
    for shape in ((0, 5), (5, 0)):
        adam_update(MasterWeight(torch.zeros(shape), "weight"), torch.zeros(shape), *fp8(shape), step(1))
