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

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M4], ids=str)
ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)
# gfloat's rounding modes, and the random bits that ours takes for them
NEAREST, DOWN, RANDOM = gfloat.RoundMode.TiesToEven, gfloat.RoundMode.TowardZero, gfloat.RoundMode.StochasticFastest


def values(fmt: Format) -> Tensor:
    """What the 256 codes read."""
    return torch.from_numpy(gfloat.decode_ndarray(FORMAT_INFO[fmt.name], ALL.int().numpy())).float()


def positive(fmt: Format) -> Tensor:
    """The finite values that are not negative, ascending with their codes."""
    found = values(fmt)[: 128 if fmt.signed else 256]
    return found[found.isfinite()]


def rounded(x: Tensor, fmt: Format, mode: gfloat.RoundMode, bits16: Tensor | None = None) -> Tensor:
    """Codes of finite numbers, saturated."""
    info, wide = FORMAT_INFO[fmt.name], x.double().numpy()
    bits = None if bits16 is None else bits16.numpy().astype(np.int64)
    found = gfloat.round_ndarray(info, wide, mode, sat=True, srbits=bits, srnumbits=16)
    return torch.from_numpy(gfloat.encode_ndarray(info, found).astype(np.uint8))


@FORMATS
def test_all_codes_read_what_gfloat_says(fmt: Format) -> None:
    expected, found = values(fmt), decode_moment(ALL, fmt)
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found.nan_to_num(7.0, math.inf, -math.inf), expected.nan_to_num(7.0, math.inf, -math.inf))


@FORMATS
@pytest.mark.parametrize("mode", [NEAREST, DOWN], ids=lambda mode: mode.name)
def test_numbers_around_codes(fmt: Format, mode: gfloat.RoundMode) -> None:
    near = around_codes(positive(fmt).double())
    x = torch.cat([near, near * (1 + 2.0**-12), near * (1 - 2.0**-12), torch.rand(4096) * fmt.max])
    x = x[x.isfinite()]
    if mode == DOWN:
        x = x[(x == 0) | (x >= fmt.smallest_normal)]  # see the next test
    bits16 = None if mode == NEAREST else torch.zeros(x.shape, dtype=torch.int32)
    expected = rounded(x, fmt, mode)
    assert torch.equal(encode_moment(x.clone(), fmt, bits16), expected)
    if fmt.signed:
        assert torch.equal(encode_moment(-x, fmt, bits16), expected | 0x80)


@FORMATS
def test_random_bits(fmt: Format) -> None:
    # every code and the next, and between them multiples of 2^-16 of the step: of these the product loses nothing
    low, high = positive(fmt)[:-1], positive(fmt)[1:]
    part = torch.randint(0, 1 << 16, (64, len(low)), dtype=torch.int32)
    x = low + (high - low) * (part * 2.0**-16)
    for bits16 in (torch.randint(0, 1 << 16, x.shape, dtype=torch.int32), (1 << 16) - part.clamp(min=1), 65535 - part):
        expected = rounded(x, fmt, RANDOM, bits16)
        assert torch.equal(expected, (torch.arange(len(low)) + (part + bits16 >= 1 << 16)).to(torch.uint8))
        assert torch.equal(encode_moment(x.clone(), fmt, bits16), expected)
        if fmt.signed:
            assert torch.equal(encode_moment(-x, fmt, bits16), expected | 0x80)


@FORMATS
@pytest.mark.parametrize("bits", [None, 0, 0xFFFF])
def test_what_is_not_finite_is_nan_and_alone(fmt: Format, bits: int | None) -> None:
    x = torch.tensor([1.0, math.nan, FLOAT32_MAX, math.inf, FLOAT32_MAX, -math.inf, 0.0, -math.nan])
    bits16 = None if bits is None else torch.full(x.shape, bits, dtype=torch.int32)
    codes = encode_moment(x, fmt, bits16)
    largest = len(positive(fmt)) - 1
    one = int((positive(fmt) == 1.0).nonzero())
    assert codes.tolist() == [one, fmt.nan_code, largest, fmt.nan_code, largest, fmt.nan_code, 0, fmt.nan_code]


def all_kinds() -> list[Tensor]:
    """What each of the functions gives for random numbers, an inf and a NaN among them."""
    wide = torch.randn(64).mul_(100)
    wide[3], wide[5] = math.inf, math.nan
    bits, codes = torch.randint(0, 1 << 16, (64,), dtype=torch.int32), torch.arange(256, dtype=torch.uint8)
    found = [round_to_bf16(wide, bits), round_to_half(wide, bits)]
    for fmt in (E4M3, E5M2, E4M4):
        y = wide if fmt.signed else wide.abs()
        found += [encode_moment(y.clone(), fmt, None), encode_moment(y.clone(), fmt, bits), decode_moment(codes, fmt)]
    return found


def test_a_gpu_is_not_waited_for_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = all_kinds()
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "is_cpu", property(lambda self: False))
        for read in ("__bool__", "__int__", "__float__", "item", "tolist"):
            patch.setattr(Tensor, read, lambda self: pytest.fail("a number is read"))
        found = all_kinds()
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
