"""What a cast did to a tensor, added to what was counted before: one read of the tensor and of its codes."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.reference.cast_statistics import EXPONENTS, LARGEST, LOWEST, SUMS
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.tiles import Source, decode, load_tile, raise_amax

COUNTED: tl.constexpr = tl.constexpr(len(SUMS))
BINS: tl.constexpr = tl.constexpr(EXPONENTS)
FIRST: tl.constexpr = tl.constexpr(LOWEST)


@triton.jit
def cast_statistics_kernel(
    x,  # Source
    q,  # Source of codes, of any padding
    scale_inv,  # Source, whose R and C are a tile's rows and columns
    sums_ptr,
    extremes_ptr,
    LARGEST_CODE: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,  # a program's, one below the other
    EVEN: tl.constexpr,  # x is made of whole programs' tiles
):
    """Add what the reference counts."""
    strips = tl.cdiv(x.C, BLOCK_C)
    first = (tl.program_id(0) // strips) * (BLOCK_R * TILES)
    cols = (tl.program_id(0) % strips) * BLOCK_C + tl.arange(0, BLOCK_C)
    elements = tl.full((), 0, tl.int32)
    zeros = tl.full((), 0, tl.int32)
    flushed = tl.full((), 0, tl.int32)
    clipped = tl.full((), 0, tl.int32)
    nonfinite = tl.full((), 0, tl.int32)
    power = tl.full((), 0.0, tl.float64)
    error = tl.full((), 0.0, tl.float64)
    counts = tl.zeros([2 * BINS], tl.int32)
    for i in range(TILES):
        rows = first + i * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (rows < x.R)[:, None] & (cols < x.C)[None, :]
        if EVEN:
            inside = (rows >= 0)[:, None] & (cols >= 0)[None, :]
        value = load_tile(x, rows, cols, EVEN)
        codes, scales = load_codes(q, scale_inv, rows, cols, inside)
        read = decode(codes) * scales
        finite = tl.abs(value) < float("inf")
        numbers = tl.where(finite, tl.abs(value), 0.0)
        bits = codes.to(tl.uint8, bitcast=True) & 0x7F
        elements += how_many(inside)
        zeros += how_many(inside & (value == 0))
        flushed += how_many(finite & (value != 0) & (bits == 0))
        clipped += how_many(finite & (bits == LARGEST_CODE) & (numbers > tl.abs(read) * FACTOR))
        nonfinite += how_many(inside & (finite == 0))
        power += sum_of_squares(numbers)
        error += sum_of_squares(tl.where(finite, value - read, 0.0))
        counts += tl.histogram(tl.reshape(exponent_bins(numbers), [BLOCK_R * BLOCK_C]), 2 * BINS)
        raise_largest(extremes_ptr, numbers)
        raise_largest(extremes_ptr + 1, tl.where(inside, scales, 0.0))
        one = tl.full(scales.shape, 1.0, tl.float32)
        raise_largest(extremes_ptr + 2, tl.where(inside, tl.math.div_rn(one, scales), 0.0))
    tl.atomic_add(sums_ptr, elements.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, zeros.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 2, flushed.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 3, clipped.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 4, nonfinite.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 5, power, sem="relaxed")
    tl.atomic_add(sums_ptr + 6, error, sem="relaxed")
    place = tl.arange(0, 2 * BINS)
    tl.atomic_add(sums_ptr + COUNTED + place, counts.to(tl.float64), mask=place < BINS, sem="relaxed")


@triton.jit
def load_codes(q, scale_inv, rows, cols, inside):
    """A tile of codes, and each one's scale_inv."""
    offsets = rows.to(tl.int64)[:, None] * q.stride_r + cols.to(tl.int64)[None, :] * q.stride_c
    codes = tl.load(q.ptr + offsets, mask=inside, other=0.0)
    offsets = (rows // scale_inv.R)[:, None] * scale_inv.stride_r + (cols // scale_inv.C)[None, :] * scale_inv.stride_c
    return codes, tl.load(scale_inv.ptr + offsets, mask=inside, other=1.0)


@triton.jit
def how_many(mask):
    """How many of a tile."""
    return tl.sum(tl.sum(mask.to(tl.int32), 1), 0)


@triton.jit
def sum_of_squares(numbers):
    """In float64."""
    return tl.sum(tl.sum(numbers.to(tl.float64) * numbers, 1), 0)


@triton.jit
def raise_largest(ptr, numbers):
    """Raise what all programs share to the largest of these, none of which is negative."""
    raise_amax(ptr.to(tl.pointer_type(tl.int32)), tl.max(tl.max(numbers, 1), 0))


@triton.jit
def exponent_bins(numbers):
    """The bin of each number's exponent; of 0 one that nobody reads."""
    subnormal = numbers < 2.0**-126
    bits = tl.where(subnormal, 0.0, numbers).to(tl.int32, bitcast=True)  # those below are in the first bin anyway
    bins = (bits >> 23) - 127 - FIRST
    bins = tl.where(bins < 0, 0, tl.where(bins > BINS - 1, BINS - 1, bins))
    return tl.where(numbers == 0, BINS, bins)


_BLOCK_R, _BLOCK_C, _TILES = 16, 128, 8


def cast_statistics(
    x: Tensor, qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], sums: Tensor, extremes: Tensor
) -> None:
    """``octavo::cast_statistics``."""
    rows, cols = x.shape
    if x.numel() == 0:
        return
    heights = (all_of if size == ALL else size for size, all_of in zip(tile, (rows, cols), strict=True))
    sources = Source(x, rows, cols, *x.stride()), Source(qdata, *qdata.shape, *qdata.stride())
    arguments = *sources, Source(scale_inv, *heights, *scale_inv.stride()), sums, extremes
    even = rows % (_BLOCK_R * _TILES) == 0 and cols % _BLOCK_C == 0
    constants = *LARGEST[qdata.dtype], _BLOCK_R, _BLOCK_C, _TILES, even
    programs = -(-rows // (_BLOCK_R * _TILES)) * -(-cols // _BLOCK_C)
    launch(cast_statistics_kernel, programs, (*arguments, *constants), num_warps=4)
