"""The kernel of casts with a scale for each block, by one or two scalings, whose blocks' sizes are powers of two.

A tile holds many blocks. Or blocks are tall, as high as a program's tiles together: then a program reads its tiles
twice, first for the blocks' amaxes, the second time from a cache.

``place`` is a program's GroupOfProgram, and ``local`` are rows of its group, which without groups is all of x. Strips,
parts and halves are cast_kernels.py's. Names with ``second`` are of the second of two scalings.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import Tile
from octavo.kernels.arguments import Scaling
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.groups import locate, places_of_codes, produce_of_group
from octavo.kernels.triton.launch import Config, with_room_for, workspace
from octavo.kernels.triton.tiles import (
    Outputs,
    encode,
    finish_column_sums,
    finite_abs,
    kept_narrow,
    rounded,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    store_scale_inv,
)


@triton.jit
def encode_blocks(tile, rounding: tl.constexpr, tiling: tl.constexpr):
    """Encode a float32 tile whose blocks each have a scale: (codes, the blocks' amax, the blocks' scale)."""
    ROWS: tl.constexpr = rounding.block[0]
    COLS: tl.constexpr = rounding.block[1]
    TR: tl.constexpr = tiling.tile_r
    TC: tl.constexpr = tiling.tile_c
    amax = tl.max(tl.max(tl.reshape(finite_abs(tile), [TR // ROWS, ROWS, TC // COLS, COLS]), 3), 1)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    wide = tl.broadcast_to(scale[:, None, :, None], [TR // ROWS, ROWS, TC // COLS, COLS])
    return encode(tile, tl.reshape(wide, [TR, TC]), rounding.e5m2), amax, scale


@triton.jit
def swizzled_place(row, col, cols):
    """Return the offset of a row's and block's scale as layouts.swizzled lays them, with ``cols`` blocks a row."""
    return (row // 128 * tl.cdiv(cols, 4) + col // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + col % 4


@triton.jit
def store_scales(
    amax, scale, HALF: tl.constexpr, block_row, strip, place, x, out, rounding: tl.constexpr, tiling: tl.constexpr
):
    """Write scale_inv and amax of one half's blocks [height, width]; block_row: that of the first, in its group."""
    blocks_c = tl.cdiv(x.C, rounding.block[1])
    first_col = HALF * blocks_c + strip * amax.shape[1]
    cols_end = (HALF + 1) * blocks_c
    first_row = block_row
    if tiling.grouped:
        rows_end = place.scale_row + place.scale_rows
        first_row += place.scale_row
    else:
        rows_end = tl.cdiv(x.R, rounding.block[0])
    row = first_row + tl.arange(0, amax.shape[0])
    col = first_col + tl.arange(0, amax.shape[1])
    mask = (row < rows_end)[:, None] & (col < cols_end)[None, :]
    offsets = row[:, None] * out.stride_r + col[None, :] * out.stride_c
    places = offsets
    if rounding.swizzles:
        if rounding.block[0] == 1:
            width = 2 * blocks_c if tiling.halves else blocks_c
            places = swizzled_place(row[:, None], col[None, :], width)
        else:
            places = swizzled_place(col[None, :], row[:, None], rows_end)
    store_scale_inv(out.scale_inv + places, scale_inv_from_scale(scale, rounding.power_of_two), mask)
    if out.amax is not None:
        tl.store(out.amax + offsets, amax, mask=mask)


