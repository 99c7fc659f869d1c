"""The references of the tests: other libraries' definitions, or written from the standards, not from our sources.

What a code of E4M3 or E5M2 reads and which code is nearest say ml_dtypes and gfloat (tests/test_formats.py holds these
against each other); gfloat also reads and rounds to E4M4, from the description below. Scales are float64 quotients that
NumPy rounds to float32, and down to powers of two, as gfloat does (tests/test_numerics.py).
"""

import math
from collections.abc import Sequence

import gfloat
import ml_dtypes
import numpy as np
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2
from torch import Tensor

from octavo import PerBlock, PerRow, PerTensor

# one of each kind, and blocks that leave every other size ragged
GRANULARITIES = [PerTensor(), PerRow(), PerRow(dim=-2), PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 32)]
GRANULARITIES += [PerBlock(128, 1), PerBlock(3, 5)]
FLOAT32_MAX = torch.finfo(torch.float32).max
# The formats as gfloat describes them. E4M4 is our own: E4M3 without its sign, and its bit in the mantissa.
FORMAT_INFO = {
    "E4M3": format_info_ocp_e4m3,
    "E5M2": format_info_ocp_e5m2,
    "E4M4": gfloat.FormatInfo(
        "e4m4",
        k=8,
        precision=5,
        bias=7,
        is_signed=False,
        domain=gfloat.Domain.Finite,
        has_nz=False,
        num_high_nans=1,
        has_subnormals=True,
        is_twos_complement=False,
    ),
}
ML_DTYPES = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
MAX = {dtype: float(ml_dtypes.finfo(oracle).max) for dtype, oracle in ML_DTYPES.items()}
# what each code reads, by dtype, float64; and the non-negative finite ones: they ascend with the code
_BYTES = np.arange(256, dtype=np.uint8)
VALUES = {dtype: torch.from_numpy(_BYTES.view(oracle).astype(np.float64)) for dtype, oracle in ML_DTYPES.items()}
FINITE = {dtype: values[:128][values[:128].isfinite()] for dtype, values in VALUES.items()}


def all_codes(dtype: torch.dtype) -> Tensor:
    """Return the 256 codes."""
    return torch.from_numpy(_BYTES.copy()).view(dtype)


def read(codes: Tensor) -> Tensor:
    """Return the values of codes, float64."""
    return VALUES[codes.dtype][codes.contiguous().view(torch.uint8).int()]


