"""Count what a cast did to a tensor, by one read of the tensor and of its codes, and add that to earlier counts.

And count the rows of a product's operand that have faults, by an element of each row of the result, and the operand's
scales.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from octavo.formats import E2M1
from octavo.kernels.arguments import Counted, CountedCast, WatchedOperand
from octavo.kernels.reference.cast_statistics import LARGEST_CODES
from octavo.kernels.reference.cast_statistics import cast_statistics as reference_cast_statistics
from octavo.kernels.triton.dequantize import scales_of_blocks
from octavo.kernels.triton.groups import locate, on_device
from octavo.kernels.triton.launch import as_argument, launch
from octavo.kernels.triton.tiles import Source, decode, load_scale_inv, load_tile, raise_amax

COUNTED: tl.constexpr = tl.constexpr(len(Counted.sums))
BINS: tl.constexpr = tl.constexpr(Counted.exponents)
FIRST: tl.constexpr = tl.constexpr(Counted.lowest)


class Counting(NamedTuple):
    """A launch's constants: LARGEST_CODES of the codes' format, and a program's tiles, one below the other."""

    largest_code: int
    factor: float
    even: bool  # x is made of whole programs' tiles
    tile_r: int = 16
    tile_c: int = 128
    tiles: int = 8


@triton.jit
def cast_statistics_kernel(
    x,  # Source
    q,  # Source of codes, of any padding
    scale_inv,  # BlockScales; of rows in groups as grouped_cast writes it
    groups,  # Groups, or None
    sums_ptr,
    extremes_ptr,
    counting: tl.constexpr,  # Counting
    grouping: tl.constexpr,  # Grouping, or None
):
    """Add what the reference counts to sums and extremes, of rows in groups to a row of them for each group."""
    strips = tl.cdiv(x.C, counting.tile_c)
    place = locate(groups, tl.program_id(0) // strips, x.R, counting.tile_r * counting.tiles, grouping)
    if grouping is None:
        add_rows(x, q, scale_inv, place, tl.program_id(0) % strips, sums_ptr, extremes_ptr, counting)
    elif place.group < groups.count:
        sums_ptr += place.group * (COUNTED + BINS)
        extremes_ptr += place.group * 3
        add_rows(x, q, scale_inv, place, tl.program_id(0) % strips, sums_ptr, extremes_ptr, counting)


@triton.jit
def add_rows(x, q, scale_inv, place, strip, sums_ptr, extremes_ptr, counting: tl.constexpr):
    """Add a program's part of a group's rows, in a strip of columns; place: GroupOfProgram."""
    TILE_R: tl.constexpr = counting.tile_r
    TILE_C: tl.constexpr = counting.tile_c
    cols = strip * TILE_C + tl.arange(0, TILE_C)
    elements = tl.full((), 0, tl.int32)
    zeros = tl.full((), 0, tl.int32)
    flushed = tl.full((), 0, tl.int32)
    clipped = tl.full((), 0, tl.int32)
    nonfinite = tl.full((), 0, tl.int32)
    power = tl.full((), 0.0, tl.float64)
    error = tl.full((), 0.0, tl.float64)
    counts = tl.zeros([2 * BINS], tl.int32)
    for i in range(counting.tiles):
        local = place.first + i * TILE_R + tl.arange(0, TILE_R)
        inside = (local < place.size)[:, None] & (cols < x.C)[None, :]
        rows = tl.where(local < place.size, place.start + local, x.R)
        if counting.even:
            inside = (local >= 0)[:, None] & (cols >= 0)[None, :]
            rows = local
        value = load_tile(x, rows, cols, counting.even)
        codes, scales = load_codes(q, scale_inv, rows, place.scale_row + local // scale_inv.block_r, cols, inside)
        read = decode(codes) * scales
        finite = tl.abs(value) < float("inf")
        numbers = tl.where(finite, tl.abs(value), 0.0)
        bits = codes.to(tl.uint8, bitcast=True) & 0x7F
        elements += how_many(inside)
        zeros += how_many(inside & (value == 0))
        flushed += how_many(finite & (value != 0) & (bits == 0))
        clipped += how_many(finite & (bits == counting.largest_code) & (numbers > tl.abs(read) * counting.factor))
        nonfinite += how_many(inside & (finite == 0))
        power += sum_of_squares(numbers)
        error += sum_of_squares(tl.where(finite, value - read, 0.0))
        counts += tl.histogram(tl.reshape(exponent_bins(numbers), [TILE_R * TILE_C]), 2 * BINS)
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
    bin = tl.arange(0, 2 * BINS)
    tl.atomic_add(sums_ptr + COUNTED + bin, counts.to(tl.float64), mask=bin < BINS, sem="relaxed")


@triton.jit
def load_codes(q, scale_inv, rows, scale_rows, cols, inside):
    """Load a tile of codes, and each code's scale_inv."""
    offsets = rows.to(tl.int64)[:, None] * q.stride_r + cols.to(tl.int64)[None, :] * q.stride_c
    codes = tl.load(q.ptr + offsets, mask=inside, other=0.0)
    offsets = scale_rows[:, None] * scale_inv.stride_r + (cols // scale_inv.block_c)[None, :] * scale_inv.stride_c
    return codes, load_scale_inv(scale_inv.ptr + offsets, inside)


@triton.jit
def how_many(mask):
    """Count the elements of a tile that a mask has."""
    return tl.sum(tl.sum(mask.to(tl.int32), 1), 0)


@triton.jit
def sum_of_squares(numbers):
    """Return the sum of a tile's squares, in float64."""
    return tl.sum(tl.sum(numbers.to(tl.float64) * numbers, 1), 0)


@triton.jit
def raise_largest(ptr, numbers):
    """Raise a number that all programs share to the largest of these, none of which is negative."""
    raise_amax(ptr.to(tl.pointer_type(tl.int32)), tl.max(tl.max(numbers, 1), 0))


@triton.jit
def exponent_bins(numbers):
    """Return the bin of each number's exponent; for 0 a bin that nobody reads."""
    subnormal = numbers < 2.0**-126
    bits = tl.where(subnormal, 0.0, numbers).to(tl.int32, bitcast=True)  # subnormal numbers are in the first bin anyway
    bins = (bits >> 23) - 127 - FIRST
    bins = tl.where(bins < 0, 0, tl.where(bins > BINS - 1, BINS - 1, bins))
    return tl.where(numbers == 0, BINS, bins)


def cast_statistics(cast: CountedCast) -> None:
    """Compute the op ``octavo::cast_statistics``; its contract is in signatures.py."""
    x, qdata, scale_inv, block, sums, extremes, offsets = cast
    if qdata.dtype is E2M1.dtype:
        return reference_cast_statistics(cast)
    rows, cols = x.shape
    if x.numel() == 0:
        return
    codes = Source(qdata, *qdata.shape, *qdata.stride())
    scales = scales_of_blocks(scale_inv, block, x.shape)
    counting = Counting(*LARGEST_CODES[qdata.dtype], False)
    height = counting.tile_r * counting.tiles
    strips = triton.cdiv(cols, counting.tile_c)
    if offsets is None:
        counting = counting._replace(even=rows % height == 0 and cols % counting.tile_c == 0)
        groups = grouping = None
        parts = triton.cdiv(rows, height)
    else:
        # finding a group takes registers too: tiles of 16 rows spill 32 of them under Triton 3.6
        counting = counting._replace(tile_r=counting.tile_r // 2, tiles=counting.tiles * 2)
        groups, grouping = on_device(offsets, block_r=block[0])
        parts = rows // height + groups.count + 1
    arguments = Source(x, rows, cols, *x.stride()), codes, scales, groups, sums, extremes, counting, grouping
    launch(cast_statistics_kernel, parts * strips, arguments, num_warps=4)


_ROWS = 256  # rows of a result that a program reads, or scales at a time
_COLUMNS = 8  # columns of an operand that it reads at a time
_SCALES = 16  # of scales a program reads so many times _ROWS


@triton.jit
def note_faults_kernel(
    y,  # Source
    operand,  # Source: codes of any padding, or numbers
    scale_inv_ptr,
    scales,  # how many, side by side in memory
    amax_ptr,
    place_ptr,
    faults_ptr,  # [4] faulty rows, all rows, the largest scale_inv, the largest amax
    first_ptr,
    offsets_ptr,  # where groups of rows end
    count,  # how many groups
    HAS_SCALES: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    IS_CODES: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    BY_GROUP: tl.constexpr,  # a scale a group
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add to the faults and raise their largest numbers, as the reference does."""
    begin = tl.program_id(0) * ROWS
    lanes = tl.arange(0, ROWS)
    rows = begin + lanes
    inside = rows < y.R
    value = tl.load(y.ptr + rows.to(tl.int64) * y.stride_r, mask=inside, other=0.0).to(tl.float32)
    suspects = inside & ((tl.abs(value) < float("inf")) == 0)
    if tl.max(suspects.to(tl.int32), 0) > 0:
        is_faulty = tl.zeros([ROWS], tl.int32)
        for start in range(0, operand.C, COLUMNS):
            cols = start + tl.arange(0, COLUMNS)
            offsets = rows.to(tl.int64)[:, None] * operand.stride_r + cols.to(tl.int64)[None, :] * operand.stride_c
            mask = suspects[:, None] & (cols < operand.C)[None, :]
            numbers = tl.load(operand.ptr + offsets, mask=mask, other=0.0)
            numbers = decode(numbers) if IS_CODES else numbers.to(tl.float32)
            is_faulty = tl.maximum(is_faulty, tl.max((tl.abs(numbers) < float("inf")).to(tl.int32) ^ 1, 1))
        faulty_rows = tl.sum(is_faulty, 0)
        if faulty_rows > 0:
            tl.atomic_add(faults_ptr, faulty_rows.to(tl.float32), sem="relaxed")
            where = tl.load(place_ptr)
            if IN_GROUPS:
                row = tl.min(tl.where(is_faulty > 0, rows, y.R), 0)
                for start in range(0, count, ROWS):
                    ends = tl.load(offsets_ptr + start + lanes, mask=start + lanes < count, other=y.R)
                    where += tl.sum((ends <= row).to(tl.int32), 0)
            tl.atomic_cas(first_ptr, 0, where, sem="relaxed")
    if begin == 0:
        tl.atomic_add(faults_ptr + 1, tl.full((), 0.0, tl.float32) + y.R, sem="relaxed")
    shared = faults_ptr.to(tl.pointer_type(tl.int32))
    if HAS_SCALES:
        largest = tl.zeros([ROWS], tl.float32)
        for start in range(begin, scales, tl.num_programs(0) * ROWS):
            inside = start + lanes < scales
            if BY_GROUP:
                ends = tl.load(offsets_ptr + start + lanes, mask=inside, other=0)
                inside &= ends > tl.load(offsets_ptr + start + lanes - 1, mask=inside & (start + lanes > 0), other=0)
            largest = tl.maximum(largest, load_scale_inv(scale_inv_ptr + start + lanes, inside, 0.0))
        raise_amax(shared + 2, tl.max(largest, 0))
    if HAS_AMAX and begin == 0:
        raise_amax(shared + 3, tl.load(amax_ptr))


def note_faults(watched: WatchedOperand) -> None:
    """Compute the op ``octavo::note_faults``; its contract is in signatures.py."""
    y, operand, scale_inv, amax, place, faults, first, offsets = watched
    if y.numel() == 0:
        return
    scales = 0 if scale_inv is None else scale_inv.numel()
    programs = triton.cdiv(max(y.shape[0], scales // _SCALES), _ROWS)
    sources = (Source(x, *x.shape, *x.stride()) for x in (y, operand))
    scales_and_amax = faults if scale_inv is None else as_argument(scale_inv), scales, faults if amax is None else amax
    ends, count = (first, 0) if offsets is None else (offsets.contiguous(), offsets.shape[0])
    by_group = offsets is not None and scale_inv is not None and scale_inv.shape[0] == count
    constants = scales > 0, amax is not None, operand.itemsize == 1, offsets is not None, by_group, _ROWS, _COLUMNS
    arguments = *sources, *scales_and_amax, place, faults, first, ends, count, *constants
    launch(note_faults_kernel, programs, arguments, num_warps=4)
