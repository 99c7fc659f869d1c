"""The casts of one scale a block, whose sizes are powers of two: many a program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.arguments import Scaling
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.launch import with_room_for, workspace
from octavo.kernels.triton.prologue import produce
from octavo.kernels.triton.tiles import (
    Outputs,
    encode,
    finish_column_sum,
    finite_abs,
    kept_narrow,
    rounded,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
)


@triton.jit
def encode_blocks(tile, scaling: tl.constexpr, tiling: tl.constexpr):
    """Codes of a float32 tile in one scaling, whose blocks divide it: (codes, the blocks' amax, their scale)."""
    ROWS: tl.constexpr = scaling.block[0]
    COLS: tl.constexpr = scaling.block[1]
    BR: tl.constexpr = tiling.block_r
    BC: tl.constexpr = tiling.block_c
    amax = tl.max(tl.max(tl.reshape(finite_abs(tile), [BR // ROWS, ROWS, BC // COLS, COLS]), 3), 1)
    scale = scale_from_amax(amax, scaling.limit, scaling.power_of_two)
    wide = tl.broadcast_to(scale[:, None, :, None], [BR // ROWS, ROWS, BC // COLS, COLS])
    return encode(tile, tl.reshape(wide, [BR, BC]), scaling.e5m2), amax, scale


@triton.jit
def store_block_scales(amax, scale, out, first_row, rows_end, first_col, cols_end, offset, scaling: tl.constexpr):
    """Write blocks' scale_inv and amax from a row and column on, up to the ends, ``offset`` elements further."""
    row = first_row + tl.arange(0, amax.shape[0])
    col = first_col + tl.arange(0, amax.shape[1])
    mask = (row < rows_end)[:, None] & (col < cols_end)[None, :]
    offsets = row[:, None] * out.stride_r + col[None, :] * out.stride_c + offset
    tl.store(out.scale_inv + offsets, scale_inv_from_scale(scale, scaling.power_of_two), mask=mask)
    if out.amax is not None:
        tl.store(out.amax + offsets, amax, mask=mask)


@triton.jit
def store_blocks(tile, HALF: tl.constexpr, place, x, out, scaling: tl.constexpr, tiling: tl.constexpr):
    """Write a float32 tile in one scaling, whose blocks divide it, to the Outputs out: codes, scale_inv, amax.

    HALF: which of two halves the tile belongs to; place: (group, strip) of the program; x has R and C, a half's.
    """
    ROWS: tl.constexpr = scaling.block[0]
    COLS: tl.constexpr = scaling.block[1]
    BR: tl.constexpr = tiling.block_r
    BC: tl.constexpr = tiling.block_c
    blocks_c = tl.cdiv(x.C, COLS)
    rows = place[0] * BR + tl.arange(0, BR)
    cols = place[1] * BC + tl.arange(0, BC)
    codes, amax, scale = encode_blocks(tile, scaling, tiling)
    first_row, first_col = place[0] * (BR // ROWS), place[1] * (BC // COLS)
    shift = HALF * blocks_c * out.stride_c
    store_block_scales(amax, scale, out, first_row, tl.cdiv(x.R, ROWS), first_col, blocks_c, shift, scaling)
    if tiling.halves:
        store_codes(codes, out.codes, rows, cols, x, tiling.even, HALF)
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
    scaling: tl.constexpr,
    second_scaling: tl.constexpr,
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
        summed = tile if function.name == "" else rounded(tile)
        finish_column_sum(tl.sum(summed, 0), sum_ptr, part_ptr, counter_ptr, place[0], groups, cols, x.C)
    store_blocks(tile, HALF, place, x, first, scaling, tiling)
    if second_scaling is not None:
        if function.name == "" and x.ptr.dtype.element_ty.primitive_bitwidth == 16:
            tile = kept_narrow(tile, x.ptr.dtype.element_ty)
        store_blocks(tile, HALF, place, x, second, second_scaling, tiling)


@triton.jit
def cast_blocks_kernel(
    x,
    h,
    first,  # Outputs of the first scaling
    second,  # of the second, or None
    sums,  # None, or (column sums, their parts [halves, groups, C])
    work_ptr,
    function: tl.constexpr,  # Function
    scaling: tl.constexpr,  # Rounding of the first
    second_scaling: tl.constexpr,  # of the second, or None
    tiling: tl.constexpr,  # Tiling
):
    """A scale for each block whose sizes divide the program's tile; two such scalings of one read."""
    strips = tl.cdiv(x.C, tiling.block_c)
    place = (tl.program_id(0) // strips, tl.program_id(0) % strips)
    cast_blocks_of_half(0, x, h, place, first, second, sums, work_ptr, function, scaling, second_scaling, tiling)
    if tiling.halves:  # one after the other: both would not fit the registers, and the cache has what is read again
        cast_blocks_of_half(1, x, h, place, first, second, sums, work_ptr, function, scaling, second_scaling, tiling)


def cast_by_block(
    given: CastInput, sums: Tensor | None, first: tuple[Scaling, Outputs], second: tuple[Scaling, Outputs] | None = None
) -> None:
    """Cast by one or two scalings of small blocks."""
    scaling, out = first
    second_scaling, second_out = second or (None, None)
    kind = "cast_blocks" if second_scaling is None and out.codes.t is None else "cast_blocks_transpose"
    chosen = with_room_for(given.config(kind), scaling.tile, (second_scaling or scaling).tile)
    strips, groups, tiling = given.tiling(chosen.block_r, chosen.block_c)
    work = None if sums is None else workspace(given.x, 2 + strips * given.halves)
    roundings = rounding_of(scaling), None if second_scaling is None else rounding_of(second_scaling)
    arguments = out, second_out, given.with_parts(sums, groups), work
    num_warps = chosen.num_warps
    if given.function.name and kind == "cast_blocks_transpose":  # what is computed is held in float32
        num_warps = min(16, 2 * num_warps)
    given.launch(cast_blocks_kernel, strips * groups, num_warps, arguments, (*roundings, tiling))
