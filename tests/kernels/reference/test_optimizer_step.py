"""A step of many weights: codes by hand, and each weight's step its own; tests/optim has the rules beside torch's."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import PerBlock, PerTensor
from octavo.formats import E4M3, E4M4, E5M2
from octavo.kernels.reference import optimizer_state
from octavo.kernels.reference.optimizer_state import Fp8Weight, MasterWeight, MomentTensors, pieces
from octavo.kernels.reference.optimizer_step import (
    AdamGroup,
    BitNumbers,
    SgdGroup,
    WeightUpdate,
    add_resolution,
    optimizer_step,
)
from octavo.kernels.step_numbers import adam_max_update, bound_after
from octavo.numerics import scale_from_amax
from octavo.weights.stored import StoredWeight
from tests.support.fp8_weights import codes_of, master_of, read, store, weight

ADAM = [
    AdamGroup(0.01, 0.9, 0.99, 1e-8, 0.1, False, True, True),
    AdamGroup(torch.tensor(0.5), 0.5, 0.9, 1e-6, 0.0, True, False, False),
]
SGD = [SgdGroup(0.1, 0.9, 0.0, 0.01, True, False), SgdGroup(torch.tensor(0.5), 0.5, 0.1, 0.0, False, True)]
PLAIN = AdamGroup(0.01, 0.9, 0.99, 1e-8, 0.0, False, True, False)

each_rule = pytest.mark.parametrize("groups", [ADAM, SGD], ids=["Adam", "SGD"])


def update(
    group: AdamGroup | SgdGroup,
    master: Any,
    grad: Tensor,
    *moments: MomentTensors,
    number: int = 1,
    key: int = 5,
    **where: Any,
) -> None:
    """Step ``number`` of one weight; ``where`` it lies in the whole: BitNumbers' other fields."""
    done = torch.tensor(float(number - 1))
    optimizer_step([WeightUpdate(master, moments, grad, done, BitNumbers(key, **where), 0)], [group])


def fp8(shape: tuple[int, int], count: int = 2) -> tuple[MomentTensors, ...]:
    return (codes_of(E4M3, shape, False, True), codes_of(E4M4, shape, True, True))[:count]


def fp32(shape: tuple[int, int], count: int = 2) -> tuple[MomentTensors, ...]:
    return tuple(MomentTensors(torch.zeros(shape)) for _ in range(count))


