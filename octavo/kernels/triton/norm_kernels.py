"""The kernels of norms with casts, and of their gradient, whose contract is in signatures.py.

A program owns TILE_R rows: it reads them for their statistics, and again to normalise them, from their end back, where
a cache still has what was read last. Rows that fit one tile stay in registers. norm is prologue.py's NormFactors, whose
statistics are written.

The gradient has a fixed number of programs, each of which goes over rows far apart: it reads dy and x once, writes dx,
and adds up its partial sums of dgamma and dbeta. A second launch adds those in their order, so that results never
differ from run to run. reference/norm.py has the formulas.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.arguments import NormGradient
from octavo.kernels.triton.cast_blocks import store_blocks
from octavo.kernels.triton.launch import Config, config, launch, multiprocessors, with_room_for
from octavo.kernels.triton.prologue import NormFactors, factor
from octavo.kernels.triton.tiles import (
    Source,
    Tiling,
    encode,
    finite_abs,
    is_last_program,
    load_tile,
    narrow,
    raise_amax,
    rounded,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    take_amax,
)


@triton.jit
def row_statistics(x, norm, rows, eps, tiling: tl.constexpr):
    """Compute and write the statistics of rows [TR]: (their first tiling.tile_c columns, mean or 0, rstd).

    The mean of the first columns is taken from all elements before they are squared. The square of its distance from
    the rows' mean is at most C / TILE_C variances (Jensen), so that little of the variance is lost by subtracting it.
    """
    cols = tl.arange(0, tiling.tile_c)
    first = load_rows(x, norm, rows, cols, tiling.even)
    store_y(first, norm.total, x, rows, cols, tiling.even)
    count = tl.full([tiling.tile_r], x.C, tl.float32)
    mean = tl.full([tiling.tile_r], 0.0, tl.float32)
    centred = first
    if norm.mean is not None:
        if tiling.one_tile:
            mean = tl.math.div_rn(tl.sum(first, 1), count)
        else:
            mean = tl.sum(first, 1) * (1.0 / tiling.tile_c)
        centred = centre(first, mean, cols, x, tiling.even)
    sums = fold_sum(centred, tiling.fold)
    squares = fold_sum(centred * centred, tiling.fold)
    if not tiling.one_tile:
        for start in range(tiling.tile_c, x.C, tiling.tile_c):
            tile = load_rows(x, norm, rows, start + cols, tiling.even)
            store_y(tile, norm.total, x, rows, start + cols, tiling.even)
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
    rstd = tl.math.div_rn(tl.full([tiling.tile_r], 1.0, tl.float32), tl.math.sqrt_rn(variance + eps))
    tl.store(norm.rstd + rows, rstd, mask=rows < x.R)
    return first, mean, rstd


@triton.jit
def load_rows(x, norm, rows, cols, EVEN: tl.constexpr):
    """Return the tile [TR, TC] of x, or of its sum with the residual as it is written, as float32."""
    tile = load_tile(x, rows, cols, EVEN)
    if norm.residual is not None:
        total = tile + load_tile(Source(norm.residual, x.R, x.C, x.C, 1), rows, cols, EVEN)
        tile = narrow(rounded(total), x.ptr.dtype.element_ty).to(tl.float32)  # else Triton adds two bfloat16
    return tile


@triton.jit
def centre(tile, mean, cols, x, EVEN: tl.constexpr):
    """Return the tile [TR, TC] less its rows' means, 0 beyond their end."""
    tile -= mean[:, None]
    if not EVEN:
        tile = tl.where((cols < x.C)[None, :], tile, 0.0)
    return tile


