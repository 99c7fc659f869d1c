"""The cast of one scale a row, of rows in order whose codes lie so too.

A program owns BLOCK_R whole rows, so their amax is its own. Rows that fit one tile are read once; longer ones twice,
the second time mostly from a cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.arguments import Scaling
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.prologue import produce
from octavo.kernels.triton.tiles import Outputs, finite_abs, scale_from_amax, scale_inv_from_scale, store_tiles


@triton.jit
def cast_rows_kernel(
    x,
    h,
    out,  # Outputs
    function: tl.constexpr,  # Function
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """A scale for each row of what is cast."""
    rows = tl.program_id(0) * tiling.block_r + tl.arange(0, tiling.block_r)
    cols = tl.arange(0, tiling.block_c)
    tile, second = produce(x, h, rows, cols, function, tiling.even)
    largest = larger(tile, second, tiling)
    if not tiling.one_tile:
        for start in range(tiling.block_c, x.C, tiling.block_c):
            more, more_second = produce(x, h, rows, start + cols, function, tiling.even)
            largest = tl.maximum(largest, larger(more, more_second, tiling))
    amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    tl.store(out.amax + rows, amax, mask=rows < x.R)
    tl.store(out.scale_inv + rows, scale_inv_from_scale(scale, rounding.power_of_two), mask=rows < x.R)
    scale = scale[:, None]
    if tiling.one_tile:
        store_tiles(tile, second, scale, scale, out.codes, rows, cols, x, rounding.e5m2, tiling)
    else:
        for start in range(0, x.C, tiling.block_c):
            tile, second = produce(x, h, rows, start + cols, function, tiling.even)
            store_tiles(tile, second, scale, scale, out.codes, rows, start + cols, x, rounding.e5m2, tiling)


@triton.jit
def larger(tile, second, tiling: tl.constexpr):
    """The finite magnitudes of a tile, or the larger ones of two halves."""
    result = finite_abs(tile)
    if tiling.halves:
        result = tl.maximum(result, finite_abs(second))
    return result


def cast_by_row(given: CastInput, scaling: Scaling, out: Outputs) -> None:
    """A scale for each row."""
    if given.rows == 0:
        return
    chosen = given.config("cast_rows")
    widest = max(16, triton.next_power_of_2(given.cols))
    block_c = min(chosen.block_c, widest)
    # narrow rows: as many as fill half a tile
    block_r = chosen.block_r * max(1, chosen.block_c // (2 * block_c))
    _, programs, tiling = given.tiling(block_r, block_c, one_tile=widest <= block_c)
    given.launch(cast_rows_kernel, programs, chosen.num_warps, (out,), (rounding_of(scaling), tiling))
