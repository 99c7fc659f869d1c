"""The kernels of one scale a block: many a program where their sizes are powers of two, else one a program."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.tiles import (
    encode,
    encode_finite,
    finish_column_sum,
    finite_abs,
    load_tile,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
)


@triton.jit
def amax_of_blocks(magnitudes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The largest of each block of [ROWS, COLS]; NaN loses, and of NaN alone it is 0."""
    BR: tl.constexpr = magnitudes.shape[0]
    BC: tl.constexpr = magnitudes.shape[1]
    amax = tl.max(tl.max(tl.reshape(magnitudes, [BR // ROWS, ROWS, BC // COLS, COLS]), 3), 1)
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def encode_blocks(tile, scale_inv_ptr, amax_ptr, first, blocks, strides, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of a tile [BR, BC] by blocks of BLOCK; writes their scale_inv, and their amax unless that pointer is None.

    Args:
        tile: float32.
        scale_inv_ptr, amax_ptr: arrays with an element a block.
        first: (row, column) among all blocks of this tile's first.
        blocks: (rows, columns) of all blocks.
        strides: of the arrays.
        ROUNDING: (E5M2, limit, power_of_two).
        BLOCK: a block's (rows, columns), powers of two that divide the tile's.
    """
    E5M2: tl.constexpr = ROUNDING[0]
    LIMIT: tl.constexpr = ROUNDING[1]
    POWER_OF_TWO: tl.constexpr = ROUNDING[2]
    ROWS: tl.constexpr = BLOCK[0]
    COLS: tl.constexpr = BLOCK[1]
    BR: tl.constexpr = tile.shape[0]
    BC: tl.constexpr = tile.shape[1]
    amax = amax_of_blocks(tl.abs(tile), ROWS, COLS)
    any_inf = tl.max(tl.max(amax, 1), 0) == float("inf")
    if any_inf:
        amax = amax_of_blocks(finite_abs(tile), ROWS, COLS)
    scale = scale_from_amax(amax, LIMIT, POWER_OF_TWO)
    row = first[0] + tl.arange(0, BR // ROWS)
    col = first[1] + tl.arange(0, BC // COLS)
    mask = (row < blocks[0])[:, None] & (col < blocks[1])[None, :]
    offsets = row[:, None] * strides[0] + col[None, :] * strides[1]
    tl.store(scale_inv_ptr + offsets, scale_inv_from_scale(scale, POWER_OF_TWO), mask=mask)
    if amax_ptr is not None:
        tl.store(amax_ptr + offsets, amax, mask=mask)
    wide = tl.broadcast_to(scale[:, None, :, None], [BR // ROWS, ROWS, BC // COLS, COLS])
    wide = tl.reshape(wide, [BR, BC])
    codes = encode_finite(tile, wide, E5M2)
    if any_inf:
        codes = encode(tile, wide, E5M2)
    return codes


@triton.jit
def cast_blocks_kernel(
    x,
    out,
    scale_inv_ptr,
    amax_ptr,
    second_out,  # the second scaling's, or None
    second_scale_inv_ptr,
    second_strides,
    sums,  # None, or (column sums [C], their parts [groups, C])
    work_ptr,
    ROUNDING: tl.constexpr,  # (E5M2, limit, power_of_two)
    BLOCK: tl.constexpr,
    SECOND_ROUNDING: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # x is made of whole programs' tiles
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A scale for each block whose sizes divide the program's tile; two such scalings of one read."""
    strips = tl.cdiv(x.C, BLOCK_C)
    strip = tl.program_id(0) % strips
    group = tl.program_id(0) // strips
    rows = group * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = strip * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = load_tile(x, rows, cols, EVEN)
    first = (group * (BLOCK_R // BLOCK[0]), strip * (BLOCK_C // BLOCK[1]))
    blocks = (tl.cdiv(x.R, BLOCK[0]), tl.cdiv(x.C, BLOCK[1]))
    codes = encode_blocks(tile, scale_inv_ptr, amax_ptr, first, blocks, (blocks[1], 1), ROUNDING, BLOCK)
    store_codes(codes, out, rows, cols, x, EVEN)
    if second_scale_inv_ptr is not None:
        first = (group * (BLOCK_R // SECOND_BLOCK[0]), strip * (BLOCK_C // SECOND_BLOCK[1]))
        blocks = (tl.cdiv(x.R, SECOND_BLOCK[0]), tl.cdiv(x.C, SECOND_BLOCK[1]))
        codes = encode_blocks(
            tile, second_scale_inv_ptr, None, first, blocks, second_strides, SECOND_ROUNDING, SECOND_BLOCK
        )
        store_codes(codes, second_out, rows, cols, x, EVEN)
    if sums is not None:
        groups = tl.cdiv(x.R, BLOCK_R)
        finish_column_sum(tl.sum(tile, 0), sums[0], sums[1], work_ptr + 2 + strip, group, groups, cols, x.C)


@triton.jit
def cast_any_block_kernel(
    x,
    out,
    scale_inv_ptr,
    amax_ptr,
    ROWS,
    COLS,
    ROUNDING: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One block a program, of any size, read twice. Writes no padding."""
    E5M2: tl.constexpr = ROUNDING[0]
    LIMIT: tl.constexpr = ROUNDING[1]
    POWER_OF_TWO: tl.constexpr = ROUNDING[2]
    col_blocks = tl.cdiv(x.C, COLS)
    first_row = (tl.program_id(0) // col_blocks) * ROWS
    first_col = (tl.program_id(0) % col_blocks) * COLS
    end_row = tl.minimum(first_row + ROWS, x.R)
    end_col = tl.minimum(first_col + COLS, x.C)
    largest = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for row in range(first_row, end_row, BLOCK_R):
        for col in range(first_col, end_col, BLOCK_C):
            rows = row + tl.arange(0, BLOCK_R)
            cols = col + tl.arange(0, BLOCK_C)
            inside = (rows < end_row)[:, None] & (cols < end_col)[None, :]
            found = tl.where(inside, finite_abs(load_tile(x, rows, cols, False)), 0.0)
            largest = tl.maximum(largest, found)
    amax = tl.max(tl.max(largest, 1), 0)
    scale = scale_from_amax(amax, LIMIT, POWER_OF_TWO)
    tl.store(amax_ptr + tl.program_id(0), amax)
    tl.store(scale_inv_ptr + tl.program_id(0), scale_inv_from_scale(scale, POWER_OF_TWO))
    for row in range(first_row, end_row, BLOCK_R):
        for col in range(first_col, end_col, BLOCK_C):
            rows = row + tl.arange(0, BLOCK_R)
            cols = col + tl.arange(0, BLOCK_C)
            inside = (rows < end_row)[:, None] & (cols < end_col)[None, :]
            codes = encode(load_tile(x, rows, cols, False), scale, E5M2)
            if out.q is not None:
                tl.store(out.q + rows.to(tl.int64)[:, None] * out.q_stride + cols[None, :], codes, mask=inside)
            if out.t is not None:
                tl.store(out.t + cols.to(tl.int64)[None, :] * out.t_stride + rows[:, None], codes, mask=inside)
