"""The casts of one scale a block: many a program where their sizes are powers of two, else one a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL, scale_shape
from octavo.kernels.triton.given import Given, Rounding, out_of
from octavo.kernels.triton.launch import launch, next_power_of_two, with_room_for, workspace
from octavo.kernels.triton.produce import produce
from octavo.kernels.triton.tiles import (
    encode,
    encode_finite,
    finish_column_sum,
    finite_abs,
    load_tile,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    store_half,
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
    any_inf = tl.max(amax) == float("inf")  # dimension by dimension Triton 3.6 fails to compile a product's for sm_100
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
def cast_scaling(
    tile,
    HALF: tl.constexpr,
    place,
    x,
    out,
    scale_inv_ptr,
    amax_ptr,
    strides,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIR: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write a tile [BR, BC] in one scaling: codes, scale_inv, amax.

    Args:
        tile: float32.
        HALF: which of the halves it belongs to, if PAIR: then two are written side by side.
        place: (group, strip) of the program.
        x: the Source, of a half's size.
        out, scale_inv_ptr, amax_ptr, strides, ROUNDING, BLOCK: see ``encode_blocks``.
        PAIR, EVEN: see ``cast_blocks_kernel``.
    """
    BR: tl.constexpr = tile.shape[0]
    BC: tl.constexpr = tile.shape[1]
    first = (place[0] * (BR // BLOCK[0]), place[1] * (BC // BLOCK[1]))
    blocks = (tl.cdiv(x.R, BLOCK[0]), tl.cdiv(x.C, BLOCK[1]))
    rows = place[0] * BR + tl.arange(0, BR)
    cols = place[1] * BC + tl.arange(0, BC)
    if PAIR:
        shift = HALF * blocks[1] * strides[1]
        scale_inv_ptr += shift
        if amax_ptr is not None:
            amax_ptr += shift
    codes = encode_blocks(tile, scale_inv_ptr, amax_ptr, first, blocks, strides, ROUNDING, BLOCK)
    if PAIR:
        store_half(codes, out, rows, cols, x, HALF, False, EVEN)
    else:
        store_codes(codes, out, rows, cols, x, EVEN)


@triton.jit
def cast_blocks_of_half(
    HALF: tl.constexpr,
    x,
    h,
    place,
    first,
    second,
    sums,
    work_ptr,
    FUNCTION: tl.constexpr,
    PAIR: tl.constexpr,
    ROUNDINGS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """All that a program writes of one half; first, second: (Codes, scale_inv, amax, strides)."""
    rows = place[0] * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = place[1] * BLOCK_C + tl.arange(0, BLOCK_C)
    tile, other = produce(x, h, rows, cols, FUNCTION, EVEN)
    if HALF == 1:
        tile = other
    if sums is not None:
        groups = tl.cdiv(x.R, BLOCK_R)
        counter_ptr = work_ptr + 2 + HALF * tl.cdiv(x.C, BLOCK_C) + place[1]
        sum_ptr = sums[0] + HALF * x.C
        part_ptr = sums[1] + HALF * groups * x.C
        finish_column_sum(tl.sum(tile, 0), sum_ptr, part_ptr, counter_ptr, place[0], groups, cols, x.C)
    ROUNDING: tl.constexpr = ROUNDINGS[0]
    BLOCK: tl.constexpr = BLOCKS[0]
    SECOND_ROUNDING: tl.constexpr = ROUNDINGS[1]
    SECOND_BLOCK: tl.constexpr = BLOCKS[1]
    cast_scaling(tile, HALF, place, x, first[0], first[1], first[2], first[3], ROUNDING, BLOCK, PAIR, EVEN)
    if SECOND_BLOCK is not None:
        cast_scaling(
            tile, HALF, place, x, second[0], second[1], None, second[2], SECOND_ROUNDING, SECOND_BLOCK, PAIR, EVEN
        )


@triton.jit
def cast_blocks_kernel(
    x,
    h,
    first,  # (Codes, scale_inv, amax or None, the strides of both) of the first scaling
    second,  # None, or (Codes, scale_inv, its strides) of the second
    sums,  # None, or (column sums, their parts [halves, groups, C])
    work_ptr,
    FUNCTION: tl.constexpr,  # see produce.py
    PAIR: tl.constexpr,  # it makes two tiles
    ROUNDINGS: tl.constexpr,  # (E5M2, limit, power_of_two) of each scaling
    BLOCKS: tl.constexpr,  # (rows, columns) of each, or None
    EVEN: tl.constexpr,  # what is cast is made of whole programs' tiles
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A scale for each block whose sizes divide the program's tile; two such scalings of one read."""
    strips = tl.cdiv(x.C, BLOCK_C)
    place = (tl.program_id(0) // strips, tl.program_id(0) % strips)
    cast_blocks_of_half(
        0, x, h, place, first, second, sums, work_ptr, FUNCTION, PAIR, ROUNDINGS, BLOCKS, EVEN, BLOCK_R, BLOCK_C
    )
    if PAIR:  # one after the other, since both together would not fit the registers: the cache has what is read again
        cast_blocks_of_half(
            1, x, h, place, first, second, sums, work_ptr, FUNCTION, PAIR, ROUNDINGS, BLOCKS, EVEN, BLOCK_R, BLOCK_C
        )


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


class Second(NamedTuple):
    """A second block scaling from the same read."""

    rounding: Rounding
    tile: Sequence[int]
    q: Tensor | None
    t: Tensor | None
    scale_inv: Tensor


def cast_by_block(
    given: Given,
    rounding: Rounding,
    tile: Sequence[int],
    q: Tensor | None,
    t: Tensor | None,
    column_sum: bool,
    second: Second | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A scale for each small block: (scale_inv, amax, column sums); with ``second``, which is written, no amax."""
    kind = "cast_blocks" if t is None and second is None else "cast_blocks_transpose"
    chosen = with_room_for(given.config(kind), tile, tile if second is None else second.tile)
    block_r, block_c = chosen.block_r, chosen.block_c
    strips, groups = -(-given.cols // block_c), -(-given.rows // block_r)
    shape = scale_shape(given.shape, tile)
    scale_inv, amax = given.float32(shape), given.float32(shape)
    sums = given.sums(column_sum)
    out, second_out = out_of(q, t), None
    if second is not None:
        # strides as the second scale_inv lies, seen from what is cast
        second_strides = second.scale_inv.stride() if second.t is None else second.scale_inv.stride()[::-1]
        second_out = out_of(second.q, second.t), second.scale_inv, second_strides
    roundings = rounding, None if second is None else second.rounding
    blocks = tuple(tile), None if second is None else tuple(second.tile)
    arguments = (
        given.source,
        given.h,
        (out, scale_inv, amax if second is None else None, scale_inv.stride()),
        second_out,
        (sums, given.float32((given.halves * groups, given.cols))) if column_sum else None,
        workspace(given.x, 2 + strips * given.halves) if column_sum else None,
        given.function,
        given.halves == 2,
        roundings,
        blocks,
        given.rows % block_r == 0 and given.cols % block_c == 0,
        block_r,
        block_c,
    )
    widths = out.q_stride, out.t_stride, q is None, t is None
    second_widths = None if second_out is None else (second_out[0].q is None, *second_out[0][1::2])
    key = given.key((), "cast_blocks", roundings, blocks, chosen, widths, second_widths, column_sum)
    launch(cast_blocks_kernel, strips * groups, arguments, chosen.num_warps, key, **given.options)
    return scale_inv, amax, sums


def cast_by_any_block(
    given: Given, rounding: Rounding, tile: Sequence[int], q: Tensor | None, t: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A scale for each block of x itself, of any size: (scale_inv, amax)."""
    x = given.x
    rows, cols = x.shape
    shape = scale_shape(x.shape, tile)
    scale_inv, amax = given.float32(shape), given.float32(shape)
    block_rows, block_cols = rows if tile[0] == ALL else tile[0], cols if tile[1] == ALL else tile[1]
    for codes, width in ((q, cols), (t, rows)):
        if codes is not None and codes.shape[1] > width:
            codes.view(torch.uint8)[:, width:].zero_()
    if amax.numel() > 0:
        arguments = (
            given.source,
            out_of(q, t),
            scale_inv,
            amax,
            block_rows,
            block_cols,
            rounding,
            min(32, next_power_of_two(block_rows)),
            min(128, next_power_of_two(block_cols)),
        )
        launch(cast_any_block_kernel, amax.numel(), arguments, 4, None)
    return scale_inv, amax