# --- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@each_rule
@pytest.mark.parametrize("kind", ["weight", "split24", "stochastic"])
@pytest.mark.parametrize("cols", [1, 100, 300])
@pytest.mark.parametrize("cuts", [(0, 4, 7), (0, 1, 2, 7), (0, 0, 7), None], ids=str)
def test_parts_on_ranks_are_those_of_the_whole(kind, cols, cuts, groups, monkeypatch):
    """Rows, or without cuts rows of whole blocks of columns."""
    shape, count = (7, cols if cuts else 300), 2 if groups is ADAM else 1
    weight = torch.randn(shape).to(torch.float32 if kind == "weight" else torch.bfloat16)
    whole, moments = master_of(kind, weight.clone()), fp8(shape, count)
    gradients = [torch.randn(shape) for _ in range(3)]
    for number, grad in enumerate(gradients, 1):
        update(groups[0], whole, grad, *moments, number=number)
    monkeypatch.setattr(optimizer_state, "PIECE", 256)  # nor do pieces matter
    parts = [(slice(*rows), slice(0, shape[1])) for rows in itertools.pairwise(cuts or ())]
    for part in parts or [(slice(2, 7), slice(128, 300))]:
        of_rank = master_of(kind, weight[part].clone())
        stored = fp8(tuple(of_rank.weight.shape), count)
        where = {"first_row": part[0].start, "first_col": part[1].start, "row_length": shape[1]}
        for number, grad in enumerate(gradients, 1):
            update(groups[0], of_rank, grad[part].contiguous(), *stored, number=number, **where)
        assert torch.equal(of_rank.weight, whole.weight[part])
        for mine, all_of_it in zip(stored, moments, strict=True):
            assert torch.equal(mine.data, all_of_it.data[part])
            assert torch.equal(mine.scale_inv, all_of_it.scale_inv[part[0], part[1].start // 128 :])


def test_random_bits_are_those_of_the_key_and_the_step() -> None:
    def moments_after(number: int, key: int) -> list[Tensor]:
        moments = fp8((3, 300))
        torch.manual_seed(1)
        update(PLAIN, MasterWeight(torch.ones(3, 300), "weight"), torch.randn(3, 300), *moments, number=number, key=key)
        return [moment.data for moment in moments]

    assert all(map(torch.equal, moments_after(1, 5), moments_after(1, 5)))
    for other in (moments_after(2, 5), moments_after(1, 6)):
        assert all((a != b).sum() > 100 for a, b in zip(moments_after(1, 5), other, strict=True))


def test_moments_are_rounded_with_bits_of_their_own() -> None:
    # equal moments would be rounded equally by equal bits
    grad = torch.rand(3, 300) + 0.5
    first, second = (codes_of(E4M3, (3, 300), False, True) for _ in range(2))
    update(PLAIN, MasterWeight(torch.ones(3, 300), "weight"), grad, first, second)
    ups = [(read(m) / c > grad**p).float() for m, c, p in ((first, 0.1, 1), (second, 0.01, 2))]
    assert abs(float(torch.corrcoef(torch.stack([u.flatten() for u in ups]))[0, 1])) < 0.15


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_one_scale_from_the_current_amax_is_as_by_hand(both: bool, root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "PIECE", 256)
    shape = (5, 300)
    first = codes_of(E5M2, shape, per_tensor=True) if both else MomentTensors(torch.zeros(shape))
    second = codes_of(E4M4, shape, root, per_tensor=True)
    weight = torch.zeros(shape)
    for number in range(1, 4):
        grad = torch.randn(shape) * 10.0**-number
        m, v = read(first).lerp(grad, 1 - 0.9), read(second).mul(0.99).addcmul(grad, grad, value=1 - 0.99)
        before = weight.clone()
        update(PLAIN, MasterWeight(weight, "weight"), grad, first, second, number=number)
        denominator = v.sqrt().div((1 - 0.99**number) ** 0.5).add(1e-8)
        assert torch.equal(weight, before.addcdiv(m, denominator, value=-0.01 / (1 - 0.9**number)))
        for moment, wide in ((first, m), (second, v.double().sqrt().float() if root else v)):
            if moment.fmt is None:
                assert torch.equal(moment.data, wide)
                continue
            scale = scale_from_amax(wide.abs().max().view(1, 1), moment.fmt.max, False, 0)
            assert moment.scale_inv is not None and torch.equal(moment.scale_inv, scale.reciprocal())
            magnitude = moment.data & 0x7F if moment.fmt.signed else moment.data
            assert int(magnitude.max()) == moment.fmt.nan_code - (4 if moment.fmt is E5M2 else 1)
            stored = read(moment).pow(0.5 if root and moment is second else 1)
            assert ((stored - wide).abs() <= wide.abs() / 8 + 1e-4 * wide.abs().max()).all()


def test_the_previous_amax_scales_the_next_step() -> None:
    shape, one = (5, 300), {"stochastic": True, "per_tensor": True, "previous": 0.0}
    first, second = codes_of(E4M3, shape, **one), codes_of(E5M2, shape, True, **one)
    weight, m = torch.zeros(shape), torch.zeros(shape)
    for number in range(1, 30):
        grad = torch.randn(shape)
        before = first.amax.clone(), second.amax.clone()
        wide = read(first).lerp(grad, 1 - 0.9)
        m = m.lerp(grad, 1 - 0.9)
        update(PLAIN, MasterWeight(weight, "weight"), grad, first, second, number=number)
        assert torch.equal(first.scale_inv, scale_from_amax(before[0], 448.0, False, 0).reciprocal())
        assert torch.equal(second.scale_inv, scale_from_amax(before[1], 57344.0, False, 0).reciprocal())
        assert torch.equal(first.amax, wide.abs().max().view(1, 1))
    assert float((read(first) - m).norm() / m.norm()) < 0.1


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9)], ids=str)
def test_an_update_is_clipped_to_the_bound_which_exact_adam_never_meets(betas: tuple[float, float]) -> None:
    shape, lr = (2, 200), 2.0**-4
    group = PLAIN._replace(beta1=betas[0], beta2=betas[1], bounds_update=True)
    for number in (1, 2, 50) if betas[0] else ():
        first, second = fp32(shape)
        first.data.copy_(torch.randn(shape) * 10)  # beside second moments of 0
        weight = torch.zeros(shape)
        update(group._replace(lr=lr), MasterWeight(weight, "weight"), torch.zeros(shape), first, second, number=number)
        assert torch.allclose(weight.abs(), torch.tensor(lr * adam_max_update(number, *betas)))
        assert torch.equal(weight.sign(), -first.data.sign())
    clipped, free = torch.zeros(shape), torch.zeros(shape)
    moments, others = fp32(shape), fp32(shape)
    for number in range(1, 30):
        grad = torch.randn(shape) * torch.randn(shape).mul(4).exp()
        update(group, MasterWeight(clipped, "weight"), grad, *moments, number=number)
        update(group._replace(bounds_update=False), MasterWeight(free, "weight"), grad, *others, number=number)
    assert torch.allclose(clipped, free, rtol=1e-5, atol=1e-7)