@triton.jit
def fold_sum(tile, FOLD: tl.constexpr):
    """Return [TR, TC // FOLD]: sums of neighbours, which a thread holds, so that sums of tiles take few registers."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1] // FOLD, FOLD]), 2)


@triton.jit
def fold_max(tile, FOLD: tl.constexpr):
    """Return [TR, TC // FOLD]: the largest of neighbours."""
    return tl.max(tl.reshape(tile, [tile.shape[0], tile.shape[1] // FOLD, FOLD]), 2)


@triton.jit
def normalised(tile, x, norm, mean, rstd, rows, cols, ZERO_CENTERED: tl.constexpr, EVEN: tl.constexpr):
    """Return the norm of the tile [TR, TC] of x by statistics in registers, 0 outside; rounds as the reference.

    prologue.normalise loads them, for casts after a launch that wrote them.
    """
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
    """Load elements ``cols`` of a parameter [C]."""
    if EVEN:
        elements = tl.load(ptr + cols)
    else:
        elements = tl.load(ptr + cols, mask=cols < x.C, other=0.0)
    return elements


@triton.jit
def store_y(tile, y_ptr, x, rows, cols, EVEN: tl.constexpr):
    """Write a tile of a result [R, C], rounded, unless y_ptr is None."""
    if y_ptr is not None:
        y = narrow(tile, y_ptr.dtype.element_ty)
        offsets = rows.to(tl.int64)[:, None] * x.C + cols[None, :]
        if EVEN:
            tl.store(y_ptr + offsets, y)
        else:
            tl.store(y_ptr + offsets, y, mask=(rows < x.R)[:, None] & (cols < x.C)[None, :])


@triton.jit
def last_start(x, tiling: tl.constexpr):
    """Return the first column of the rows' last tile."""
    start = 0
    if not tiling.one_tile:
        start = (x.C - 1) // tiling.tile_c * tiling.tile_c
    return start


@triton.jit
def tile_from(start, first, x, norm, y_ptr, mean, rstd, rows, ZERO_CENTERED: tl.constexpr, tiling: tl.constexpr):
    """Return (the rows' tile from column ``start`` on, normalised and written to y_ptr; its columns)."""
    cols = start + tl.arange(0, tiling.tile_c)
    tile = first
    if not tiling.one_tile:
        tile = load_rows(x, norm, rows, cols, tiling.even)
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
    """Write statistics, and if wanted y, the amax, and codes by a delayed scale."""
    scale = 1.0
    if delayed_scale_ptr is not None:
        delayed_scale = tl.load(delayed_scale_ptr + ROLE)
        scale = tl.where(delayed_scale == 0, 1.0, delayed_scale)  # a CUDA graph replayed after the state was emptied
        if tl.program_id(0) == 0:
            tl.store(out.scale_inv, scale_inv_from_scale(scale, False))
    amax = 0.0
    for i in range(tiling.tiles):
        rows = (tl.program_id(0) * tiling.tiles + i) * tiling.tile_r + tl.arange(0, tiling.tile_r)
        first, mean, rstd = row_statistics(x, norm, rows, eps, tiling)
        if out.amax is not None or y_ptr is not None:
            last = last_start(x, tiling)
            largest = tl.full([tiling.tile_r, tiling.tile_c // tiling.fold], 0.0, tl.float32)
            for back in range(0, last + 1, tiling.tile_c):
                tile, cols = tile_from(last - back, first, x, norm, y_ptr, mean, rstd, rows, ZERO_CENTERED, tiling)
                store_codes(encode(tile, scale, E5M2), out.codes, rows, cols, x, tiling.even)
                # after the codes are stored: with this first, Triton 3.6 spills for sm_100
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
    """Write statistics and y, and cast y with a scale for each row."""
    rows = tl.program_id(0) * tiling.tile_r + tl.arange(0, tiling.tile_r)
    first, mean, rstd = row_statistics(x, norm, rows, eps, tiling)
    tile = normalised(first, x, norm, mean, rstd, rows, tl.arange(0, tiling.tile_c), ZERO_CENTERED, tiling.even)
    largest = fold_max(finite_abs(tile), tiling.fold)
    last = last_start(x, tiling)
    if not tiling.one_tile:
        for back in range(0, last, tiling.tile_c):
            more, _ = tile_from(last - back, first, x, norm, None, mean, rstd, rows, ZERO_CENTERED, tiling)
            largest = tl.maximum(largest, fold_max(finite_abs(more), tiling.fold))
    amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    for start in range(0, last + 1, tiling.tile_c):
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
    second_out,  # outputs of the second scaling, or None
    ZERO_CENTERED: tl.constexpr,
    rounding: tl.constexpr,  # Rounding of the first
    second_rounding: tl.constexpr,  # None for one scaling
    tiling: tl.constexpr,  # Tiling
):
    """Write statistics and y, and cast y with a scale for each block whose sizes divide a tile, or twice so."""
    tile_row = tl.program_id(0)
    rows = tile_row * tiling.tile_r + tl.arange(0, tiling.tile_r)
    first, mean, rstd = row_statistics(x, norm, rows, eps, tiling)
    last = last_start(x, tiling)
    for back in range(0, last + 1, tiling.tile_c):
        tile, _ = tile_from(last - back, first, x, norm, y_ptr, mean, rstd, rows, ZERO_CENTERED, tiling)
        strip = (last - back) // tiling.tile_c
        store_blocks(tile, 0, tile_row, strip, None, x, first_out, rounding, tiling)
        if second_rounding is not None:
            store_blocks(tile, 0, tile_row, strip, None, x, second_out, second_rounding, tiling)


@triton.jit
def normalised_rows(dy, x, norm, rows, cols, ZERO_CENTERED: tl.constexpr, EVEN: tl.constexpr):
    """Return tiles [TR, TC] of dy, n = (x - mean) rstd, w = dy gamma; and rstd [TR]. dy and w are 0 outside of x."""
    inside = rows < x.R
    rstd = tl.load(norm.rstd + rows, mask=inside, other=0.0)
    gradient = load_tile(dy, rows, cols, EVEN)
    n = load_tile(x, rows, cols, EVEN)
    if norm.mean is not None:
        n -= tl.load(norm.mean + rows, mask=inside, other=0.0)[:, None]
    n *= rstd[:, None]
    w = gradient * factor(vector(norm.gamma, cols, x, EVEN), ZERO_CENTERED)[None, :]
    return gradient, n, w, rstd


@triton.jit
def store_dx(w, n, mean_wn, mean_w, rstd, residual, dx_ptr, x, rows, cols, EVEN: tl.constexpr):
    """Write a tile [TR, TC] of rstd (w - n mean(w n) - mean(w)) + residual."""
    dx = (w - n * mean_wn[:, None] - mean_w[:, None]) * rstd[:, None]
    if residual is not None:
        dx += load_tile(residual, rows, cols, EVEN)
    store_y(dx, dx_ptr, x, rows, cols, EVEN)


@triton.jit
def norm_backward_kernel(
    dy,
    x,
    residual,  # Source, or None
    norm,
    dx_ptr,
    partial_ptr,  # [1 or 2, programs, C]: of dgamma, and of dbeta
    WITH_BETA: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Write dx, and each program's partial sums of dgamma and dbeta.

    If rows fit a tile, the sums stay in registers. Longer rows are read twice, and their sums grow in memory.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, tiling.tile_c)
    count = tl.full([tiling.tile_r], x.C, tl.float32)
    dgamma_ptr = partial_ptr + program * x.C
    dbeta_ptr = partial_ptr + (programs + program) * x.C
    if tiling.one_tile:
        dgamma = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
        dbeta = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
        for first in range(program * tiling.tile_r, x.R, programs * tiling.tile_r):
            rows = first + tl.arange(0, tiling.tile_r)
            gradient, n, w, rstd = normalised_rows(dy, x, norm, rows, cols, ZERO_CENTERED, tiling.even)
            dgamma += gradient * n
            if WITH_BETA:
                dbeta += gradient
            mean_wn = tl.math.div_rn(tl.sum(rounded(w * n), 1), count)
            mean_w = tl.full([tiling.tile_r], 0.0, tl.float32)
            if norm.mean is not None:
                mean_w = tl.math.div_rn(tl.sum(rounded(w), 1), count)
            store_dx(w, n, mean_wn, mean_w, rstd, residual, dx_ptr, x, rows, cols, tiling.even)
        tl.store(dgamma_ptr + cols, tl.sum(dgamma, 0), mask=cols < x.C)
        if WITH_BETA:
            tl.store(dbeta_ptr + cols, tl.sum(dbeta, 0), mask=cols < x.C)
    else:
        for first in range(program * tiling.tile_r, x.R, programs * tiling.tile_r):
            rows = first + tl.arange(0, tiling.tile_r)
            sums_wn = tl.full([tiling.tile_r, tiling.tile_c // tiling.fold], 0.0, tl.float32)
            sums_w = tl.full([tiling.tile_r, tiling.tile_c // tiling.fold], 0.0, tl.float32)
            for start in range(0, x.C, tiling.tile_c):
                _, n, w, _ = normalised_rows(dy, x, norm, rows, start + cols, ZERO_CENTERED, tiling.even)
                sums_wn += fold_sum(rounded(w * n), tiling.fold)
                if norm.mean is not None:
                    sums_w += fold_sum(rounded(w), tiling.fold)
            mean_wn = tl.math.div_rn(tl.sum(sums_wn, 1), count)
            mean_w = tl.math.div_rn(tl.sum(sums_w, 1), count)
            for start in range(0, x.C, tiling.tile_c):
                gradient, n, w, rstd = normalised_rows(dy, x, norm, rows, start + cols, ZERO_CENTERED, tiling.even)
                written = tl.where(first == program * tiling.tile_r, 0, x.C)  # nothing yet, the first time
                grow(dgamma_ptr, tl.sum(rounded(gradient * n), 0), start + cols, written, x.C)
                if WITH_BETA:
                    grow(dbeta_ptr, tl.sum(gradient, 0), start + cols, written, x.C)
                store_dx(w, n, mean_wn, mean_w, rstd, residual, dx_ptr, x, rows, start + cols, tiling.even)
            tl.debug_barrier()  # another thread may read what this one has written


@triton.jit
def grow(ptr, values, cols, written, C):
    """Add values to elements ``cols`` of [C], of which so many are written; the others count as 0."""
    previous = tl.load(ptr + cols, mask=cols < written, other=0.0)
    tl.store(ptr + cols, previous + values, mask=cols < C)


@triton.jit
def norm_backward_sum_kernel(
    partial,  # each program's sums for dgamma, then those for dbeta if that is not None
    dgamma_ptr,
    dbeta_ptr,
    strips,
    EVEN: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Write the sums of all programs' partial sums."""
    is_beta = tl.program_id(0) // strips
    cols = (tl.program_id(0) % strips) * TILE_C + tl.arange(0, TILE_C)
    first = is_beta * partial.R
    end = first + partial.R
    total = tl.zeros([TILE_R, TILE_C], tl.float32)
    for start in range(first, end, TILE_R):
        rows = start + tl.arange(0, TILE_R)
        total += load_tile(Source(partial.ptr, end, partial.C, partial.stride_r, partial.stride_c), rows, cols, EVEN)
    result = narrow(tl.sum(total, 0), dgamma_ptr.dtype.element_ty)
    if is_beta == 0:
        tl.store(dgamma_ptr + cols, result, mask=cols < partial.C)
    elif dbeta_ptr is not None:
        tl.store(dbeta_ptr + cols, result, mask=cols < partial.C)


def norm_backward(gradient: NormGradient) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op ``octavo::norm_backward``; its contract is in signatures.py."""
    dy, x, gamma, mean, rstd, kind, zero_centered, with_beta, residual = gradient
    rows, cols = x.shape
    dx, dgamma, dbeta = x.new_empty((rows, cols)), gamma.new_empty(cols), gamma.new_empty(cols if with_beta else 0)
    if rows * cols == 0:
        return dx, dgamma.zero_(), dbeta.zero_()
    gamma, mean, rstd = gamma.contiguous(), mean.contiguous(), rstd.contiguous()
    chosen, one_tile = _tile(config("norm_backward", (rows * cols).bit_length()), cols)
    tile_r, tile_c, per_multiprocessor, num_warps = chosen
    enough = per_multiprocessor * (multiprocessors(x.get_device()) or 2)  # interpreted, two
    programs = min(triton.cdiv(rows, tile_r), enough)
    partial = rstd.new_empty((1 + with_beta, programs, cols))
    even = rows % tile_r == 0 and cols % tile_c == 0
    norm = NormFactors(mean if kind == "layer_norm" else None, rstd, gamma, None)
    dy_source = Source(dy, rows, cols, *dy.stride())
    residual_source = None if residual is None else Source(residual, rows, cols, *residual.stride())
    constants = with_beta, zero_centered, Tiling(even, tile_r, tile_c, one_tile=one_tile, fold=16 // x.element_size())
    arguments = dy_source, Source(x, rows, cols, *x.stride()), residual_source, norm, dx, partial, *constants
    launch(norm_backward_kernel, programs, arguments, num_warps, fuses=True)
    tile = 128, 32
    strips = triton.cdiv(cols, tile[1])
    even = programs % tile[0] == 0 and cols % tile[1] == 0
    sum_arguments = Source(partial, programs, cols, cols, 1), dgamma, dbeta if with_beta else None, strips, even, *tile
    launch(norm_backward_sum_kernel, strips * len(partial), sum_arguments, 8)
    return dx, dgamma, dbeta


@functools.lru_cache(maxsize=4096)
def _tile(chosen: Config, cols: int) -> tuple[Config, bool]:
    """Return a configuration of as many elements a thread for rows of ``cols``, and whether a tile holds them."""
    widest = max(16, triton.next_power_of_2(cols))
    wide = with_room_for(chosen, (1, widest))
    larger = wide.tile_c // chosen.tile_c
    if wide.num_warps < larger * chosen.num_warps:  # the row would take more than 16 warps
        tile_r = min(4, chosen.tile_r * chosen.tile_c // 16)
        return chosen._replace(tile_r=tile_r, tile_c=chosen.tile_r * chosen.tile_c // tile_r), False
    if larger > 1:
        return wide._replace(depth=max(1, chosen.depth // larger)), True
    return chosen._replace(tile_r=chosen.tile_r * chosen.tile_c // widest, tile_c=widest), True
