"""The kernels of norms with casts, a program of which owns BLOCK_R rows.

It reads them for their statistics, and again, from a cache, to normalise them. Rows that fit one tile stay in
registers.

SHAPE is (EVEN, ONE_TILE, TILES, BLOCK_R, BLOCK_C, FOLD). EVEN: x is made of whole programs' tiles; ONE_TILE: a tile
holds whole rows; TILES: how many times BLOCK_R rows a program does; FOLD: elements that a thread loads at once. norm is
produce.py's Norm, whose statistics are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.cast_blocks import cast_scaling
from octavo.kernels.triton.cast_rows import encode_rows
from octavo.kernels.triton.produce import factor
from octavo.kernels.triton.tiles import (
    encode,
    encode_finite,
    finite_abs,
    is_last_program,
    load_tile,
    narrow,
    raise_amax,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    take_amax,
)


@triton.jit
def row_statistics(x, norm, rows, eps, SHAPE: tl.constexpr):
    """Find and write the statistics of rows [BR]: (their first BLOCK_C columns, mean or 0, rstd).

    The mean of the first columns is taken from all elements before they are squared. The square of its distance from
    the rows' mean is at most C / BLOCK_C variances (Jensen), so that little of the variance is lost by subtracting it.
    """
    EVEN: tl.constexpr = SHAPE[0]
    ONE_TILE: tl.constexpr = SHAPE[1]
    BLOCK_R: tl.constexpr = SHAPE[3]
    BLOCK_C: tl.constexpr = SHAPE[4]
    FOLD: tl.constexpr = SHAPE[5]
    cols = tl.arange(0, BLOCK_C)
    first = load_tile(x, rows, cols, EVEN)
    count = tl.full([BLOCK_R], x.C, tl.float32)
    mean = tl.zeros([BLOCK_R], tl.float32)
    centred = first
    if norm.mean is not None:
        if ONE_TILE:
            mean = tl.math.div_rn(tl.sum(first, 1), count)
        else:
            mean = tl.sum(first, 1) * (1.0 / BLOCK_C)
        centred = centre(first, mean, cols, x, EVEN)
    sums = fold_sum(centred, FOLD)
    squares = fold_sum(centred * centred, FOLD)
    if not ONE_TILE:
        for start in range(BLOCK_C, x.C, BLOCK_C):
            tile = load_tile(x, rows, start + cols, EVEN)
            if norm.mean is not None:
                tile = centre(tile, mean, start + cols, x, EVEN)
                sums += fold_sum(tile, FOLD)
            squares += fold_sum(tile * tile, FOLD)
    variance = tl.math.div_rn(tl.sum(squares, 1), count)
    if norm.mean is not None:
        if not ONE_TILE:
            distance = tl.math.div_rn(tl.sum(sums, 1), count)
            mean += distance
            distance *= distance
            centred_variance = tl.where(variance > distance, variance - distance, 0.0)
            variance = tl.where(variance < float("inf"), centred_variance, variance)
        tl.store(norm.mean + rows, mean, mask=rows < x.R)
    rstd = tl.math.div_rn(tl.full([BLOCK_R], 1.0, tl.float32), tl.math.sqrt_rn(variance + eps))
    tl.store(norm.rstd + rows, rstd, mask=rows < x.R)
    return first, mean, rstd


@triton.jit
def centre(tile, mean, cols, x, EVEN: tl.constexpr):
    """The tile [BR, BC] less its rows' means, 0 beyond their end."""
    tile -= mean[:, None]
    if not EVEN:
        tile = tl.where((cols < x.C)[None, :], tile, 0.0)
    return tile


