"""The casts of one scale a block, whose sizes are powers of two: many a program."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import Tile
from octavo.kernels.arguments import Scaling, new_scales
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.launch import launch, with_room_for, workspace
from octavo.kernels.triton.prologue import produce
from octavo.kernels.triton.tiles import (
    Codes,
    Rounding,
    encode,
    finish_column_sum,
    finite_abs,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    store_half,
)


@triton.jit
def encode_blocks(tile, scale_inv_ptr, amax_ptr, first, blocks, strides, rounding: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of a tile [BR, BC] by blocks of BLOCK; writes their scale_inv, and their amax unless that pointer is None.

    Args:
        tile: float32.
        scale_inv_ptr, amax_ptr: arrays with an element a block.
        first: (row, column) among all blocks of this tile's first.
        blocks: (rows, columns) of all blocks.
        strides: of the arrays.
        rounding: Rounding.
        BLOCK: a block's (rows, columns), powers of two that divide the tile's.
    """
    ROWS: tl.constexpr = BLOCK[0]
    COLS: tl.constexpr = BLOCK[1]
    BR: tl.constexpr = tile.shape[0]
    BC: tl.constexpr = tile.shape[1]
    amax = tl.max(tl.max(tl.reshape(finite_abs(tile), [BR // ROWS, ROWS, BC // COLS, COLS]), 3), 1)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    row = first[0] + tl.arange(0, BR // ROWS)
    col = first[1] + tl.arange(0, BC // COLS)
    mask = (row < blocks[0])[:, None] & (col < blocks[1])[None, :]
    offsets = row[:, None] * strides[0] + col[None, :] * strides[1]
    tl.store(scale_inv_ptr + offsets, scale_inv_from_scale(scale, rounding.power_of_two), mask=mask)
    if amax_ptr is not None:
        tl.store(amax_ptr + offsets, amax, mask=mask)
    wide = tl.broadcast_to(scale[:, None, :, None], [BR // ROWS, ROWS, BC // COLS, COLS])
    return encode(tile, tl.reshape(wide, [BR, BC]), rounding.e5m2)


class BlockTiling(NamedTuple):
    """A program's tile and the blocks in it."""

    even: bool  # what is cast is made of whole programs' tiles
    block_r: int
    block_c: int
    block: tuple[int, int]  # (rows, columns) that share a scale
    second_block: tuple[int, int] | None = None
    pair: bool = False  # two tiles are written, side by side


class BlockOutputs(NamedTuple):
    """Where one scaling of blocks is written; the strides are of scale_inv and of amax, which may be None."""

    codes: Any
    scale_inv: Any
    amax: Any
    stride_r: Any
    stride_c: Any


@triton.jit
def cast_scaling(
    tile, HALF: tl.constexpr, place, x, out, rounding: tl.constexpr, BLOCK: tl.constexpr, tiling: tl.constexpr
):
    """Write a tile [BR, BC] in one scaling: codes, scale_inv, amax.

    Args:
        tile: float32.
        HALF: which of the halves it belongs to, if two are written.
        place: (group, strip) of the program.
        x: the Source, of a half's size.
        out: BlockOutputs.
        rounding, BLOCK: see ``encode_blocks``.
        tiling: what has even, block_r, block_c and pair, as BlockTiling has.
    """
    first = (place[0] * (tiling.block_r // BLOCK[0]), place[1] * (tiling.block_c // BLOCK[1]))
    blocks = (tl.cdiv(x.R, BLOCK[0]), tl.cdiv(x.C, BLOCK[1]))
    rows = place[0] * tiling.block_r + tl.arange(0, tiling.block_r)
    cols = place[1] * tiling.block_c + tl.arange(0, tiling.block_c)
    scale_inv_ptr = out.scale_inv
    amax_ptr = out.amax
    if tiling.pair:
        shift = HALF * blocks[1] * out.stride_c
        scale_inv_ptr += shift
        if amax_ptr is not None:
            amax_ptr += shift
    strides = (out.stride_r, out.stride_c)
    codes = encode_blocks(tile, scale_inv_ptr, amax_ptr, first, blocks, strides, rounding, BLOCK)
    if tiling.pair:
        store_half(codes, out.codes, rows, cols, x, HALF, False, tiling.even)
    else:
        store_codes(codes, out.codes, rows, cols, x, tiling.even)


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
    function: tl.constexpr,
    rounding: tl.constexpr,
    second_rounding: tl.constexpr,
    tiling: tl.constexpr,
):
    """All that a program writes of one half; the arguments after ``place`` are the kernel's."""
    rows = place[0] * tiling.block_r + tl.arange(0, tiling.block_r)
    cols = place[1] * tiling.block_c + tl.arange(0, tiling.block_c)
    tile, other = produce(x, h, rows, cols, function, tiling.even)
    if HALF == 1:
        tile = other
    if sums is not None:
        groups = tl.cdiv(x.R, tiling.block_r)
        counter_ptr = work_ptr + 2 + HALF * tl.cdiv(x.C, tiling.block_c) + place[1]
        sum_ptr = sums[0] + HALF * x.C
        part_ptr = sums[1] + HALF * groups * x.C
        finish_column_sum(tl.sum(tile, 0), sum_ptr, part_ptr, counter_ptr, place[0], groups, cols, x.C)
    BLOCK: tl.constexpr = tiling.block  # Triton 3.6 takes no argument that is a constant's part
    cast_scaling(tile, HALF, place, x, first, rounding, BLOCK, tiling)
    if second_rounding is not None:
        SECOND_BLOCK: tl.constexpr = tiling.second_block
        cast_scaling(tile, HALF, place, x, second, second_rounding, SECOND_BLOCK, tiling)


@triton.jit
def cast_blocks_kernel(
    x,
    h,
    first,  # BlockOutputs of the first scaling
    second,  # of the second, or None
    sums,  # None, or (column sums, their parts [halves, groups, C])
    work_ptr,
    function: tl.constexpr,  # Function
    rounding: tl.constexpr,
    second_rounding: tl.constexpr,  # or None
    tiling: tl.constexpr,  # BlockTiling
):
    """A scale for each block whose sizes divide the program's tile; two such scalings of one read."""
    strips = tl.cdiv(x.C, tiling.block_c)
    place = (tl.program_id(0) // strips, tl.program_id(0) % strips)
    cast_blocks_of_half(0, x, h, place, first, second, sums, work_ptr, function, rounding, second_rounding, tiling)
    if tiling.pair:  # one after the other, since both would not fit the registers: the cache has what is read again
        cast_blocks_of_half(1, x, h, place, first, second, sums, work_ptr, function, rounding, second_rounding, tiling)


class BlockScaling(NamedTuple):
    """One scaling by blocks, and where it is written."""

    rounding: Rounding
    tile: Tile
    outputs: BlockOutputs


def block_scaling(
    given: CastInput, scaling: Scaling, out: Codes, transpose: bool = False, with_amax: bool = True
) -> BlockScaling:
    """A scaling whose scale_inv and amax are yet to be written; transpose: scale_inv is returned so."""
    scale_inv = new_scales(given.x, given.shape, scaling.tile, transpose)
    amax = new_scales(given.x, given.shape, scaling.tile) if with_amax else None
    strides = scale_inv.stride()[::-1] if transpose else scale_inv.stride()
    return BlockScaling(rounding_of(scaling), scaling.tile, BlockOutputs(out, scale_inv, amax, *strides))


def cast_by_block(
    given: CastInput, column_sum: bool, first: BlockScaling, second: BlockScaling | None = None
) -> Tensor:
    """Cast by one or two scalings of small blocks: the column sums."""
    transposes = second is not None or first.outputs.codes.t is not None
    blocks = [scaling.tile for scaling in (first, second) if scaling is not None]
    chosen = with_room_for(given.config("cast_blocks_transpose" if transposes else "cast_blocks"), *blocks)
    block_r, block_c = chosen.block_r, chosen.block_c
    strips, groups = -(-given.cols // block_c), -(-given.rows // block_r)
    even = given.rows % block_r == 0 and given.cols % block_c == 0
    sums = given.sums(column_sum)
    arguments = (
        given.source,
        given.h,
        first.outputs,
        None if second is None else second.outputs,
        (sums, given.float32(given.halves * groups, given.cols)) if column_sum else None,
        workspace(given.x, 2 + strips * given.halves) if column_sum else None,
        given.function,
        first.rounding,
        None if second is None else second.rounding,
        BlockTiling(even, block_r, block_c, first.tile, None if second is None else second.tile, given.halves == 2),
    )
    launch(cast_blocks_kernel, strips * groups, arguments, chosen.num_warps, **given.options)
    return sums
