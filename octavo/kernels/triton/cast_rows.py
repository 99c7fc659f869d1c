"""The cast of one scale a row. Of one a column it is the same, seen transposed with the outputs exchanged.

A program owns BLOCK_R whole rows, so their amax is its own. Rows that fit one tile are read once; longer ones twice,
the second time mostly from a cache. The halves of a gated gradient share a row's scale; seen transposed they are rows
of their own, a program for each half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.given import Given, Rounding, out_of
from octavo.kernels.triton.launch import launch, next_power_of_two
from octavo.kernels.triton.produce import produce
from octavo.kernels.triton.tiles import (
    encode,
    encode_finite,
    finite_abs,
    narrow,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    store_half,
)


@triton.jit
def cast_rows_kernel(
    x,
    h,
    out,
    scale_inv_ptr,
    amax_ptr,
    sum_ptr,  # sums of rows, or None
    FUNCTION: tl.constexpr,  # see produce.py
    ROUNDING: tl.constexpr,  # (E5M2, limit, power_of_two)
    HALVES: tl.constexpr,  # "": one tile; "joined": two, whose rows share a scale; "apart": two, of rows of their own
    EVEN: tl.constexpr,  # x is made of whole tiles
    ONE_TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A scale for each row of what is cast."""
    LIMIT: tl.constexpr = ROUNDING[1]
    POWER_OF_TWO: tl.constexpr = ROUNDING[2]
    program = tl.program_id(0)
    half = 0
    if HALVES == "apart":
        half = program % 2
        program = program // 2
    rows = program * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_C)
    tile, second = produce_half(x, h, rows, cols, half, FUNCTION, HALVES, EVEN)
    largest = larger(tl.abs(tile), tl.abs(second), HALVES)
    sums = tile
    if not ONE_TILE:
        for start in range(BLOCK_C, x.C, BLOCK_C):
            more, more_second = produce_half(x, h, rows, start + cols, half, FUNCTION, HALVES, EVEN)
            largest = tl.maximum(largest, larger(tl.abs(more), tl.abs(more_second), HALVES))
            if sum_ptr is not None:
                sums += more
    amax = tl.max(largest, 1)
    amax = tl.where(amax == amax, amax, 0.0)  # a row of NaN alone
    of_half = half * x.R + rows
    if sum_ptr is not None:
        tl.store(sum_ptr + of_half, narrow(tl.sum(sums, 1), sum_ptr.dtype.element_ty), mask=rows < x.R)
    any_inf = tl.max(amax, 0) == float("inf")
    if any_inf:
        largest = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for start in range(0, x.C, BLOCK_C):
            more, more_second = produce_half(x, h, rows, start + cols, half, FUNCTION, HALVES, EVEN)
            largest = tl.maximum(largest, larger(finite_abs(more), finite_abs(more_second), HALVES))
        amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, LIMIT, POWER_OF_TWO)
    tl.store(amax_ptr + of_half, amax, mask=rows < x.R)
    tl.store(scale_inv_ptr + of_half, scale_inv_from_scale(scale, POWER_OF_TWO), mask=rows < x.R)
    if ONE_TILE:
        store_rows(tile, second, x, out, scale, any_inf, rows, cols, half, ROUNDING, HALVES, EVEN)
    else:
        for start in range(0, x.C, BLOCK_C):
            tile, second = produce_half(x, h, rows, start + cols, half, FUNCTION, HALVES, EVEN)
            store_rows(tile, second, x, out, scale, any_inf, rows, start + cols, half, ROUNDING, HALVES, EVEN)


@triton.jit
def produce_half(x, h, rows, cols, half, FUNCTION: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr):
    """What ``produce`` makes; of halves that are apart, this program's."""
    tile, second = produce(x, h, rows, cols, FUNCTION, EVEN)
    if HALVES == "apart":
        tile = tl.where(half == 0, tile, second)
    return tile, second


@triton.jit
def larger(a, b, HALVES: tl.constexpr):
    """The larger magnitude of two tiles that share scales, else the first's; NaN may lose or stay."""
    if HALVES == "joined":
        a = tl.maximum(a, b)
    return a


@triton.jit
def store_rows(
    tile,
    second,
    x,
    out,
    scale,
    any_inf,
    rows,
    cols,
    half,
    ROUNDING: tl.constexpr,
    HALVES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write codes of [BR, BC] by its rows' scales [BR]."""
    codes = encode_rows(tile, scale, any_inf, ROUNDING[0])
    if HALVES == "":
        store_codes(codes, out, rows, cols, x, EVEN)
    else:
        store_half(codes, out, rows, cols, x, half, HALVES == "apart", EVEN)
        if HALVES == "joined":
            codes = encode_rows(second, scale, any_inf, ROUNDING[0])
            store_half(codes, out, rows, cols, x, 1, False, EVEN)


@triton.jit
def encode_rows(tile, scale, any_inf, E5M2: tl.constexpr):
    """Codes of [BR, BC] by its rows' scales [BR]."""
    codes = encode_finite(tile, scale[:, None], E5M2)
    if any_inf:
        codes = encode(tile, scale[:, None], E5M2)
    return codes


def cast_by_row(
    given: Given, rounding: Rounding, q: Tensor | None, t: Tensor | None, row_sum: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """A scale for each row: (scale_inv [R, 1], amax [R, 1], sums of rows [R] or [0])."""
    rows = given.shape[0]
    scale_inv, amax = given.float32((rows, 1)), given.float32((rows, 1))
    sums = given.t().sums(row_sum)
    if rows == 0:
        return scale_inv, amax, sums
    in_order = t is None and given.x.stride(1) == 1
    chosen = given.config("cast_rows" if in_order else "cast_rows_transpose")
    widest = max(16, next_power_of_two(given.cols))
    block_c = min(chosen.block_c, widest)
    # narrow rows: as many as fill half a tile
    block_r = chosen.block_r * max(1, chosen.block_c // (2 * block_c))
    halves = "" if given.halves == 1 else "apart" if given.is_transposed else "joined"
    out = out_of(q, t)
    arguments = (
        given.source,
        given.h,
        out,
        scale_inv,
        amax,
        sums if row_sum else None,
        given.function,
        rounding,
        halves,
        given.rows % block_r == 0 and given.cols % block_c == 0,
        widest <= block_c,
        block_r,
        block_c,
    )
    key = given.key((), "cast_rows", rounding, chosen, out.q_stride, out.t_stride, q is None, t is None, row_sum)
    programs = -(-given.rows // block_r) * (2 if halves == "apart" else 1)
    launch(cast_rows_kernel, programs, arguments, chosen.num_warps, key, **given.options)
    return scale_inv, amax, sums