@triton.jit
def store_blocks(
    tile, HALF: tl.constexpr, tile_row, strip, place, x, out, rounding: tl.constexpr, tiling: tl.constexpr, tall=None
):
    """Write a float32 tile by one scaling to the Outputs out: codes, scale_inv, amax.

    HALF: which of two halves the tile belongs to; x has R and C, a half's. tile_row: how many tiles lie above it, in
    its group; strip: how many to its left. place: read of rows in groups alone. tall: None where blocks divide the
    tile; of taller blocks the result of ``tall_scales``, which has written their scales.
    """
    local = tile_row * tiling.tile_r + tl.arange(0, tiling.tile_r)
    cols = strip * tiling.tile_c + tl.arange(0, tiling.tile_c)
    if tall is None:
        codes, amax, scale = encode_blocks(tile, rounding, tiling)
        block_row = tile_row * (tiling.tile_r // rounding.block[0])
        store_scales(amax, scale, HALF, block_row, strip, place, x, out, rounding, tiling)
    else:
        codes = encode(tile, tall[HALF], rounding.e5m2)
    HALF_OF_TWO: tl.constexpr = HALF if tiling.halves else None
    rows, columns, end = places_of_codes(x, out.codes, place, local, tiling)
    store_codes(codes, out.codes, rows, cols, x, tiling.even, HALF_OF_TWO, columns, end)


@triton.jit
def tall_scales_of(amaxes, HALF: tl.constexpr, strip, place, x, out, rounding: tl.constexpr, tiling: tl.constexpr):
    """Write the amax and scale_inv of one half's tall blocks; return their columns' scales [1, TC]."""
    BLOCKS: tl.constexpr = tiling.tile_c // rounding.block[1]
    amax = tl.max(tl.reshape(amaxes, [1, BLOCKS, rounding.block[1]]), 2)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    wide = tl.broadcast_to(scale[:, :, None], [1, BLOCKS, rounding.block[1]])
    scales = tl.reshape(wide, [1, tiling.tile_c])
    store_scales(amax, scale, HALF, place.part, strip, place, x, out, rounding, tiling)
    return scales


@triton.jit
def tall_scales(amaxes, amaxes_of_half, strip, place, x, out, rounding: tl.constexpr, tiling: tl.constexpr):
    """Write the amax and scale_inv of tall blocks, from ``column_amaxes``.

    Return the columns' scales [1, TC], and those of the other half.
    """
    scales = tall_scales_of(amaxes, 0, strip, place, x, out, rounding, tiling)
    scales_of_half = scales
    if tiling.halves:
        scales_of_half = tall_scales_of(amaxes_of_half, 1, strip, place, x, out, rounding, tiling)
    return scales, scales_of_half


@triton.jit
def column_amaxes(x, extra, place, cols, function: tl.constexpr, grouping: tl.constexpr, tiling: tl.constexpr):
    """Return the amaxes of the columns [TC] of a program's part, and of its other half."""
    largest = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    largest_of_half = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        local = (place.part * tiling.tiles + i) * tiling.tile_r + tl.arange(0, tiling.tile_r)
        tile, other_half = produce_of_group(x, extra, place, local, cols, function, grouping, tiling)
        largest = tl.maximum(largest, finite_abs(tile))
        if tiling.halves:
            largest_of_half = tl.maximum(largest_of_half, finite_abs(other_half))
    return tl.max(largest, 0), tl.max(largest_of_half, 0)


@triton.jit
def store_halves(tile, other_half, tile_row, strip, place, x, out, rounding: tl.constexpr, tiling: tl.constexpr, tall):
    """Write what ``produce`` returned as store_blocks does."""
    store_blocks(tile, 0, tile_row, strip, place, x, out, rounding, tiling, tall)
    if tiling.halves:
        store_blocks(other_half, 1, tile_row, strip, place, x, out, rounding, tiling, tall)


@triton.jit
def cast_blocks_kernel(
    x,
    extra,
    groups,  # Groups, or None
    out,  # Outputs of the first scaling
    second_out,  # outputs of the second scaling, or None
    sums,  # None, or (column sums, partial sums [halves, parts, C])
    work_ptr,
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping, or None
    rounding: tl.constexpr,  # Rounding of the first
    second_rounding: tl.constexpr,  # None for one scaling
    tiling: tl.constexpr,  # Tiling
):
    """Cast with a scale for each block whose sizes divide the program's part; with two such scalings from one read.

    If the part has several tiles, a first read finds the amaxes of blocks that are as high as the part.
    """
    strips = tl.cdiv(x.C, tiling.tile_c)
    program = tl.program_id(0)
    if function.name == "norm":
        program = tl.num_programs(0) - 1 - program  # what the statistics' launch read last is still in the cache
    place = locate(groups, program // strips, x.R, tiling.tiles * tiling.tile_r, grouping)
    strip = program % strips
    cols = strip * tiling.tile_c + tl.arange(0, tiling.tile_c)
    tall, second_tall = None, None  # what tall_scales returns, of blocks that are higher than a tile
    if tiling.tiles > 1:
        amaxes, amaxes_of_half = column_amaxes(x, extra, place, cols, function, grouping, tiling)
        if rounding.block[0] > tiling.tile_r:
            tall = tall_scales(amaxes, amaxes_of_half, strip, place, x, out, rounding, tiling)
        if second_rounding is not None and second_rounding.block[0] > tiling.tile_r:
            second_tall = tall_scales(amaxes, amaxes_of_half, strip, place, x, second_out, second_rounding, tiling)
    total = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    total_of_half = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    for i in range(tiling.tiles):  # upwards: the tile that was read last is in the nearest cache
        tile_row = place.part * tiling.tiles + tiling.tiles - 1 - i
        local = tile_row * tiling.tile_r + tl.arange(0, tiling.tile_r)
        tile, half = produce_of_group(x, extra, place, local, cols, function, grouping, tiling)
        if sums is not None:
            total += tile if function.name == "" else rounded(tile)
            if tiling.halves:
                total_of_half += rounded(half)
        store_halves(tile, half, tile_row, strip, place, x, out, rounding, tiling, tall)
        if second_rounding is not None:
            if function.name == "" and tiling.tiles == 1 and x.ptr.dtype.element_ty.primitive_bitwidth == 16:
                tile = kept_narrow(tile, x.ptr.dtype.element_ty)
            store_halves(tile, half, tile_row, strip, place, x, second_out, second_rounding, tiling, second_tall)
    if sums is not None:
        total = tl.sum(total, 0)
        total_of_half = tl.sum(total_of_half, 0)
        parts = tl.num_programs(0) // strips
        finish_column_sums(total, total_of_half, sums, work_ptr + strip, place.part, parts, cols, x.C, tiling.halves)


def tiles_of_blocks(inputs: CastInput, kind: str, *blocks: Tile) -> tuple[Config, int, int]:
    """Return (a tile, how many of them, one below the other, hold whole blocks, warps).

    A tile as high as a block of 128 rows would leave a multiprocessor one or two programs, which wait for what they
    read, then compute, then write. So a program reads such a block in several tiles.
    """
    chosen = inputs.config(kind)
    height = max(chosen.tile_r, *(rows for rows, _ in blocks))
    chosen = with_room_for(chosen, *((rows if rows < height else 1, cols) for rows, cols in blocks))
    tiles, num_warps = height // chosen.tile_r, chosen.num_warps
    if kind == "cast_blocks_transpose" and (tiles > 1 or inputs.function.name):  # more is held in float32
        num_warps = min(16, 2 * num_warps)
    return chosen, tiles, num_warps


def cast_by_block(inputs: CastInput, sums: Tensor | None, *scalings: tuple[Scaling, Outputs]) -> None:
    """Cast by one or two scalings of small blocks."""
    (scaling, out), *others = scalings
    second_scaling, second_out = others[0] if others else (None, None)
    kind = "cast_blocks" if second_scaling is None and out.codes.t is None else "cast_blocks_transpose"
    chosen, tiles, num_warps = tiles_of_blocks(inputs, kind, scaling.tile, (second_scaling or scaling).tile)
    strips, parts, tiling = inputs.tiling(chosen.tile_r * tiles, chosen.tile_c)
    work = None if sums is None else workspace(inputs.x, strips)
    roundings = rounding_of(scaling), None if second_scaling is None else rounding_of(second_scaling)
    groups, grouping = inputs.groups or (None, None)
    arguments = groups, out, second_out, inputs.with_partial_sums(sums, parts), work
    constants = grouping, *roundings, tiling._replace(tile_r=chosen.tile_r, tiles=tiles)
    inputs.launch(cast_blocks_kernel, strips * parts, num_warps, arguments, constants)
