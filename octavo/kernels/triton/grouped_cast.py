"""The casts of rows in groups: each group has scales for itself, and one launch casts all groups.

    one scale a group, a column and group   Delayed one launch; Dynamic two, the first for the amaxes
    one scale a row                         one launch
    blocks of powers of two up to 128       one launch; of other sizes: the reference, which waits for the groups' sizes

A program works on some rows of one group (groups.py). Codes that belong to no group are written by programs without
one, so no launch clears anything.

work (int32, all 0 before and after): the bits of amaxes, a group or column and group each, and counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import CastSource, Output, Scaling, new_cast
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.triton.cast_input import CastInput, cast_input, codes_to, outputs_to, rounding_of
from octavo.kernels.triton.cast_kernels import (
    encode_blocks,
    finish_lines,
    larger,
    row_tile,
    store_block_scales,
    tall_blocks,
    tiles_of_blocks,
)
from octavo.kernels.triton.delayed_update import scale_exists
from octavo.kernels.triton.groups import Grouping, locate, on_device
from octavo.kernels.triton.groups import Groups as GroupsOnDevice
from octavo.kernels.triton.launch import workspace
from octavo.kernels.triton.prologue import Input, produce
from octavo.kernels.triton.tiles import (
    Outputs,
    Tiling,
    encode,
    finite_abs,
    is_last_program,
    raise_amax,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    store_tiles,
)


@triton.jit
def produce_of_group(x, extra, place, local, cols, function: tl.constexpr, grouping: tl.constexpr):
    """Return ``produce`` of a group's rows ``local``."""
    is_mine = local < place.size
    rows = tl.where(is_mine, place.start + local, x.R)
    H_ROWS: tl.constexpr = grouping.h_tile_r
    return produce(x, extra, rows, cols, function, False, tl.where(is_mine, place.h_row + local // H_ROWS, 0))


@triton.jit
def places_of_codes(x, place, local):
    """Return where codes of a group's rows go: (rows, R where there are none; transposed columns; their end)."""
    rows = tl.where(local < place.height, place.start + local, x.R)
    return rows, place.column + local, place.column + place.columns


@triton.jit
def lines_of_group(x, groups, place, cols, COLUMNS: tl.constexpr, tiling: tl.constexpr):
    """Return the lines of a group or its columns ``cols``: (group; width; lines; the other half's; which exist)."""
    is_group = place.group < groups.count
    group = tl.where(is_group, place.group, 0)
    width = x.C
    if tiling.halves:
        width = 2 * x.C
    if COLUMNS:
        lines = group * width + cols
        inside = cols < tl.where(is_group, x.C, 0)
        second_lines = lines + x.C
    else:
        lines, second_lines, inside = group, group, is_group
    return group, width, lines, second_lines, inside


@triton.jit
def finish_groups(work_ptr, groups, cols, cols_end, width, out, scales_ptr, rounding: tl.constexpr):
    """Write the amax, scale_inv and scale of all groups' columns ``cols``, of ``width``, and set their bits to 0."""
    STEP: tl.constexpr = 16
    for first in range(0, groups.count, STEP):
        group = first + tl.arange(0, STEP)
        lines = group[:, None] * width + cols[None, :]
        end = groups.count * width
        lines = tl.where((group < groups.count)[:, None] & (cols < cols_end)[None, :], lines, end)
        finish_lines(work_ptr, lines, end, out, scales_ptr, rounding)


@triton.jit(do_not_specialize=["heights"])
def group_amax_kernel(
    x,
    extra,
    groups,
    out,  # Outputs of the scaling
    scales_ptr,  # the scales that the cast reads: one a group, or one for each column of a group
    delayed_scale_ptr,  # None, or: return at once where a scale exists
    work_ptr,
    heights,  # programs of a strip
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping
    COLUMNS: tl.constexpr,  # a scale for each column of a group
    ROLE: tl.constexpr,
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Write the amaxes and scales of groups, or of their columns."""
    if delayed_scale_ptr is not None:
        if tl.load(delayed_scale_ptr + ROLE) != 0:
            return
    HEIGHT: tl.constexpr = tiling.tiles * tiling.block_r
    strips = tl.num_programs(0) // heights
    strip = tl.program_id(0) % strips
    place = locate(groups, tl.program_id(0) // strips, x.R, HEIGHT, grouping)
    cols = strip * tiling.block_c + tl.arange(0, tiling.block_c)
    largest = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    second_largest = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    for first in range(place.first, tl.minimum(place.first + HEIGHT, place.size), tiling.block_r):
        local = first + tl.arange(0, tiling.block_r)
        tile, second = produce_of_group(x, extra, place, local, cols, function, grouping)
        largest = tl.maximum(largest, finite_abs(tile))
        if tiling.halves:
            second_largest = tl.maximum(second_largest, finite_abs(second))
    _, width, lines, second_lines, inside = lines_of_group(x, groups, place, cols, COLUMNS, tiling)
    if COLUMNS:
        raise_amax(work_ptr + lines, tl.max(largest, 0), inside)
        if tiling.halves:
            raise_amax(work_ptr + second_lines, tl.max(second_largest, 0), inside)
        if is_last_program(work_ptr + groups.count * width + strip, heights):
            finish_groups(work_ptr, groups, cols, x.C, width, out, scales_ptr, rounding)
            if tiling.halves:
                finish_groups(work_ptr, groups, x.C + cols, width, width, out, scales_ptr, rounding)
    else:
        raise_amax(work_ptr + lines, tl.max(tl.max(tl.maximum(largest, second_largest), 1), 0))
        if is_last_program(work_ptr + groups.count, tl.num_programs(0)):
            finish_lines(work_ptr, tl.arange(0, grouping.width), groups.count, out, scales_ptr, rounding)


@triton.jit
def known_scale(delayed_scale_ptr, scales_ptr, lines, inside, ROLE: tl.constexpr):
    """Return the delayed scale; for Dynamic, or while there is none yet, the scales that group_amax_kernel wrote."""
    delayed = tl.full(lines.shape, 0.0, tl.float32)
    if delayed_scale_ptr is not None:
        delayed += tl.load(delayed_scale_ptr + ROLE)
    scale = tl.full(lines.shape, 1.0, tl.float32)  # for a CUDA graph that is replayed after the state was emptied
    if scales_ptr is not None:  # not written where a delayed scale exists
        scale = tl.load(scales_ptr + lines, mask=inside & (delayed == 0), other=1.0)
    return tl.where(delayed == 0, scale, delayed)


@triton.jit(do_not_specialize=["heights"])
def cast_group_kernel(
    x,
    extra,
    groups,
    out,  # Outputs; of a delayed scale its amax and scale_inv are written too
    scales_ptr,  # that group_amax_kernel wrote, or None
    delayed_scale_ptr,  # None for Dynamic
    work_ptr,
    heights,  # programs of a strip
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping
    COLUMNS: tl.constexpr,  # a scale for each column of a group
    ROLE: tl.constexpr,
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Write codes by the scales of groups or of their columns."""
    HEIGHT: tl.constexpr = tiling.tiles * tiling.block_r
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    if delayed_scale_ptr is None:
        program = programs - 1 - program  # what group_amax_kernel read last is still in the cache
    strips = programs // heights
    place = locate(groups, program // strips, x.R, HEIGHT, grouping)
    cols = (program % strips) * tiling.block_c + tl.arange(0, tiling.block_c)
    group, _, lines, second_lines, inside = lines_of_group(x, groups, place, cols, COLUMNS, tiling)
    scale = known_scale(delayed_scale_ptr, scales_ptr, lines, inside, ROLE)
    if COLUMNS:
        scale = scale[None, :]
    second_scale = scale
    if COLUMNS and tiling.halves:
        second_scale = known_scale(delayed_scale_ptr, scales_ptr, second_lines, inside, ROLE)[None, :]
    largest = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    last = tl.minimum(place.first + HEIGHT, tl.maximum(place.height, place.columns))
    for first in range(place.first, last, tiling.block_r):
        local = first + tl.arange(0, tiling.block_r)
        tile, second = produce_of_group(x, extra, place, local, cols, function, grouping)
        if delayed_scale_ptr is not None:
            largest = tl.maximum(largest, larger(tile, second, tiling))
        rows, columns, end = places_of_codes(x, place, local)
        store_tiles(tile, second, scale, second_scale, out.codes, rows, cols, x, rounding.e5m2, tiling, columns, end)
    if delayed_scale_ptr is not None:
        raise_amax(work_ptr + group, tl.max(tl.max(largest, 1), 0))
        if is_last_program(work_ptr + groups.count, programs):
            indices = tl.arange(0, grouping.width)
            is_group = indices < groups.count
            scales = known_scale(delayed_scale_ptr, scales_ptr, indices, is_group, ROLE)
            tl.store(out.scale_inv + indices, scale_inv_from_scale(scales, False), mask=is_group)
            # from L2: this multiprocessor's own cache doesn't see what others raised
            amax = tl.load(work_ptr + indices, mask=is_group, other=0, cache_modifier=".cg").to(
                tl.float32, bitcast=True
            )
            tl.store(out.amax + indices, amax, mask=is_group)
            tl.debug_barrier()  # all threads have read
            tl.store(work_ptr + indices, tl.zeros_like(indices), mask=is_group)


@triton.jit
def cast_group_rows_kernel(
    x,
    extra,
    groups,
    out,  # Outputs
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Cast with a scale for each row, as cast_rows_kernel does."""
    place = locate(groups, tl.program_id(0), x.R, tiling.block_r, grouping)
    local = place.first + tl.arange(0, tiling.block_r)
    cols = tl.arange(0, tiling.block_c)
    tile, second = produce_of_group(x, extra, place, local, cols, function, grouping)
    largest = larger(tile, second, tiling)
    if not tiling.one_tile:
        for start in range(tiling.block_c, x.C, tiling.block_c):
            more, more_second = produce_of_group(x, extra, place, local, start + cols, function, grouping)
            largest = tl.maximum(largest, larger(more, more_second, tiling))
    amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    rows, columns, end = places_of_codes(x, place, local)
    tl.store(out.amax + rows, amax, mask=rows < x.R)
    tl.store(out.scale_inv + rows, scale_inv_from_scale(scale, rounding.power_of_two), mask=rows < x.R)
    scale = scale[:, None]
    E5M2: tl.constexpr = rounding.e5m2
    if tiling.one_tile:
        store_tiles(tile, second, scale, scale, out.codes, rows, cols, x, E5M2, tiling, columns, end)
    else:
        for start in range(0, x.C, tiling.block_c):
            tile, second = produce_of_group(x, extra, place, local, start + cols, function, grouping)
            store_tiles(tile, second, scale, scale, out.codes, rows, start + cols, x, E5M2, tiling, columns, end)


@triton.jit
def store_group_scales(amax, scale, HALF: tl.constexpr, row, place, strip, x, out, scaling: tl.constexpr):
    """Write scale_inv and amax of one half's blocks [height, width], from a row of the group's blocks on."""
    blocks_c = tl.cdiv(x.C, scaling.block[1])
    first_col, col_end = HALF * blocks_c + strip * amax.shape[1], (HALF + 1) * blocks_c
    row_end = place.scale_row + place.scale_rows
    store_block_scales(amax, scale, out, place.scale_row + row, row_end, first_col, col_end, col_end, scaling)


@triton.jit
def store_group_blocks(
    tile, HALF: tl.constexpr, first, place, strip, x, out, scaling: tl.constexpr, tiling: tl.constexpr, tall
):
    """Write a tile from the group's row ``first`` on; ``tall`` as in store_blocks."""
    local = first + tl.arange(0, tiling.block_r)
    cols = strip * tiling.block_c + tl.arange(0, tiling.block_c)
    if tall is None:
        codes, amax, scale = encode_blocks(tile, scaling, tiling)
        store_group_scales(amax, scale, HALF, first // scaling.block[0], place, strip, x, out, scaling)
    else:
        codes = encode(tile, tall, scaling.e5m2)
    rows, columns, end = places_of_codes(x, place, local)
    HALF_OF_TWO: tl.constexpr = HALF if tiling.halves else None
    store_codes(codes, out.codes, rows, cols, x, False, HALF_OF_TWO, columns, end)


@triton.jit
def cast_group_blocks_kernel(
    x,
    extra,
    groups,
    out,  # Outputs
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping
    scaling: tl.constexpr,  # Rounding
    tiling: tl.constexpr,  # Tiling
):
    """Cast with a scale for each block of a group; cast_blocks_kernel says how blocks of several tiles are cast."""
    BR: tl.constexpr = tiling.block_r
    strips = tl.cdiv(x.C, tiling.block_c)
    strip = tl.program_id(0) % strips
    cols = strip * tiling.block_c + tl.arange(0, tiling.block_c)
    place = locate(groups, tl.program_id(0) // strips, x.R, tiling.tiles * BR, grouping)
    tall = None  # scales, of each half
    tall_of_half = None
    if tiling.tiles > 1:
        largest = tl.full([BR, tiling.block_c], 0.0, tl.float32)
        largest_of_half = tl.full([BR, tiling.block_c], 0.0, tl.float32)
        for i in range(tiling.tiles):
            local = place.first + i * BR + tl.arange(0, BR)
            tile, half = produce_of_group(x, extra, place, local, cols, function, grouping)
            largest = tl.maximum(largest, finite_abs(tile))
            if tiling.halves:
                largest_of_half = tl.maximum(largest_of_half, finite_abs(half))
        row = place.first // scaling.block[0]
        amax, scale, tall = tall_blocks(tl.max(largest, 0), scaling, tiling)
        store_group_scales(amax, scale, 0, row, place, strip, x, out, scaling)
        if tiling.halves:
            amax, scale, tall_of_half = tall_blocks(tl.max(largest_of_half, 0), scaling, tiling)
            store_group_scales(amax, scale, 1, row, place, strip, x, out, scaling)
    for i in range(tiling.tiles):
        first = place.first + (tiling.tiles - 1 - i) * BR
        tile, half = produce_of_group(x, extra, place, first + tl.arange(0, BR), cols, function, grouping)
        store_group_blocks(tile, 0, first, place, strip, x, out, scaling, tiling, tall)
        if tiling.halves:
            store_group_blocks(half, 1, first, place, strip, x, out, scaling, tiling, tall_of_half)


class _GroupedSource(NamedTuple):
    """The input that kernels of a grouped cast read, and its groups."""

    inputs: CastInput
    groups: GroupsOnDevice
    grouping: Grouping

    def programs(self, height: int) -> int:
        """Return a number of programs, of so many rows each, that is enough for any groups."""
        rows = self.inputs.rows
        return rows // height + self.groups.count + 1 if self.grouping.ragged else triton.cdiv(rows, height) or 1

    def tiling(self, block_r: int, block_c: int, tiles: int = 1, one_tile: bool = False) -> tuple[int, int, Tiling]:
        """Return how programs share the cast: (strips of columns, programs of a strip, tiling)."""
        strips, _, tiling = self.inputs.tiling(block_r, block_c, tiles, one_tile)
        return strips, self.programs(tiling.tiles * block_r), tiling._replace(even=False)

    def launch(
        self, kernel: Any, programs: int, num_warps: int, arguments: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        """Launch a kernel that reads this, with these other arguments and constants of it."""
        self.inputs.launch(kernel, programs, num_warps, (self.groups, *arguments), (self.grouping, *constants))


def grouped_cast(source: CastSource, scaling: Scaling, output: Output, offsets: Tensor) -> tuple[Tensor, ...]:
    """Compute the op ``octavo::cast`` of rows in groups; its contract is in signatures.py."""
    inputs, tile = cast_input(source), scaling.tile
    if not inputs.fits(tile) and not (inputs.rows * inputs.cols == 0 and is_small_block(tile)):
        return reference_cast(source, scaling, None, output, offsets)
    q, t, scale_inv, amax = new_cast(source, scaling, None, output, offsets)
    inputs.clear_padding(q, output.pad)
    out = outputs_to(codes_to(q, t), scale_inv, amax)
    h_tile_r = inputs.function.tile_r if isinstance(inputs.extra, Input) and inputs.extra.scale_inv is not None else 1
    ragged = output.transpose or tile[0] != 1 or h_tile_r != 1
    options = output.pad, tile[0], h_tile_r, ragged, t.shape[1], scale_inv.shape[0]
    grouped = _GroupedSource(inputs, *on_device(offsets, *options))
    if tile == (1, ALL):
        _cast_by_row(grouped, scaling, out)
    elif tile[0] == ALL:
        _cast_by_group(grouped, scaling, out)
    else:
        _cast_by_block(grouped, scaling, out)
    return q, t, scale_inv, amax


def _cast_by_group(grouped: _GroupedSource, scaling: Scaling, out: Outputs) -> None:
    """Cast with a scale for each group, or each column of a group."""
    inputs, delayed_scale, role = grouped.inputs, scaling.delayed_scale, scaling.role
    by_column = scaling.tile[1] != ALL
    lines = grouped.groups.count * (inputs.shape[1] if by_column else 1)
    constants = by_column, role, rounding_of(scaling)
    scales = None
    if delayed_scale is None or not scale_exists(delayed_scale, role):
        scales = inputs.x.new_empty(lines, dtype=torch.float32)
        chosen = inputs.config("amax_lines" if by_column else "amax")
        strips, heights, tiling = grouped.tiling(*chosen[:3])
        amax_arguments = out._replace(codes=None), scales, delayed_scale, workspace(inputs.x, lines + strips), heights
        num_warps = chosen.num_warps * (inputs.halves if by_column else 1)  # registers hold both halves' amaxes
        grouped.launch(group_amax_kernel, strips * heights, num_warps, amax_arguments, (*constants, tiling))
    if delayed_scale is not None or out.codes.q is not None or out.codes.t is not None:
        chosen = inputs.config("cast" if out.codes.t is None else "cast_transpose")
        strips, heights, tiling = grouped.tiling(*chosen[:3])
        arguments = out, scales, delayed_scale, workspace(inputs.x, lines + 1), heights
        grouped.launch(cast_group_kernel, strips * heights, chosen.num_warps, arguments, (*constants, tiling))


def _cast_by_row(grouped: _GroupedSource, scaling: Scaling, out: Outputs) -> None:
    """Cast with a scale for each row."""
    chosen, widest = row_tile(grouped.inputs)
    if out.codes.t is not None:  # a program writes a transposed row's padding too
        chosen = chosen._replace(block_r=max(grouped.grouping.pad, chosen.block_r), block_c=min(chosen.block_c, 256))
    _, heights, tiling = grouped.tiling(chosen.block_r, chosen.block_c, one_tile=widest <= chosen.block_c)
    grouped.launch(cast_group_rows_kernel, heights, chosen.num_warps, (out,), (rounding_of(scaling), tiling))


def _cast_by_block(grouped: _GroupedSource, scaling: Scaling, out: Outputs) -> None:
    """Cast with a scale for each block."""
    kind = "cast_blocks" if out.codes.t is None else "cast_blocks_transpose"
    chosen, tiles, num_warps = tiles_of_blocks(grouped.inputs, kind, scaling.tile)
    strips, heights, whole = grouped.tiling(chosen.block_r * tiles, chosen.block_c)
    constants = rounding_of(scaling), whole._replace(block_r=chosen.block_r, tiles=tiles)
    grouped.launch(cast_group_blocks_kernel, strips * heights, num_warps, (out,), constants)
