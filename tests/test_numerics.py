import math

import pytest
import torch

from octavo import numerics
from tests.support.definitions import FLOAT32_MAX, scale_inv_of, scale_of

LIMITS = [448.0, 57344.0]
EDGES = [
    2.0**-149,  # the smallest subnormal
    3 * 2.0**-149,
    2.0**-126 - 2.0**-149,  # the largest subnormal
    2.0**-126,  # the smallest normal
    448 * 2.0**-128,  # 448 / amax is at the edge of float32's range
    448 * 2.0**-127,
    448 * 2.0**-126,  # scale 2^126 for E4M3
    447 * 2.0**-126,
    57344 * 2.0**-126,
    1e-30,
    2.0**-9,
    0.1,
    1.0,
    math.pi,
    448.0,
    448.00003,
    57344.0,
    65504.0,  # float16's largest
    1e30,
    2.0**127,
    (2 - 2.0**-7) * 2.0**127,  # bfloat16's largest
    FLOAT32_MAX,
]
# every float32 exponent with random mantissas
RANDOM = torch.cat(
    [torch.randint(1, 0x7F800000, (1500,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))]
)


def amaxes() -> torch.Tensor:
    return torch.cat([torch.tensor(EDGES), RANDOM.view(torch.float32)])


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 7, 64])
def test_scale_is_correctly_rounded(limit: float, power_of_two: bool, margin: int) -> None:
    amax = amaxes()
    before = amax.clone()
    scale = numerics.scale_from_amax(amax, limit, power_of_two, margin)
    expected = [scale_of(a, limit, power_of_two, margin) for a in amax.tolist()]
    assert scale.dtype == torch.float32
    assert scale.tolist() == expected
    assert torch.equal(amax, before)


def test_the_random_amaxes_would_show_a_reciprocal() -> None:
    # the trap that the division avoids: 448 * (1 / amax) is misrounded for about 27 % of all amax
    amax = torch.rand(1000) + 1
    wrong = 448.0 * torch.reciprocal(amax)
    assert (wrong != numerics.scale_from_amax(amax, 448.0, False, 0)).sum() > 100


def test_power_of_two_rounds_down() -> None:
    amax = amaxes()
    exact = numerics.scale_from_amax(amax, 448.0, False, 0)
    rounded = numerics.scale_from_amax(amax, 448.0, True, 0)
    assert bool((rounded <= exact).all()) and bool((exact < 2 * rounded).all() | (rounded == 2.0**126).any())
    assert all(math.frexp(s)[0] == 0.5 for s in rounded.tolist())


def test_scale_saturates_nothing() -> None:
    # amax x scale, rounded to float32, is at most one rounding above the limit
    amax = amaxes()
    for limit in LIMITS:
        scaled = amax.double() * numerics.scale_from_amax(amax, limit, False, 0).double()
        assert float(scaled.max()) <= limit * (1 + 2.0**-23)
        assert float((amax.double() * numerics.scale_from_amax(amax, limit, True, 0).double()).max()) <= limit


def test_scale_and_scale_inv_are_normal_numbers() -> None:
    assert (numerics.MAX_SCALE, numerics.MIN_SCALE) == (2.0**126, 2.0**-126)
    for margin in (0, 64):
        scale = numerics.scale_from_amax(amaxes(), 448.0, False, margin)
        for t in (scale, numerics.scale_inv_from_scale(scale)):
            assert bool((t >= 2.0**-126).all()) and bool(torch.isfinite(t).all())
    assert numerics.scale_from_amax(torch.tensor(2.0**-149), 448.0, False, 0) == 2.0**126
    assert numerics.scale_from_amax(torch.tensor(FLOAT32_MAX), 448.0, True, 64) == 2.0**-126


def test_scale_inv_is_the_correctly_rounded_reciprocal() -> None:
    bits = torch.randint(0x00800000, 0x7E800001, (3000,), dtype=torch.int32)  # from 2^-126 to 2^126
    scale = torch.cat([bits.view(torch.float32), torch.tensor([2.0**-126, 2.0**126, 1.0, 448.0, 3.0])])
    assert numerics.scale_inv_from_scale(scale).tolist() == [scale_inv_of(s) for s in scale.tolist()]
    # alone as well: vector instructions and what is left over after them may differ
    for s in scale[-40:]:
        assert numerics.scale_inv_from_scale(s[None, None]).item() == scale_inv_of(s.item())


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_amax_zero(zero: float, power_of_two: bool) -> None:
    amax = torch.tensor([[zero, 2.0], [zero, zero]])
    scale = scale_of(2.0, 448.0, power_of_two, 3)
    assert numerics.scale_from_amax(amax, 448.0, power_of_two, 3).tolist() == [[1.0, scale], [1.0, 1.0]]
    assert numerics.scale_of(zero, 448.0, power_of_two, 3) == 1.0
    assert numerics.scale_of(zero, 448.0, power_of_two, 3, previous=7.0) == 7.0


@pytest.mark.parametrize("limit", [448.0, 57344.0])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 5, 64])
def test_one_number_has_the_same_arithmetic(limit: float, power_of_two: bool, margin: int) -> None:
    amax = amaxes()
    scale = numerics.scale_from_amax(amax, limit, power_of_two, margin)
    assert [numerics.scale_of(a, limit, power_of_two, margin) for a in amax.tolist()] == scale.tolist()
    scale_inv = torch.tensor([numerics.scale_inv_of(s) for s in scale.tolist()])
    assert torch.equal(scale_inv, numerics.scale_inv_from_scale(scale))


@pytest.mark.parametrize("shape", [(), (1, 1), (0, 3), (3, 1), (2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    amax = torch.full(shape, 2.0)
    scale = numerics.scale_from_amax(amax, 448.0, False, 0)
    assert scale.shape == shape and bool((scale == 224.0).all())
    assert numerics.scale_inv_from_scale(scale).shape == shape


def test_floor_power_of_two() -> None:
    scale = torch.tensor([2.0**-126, 0.75, 1.0, 1.9999999, 2.0, 3.0, 2.0**127, math.inf])
    floored = [2.0**-126, 0.5, 1.0, 1.0, 2.0, 2.0, 2.0**127, math.inf]
    assert numerics.floor_power_of_two(scale).tolist() == floored
