"""The kernel of one scale a row. Of one a column it is the same, on the transposed view with the outputs exchanged.

A program owns BLOCK_R whole rows, so their amax is its own. Rows that fit one tile are read once; longer ones twice,
the second time mostly from a cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.tiles import (
    encode,
    encode_finite,
    finite_abs,
    load_tile,
    narrow,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
)


@triton.jit
def cast_rows_kernel(
    x,
    out,
    scale_inv_ptr,
    amax_ptr,
    sum_ptr,  # [R] sums of rows, or None
    ROUNDING: tl.constexpr,  # (E5M2, limit, power_of_two)
    EVEN: tl.constexpr,  # x is made of whole tiles
    ONE_TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A scale for each row of x."""
    E5M2: tl.constexpr = ROUNDING[0]
    LIMIT: tl.constexpr = ROUNDING[1]
    POWER_OF_TWO: tl.constexpr = ROUNDING[2]
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_C)
    tile = load_tile(x, rows, cols, EVEN)
    largest = tl.abs(tile)
    sums = tile
    if not ONE_TILE:
        for start in range(BLOCK_C, x.C, BLOCK_C):
            more = load_tile(x, rows, start + cols, EVEN)
            largest = tl.maximum(largest, tl.abs(more))
            if sum_ptr is not None:
                sums += more
    amax = tl.max(largest, 1)
    amax = tl.where(amax == amax, amax, 0.0)  # a row of NaN alone
    if sum_ptr is not None:
        tl.store(sum_ptr + rows, narrow(tl.sum(sums, 1), sum_ptr.dtype.element_ty), mask=rows < x.R)
    any_inf = tl.max(amax, 0) == float("inf")
    if any_inf:
        largest = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for start in range(0, x.C, BLOCK_C):
            largest = tl.maximum(largest, finite_abs(load_tile(x, rows, start + cols, EVEN)))
        amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, LIMIT, POWER_OF_TWO)
    tl.store(amax_ptr + rows, amax, mask=rows < x.R)
    tl.store(scale_inv_ptr + rows, scale_inv_from_scale(scale, POWER_OF_TWO), mask=rows < x.R)
    if ONE_TILE:
        store_codes(encode_rows(tile, scale, any_inf, E5M2), out, rows, cols, x, EVEN)
    else:
        for start in range(0, x.C, BLOCK_C):
            tile = load_tile(x, rows, start + cols, EVEN)
            store_codes(encode_rows(tile, scale, any_inf, E5M2), out, rows, start + cols, x, EVEN)


@triton.jit
def encode_rows(tile, scale, any_inf, E5M2: tl.constexpr):
    """Codes of [BR, BC] by its rows' scales [BR]."""
    codes = encode_finite(tile, scale[:, None], E5M2)
    if any_inf:
        codes = encode(tile, scale[:, None], E5M2)
    return codes
