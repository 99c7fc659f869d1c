"""The 256 codes of a moment, and numbers around them, against gfloat; Triton's stand in whole steps."""

import math

import gfloat
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2
from octavo.formats import E4M4, Format
from octavo.kernels.moment_codes import decode_moment, encode_moment, round_to_bf16, round_to_half
from tests.support.definitions import FLOAT32_MAX, FORMAT_INFO, around_codes, same_bits
from tests.support.fp8_weights import random32

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M4], ids=str)
ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)
# gfloat's rounding modes, and the random bits that ours takes for them
NEAREST, DOWN, RANDOM = gfloat.RoundMode.TiesToEven, gfloat.RoundMode.TowardZero, gfloat.RoundMode.StochasticFastest


def values(fmt: Format) -> Tensor:
    """Return the values that the 256 codes read."""
    return torch.from_numpy(gfloat.decode_ndarray(FORMAT_INFO[fmt.name], ALL.int().numpy())).float()


def positive(fmt: Format) -> Tensor:
    """The finite values that are not negative, ascending with their codes."""
    finite = values(fmt)[: 128 if fmt.signed else 256]
    return finite[finite.isfinite()]


def rounded(x: Tensor, fmt: Format, mode: gfloat.RoundMode, upper: Tensor | None = None) -> Tensor:
    """Codes of finite numbers, saturated; ``upper``: as many random bits as are dropped."""
    info, wide = FORMAT_INFO[fmt.name], x.double().numpy()
    bits = None if upper is None else upper.numpy().astype(np.int64)
    nearest = gfloat.round_ndarray(info, wide, mode, sat=True, srbits=bits, srnumbits=23 - fmt.mantissa_bits)
    return torch.from_numpy(gfloat.encode_ndarray(info, nearest).astype(np.uint8))


@FORMATS
def test_all_codes_read_what_gfloat_says(fmt: Format) -> None:
    expected, read_back = values(fmt), decode_moment(ALL, fmt)
    assert torch.equal(read_back.isnan(), expected.isnan())
    assert same_bits(read_back.nan_to_num(7.0, math.inf, -math.inf), expected.nan_to_num(7.0, math.inf, -math.inf))


@FORMATS
@pytest.mark.parametrize("mode", [NEAREST, DOWN], ids=lambda mode: mode.name)
def test_numbers_around_codes(fmt: Format, mode: gfloat.RoundMode) -> None:
    near = around_codes(positive(fmt).double())
    x = torch.cat([near, near * (1 + 2.0**-12), near * (1 - 2.0**-12), torch.rand(4096) * fmt.max])
    x = x[x.isfinite()]
    if mode == DOWN:
        x = x[(x == 0) | (x >= fmt.smallest_normal)]  # see the next test
    bits = None if mode == NEAREST else torch.zeros(x.shape, dtype=torch.int32)
    expected = rounded(x, fmt, mode)
    assert torch.equal(encode_moment(x.clone(), fmt, bits), expected)
    if fmt.signed:
        assert torch.equal(encode_moment(-x, fmt, bits), expected | 0x80)


