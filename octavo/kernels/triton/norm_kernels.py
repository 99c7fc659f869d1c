"""The kernels of norms with casts, a program of which owns BLOCK_R rows.

It reads them for their statistics, and again, from a cache, to normalise them. Rows that fit one tile stay in
registers.

norm is prologue.py's Norm, whose statistics are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.cast_blocks import store_blocks
from octavo.kernels.triton.prologue import factor
from octavo.kernels.triton.tiles import (
    encode,
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
def row_statistics(x, norm, rows, eps, tiling: tl.constexpr):
    """Find and write the statistics of rows [BR]: (their first tiling.block_c columns, mean or 0, rstd).

    The mean of the first columns is taken from all elements before they are squared. The square of its distance from
    the rows' mean is at most C / BLOCK_C variances (Jensen), so that little of the variance is lost by subtracting it.
    """
    cols = tl.arange(0, tiling.block_c)
    first = load_tile(x, rows, cols, tiling.even)
    count = tl.full([tiling.block_r], x.C, tl.float32)
    mean = tl.full([tiling.block_r], 0.0, tl.float32)
    centred = first
    if norm.mean is not None:
        if tiling.one_tile:
            mean = tl.math.div_rn(tl.sum(first, 1), count)
        else:
            mean = tl.sum(first, 1) * (1.0 / tiling.block_c)
        centred = centre(first, mean, cols, x, tiling.even)
    sums = fold_sum(centred, tiling.fold)
    squares = fold_sum(centred * centred, tiling.fold)
    if not tiling.one_tile:
        for start in range(tiling.block_c, x.C, tiling.block_c):
            tile = load_tile(x, rows, start + cols, tiling.even)
            if norm.mean is not None:
                tile = centre(tile, mean, start + cols, x, tiling.even)
                sums += fold_sum(tile, tiling.fold)
            squares += fold_sum(tile * tile, tiling.fold)
    variance = tl.math.div_rn(tl.sum(squares, 1), count)
    if norm.mean is not None:
        if not tiling.one_tile:
            distance = tl.math.div_rn(tl.sum(sums, 1), count)
            mean += distance
            distance *= distance
            centred_variance = tl.where(variance > distance, variance - distance, 0.0)
            variance = tl.where(variance < float("inf"), centred_variance, variance)
        tl.store(norm.mean + rows, mean, mask=rows < x.R)
    rstd = tl.math.div_rn(tl.full([tiling.block_r], 1.0, tl.float32), tl.math.sqrt_rn(variance + eps))
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
    """The same with the largest."""
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
def tile_from(start, first, x, norm, y_ptr, mean, rstd, rows, ZERO_CENTERED: tl.constexpr, tiling: tl.constexpr):
    """(The rows' tile from column ``start`` on, normalised and written to y_ptr; its columns)."""
    cols = start + tl.arange(0, tiling.block_c)
    tile = first
    if not tiling.one_tile:
        tile = load_tile(x, rows, cols, tiling.even)
    tile = normalised(tile, x, norm, mean, rstd, rows, cols, ZERO_CENTERED, tiling.even)
    store_y(tile, y_ptr, x, rows, cols, tiling.even)
    return tile, cols


@triton.jit
def norm_tensor_kernel(
    x,
    norm,
    y_ptr,
    eps,
    out,  # Outputs, whose codes and amax may be None
    delayed_scale_ptr,  # None: no codes
    work_ptr,  # [0] the bits of the shared amax, [1] its counter; 0 before and after
    ZERO_CENTERED: tl.constexpr,
    ROLE: tl.constexpr,
    E5M2: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Statistics; and y, the amax, and codes by a delayed scale."""
    scale = 1.0
    if delayed_scale_ptr is not None:
        found = tl.load(delayed_scale_ptr + ROLE)
        scale = tl.where(found == 0, 1.0, found)  # a CUDA graph replayed after the state was emptied
        if tl.program_id(0) == 0:
            tl.store(out.scale_inv, scale_inv_from_scale(scale, False))
    amax = 0.0
    for i in range(tiling.tiles):
        rows = (tl.program_id(0) * tiling.tiles + i) * tiling.block_r + tl.arange(0, tiling.block_r)
        first, mean, rstd = row_statistics(x, norm, rows, eps, tiling)
        if out.amax is not None or y_ptr is not None:
            end = x.C
            if tiling.one_tile:
                end = tiling.block_c
            largest = tl.full([tiling.block_r, tiling.block_c // tiling.fold], 0.0, tl.float32)
            for start in range(0, end, tiling.block_c):
                tile, cols = tile_from(start, first, x, norm, y_ptr, mean, rstd, rows, ZERO_CENTERED, tiling)
                store_codes(encode(tile, scale, E5M2), out.codes, rows, cols, x, tiling.even)
                # last: before the codes Triton 3.6 spills for sm_100
                largest = tl.maximum(largest, fold_max(finite_abs(tile), tiling.fold))
            amax = tl.maximum(amax, tl.max(tl.max(largest, 1), 0))
    if out.amax is not None:
        raise_amax(work_ptr, amax)
        if is_last_program(work_ptr + 1, tl.num_programs(0)):
            tl.store(out.amax, take_amax(work_ptr))


@triton.jit
def norm_rows_kernel(
    x,
    norm,
    y_ptr,
    eps,
    out,  # Outputs
    ZERO_CENTERED: tl.constexpr,
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Statistics, y, and a scale for each row."""
    rows = tl.program_id(0) * tiling.block_r + tl.arange(0, tiling.block_r)
    first, mean, rstd = row_statistics(x, norm, rows, eps, tiling)
    tile = normalised(first, x, norm, mean, rstd, rows, tl.arange(0, tiling.block_c), ZERO_CENTERED, tiling.even)
    largest = fold_max(finite_abs(tile), tiling.fold)
    if not tiling.one_tile:
        for start in range(tiling.block_c, x.C, tiling.block_c):
            cols = start + tl.arange(0, tiling.block_c)
            more = load_tile(x, rows, cols, tiling.even)
            more = normalised(more, x, norm, mean, rstd, rows, cols, ZERO_CENTERED, tiling.even)
            largest = tl.maximum(largest, fold_max(finite_abs(more), tiling.fold))
    amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    end = x.C
    if tiling.one_tile:
        end = tiling.block_c
    for start in range(0, end, tiling.block_c):
        tile, cols = tile_from(start, first, x, norm, y_ptr, mean, rstd, rows, ZERO_CENTERED, tiling)
        store_codes(encode(tile, scale[:, None], rounding.e5m2), out.codes, rows, cols, x, tiling.even)
    tl.store(out.amax + rows, amax, mask=rows < x.R)
    tl.store(out.scale_inv + rows, scale_inv_from_scale(scale, rounding.power_of_two), mask=rows < x.R)


@triton.jit
def norm_blocks_kernel(
    x,
    norm,
    y_ptr,
    eps,
    first_out,  # Outputs of the first scaling
    second_out,  # of the second, or None
    ZERO_CENTERED: tl.constexpr,
    scaling: tl.constexpr,  # Rounding of the first
    second_scaling: tl.constexpr,  # of the second, or None
    tiling: tl.constexpr,  # Tiling
):
    """Statistics, y, and a scale for each block whose sizes divide a tile; two such scalings."""
    group = tl.program_id(0)
    rows = group * tiling.block_r + tl.arange(0, tiling.block_r)
    first, mean, rstd = row_statistics(x, norm, rows, eps, tiling)
    end = x.C
    if tiling.one_tile:
        end = tiling.block_c
    for start in range(0, end, tiling.block_c):
        tile, _ = tile_from(start, first, x, norm, y_ptr, mean, rstd, rows, ZERO_CENTERED, tiling)
        place = (group, start // tiling.block_c)
        store_blocks(tile, 0, place, x, first_out, scaling, tiling)
        if second_scaling is not None:
            store_blocks(tile, 0, place, x, second_out, second_scaling, tiling)
