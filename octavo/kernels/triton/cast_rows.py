"""The cast of one scale a row. Of one a column it is the same, seen transposed with the outputs exchanged.

A program owns BLOCK_R whole rows, so their amax is its own. Rows that fit one tile are read once; longer ones twice,
the second time mostly from a cache. The halves of a gated gradient share a row's scale; seen transposed they are rows
of their own, a program for each half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.arguments import Scaling, new_sums
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.prologue import produce
from octavo.kernels.triton.tiles import (
    Outputs,
    encode,
    finite_abs,
    narrow,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
)


@triton.jit
def cast_rows_kernel(
    x,
    h,
    out,  # Outputs
    sum_ptr,  # sums of rows, or None
    function: tl.constexpr,  # Function
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """A scale for each row of what is cast."""
    program = tl.program_id(0)
    half = 0
    if tiling.halves == "below":
        half = program % 2
        program = program // 2
    rows = program * tiling.block_r + tl.arange(0, tiling.block_r)
    cols = tl.arange(0, tiling.block_c)
    tile, second = produce_half(x, h, rows, cols, half, function, tiling)
    largest = larger(tile, second, tiling)
    sums = tile
    if not tiling.one_tile:
        for start in range(tiling.block_c, x.C, tiling.block_c):
            more, more_second = produce_half(x, h, rows, start + cols, half, function, tiling)
            largest = tl.maximum(largest, larger(more, more_second, tiling))
            if sum_ptr is not None:
                sums += more
    amax = tl.max(largest, 1)
    of_half = half * x.R + rows
    if sum_ptr is not None:
        tl.store(sum_ptr + of_half, narrow(tl.sum(sums, 1), sum_ptr.dtype.element_ty), mask=rows < x.R)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    tl.store(out.amax + of_half, amax, mask=rows < x.R)
    tl.store(out.scale_inv + of_half, scale_inv_from_scale(scale, rounding.power_of_two), mask=rows < x.R)
    if tiling.one_tile:
        store_rows(tile, second, x, out.codes, scale, rows, cols, half, rounding.e5m2, tiling)
    else:
        for start in range(0, x.C, tiling.block_c):
            tile, second = produce_half(x, h, rows, start + cols, half, function, tiling)
            store_rows(tile, second, x, out.codes, scale, rows, start + cols, half, rounding.e5m2, tiling)


@triton.jit
def produce_half(x, h, rows, cols, half, function: tl.constexpr, tiling: tl.constexpr):
    """What ``produce`` makes; of halves below each other, this program's."""
    tile, second = produce(x, h, rows, cols, function, tiling.even)
    if tiling.halves == "below":
        tile = tl.where(half == 0, tile, second)
    return tile, second


@triton.jit
def larger(a, b, tiling: tl.constexpr):
    """The larger finite magnitude of two tiles beside each other, which share scales, else the first's."""
    result = finite_abs(a)
    if tiling.halves == "beside":
        result = tl.maximum(result, finite_abs(b))
    return result


@triton.jit
def store_rows(tile, second, x, out, scale, rows, cols, half, E5M2: tl.constexpr, tiling: tl.constexpr):
    """Write codes of [BR, BC] by its rows' scales [BR]."""
    codes = encode(tile, scale[:, None], E5M2)
    if tiling.halves == "":
        store_codes(codes, out, rows, cols, x, tiling.even)
    else:
        store_codes(codes, out, rows, cols, x, tiling.even, half, tiling.halves == "below")
        if tiling.halves == "beside":
            store_codes(encode(second, scale[:, None], E5M2), out, rows, cols, x, tiling.even, 1)


def cast_by_row(given: CastInput, scaling: Scaling, out: Outputs, row_sum: bool = False) -> Tensor:
    """A scale for each row: the sums of rows [R] or [0]."""
    rows = given.shape[0]
    sums = new_sums(given.x, rows, row_sum)
    if rows == 0:
        return sums
    in_order = out.codes.t is None and given.x.stride(1) == 1
    chosen = given.config("cast_rows" if in_order else "cast_rows_transpose")
    widest = max(16, triton.next_power_of_2(given.cols))
    block_c = min(chosen.block_c, widest)
    # narrow rows: as many as fill half a tile
    block_r = chosen.block_r * max(1, chosen.block_c // (2 * block_c))
    _, groups, tiling = given.tiling(block_r, block_c, one_tile=widest <= block_c)
    programs = groups * (2 if tiling.halves == "below" else 1)
    arguments = out, sums if row_sum else None
    given.launch(cast_rows_kernel, programs, chosen.num_warps, arguments, (rounding_of(scaling), tiling))
    return sums