def scaled_master(weight: Tensor) -> Fp8Weight:
    """A float16 master behind codes, whose scale is 128 times theirs."""
    amax = weight.abs().max().float().view(1, 1)
    scale = scale_from_amax(amax, E4M3.max, True, 0)
    codes = (weight * scale).to(E4M3.dtype).view(torch.uint8)
    return Fp8Weight(codes, "fp8_fp16", 1 / scale, (weight * scale * 128).half(), amax.clone())


@pytest.mark.parametrize("decay", [0.0, 0.5, 30.0])
def test_a_scaled_master_never_overflows(decay: float) -> None:
    # one element sees the gradients that move it most, the others none or any
    beta1, beta2, steps, lr = 0.9, 0.999, 60, 0.1
    master, moments = scaled_master(torch.randn(2, 200) * 1e-3), fp32((2, 200))
    group = PLAIN._replace(lr=lr, beta2=beta2, weight_decay=decay, bounds_update=True)
    for number in range(1, steps + 1):
        grad = torch.randn(2, 200)
        grad[0] = (beta1 / beta2) ** (steps - number)
        bound = float(bound_after(master.amax, lr, adam_max_update(number, beta1, beta2), decay))
        update(group, master, grad, *moments, number=number)
        assert master.low_bits.isfinite().all()
        held = float((master.low_bits.float() * master.scale_inv / 128).abs().max())
        assert float(master.amax) == held <= bound * (1 + 2.0**-10)
    assert math.log2(float(master.scale_inv)) % 1 == 0


def test_a_scaled_master_that_was_rounded_up_does_not_overflow() -> None:
    # beside a large bound a weight is a subnormal float16, rounded up by 1 %; the next bound is small
    weight = torch.full((1, 200), 2.0**-50)
    for factor in torch.linspace(0.5, 1, 60).tolist():
        master, moments = scaled_master(weight * factor), fp32((1, 200))
        for number, lr in enumerate((1e-5, 0.0, 0.0), 1):
            update(PLAIN._replace(lr=lr, bounds_update=True), master, torch.zeros(1, 200), *moments, number=number)
            assert master.low_bits.isfinite().all()


# --- many weights -----------------------------------------------------------------------------------------------------


COUNT = 1 << 20  # steps of float32 in one of E4M3


def all_random_bits(key: int, index: Tensor) -> Tensor:
    """Return random bits whose upper 20, and lower half and upper 4, take each value once in COUNT elements."""
    return ((index << 12) | ((index >> 4) & 0xFFF)).to(torch.int32)


BOUNDED = {"Adam": PLAIN._replace(bounds_update=True), "SGD": SGD[0]._replace(max_update=2.0)}


@pytest.mark.parametrize("group", BOUNDED.values(), ids=BOUNDED)
def test_the_mean_over_all_random_bits_is_the_number_that_is_rounded(group: Any, monkeypatch: Any) -> None:
    """A step with a moment and a weight in codes is held against the same step in float32, where nothing is rounded."""
    monkeypatch.setattr(f"{optimizer_step.__module__}.random_bits", all_random_bits)
    codes = [codes_of(fmt, (1, COUNT), root, True, True, 1.0) for fmt, root in ((E4M3, False), (E4M4, True))]
    coded, small = tuple(codes[: 2 - isinstance(group, SgdGroup)]), (1, 128)
    means = []
    exact = weight("fp8_fp32", small), fp32(small, len(coded))
    for master, moments in (exact, (weight("fp8_stochastic", (1, COUNT)), coded)):
        store(master, torch.full_like(master.weight, 1.25, dtype=torch.float32))
        update(group, master, torch.full_like(master.weight, 0.7123457, dtype=torch.float32), *moments)
        values = read(master), read(moments[0]), *(read(v).sqrt() for v in moments[1:])
        means.append([float(x.double().mean()) for x in values])
    (w, *of_float32), (w_coded, *of_codes) = means
    assert w_coded == w  # its scale is a power of two
    assert of_codes == pytest.approx(of_float32, rel=2.0**-23)


def weights(groups: list[Any]) -> list[WeightUpdate]:
    """Equal ones at each call."""
    torch.manual_seed(1)
    updates = []
    for number, shape in enumerate([(1, 1), (3, 300), (0, 5), (2, 128)]):
        master, step = MasterWeight(torch.randn(shape).bfloat16(), "stochastic"), torch.tensor(float(number))
        stored, bits = fp8(shape, 2 if groups is ADAM else 1), BitNumbers(5 + number, 7 * number)
        updates.append(WeightUpdate(master, stored, torch.randn(shape), step, bits, number % 2))
    return updates


def equal(a: list[WeightUpdate], b: list[WeightUpdate]) -> bool:
    tensors = ([t for u in us for t in (u.step, u.master.weight, *(m.data for m in u.moments))] for us in (a, b))
    return all(map(torch.equal, *tensors))