@triton.jit
def fold_sum(tile, FOLD: tl.constexpr):
    """[BR, BC // FOLD]: sums of neighbours, which a thread holds, so that sums of tiles take few registers."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // FOLD, FOLD]), 2)


@triton.jit
def fold_max(tile, FOLD: tl.constexpr):
    """The same with the largest; NaN may lose or stay."""
    return tl.max(tl.reshape(tile, [tile.shape[0], tile.shape[1] // FOLD, FOLD]), 2)


@triton.jit
def normalised(tile, x, norm, mean, rstd, rows, cols, ZERO_CENTERED: tl.constexpr, EVEN: tl.constexpr):
    """What the norm makes of the tile [BR, BC] of x, 0 outside of it; rounds as the reference does."""
    if norm.mean is not None:
        tile -= mean[:, None]
    tile *= rstd[:, None]
    tile *= factor(vector(norm.gamma, cols, x, EVEN), ZERO_CENTERED)[None, :]
    if norm.beta is not None:
        tile += vector(norm.beta, cols, x, EVEN).to(tl.float32)[None, :]
    if not EVEN:
        tile = tl.where((rows < x.R)[:, None] & (cols < x.C)[None, :], tile, 0.0)
    return tile


@triton.jit
def vector(ptr, cols, x, EVEN: tl.constexpr):
    """Elements ``cols`` of a parameter [C]."""
    if EVEN:
        result = tl.load(ptr + cols)
    else:
        result = tl.load(ptr + cols, mask=cols < x.C, other=0.0)
    return result


@triton.jit
def store_y(tile, y_ptr, x, rows, cols, EVEN: tl.constexpr):
    """Write what was normalised, rounded, unless y_ptr is None."""
    if y_ptr is not None:
        y = narrow(tile, y_ptr.dtype.element_ty)
        offsets = rows.to(tl.int64)[:, None] * x.C + cols[None, :]
        if EVEN:
            tl.store(y_ptr + offsets, y)
        else:
            tl.store(y_ptr + offsets, y, mask=(rows < x.R)[:, None] & (cols < x.C)[None, :])


@triton.jit
def finish_rows(
    first,
    x,
    norm,
    y_ptr,
    out,
    scale,
    mean,
    rstd,
    rows,
    ANY: tl.constexpr,  # there may be inf
    ZERO_CENTERED: tl.constexpr,
    E5M2: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Write y and codes by one scale of rows whose statistics are known: their amax; if not ANY, inf where one is."""
    EVEN: tl.constexpr = SHAPE[0]
    ONE_TILE: tl.constexpr = SHAPE[1]
    BLOCK_R: tl.constexpr = SHAPE[3]
    BLOCK_C: tl.constexpr = SHAPE[4]
    FOLD: tl.constexpr = SHAPE[5]
    end = x.C
    if ONE_TILE:
        end = BLOCK_C
    largest = tl.zeros([BLOCK_R, BLOCK_C // FOLD], tl.float32)
    for start in range(0, end, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        tile = first
        if not ONE_TILE:
            tile = load_tile(x, rows, cols, EVEN)
        tile = normalised(tile, x, norm, mean, rstd, rows, cols, ZERO_CENTERED, EVEN)
        if ANY:
            largest = tl.maximum(largest, fold_max(finite_abs(tile), FOLD))
            codes = encode(tile, scale, E5M2)
        else:
            largest = tl.maximum(largest, fold_max(tl.abs(tile), FOLD))
            codes = encode_finite(tile, scale, E5M2)
            store_y(tile, y_ptr, x, rows, cols, EVEN)
        store_codes(codes, out, rows, cols, x, EVEN)
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def norm_tensor_kernel(
    x,
    norm,
    y_ptr,
    eps,
    out,  # of None: no codes
    scale_inv_ptr,
    amax_ptr,  # or None
    delayed_scale_ptr,  # None: no codes
    work_ptr,  # [0] the bits of the shared amax, [1] its counter; 0 before and after
    ZERO_CENTERED: tl.constexpr,
    ROLE: tl.constexpr,
    E5M2: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Statistics; and y, the amax, and codes by a delayed scale."""
    TILES: tl.constexpr = SHAPE[2]
    BLOCK_R: tl.constexpr = SHAPE[3]
    scale = 1.0
    if delayed_scale_ptr is not None:
        found = tl.load(delayed_scale_ptr + ROLE)
        scale = tl.where(found == 0, 1.0, found)  # a CUDA graph replayed after the state was emptied
        if tl.program_id(0) == 0:
            tl.store(scale_inv_ptr, scale_inv_from_scale(scale, False))
    amax = 0.0
    for i in range(TILES):
        rows = (tl.program_id(0) * TILES + i) * BLOCK_R + tl.arange(0, BLOCK_R)
        first, mean, rstd = row_statistics(x, norm, rows, eps, SHAPE)
        if amax_ptr is not None or y_ptr is not None:
            largest = finish_rows(
                first, x, norm, y_ptr, out, scale, mean, rstd, rows, False, ZERO_CENTERED, E5M2, SHAPE
            )
            if largest == float("inf"):  # then once more, with care
                tl.debug_barrier()
                largest = finish_rows(
                    first, x, norm, y_ptr, out, scale, mean, rstd, rows, True, ZERO_CENTERED, E5M2, SHAPE
                )
            amax = tl.maximum(amax, largest)
    if amax_ptr is not None:
        raise_amax(work_ptr, amax)
        if is_last_program(work_ptr + 1, tl.num_programs(0)):
            tl.store(amax_ptr, take_amax(work_ptr))


@triton.jit
def norm_rows_kernel(
    x,
    norm,
    y_ptr,
    eps,
    out,
    scale_inv_ptr,
    amax_ptr,
    ZERO_CENTERED: tl.constexpr,
    ROUNDING: tl.constexpr,  # (E5M2, limit, power_of_two)
    SHAPE: tl.constexpr,
):
    """Statistics, y, and a scale for each row."""
    EVEN: tl.constexpr = SHAPE[0]
    ONE_TILE: tl.constexpr = SHAPE[1]
    BLOCK_R: tl.constexpr = SHAPE[3]
    BLOCK_C: tl.constexpr = SHAPE[4]
    FOLD: tl.constexpr = SHAPE[5]
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    first, mean, rstd = row_statistics(x, norm, rows, eps, SHAPE)
    tile = normalised(first, x, norm, mean, rstd, rows, tl.arange(0, BLOCK_C), ZERO_CENTERED, EVEN)
    largest = fold_max(tl.abs(tile), FOLD)
    if not ONE_TILE:
        for start in range(BLOCK_C, x.C, BLOCK_C):
            cols = start + tl.arange(0, BLOCK_C)
            more = load_tile(x, rows, cols, EVEN)
            more = normalised(more, x, norm, mean, rstd, rows, cols, ZERO_CENTERED, EVEN)
            largest = tl.maximum(largest, fold_max(tl.abs(more), FOLD))
    amax = tl.max(largest, 1)
    amax = tl.where(amax == amax, amax, 0.0)  # a row of NaN alone
    any_inf = tl.max(amax, 0) == float("inf")
    if any_inf:
        largest = tl.zeros([BLOCK_R, BLOCK_C // FOLD], tl.float32)
        for start in range(0, x.C, BLOCK_C):
            cols = start + tl.arange(0, BLOCK_C)
            more = load_tile(x, rows, cols, EVEN)
            more = normalised(more, x, norm, mean, rstd, rows, cols, ZERO_CENTERED, EVEN)
            largest = tl.maximum(largest, fold_max(finite_abs(more), FOLD))
        amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, ROUNDING[1], ROUNDING[2])
    tl.store(amax_ptr + rows, amax, mask=rows < x.R)
    tl.store(scale_inv_ptr + rows, scale_inv_from_scale(scale, ROUNDING[2]), mask=rows < x.R)
    end = x.C
    if ONE_TILE:
        end = BLOCK_C
    for start in range(0, end, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        if not ONE_TILE:
            tile = load_tile(x, rows, cols, EVEN)
            tile = normalised(tile, x, norm, mean, rstd, rows, cols, ZERO_CENTERED, EVEN)
        store_y(tile, y_ptr, x, rows, cols, EVEN)
        store_codes(encode_rows(tile, scale, any_inf, ROUNDING[0]), out, rows, cols, x, EVEN)


@triton.jit
def norm_blocks_kernel(
    x,
    norm,
    y_ptr,
    eps,
    out,
    scale_inv_ptr,
    amax_ptr,  # or None
    strides,  # of both
    second_out,  # the second scaling's, or None
    second_scale_inv_ptr,
    second_strides,
    ZERO_CENTERED: tl.constexpr,
    ROUNDINGS: tl.constexpr,  # (E5M2, limit, power_of_two) of each
    BLOCKS: tl.constexpr,  # (rows, columns) of each, or None
    SHAPE: tl.constexpr,
):
    """Statistics, y, and a scale for each block whose sizes divide a tile; two such scalings."""
    EVEN: tl.constexpr = SHAPE[0]
    ONE_TILE: tl.constexpr = SHAPE[1]
    BLOCK_R: tl.constexpr = SHAPE[3]
    BLOCK_C: tl.constexpr = SHAPE[4]
    ROUNDING: tl.constexpr = ROUNDINGS[0]
    BLOCK: tl.constexpr = BLOCKS[0]
    SECOND_ROUNDING: tl.constexpr = ROUNDINGS[1]
    SECOND_BLOCK: tl.constexpr = BLOCKS[1]
    group = tl.program_id(0)
    rows = group * BLOCK_R + tl.arange(0, BLOCK_R)
    first, mean, rstd = row_statistics(x, norm, rows, eps, SHAPE)
    end = x.C
    if ONE_TILE:
        end = BLOCK_C
    for start in range(0, end, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        tile = first
        if not ONE_TILE:
            tile = load_tile(x, rows, cols, EVEN)
        tile = normalised(tile, x, norm, mean, rstd, rows, cols, ZERO_CENTERED, EVEN)
        store_y(tile, y_ptr, x, rows, cols, EVEN)
        place = (group, start // BLOCK_C)
        cast_scaling(tile, 0, place, x, out, scale_inv_ptr, amax_ptr, strides, ROUNDING, BLOCK, False, EVEN)
        if SECOND_BLOCK is not None:
            ptr = second_scale_inv_ptr
            cast_scaling(
                tile, 0, place, x, second_out, ptr, None, second_strides, SECOND_ROUNDING, SECOND_BLOCK, False, EVEN
            )