def round_to_codes(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest codes (as uint8) to bf16, fp16 or fp32, ties to the even one.

    Finite values saturate; NaN becomes 0x7F, as infinity does in E4M3.
    """
    wide = torch.where(value.isfinite(), value.float().clamp(-MAX[dtype], MAX[dtype]), value.float())
    with np.errstate(invalid="ignore"):  # a signalling NaN
        codes = torch.from_numpy(wide.contiguous().numpy().astype(ML_DTYPES[dtype]).view(np.uint8))
    return codes.masked_fill(read(codes.view(dtype)).isnan(), 0x7F)


def all_bfloat16() -> Tensor:
    """Return every bfloat16 value."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def neighbours(values: Tensor, distance: int = 3) -> Tensor:
    """Return these non-negative float32 values and ``distance`` neighbours on either side, finite ones."""
    bits = values.float().view(torch.int32)[:, None] + torch.arange(-distance, distance + 1, dtype=torch.int32)
    near = bits[bits >= 0].view(torch.float32)
    return near[near.isfinite()]


def around_codes(grid: Tensor) -> Tensor:
    """Return float32 values around these codes' values and the middles between them, and values beyond all codes."""
    beyond = grid[-1] * torch.tensor([17 / 16, 2.0, 1e4], dtype=torch.float64)
    ends = torch.tensor([2.0**-149, 2.0**-126, FLOAT32_MAX], dtype=torch.float64)
    return neighbours(torch.cat([grid, (grid[1:] + grid[:-1]) / 2, beyond, ends]))


def boundaries(dtype: torch.dtype) -> Tensor:
    """Return ``around_codes`` of a float8 dtype, of both signs."""
    near = around_codes(FINITE[dtype])
    return torch.cat([near, -near])


def scales_of(amax: Tensor, limit: float, power_of_two: bool, margin: int = 0, previous: float = 1.0) -> Tensor:
    """Return the scale for each ``amax``, float32."""
    # rounded to float64 and then to float32, which is to float32: a quotient's 53 bits are at least 2 x 24 + 2
    with np.errstate(divide="ignore", over="ignore"):
        scale = (limit / 2.0**margin / amax.double().numpy()).astype(np.float32).clip(2.0**-126, 2.0**126)
    if power_of_two:
        scale = np.ldexp(np.float32(0.5), np.frexp(scale)[1])
    return torch.where(amax == 0, previous, torch.from_numpy(scale))


def scale_of(amax: float, limit: float, power_of_two: bool, margin: int = 0, previous: float = 1.0) -> float:
    """Return the scale for one ``amax``."""
    return scales_of(torch.tensor([amax], dtype=torch.float64), limit, power_of_two, margin, previous).item()


def scale_invs_of(scale: Tensor) -> Tensor:
    """Return the scales' reciprocals."""
    return torch.from_numpy((1.0 / scale.double().numpy()).astype(np.float32))


def scale_grid(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of scale_inv."""
    return tuple(1 if step == -1 else math.ceil(size / step) for size, step in zip(shape, tile, strict=True))


def tile_numbers(shape: Sequence[int], tile: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the row [R, 1] and column [1, C] of the scale_inv of each element of an [R, C] tensor."""
    rows, cols = (
        torch.arange(size) // (max(size, 1) if step == -1 else step) for size, step in zip(shape, tile, strict=True)
    )
    return rows[:, None], cols[None]


def cast(
    x: Tensor, dtype: torch.dtype, tile: Sequence[int], power_of_two: bool = False, margin: int = 0, scale: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes as uint8, scale_inv, amax); with ``scale`` not 0, that one for all."""
    rows, cols = tile_numbers(x.shape, tile)
    amax = torch.zeros(scale_grid(x.shape, tile))
    magnitude = torch.where(x.isfinite(), x.float().abs(), 0.0)
    amax.view(-1).scatter_reduce_(0, (rows * amax.shape[1] + cols).flatten(), magnitude.flatten(), "amax")
    scales = torch.full_like(amax, scale) if scale else scales_of(amax, MAX[dtype], power_of_two, margin)
    scaled = x.double() * scales.double()[rows, cols]  # 48 significant bits at most: exact in float64
    saturating = scaled.float().clamp(-FLOAT32_MAX, FLOAT32_MAX)
    scale_inv = scale_invs_of(scales)
    if power_of_two and tuple(tile) in ((1, 32), (32, 1)):
        exponents = scale_inv.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
        scale_inv = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    return round_to_codes(torch.where(x.isfinite(), saturating, x.float()), dtype), scale_inv, amax


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def nvfp4(
    x: Tensor,
    tile: tuple[int, int],
    margin: int = 0,
    scale: float = 0.0,
    rotation: int | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (packed codes of E2M1 as uint8, scale_inv in bfloat16) of x [R, C], whose rows are the contraction.

    Scales are Transformer Engine's chain, S = 448 x 6 / amax and E4M3(amax of the block x (S / 6)); S is a power of two
    between 2^-117 and 2^117, and a quarter of it where x is rotated. ``scale`` not 0: S of an earlier amax.
    """
    f32 = np.float32
    padded = np.pad(x.float().numpy(), ((0, -x.shape[0] % tile[0]), (0, -x.shape[1] % 16)))
    outer = scale or scale_of(float(f32(np.abs(padded[np.isfinite(padded)]).max(initial=0))), 2688.0, True, margin)
    if rotation is not None:
        outer, padded = outer / 4, rotated(padded, rotation)
    outer = f32(min(max(outer, 2.0**-117), 2.0**117))
    blocks = np.abs(padded).reshape(len(padded) // tile[0], tile[0], -1, 16)
    largest = blocks.max((1, 3), initial=0)  # NaN where there is one
    inner = np.minimum(largest * f32(outer * f32(f32(1) / f32(6))), f32(448)).astype(ml_dtypes.float8_e4m3fn)
    scale_inv = inner.astype(f32) * f32(f32(1) / outer)
    by_element = np.minimum(f32(1) / scale_inv, f32(FLOAT32_MAX)).repeat(tile[0], 0).repeat(16, 1)
    scaled = np.clip(np.nan_to_num(padded * by_element, nan=6.0), f32(-6), f32(6))
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    if seed is not None:
        codes = _stochastic(scaled, random_bytes(padded, seed))
    scale_inv[~np.isfinite(largest)] = np.nan
    codes = codes[: len(x)]
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4), torch.from_numpy(scale_inv).bfloat16()


def _stochastic(scaled: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return the codes of E2M1 of numbers from -6 to 6: the next one where the fraction's 8 bits and these carry."""
    values = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    low = np.minimum(np.searchsorted(values, np.abs(scaled), "right") - 1, 6)
    fraction = (np.abs(scaled) - values[low]) / (values[low + 1] - values[low])
    codes = low + (np.floor(fraction * 256) + drawn >= 256)
    return (codes | np.signbit(scaled) << 3).astype(np.uint8)


def rotated(x: np.ndarray, signs: int) -> np.ndarray:
    """Return x [R, C], each 16 of a row times Sylvester's matrix / 4 whose row i is negated where bit i is set.

    Sums are float32's, of neighbours first; the result is rounded to bfloat16.
    """
    lanes = np.arange(16)
    turned = x.reshape(-1, 16) * np.where(signs >> lanes & 1, np.float32(-1), np.float32(1))
    for distance in (1, 2, 4, 8):
        partner = turned[:, lanes ^ distance]
        turned = np.where(lanes & distance, partner - turned, turned + partner)
    return (turned * np.float32(0.25)).astype(ml_dtypes.bfloat16).astype(np.float32).reshape(x.shape)


def random_bytes(x: np.ndarray, seed: int) -> np.ndarray:
    """Return the 8 bits, of each element of x [R, C], that stochastic rounding adds: of seed, block and place."""
    lanes, odd = np.arange(16, dtype=np.uint32), np.uint32(0x9E3779B1)
    numbers = (x + np.float32(0)).reshape(len(x), -1, 16).view(np.uint32)  # without the sign of 0
    content = _hash(numbers + lanes * odd).sum(2, dtype=np.uint32)
    row, block = np.arange(len(x), dtype=np.uint32)[:, None], np.arange(numbers.shape[1], dtype=np.uint32)
    key = _hash(_hash(content ^ np.uint32(seed)) + row * odd) ^ block
    words = _hash(key[:, :, None] + lanes[:4] * odd)
    return words.view(np.uint8).reshape(x.shape) if words.size else np.zeros(x.shape, np.uint8)


def _hash(x: np.ndarray) -> np.ndarray:
    """C. Wellons' lowbias32."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def dequantize(codes: Tensor, scale_inv: Tensor, tile: Sequence[int]) -> Tensor:
    """Return the exact values of a pair [R, C], float64."""
    return read(codes) * scale_inv.double()[tile_numbers(codes.shape, tile)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit (so -0 is not 0, and NaN may equal NaN)."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
