import math

import gfloat
import pytest
import torch
from gfloat.formats import format_info_binary32, format_info_ocp_e8m0

from octavo import numerics
from octavo.numerics import E8M0, exponents_of, powers_of
from tests.support.definitions import FLOAT32_MAX, neighbours, same_bits, scale_invs_of, scale_of, scales_of

# every float32 exponent with random mantissas
RANDOM = torch.randint(1, 0x7F800000, (3000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))


def amaxes() -> torch.Tensor:
    """Positive numbers: any, and all around where a quotient of a limit is a power of two or leaves float32's range."""
    powers = torch.tensor([2.0**exponent for exponent in range(-149, 128)], dtype=torch.float64)
    places = torch.cat([powers, powers[:-1] * 448 / 256, torch.tensor([FLOAT32_MAX, math.pi, 65504.0])])
    near = neighbours(places, 1)
    return torch.cat([near[near > 0], RANDOM.view(torch.float32)])


def test_the_definitions_roundings_are_gfloats() -> None:
    amax = amaxes()[::7]
    scale = gfloat.round_ndarray(format_info_binary32, 448 / amax.double().numpy()).clip(2.0**-126, 2.0**126)
    down = gfloat.round_ndarray(format_info_ocp_e8m0, scale, gfloat.RoundMode.TowardZero)
    inverse = gfloat.round_ndarray(format_info_binary32, 1 / scale)
    results = scales_of(amax, 448, False), scales_of(amax, 448, True), scale_invs_of(scales_of(amax, 448, False))
    assert [each.double().tolist() for each in results] == [scale.tolist(), down.tolist(), inverse.tolist()]


@pytest.mark.parametrize("limit", [448.0, 57344.0])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 7, 64])
def test_scale_is_correctly_rounded(limit: float, power_of_two: bool, margin: int) -> None:
    amax = amaxes()
    before = amax.clone()
    scale = numerics.scale_from_amax(amax, limit, power_of_two, margin)
    assert same_bits(scale, scales_of(amax, limit, power_of_two, margin))
    assert torch.equal(amax, before)
    assert [numerics.scale_of(one, limit, power_of_two, margin) for one in amax.tolist()] == scale.tolist()


def test_scale_inv_is_the_correctly_rounded_reciprocal_and_normal() -> None:
    bits = torch.randint(0x00800000, 0x7E800001, (3000,), dtype=torch.int32)  # from 2^-126 to 2^126
    scale = torch.cat([bits.view(torch.float32), torch.tensor([2.0**-126, 2.0**126, 1.0, 448.0, 3.0])])
    expected = scale_invs_of(scale)
    assert same_bits(numerics.scale_inv_from_scale(scale), expected)
    assert expected.min() >= 2.0**-126 and expected.max() <= 2.0**126
    # alone as well: vector instructions and what is left over after them may differ
    for s, inv in zip(scale[-40:], expected[-40:], strict=True):
        assert numerics.scale_inv_from_scale(s[None, None]).item() == inv


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_amax_zero(zero: float, power_of_two: bool) -> None:
    amax = torch.tensor([[zero, 2.0], [zero, zero]])
    scale = scale_of(2.0, 448.0, power_of_two, 3)
    assert numerics.scale_from_amax(amax, 448.0, power_of_two, 3).tolist() == [[1.0, scale], [1.0, 1.0]]
    assert numerics.scale_of(zero, 448.0, power_of_two, 3) == 1.0
    assert numerics.scale_of(zero, 448.0, power_of_two, 3, previous=7.0) == 7.0


def test_floor_power_of_two() -> None:
    scale = torch.cat([scales_of(amaxes(), 448.0, False), neighbours(torch.tensor([2.0**127]), 2)])
    expected = gfloat.round_ndarray(format_info_ocp_e8m0, scale.double().numpy(), gfloat.RoundMode.TowardZero)
    assert numerics.floor_power_of_two(scale).tolist() == expected.tolist()
    within = scale <= 2.0**126
    assert numerics.floor_power_of_two_by_comparison(scale[within]).tolist() == expected[within].tolist()
    assert numerics.floor_power_of_two(torch.tensor(math.inf)) == math.inf


def test_exponents_keep_every_scale_in_a_graph_and_outside() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(exponents_of(codes.view(E8M0)), codes) and same_bits(powers_of(codes).to(E8M0), codes.view(E8M0))
    powers, exponents = torch.exp2(torch.arange(-126.0, 128.0)), codes[1:255]
    compiled = torch.compile(powers_of, backend="eager")
    torch.testing.assert_close(compiled(codes), powers_of(codes), rtol=0, atol=0, equal_nan=True)
    in_graph = torch.compile(exponents_of, backend="eager"), compiled
    for to_exponents, to_powers in ((exponents_of, powers_of), in_graph):
        assert torch.equal(to_powers(codes)[1:255], powers)
        assert all(torch.equal(to_exponents(scales), exponents) for scales in (powers, powers.to(E8M0)))


def test_a_delayed_scale_holds_where_there_is_one():
    amax, delayed = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 3.0, 5.0, 2.0**-9, math.nan])
    scales = numerics.scale_from_amax(amax, 448.0, True, 0, delayed)
    assert same_bits(scales, torch.tensor([256.0, 3.0, 5.0, 2.0**-9, math.nan]))  # a fault stays visible