def between_codes(fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [n], numbers above them [64, n], and by what part of a step these lie above [64, n].

    Parts are in units of 2^-(23 - mantissa bits): all that float32 has of a step, of which the product loses nothing.
    """
    low, high, units = positive(fmt)[:-1], positive(fmt)[1:], 1 << (23 - fmt.mantissa_bits)
    part = torch.randint(0, units, (64, len(low)), dtype=torch.int32)
    part[0] = units - 1
    return torch.arange(len(low), dtype=torch.int32), low + (high - low) * (part / units), part


@FORMATS
def test_a_number_goes_up_for_as_many_random_bits_as_it_lies_above_a_code(fmt: Format) -> None:
    code, x, part = between_codes(fmt)
    dropped = 23 - fmt.mantissa_bits
    units = 1 << dropped
    for upper in (torch.randint(0, units, x.shape, dtype=torch.int32), units - part.clamp(min=1), units - 1 - part):
        drawn = (upper << (32 - dropped)) | torch.randint(0, 1 << (32 - dropped), x.shape, dtype=torch.int32)
        expected = rounded(x, fmt, RANDOM, upper)
        assert torch.equal(expected, (code + (part + upper >= units)).to(torch.uint8))
        assert torch.equal(encode_moment(x.clone(), fmt, drawn), expected)
        if fmt.signed:
            assert torch.equal(encode_moment(-x, fmt, drawn), expected | 0x80)


@FORMATS
def test_the_hybrid_is_to_nearest_but_where_that_changes_nothing(fmt: Format) -> None:
    code, x, _ = between_codes(fmt)
    drawn, nearest = random32(x.shape), rounded(x, fmt, NEAREST)
    stochastic = encode_moment(x.clone(), fmt, drawn)
    for stored in (code, code + 1, code + 2, (code * 0)):  # the replaced code: either neighbour, or another
        stored = stored.clamp(max=len(code)).to(torch.uint8).expand(x.shape)
        expected = torch.where(nearest == stored, stochastic, nearest)
        assert torch.equal(encode_moment(x.clone(), fmt, drawn, stored), expected)
        if fmt.signed:  # of either sign, as 0 and -0 are one number
            assert torch.equal(encode_moment(-x, fmt, drawn, stored), expected | 0x80)
            assert torch.equal(encode_moment(-x, fmt, drawn, stored | 0x80), expected | 0x80)


def test_the_hybrid_in_bf16() -> None:
    wide = torch.randn(4096) * 2.0 ** torch.randint(-130, 130, (4096,)).float()
    wide[3], wide[5], wide[7] = math.inf, math.nan, 0.0
    drawn, nearest = random32(wide.shape), wide.bfloat16()
    stored = torch.where(torch.rand(4096) < 0.5, nearest, torch.nextafter(nearest, nearest.new_zeros(())))
    assert torch.equal(round_to_bf16(wide, drawn, -stored).isnan(), wide.isnan())
    expected = torch.where(nearest == stored, round_to_bf16(wide, drawn), nearest)
    assert same_bits(round_to_bf16(wide, drawn, stored).nan_to_num(7.0), expected.nan_to_num(7.0))


@FORMATS
@pytest.mark.parametrize("drawn", [None, 0, -1])
def test_what_is_not_finite_is_nan_and_alone(fmt: Format, drawn: int | None) -> None:
    x = torch.tensor([1.0, math.nan, FLOAT32_MAX, math.inf, FLOAT32_MAX, -math.inf, 0.0, -math.nan])
    codes = encode_moment(x, fmt, None if drawn is None else torch.full(x.shape, drawn, dtype=torch.int32))
    largest = len(positive(fmt)) - 1
    one = int((positive(fmt) == 1.0).nonzero())
    assert codes.tolist() == [one, fmt.nan_code, largest, fmt.nan_code, largest, fmt.nan_code, 0, fmt.nan_code]


def all_kinds() -> list[Tensor]:
    """Return each function's results for random numbers, an inf and a NaN among them."""
    wide = torch.randn(64).mul_(100)
    wide[3], wide[5] = math.inf, math.nan
    bits, codes = random32((64,)), torch.arange(256, dtype=torch.uint8)
    results = [round_to_bf16(wide, bits), round_to_bf16(wide, bits, wide.bfloat16()), round_to_half(wide, bits)]
    for fmt in (E4M3, E5M2, E4M4):
        y = wide if fmt.signed else wide.abs()
        results += [encode_moment(y.clone(), fmt, None), encode_moment(y.clone(), fmt, bits), decode_moment(codes, fmt)]
        results.append(encode_moment(y.clone(), fmt, bits, codes[:64]))
    return results


def test_a_gpu_is_not_waited_for_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = all_kinds()
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "is_cpu", property(lambda self: False))
        for read in ("__bool__", "__int__", "__float__", "item", "tolist"):
            patch.setattr(Tensor, read, lambda self: pytest.fail("a number is read"))
        results = all_kinds()
    assert all(same_bits(one, other) for one, other in zip(results, expected, strict=True))
