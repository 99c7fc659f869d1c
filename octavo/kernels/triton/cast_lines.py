"""The casts of one scale a line: a row, a column, or a row for some codes and a column for others.

Lines are shared by programs, so there are two launches, the first of which finds their amaxes. In both a program works
down a strip of columns, as those of cast_tensor.py do. Rows that lie in order and whose codes do too are cast in one
launch by cast_rows.py.

work (int32, all 0 before and after): the bits of the columns' amaxes and of the rows', a counter a strip, one a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import Scaling
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.launch import workspace
from octavo.kernels.triton.prologue import produce
from octavo.kernels.triton.tiles import (
    Outputs,
    finish_column_sum,
    finite_abs,
    is_last_program,
    raise_amax,
    scale_from_amax,
    scale_inv_from_scale,
    store_tiles,
)

LINES = (1, ALL), (ALL, 1)


@triton.jit
def finish_lines(bits_ptr, lines, end, out, scale_ptr, rounding: tl.constexpr):
    """Write the amax, scale_inv and scale of ``lines`` before ``end``, and set their bits back to 0."""
    inside = lines < end
    # from L2: this multiprocessor's own cache doesn't see what others raised
    amax = tl.load(bits_ptr + lines, mask=inside, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
    tl.store(out.amax + lines, amax, mask=inside)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    tl.store(scale_ptr + lines, scale, mask=inside)
    tl.store(out.scale_inv + lines, scale_inv_from_scale(scale, rounding.power_of_two), mask=inside)
    tl.debug_barrier()  # all threads have read
    tl.store(bits_ptr + lines, tl.zeros_like(lines), mask=inside)


@triton.jit(do_not_specialize=["groups"])
def line_amax_kernel(
    x,
    h,
    by_row,  # Outputs of a scaling by rows, or anything
    by_column,  # of one by columns
    scales,  # of the rows, and of the columns, for the cast
    work_ptr,
    groups,  # of tiling.tiles tiles in a strip
    function: tl.constexpr,  # Function
    row_rounding: tl.constexpr,  # None without a scaling by rows
    column_rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """The amaxes and scales of all rows, all columns or both."""
    HEIGHT: tl.constexpr = tiling.tiles * tiling.block_r
    strips = tl.num_programs(0) // groups
    strip = tl.program_id(0) % strips
    group = tl.program_id(0) // strips
    cols = strip * tiling.block_c + tl.arange(0, tiling.block_c)
    row_bits_ptr = work_ptr + x.C
    if tiling.halves:
        row_bits_ptr += x.C
    counter_ptr = row_bits_ptr + x.R
    largest = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    second_largest = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = group * HEIGHT + i * tiling.block_r + tl.arange(0, tiling.block_r)
        tile, second = produce(x, h, rows, cols, function, tiling.even)
        tile = finite_abs(tile)
        second = finite_abs(second)
        if column_rounding is not None:
            largest = tl.maximum(largest, tile)
            if tiling.halves:
                second_largest = tl.maximum(second_largest, second)
        if row_rounding is not None:
            if tiling.halves:
                tile = tl.maximum(tile, second)
            raise_amax(row_bits_ptr + rows, tl.max(tile, 1), rows < x.R)
    if column_rounding is not None:
        raise_amax(work_ptr + cols, tl.max(largest, 0), cols < x.C)
        if tiling.halves:
            raise_amax(work_ptr + x.C + cols, tl.max(second_largest, 0), cols < x.C)
        if is_last_program(counter_ptr + strip, groups):
            finish_lines(work_ptr, cols, x.C, by_column, scales[1], column_rounding)
            if tiling.halves:
                second_cols = tl.where(cols < x.C, x.C + cols, 2 * x.C)
                finish_lines(work_ptr, second_cols, 2 * x.C, by_column, scales[1], column_rounding)
    if row_rounding is not None:
        if is_last_program(counter_ptr + strips + group, strips):
            finish_lines(row_bits_ptr, group * HEIGHT + tl.arange(0, HEIGHT), x.R, by_row, scales[0], row_rounding)


@triton.jit(do_not_specialize=["groups"])
def cast_lines_kernel(
    x,
    h,
    by_row,  # Outputs of a scaling by rows, or anything
    by_column,  # of one by columns
    scales,  # that line_amax_kernel wrote
    sums,  # None, or (column sums, their parts [halves, groups, C])
    work_ptr,
    groups,  # of tiling.tiles tiles in a strip
    function: tl.constexpr,  # Function
    row_rounding: tl.constexpr,  # None without a scaling by rows
    column_rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Codes by the scales of rows, of columns or both."""
    programs = tl.num_programs(0)
    program = programs - 1 - tl.program_id(0)  # what line_amax_kernel read last is still in the cache
    strips = programs // groups
    strip = program % strips
    group = program // strips
    cols = strip * tiling.block_c + tl.arange(0, tiling.block_c)
    column_scale = 1.0
    second_scale = 1.0
    if column_rounding is not None:
        column_scale = tl.load(scales[1] + cols, mask=cols < x.C, other=1.0)[None, :]
        second_scale = column_scale
        if tiling.halves:
            second_scale = tl.load(scales[1] + x.C + cols, mask=cols < x.C, other=1.0)[None, :]
    total = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    second_total = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = (group * tiling.tiles + i) * tiling.block_r + tl.arange(0, tiling.block_r)
        tile, second = produce(x, h, rows, cols, function, tiling.even)
        if row_rounding is not None:
            scale = tl.load(scales[0] + rows, mask=rows < x.R, other=1.0)[:, None]
            store_tiles(tile, second, scale, scale, by_row.codes, rows, cols, x, row_rounding.e5m2, tiling)
        if column_rounding is not None:
            codes = by_column.codes
            store_tiles(tile, second, column_scale, second_scale, codes, rows, cols, x, column_rounding.e5m2, tiling)
        if sums is not None:
            total += tile
            if tiling.halves:
                second_total += second
    if sums is not None:
        finish_column_sum(tl.sum(total, 0), sums[0], sums[1], work_ptr + strip, group, groups, cols, x.C)
        if tiling.halves:
            finish_column_sum(
                tl.sum(second_total, 0),
                sums[0] + x.C,
                sums[1] + groups * x.C,
                work_ptr + strips + strip,
                group,
                groups,
                cols,
                x.C,
            )


def cast_by_line(given: CastInput, sums: Tensor | None, *scalings: tuple[Scaling, Outputs]) -> None:
    """A scale for each row, for each column, or one scaling of each."""
    by_tile = {scaling.tile: (rounding_of(scaling), out) for scaling, out in scalings}
    roundings, outs = zip(*(by_tile.get(tile, (None, None)) for tile in LINES), strict=True)
    scales = given.x.new_empty(sum(given.shape), dtype=torch.float32).split(given.shape)
    chosen = given.config("amax_lines")
    strips, groups, tiling = given.tiling(*chosen[:3])
    work = workspace(given.x, sum(given.shape) + strips + groups)
    found = (*(out and out._replace(codes=None) for out in outs), scales, work, groups)
    given.launch(line_amax_kernel, strips * groups, chosen.num_warps, found, (*roundings, tiling))
    if sums is not None or any(out.codes.q is not None or out.codes.t is not None for _, out in scalings):
        chosen = given.config("cast_lines")
        strips, groups, tiling = given.tiling(*chosen[:3])
        work = workspace(given.x, strips * given.halves)
        arguments = *outs, scales, given.with_parts(sums, groups), work, groups
        given.launch(cast_lines_kernel, strips * groups, chosen.num_warps, arguments, (*roundings, tiling))
