"""What the tests hold Octavo against, written from the standards and not from its sources.

E4M3 and E5M2 are enumerated from the bit layout of the "OCP 8-bit Floating Point Specification", revision 1.0, table 1.
Scales are computed with fractions; rounding to codes is a search among the midpoints of all finite codes.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from octavo import PerBlock, PerRow, PerTensor

# one of each kind, and blocks that leave every other size ragged
GRANULARITIES = [
    PerTensor(),
    PerRow(),
    PerRow(dim=-2),
    PerBlock(1, 128),
    PerBlock(128, 128),
    PerBlock(1, 32),
    PerBlock(128, 1),
    PerBlock(3, 5),
]
FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
E4M3_CODES, E5M2_CODES = torch.float8_e4m3fn, torch.float8_e5m2


def value_of(code: int, dtype: torch.dtype) -> float:
    """What a code reads."""
    sign = -1.0 if code & 0x80 else 1.0
    if dtype == E4M3_CODES:  # s eeee mmm, bias 7; S.1111.111 is NaN, there is no infinity
        exponent, mantissa, bias, steps = (code >> 3) & 15, code & 7, 7, 8
        if exponent == 15 and mantissa == 7:
            return math.nan
    else:  # s eeeee mm, bias 15; S.11111.00 is infinity, S.11111.{01, 10, 11} are NaN
        exponent, mantissa, bias, steps = (code >> 2) & 31, code & 3, 15, 4
        if exponent == 31:
            return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * (mantissa / steps) * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / steps) * 2.0 ** (exponent - bias)


# what each code reads, by dtype, float64; and the non-negative finite ones: they ascend with the code
VALUES = {d: torch.tensor([value_of(c, d) for c in range(256)], dtype=torch.float64) for d in (E4M3_CODES, E5M2_CODES)}
FINITE = {E4M3_CODES: VALUES[E4M3_CODES][:0x7F], E5M2_CODES: VALUES[E5M2_CODES][:0x7C]}
MAX = {E4M3_CODES: 448.0, E5M2_CODES: 57344.0}


def all_codes(dtype: torch.dtype) -> Tensor:
    """The 256 codes."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def read(codes: Tensor) -> Tensor:
    """Codes as float64, by enumeration."""
    return VALUES[codes.dtype][codes.contiguous().view(torch.uint8).int()]


def round_to_codes(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest codes (as uint8), ties to the even one.

    Finite values saturate; NaN becomes 0x7F, as infinity does in E4M3.
    """
    value = value.double()
    grid = FINITE[dtype]
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = value.abs().nan_to_num(nan=0.0).contiguous()
    code = torch.searchsorted(middle, magnitude)  # how many midpoints lie below it
    tie = middle[code.clamp(max=len(middle) - 1)] == magnitude
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    code = torch.where(torch.isinf(value), 0x7F if dtype == E4M3_CODES else 0x7C, code)
    code = code + torch.where(torch.signbit(value), 0x80, 0)
    faulty = torch.isnan(value) | (torch.isinf(value) & (dtype == E4M3_CODES))
    return torch.where(faulty, 0x7F, code).to(torch.uint8)


def float32(x: Fraction) -> float:
    """A positive fraction rounded to nearest float32, ties to even, subnormals included."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= x < Fraction(2) ** exponent  # now 2^exponent <= x < 2^(exponent + 1)
    unit = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(x / unit) * unit  # of a Fraction: half to even
    return math.inf if rounded >= 2**128 else float(rounded)


def scale_of(amax: float, limit: float, power_of_two: bool, margin: int = 0, previous: float = 1.0) -> float:
    """The scale for ``amax``, rounded to float32."""
    if amax == 0:
        return previous
    scale = float32(Fraction(limit) / 2**margin / Fraction(amax))
    if power_of_two and 0 < scale < math.inf:
        scale = 2.0 ** (math.frexp(scale)[1] - 1)
    return min(max(scale, 2.0**-126), 2.0**126)


def scale_inv_of(scale: float) -> float:
    """Its reciprocal."""
    return float32(1 / Fraction(scale))


def tiles_of(shape: Sequence[int], tile: Sequence[int]) -> Iterator[tuple[int, int, slice, slice]]:
    """(row of scale_inv, column of scale_inv, rows, columns) of each tile of an [R, C] tensor, one by one."""
    starts = []
    for size, step in zip(shape, tile, strict=True):
        starts.append([(0, size)] if step == -1 else [(i, min(i + step, size)) for i in range(0, size, step)])
    for i, (top, bottom) in enumerate(starts[0]):
        for j, (left, right) in enumerate(starts[1]):
            yield i, j, slice(top, bottom), slice(left, right)


def scale_grid(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of scale_inv."""
    last = max(((i, j) for i, j, _, _ in tiles_of(shape, tile)), default=None)
    if last is not None:
        return last[0] + 1, last[1] + 1
    return tuple(1 if step == -1 else math.ceil(size / step) for size, step in zip(shape, tile, strict=True))


def cast(
    x: Tensor, dtype: torch.dtype, tile: Sequence[int], power_of_two: bool = False, margin: int = 0, scale: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes as uint8, scale_inv, amax), tile after tile; with ``scale`` not 0, that one for all."""
    grid = scale_grid(x.shape, tile)
    scale_inv, amax = torch.full(grid, math.nan), torch.full(grid, math.nan)
    scaled = torch.full(x.shape, math.nan, dtype=torch.float64)
    exact = x.double()
    for i, j, rows, cols in tiles_of(x.shape, tile):
        part = exact[rows, cols]
        finite = part[torch.isfinite(part)].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        s = scale or scale_of(largest, MAX[dtype], power_of_two, margin)
        amax[i, j], scale_inv[i, j] = largest, scale_inv_of(s)
        scaled[rows, cols] = part * s  # 48 significant bits at most: exact in float64
    saturating = scaled.float().clamp(-FLOAT32_MAX, FLOAT32_MAX).double()
    rounded = torch.where(torch.isfinite(exact), saturating, exact)
    return round_to_codes(rounded, dtype), scale_inv, amax


def dequantize(codes: Tensor, scale_inv: Tensor, tile: Sequence[int]) -> Tensor:
    """The exact values of a pair [R, C], float64."""
    value = read(codes)
    for i, j, rows, cols in tiles_of(codes.shape, tile):
        value[rows, cols] *= scale_inv[i, j].double()
    return value


def sqnr(actual: Tensor, exact: Tensor) -> float:
    """Signal to error in dB."""
    error = (actual.double() - exact).square().sum()
    return math.inf if error == 0 else float(10 * torch.log10(exact.square().sum() / error))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit (so -0 is not 0, and NaN may equal NaN)."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool((a.contiguous().view(integer) == b.contiguous().view(integer)).all())
    )