@pytest.mark.parametrize("divisor", [None, 4.0])
@each_rule
def test_each_is_updated_by_its_group(groups: list[Any], divisor: float | None) -> None:
    ours, theirs = weights(groups), weights(groups)
    scale = None if divisor is None else torch.tensor([divisor])
    for _ in range(3):
        optimizer_step(ours, groups, None, scale)
        for one in theirs:
            optimizer_step([one._replace(group=0, gradient=one.gradient / (divisor or 1.0))], [groups[one.group]])
    assert equal(ours, theirs) and not equal(ours, weights(groups))
    assert [float(one.step) for one in ours] == [3.0, 4.0, 5.0, 6.0]


@each_rule
def test_a_flag_that_is_not_0_skips_all(groups: list[Any]) -> None:
    ours, theirs = weights(groups), weights(groups)
    for flag in (torch.tensor(True), torch.tensor([1.0]), torch.tensor(2)):
        optimizer_step(ours, groups, flag)
        assert equal(ours, theirs)
    optimizer_step(ours, groups, torch.tensor(0.0))
    optimizer_step(theirs, groups)
    assert equal(ours, theirs) and not equal(ours, weights(groups))


# --- the resolution ---------------------------------------------------------------------------------------------------


def sums_of(before: Tensor, after: Tensor, master: Any) -> list[float]:
    sums = torch.zeros(2, dtype=torch.float64)
    for piece in pieces(*before.shape):
        add_resolution(sums, piece, piece.of(before), piece.of(after), master)
    return sums.tolist()


def step_at(w: float) -> float:
    """The distance of E4M3's neighbours, with exponents without end."""
    return 2.0 ** (math.floor(math.log2(abs(w))) - 3) if w else 0.0


def test_the_grid_is_that_of_e4m3_at_any_magnitude() -> None:
    values = [0.0, 1.0, -1.0, 1.9375, 0.06, -3e5, 2.0**-20]
    w = torch.tensor([values])
    assert sums_of(w, w, MasterWeight(w, "weight"))[1] == sum(step_at(value) ** 2 for value in values)
    codes = torch.arange(0x08, 0x7E, dtype=torch.uint8)  # normal ones and their neighbours above
    below, above = (part.view(torch.float8_e4m3fn).float() for part in (codes, codes + 1))
    assert [step_at(value) for value in below.tolist()] == (above - below).tolist()


@pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(128, 128)], ids=str)
def test_weights_in_fp8_have_a_smallest_step_by_their_scale(granularity: PerTensor | PerBlock) -> None:
    stored = StoredWeight.cast(torch.randn(130, 300) * torch.logspace(-8, 0, 300), granularity)
    master = Fp8Weight(stored.qdata.view(torch.uint8), "fp8_stochastic", stored.scale_inv)
    w = stored.dequantize().detach()
    smallest = stored.scale_inv.repeat_interleave(130 if len(stored.scale_inv) == 1 else 128, 0)[:130]
    smallest = smallest.repeat_interleave(300 if smallest.shape[1] == 1 else 128, 1)[:, :300] * 2.0**-9
    steps = torch.tensor([[step_at(value) for value in row] for row in w.tolist()])
    assert (steps < smallest).any() and (steps > smallest).any()
    expected = torch.maximum(steps, smallest).double().square().sum()
    assert sums_of(w, w, master)[1] == pytest.approx(float(expected), rel=1e-6)


def test_what_is_not_finite_counts_for_nothing() -> None:
    w = torch.tensor([[1.0, math.nan, math.inf, 2.0, 3.0]])
    after = torch.tensor([[1.5, 1.0, 1.0, math.nan, -math.inf]])
    assert sums_of(w, after, MasterWeight(w, "weight")) == [0.25, 0.125**2]


@each_rule
def test_a_step_adds_the_measured_weights_sums(groups: list[Any]) -> None:
    moments = fp32((5, 300), 2 if groups is ADAM else 1)
    sums = torch.zeros(2, dtype=torch.float64)
    for measured in (True, False, True):
        w = torch.randn(5, 300)
        before, was = w.clone(), sums.clone()
        one = WeightUpdate(MasterWeight(w, "weight"), moments, torch.randn(5, 300), torch.tensor(0.0), BitNumbers(0), 0)
        one = one._replace(measured=measured)
        optimizer_step([one], groups, None, None, sums)
        if measured:
            assert float(sums[0] - was[0]) == pytest.approx(float((w - before).double().square().sum()), rel=1e-5)
        else:
            assert torch.equal(sums, was)
    optimizer_step([one], groups, torch.tensor(1.0), None, sums.fill_(7.0))
    assert sums.tolist() == [7.0, 7.0]
