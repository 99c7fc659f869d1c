"""The kernels of casts, by what shares a scale; those of blocks are in cast_blocks.py.

    a tensor    cast_tensor_kernel: the cast with both layouts, amax, column sums and the delayed roll; amax_kernel
    a line      a row, a column, or a row for some codes and a column for others: lines are shared by programs, so
                line_amax_kernel finds their amaxes before cast_lines_kernel
    a row       cast_rows_kernel, of rows in order whose codes lie so too: a program owns TILE_R whole rows. Those that
                fit one tile are read once; longer ones twice, the second time mostly from a cache

A strip is as many columns as a tile has; a program's part of a strip is one tile or several, one below the other. For
tensors and lines it is several, so that few programs raise the shared amax and add to a strip's column sums. The last
program to end finishes what several share, in the same launch.

work (int32, all 0 before and after). For a tensor: [0] the bits of the shared amax, [1] its counter, [2...] a counter
for each strip with column sums. For lines: the bits of the columns' amaxes and of the rows', a counter for each strip,
one for the same part of all strips.

The kernel of rows casts rows in groups too (``tiling.grouped``, grouped_cast.py): ``place`` is a program's
GroupOfProgram, and ``local`` are rows of its group, which without groups is all of x.

``produce`` returns a tile and, where ``tiling.halves`` (a gated activation's gradient), the tile of the matrix's other
half of columns, ``other_half``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL, PADDING
from octavo.kernels.arguments import Commit, Scaling
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.delayed_update import (
    StateTensors,
    roll,
    roll_others,
    scale_exists,
    scale_of_pass,
    state_and_update,
)
from octavo.kernels.triton.groups import locate, places_of_codes, produce_of_group
from octavo.kernels.triton.launch import workspace
from octavo.kernels.triton.prologue import produce
from octavo.kernels.triton.tiles import (
    Codes,
    Outputs,
    encode,
    finish_column_sums,
    finite_abs,
    is_last_program,
    raise_amax,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    store_tiles,
    take_amax,
)


@triton.jit
def finite_magnitudes(tile, other_half, tiling: tl.constexpr, largest=None):
    """Return the finite magnitudes of a tile, or the larger ones of two halves; or ``largest`` raised to them."""
    result = finite_abs(tile)
    if largest is not None:
        result = tl.maximum(largest, result)
    if tiling.halves:
        result = tl.maximum(result, finite_abs(other_half))
    return result


@triton.jit
def strip_amax(x, extra, first_row, cols, function: tl.constexpr, tiling: tl.constexpr):
    """Return the amax of a program's tiles, a scalar."""
    largest = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = first_row + i * tiling.tile_r + tl.arange(0, tiling.tile_r)
        tile, other_half = produce(x, extra, rows, cols, function, tiling.even)
        largest = finite_magnitudes(tile, other_half, tiling, largest)
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def cast_strip(
    x,
    extra,
    out,
    scale,
    first_row,
    cols,
    function: tl.constexpr,
    E5M2: tl.constexpr,
    SUMS: tl.constexpr,
    tiling: tl.constexpr,
    recast=None,  # (a scale, Codes) of the activation whose gradient is cast
    recast_function: tl.constexpr = None,  # its Function
):
    """Write a program's codes. Return (the tiles' amax, their columns' sums [TILE_C], those of the other half)."""
    largest = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    sums = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    sums_of_half = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = first_row + i * tiling.tile_r + tl.arange(0, tiling.tile_r)
        tile, other_half = produce(x, extra, rows, cols, function, tiling.even)
        largest = finite_magnitudes(tile, other_half, tiling, largest)
        if SUMS:
            sums += tile
            if tiling.halves:
                sums_of_half += other_half
        if recast_function is not None:
            # before any store, so extra is loaded once
            y, _ = produce(x, extra, rows, cols, recast_function, tiling.even)
            store_codes(encode(y, tl.load(recast[0]), recast_function.e5m2), recast[1], rows, cols, x, tiling.even)
        store_tiles(tile, other_half, scale, scale, out, rows, cols, x, E5M2, tiling)
    return tl.max(tl.max(largest, 1), 0), tl.sum(sums, 0), tl.sum(sums_of_half, 0)


@triton.jit(do_not_specialize=["parts"])
def amax_kernel(
    x,
    extra,
    amax_ptr,
    delayed,  # with a ROLE, a State: return at once where a scale exists
    work_ptr,
    parts,  # of a strip, each a program's
    function: tl.constexpr,  # Function
    ROLE: tl.constexpr,  # None for Dynamic (Triton 3.6 can't compare a State that holds None with None)
    tiling: tl.constexpr,  # Tiling
):
    """Write the amax of all that is cast."""
    if ROLE is not None and scale_of_pass(delayed, ROLE) != 0:
        return
    strips = tl.num_programs(0) // parts
    program = tl.program_id(0)
    first_row = (program // strips) * (tiling.tiles * tiling.tile_r)
    cols = (program % strips) * tiling.tile_c + tl.arange(0, tiling.tile_c)
    raise_amax(work_ptr, strip_amax(x, extra, first_row, cols, function, tiling))
    if is_last_program(work_ptr + 1, tl.num_programs(0)):
        tl.store(amax_ptr, take_amax(work_ptr))


@triton.jit
def scale_of(delayed, own_amax_ptr, ROLE: tl.constexpr, rounding: tl.constexpr):
    """Return the delayed scale; for Dynamic, or while there is none yet, the scale of the tensor's own amax."""
    if ROLE is not None:
        scale = scale_of_pass(delayed, ROLE)
        if scale == 0:
            if own_amax_ptr is not None:
                scale = scale_from_amax(tl.load(own_amax_ptr), rounding.limit, rounding.power_of_two)
            else:  # a CUDA graph replayed after the state was emptied
                scale = 1.0
    else:
        scale = scale_from_amax(tl.load(own_amax_ptr), rounding.limit, rounding.power_of_two)
    return scale


@triton.jit(do_not_specialize=["parts"])
def cast_tensor_kernel(
    x,
    extra,
    out,  # Outputs; its amax is written if Delayed
    own_amax_ptr,  # out.amax if amax_kernel wrote it: for Dynamic, or where there may be no history; else None
    delayed,  # with a ROLE, a State; without an update only its scale is read
    rolled,  # with an update, amaxes that the last program rolls too: (of the input, of the weight)
    sums,  # None, or (column sums [C], partial sums [halves, parts, C])
    recast,  # with recast_function, (a scale, Codes) of the activation whose gradient is cast
    work_ptr,
    parts,  # of a strip, each a program's
    function: tl.constexpr,  # Function
    ROLE: tl.constexpr,  # None for Dynamic
    rounding: tl.constexpr,
    update: tl.constexpr,  # Update, or None
    recast_function: tl.constexpr,  # Function of that activation, or None
    tiling: tl.constexpr,  # Tiling
):
    """Cast with one scale: write codes in one or both layouts, scale_inv, and the amax, sums and roll if wanted."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    scale = scale_of(delayed, own_amax_ptr, ROLE, rounding)
    if ROLE is None:
        program = programs - 1 - program  # what amax_kernel read last is still in the cache
    if program == 0:
        tl.store(out.scale_inv, scale_inv_from_scale(scale, False))
        if out.scale is not None:
            tl.store(out.scale, scale)
    strips = programs // parts
    strip = program % strips
    part = program // strips
    cols = strip * tiling.tile_c + tl.arange(0, tiling.tile_c)
    first_row = part * (tiling.tiles * tiling.tile_r)
    SUMS: tl.constexpr = sums is not None
    amax, total, total_of_half = cast_strip(
        x, extra, out.codes, scale, first_row, cols, function, rounding.e5m2, SUMS, tiling, recast, recast_function
    )
    if ROLE is not None:
        raise_amax(work_ptr, amax)
    counted = programs
    counts = True
    if sums is not None:  # only the last program of each strip counts at the second counter
        counted = strips
        counter = work_ptr + 2 + strip
        counts = finish_column_sums(total, total_of_half, sums, counter, part, parts, cols, x.C, tiling.halves)
    if ROLE is not None:
        if counts:
            if is_last_program(work_ptr + 1, counted):
                amax = take_amax(work_ptr)
                tl.store(out.amax, amax)
                if update is not None:  # all programs have read their scale
                    roll_others(delayed, rolled[0], rolled[1], update)
                    roll(delayed, amax, ROLE, update)


def find_amax(inputs: CastInput, amax: Tensor, delayed: StateTensors | None = None, role: int | None = None) -> None:
    """Write amax [1, 1]; with ``delayed`` and a role, only where that state has no scale for the role yet."""
    chosen = inputs.config("amax")
    strips, parts, tiling = inputs.tiling(*chosen[:3])
    arguments = amax, delayed, workspace(inputs.x, 2), parts
    inputs.launch(amax_kernel, strips * parts, chosen.num_warps, arguments, (role, tiling))


def cast_by_tensor(
    inputs: CastInput,
    scaling: Scaling,
    out: Outputs,
    sums: Tensor | None,
    commit: Commit | None = None,  # the last program rolls it, with this cast's amax
    amax_is_written: bool = False,  # by a norm's launch before: out's amax
    recast: tuple[Scaling, Codes] | None = None,  # of the activation whose gradient is cast, if that is cast too
) -> None:
    """Cast with one scale for all; up to two launches, of which the first finds the amax where no scale is known."""
    delayed_scale = scaling.delayed_scale
    role = None if delayed_scale is None else scaling.role
    delayed, update = (None, None) if commit is None else state_and_update(commit)
    if delayed is None and delayed_scale is not None:
        delayed = StateTensors(delayed_scale, None, None, None)
    needs_amax = amax_is_written or delayed_scale is None or not scale_exists(delayed_scale, scaling.role)
    if needs_amax and not amax_is_written:
        find_amax(inputs, out.amax, delayed, role)
    chosen = inputs.config("cast" if out.codes.t is None else "cast_transpose", recast is not None)
    strips, parts, tiling = inputs.tiling(*chosen[:3])
    recast_to = recast_function = None  # (its scale, its Codes) and its Function
    if recast is not None:
        recast_to = recast[0].delayed_scale, recast[1]
        recast_function = inputs.function._replace(gradient=False, e5m2=rounding_of(recast[0]).e5m2)
    read = out.amax if needs_amax else None, delayed, (None, None) if commit is None else commit[3:5]
    work = workspace(inputs.x, 2 + strips)
    arguments = out, *read, inputs.with_partial_sums(sums, parts), recast_to, work, parts
    constants = role, rounding_of(scaling), update, recast_function, tiling
    inputs.launch(cast_tensor_kernel, strips * parts, chosen.num_warps, arguments, constants)


@triton.jit
def cast_rows_kernel(
    x,
    extra,
    groups,  # Groups, or None
    out,  # Outputs
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping, or None
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Cast with a scale for each row."""
    place = locate(groups, tl.program_id(0), x.R, tiling.tile_r, grouping)
    local = place.first + tl.arange(0, tiling.tile_r)
    cols = tl.arange(0, tiling.tile_c)
    tile, other_half = produce_of_group(x, extra, place, local, cols, function, grouping, tiling)
    largest = finite_magnitudes(tile, other_half, tiling)
    if not tiling.one_tile:
        for start in range(tiling.tile_c, x.C, tiling.tile_c):
            more, more_of_half = produce_of_group(x, extra, place, local, start + cols, function, grouping, tiling)
            largest = tl.maximum(largest, finite_magnitudes(more, more_of_half, tiling))
    amax = tl.max(largest, 1)
    scale = scale_from_amax(amax, rounding.limit, rounding.power_of_two)
    rows, columns, end = places_of_codes(x, out.codes, place, local, tiling)
    tl.store(out.amax + rows, amax, mask=rows < x.R)
    tl.store(out.scale_inv + rows, scale_inv_from_scale(scale, rounding.power_of_two), mask=rows < x.R)
    scale = scale[:, None]
    E5M2: tl.constexpr = rounding.e5m2
    if tiling.one_tile:
        store_tiles(tile, other_half, scale, scale, out.codes, rows, cols, x, E5M2, tiling, columns, end)
    else:
        for start in range(0, x.C, tiling.tile_c):
            tile, other_half = produce_of_group(x, extra, place, local, start + cols, function, grouping, tiling)
            store_tiles(tile, other_half, scale, scale, out.codes, rows, start + cols, x, E5M2, tiling, columns, end)


def cast_by_row(inputs: CastInput, scaling: Scaling, out: Outputs) -> None:
    """Cast with a scale for each row, one launch."""
    if inputs.rows == 0 and inputs.groups is None:
        return
    groups, grouping = inputs.groups or (None, None)
    chosen = inputs.config("cast_rows")
    widest = max(PADDING, triton.next_power_of_2(inputs.cols))  # holds a row and its padding
    tile_c = min(chosen.tile_c, widest)
    tile_r = chosen.tile_r * max(1, chosen.tile_c // (2 * tile_c))  # as many narrow rows as fill half a tile
    if grouping is not None and out.codes.t is not None:  # a program writes a transposed row's padding too
        tile_r, tile_c = max(grouping.pad, tile_r), min(tile_c, 256)
    _, programs, tiling = inputs.tiling(tile_r, tile_c, one_tile=widest <= tile_c)
    constants = grouping, rounding_of(scaling), tiling
    inputs.launch(cast_rows_kernel, programs, chosen.num_warps, (groups, out), constants)


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


@triton.jit(do_not_specialize=["parts"])
def line_amax_kernel(
    x,
    extra,
    by_row,  # Outputs of a scaling by rows, or anything
    by_column,  # outputs of the scaling by columns
    scales,  # the scales that the cast reads: those of rows, then those of columns
    work_ptr,
    parts,  # of a strip, each a program's
    function: tl.constexpr,  # Function
    row_rounding: tl.constexpr,  # None without a scaling by rows
    column_rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Write the amaxes and scales of all rows, all columns or both."""
    HEIGHT: tl.constexpr = tiling.tiles * tiling.tile_r
    strips = tl.num_programs(0) // parts
    strip = tl.program_id(0) % strips
    part = tl.program_id(0) // strips
    cols = strip * tiling.tile_c + tl.arange(0, tiling.tile_c)
    row_bits_ptr = work_ptr + x.C
    if tiling.halves:
        row_bits_ptr += x.C
    counter_ptr = row_bits_ptr + x.R
    largest = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    largest_of_half = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = part * HEIGHT + i * tiling.tile_r + tl.arange(0, tiling.tile_r)
        tile, other_half = produce(x, extra, rows, cols, function, tiling.even)
        tile = finite_abs(tile)
        other_half = finite_abs(other_half)
        if column_rounding is not None:
            largest = tl.maximum(largest, tile)
            if tiling.halves:
                largest_of_half = tl.maximum(largest_of_half, other_half)
        if row_rounding is not None:
            if tiling.halves:
                tile = tl.maximum(tile, other_half)
            raise_amax(row_bits_ptr + rows, tl.max(tile, 1), rows < x.R)
    if column_rounding is not None:
        raise_amax(work_ptr + cols, tl.max(largest, 0), cols < x.C)
        if tiling.halves:
            raise_amax(work_ptr + x.C + cols, tl.max(largest_of_half, 0), cols < x.C)
        if is_last_program(counter_ptr + strip, parts):
            finish_lines(work_ptr, cols, x.C, by_column, scales[1], column_rounding)
            if tiling.halves:
                cols_of_half = tl.where(cols < x.C, x.C + cols, 2 * x.C)
                finish_lines(work_ptr, cols_of_half, 2 * x.C, by_column, scales[1], column_rounding)
    if row_rounding is not None and is_last_program(counter_ptr + strips + part, strips):
        finish_lines(row_bits_ptr, part * HEIGHT + tl.arange(0, HEIGHT), x.R, by_row, scales[0], row_rounding)


@triton.jit(do_not_specialize=["parts"])
def cast_lines_kernel(
    x,
    extra,
    by_row,  # Outputs of a scaling by rows, or anything
    by_column,  # outputs of the scaling by columns
    scales,  # that line_amax_kernel wrote
    sums,  # None, or (column sums, partial sums [halves, parts, C])
    work_ptr,
    parts,  # of a strip, each a program's
    function: tl.constexpr,  # Function
    row_rounding: tl.constexpr,  # None without a scaling by rows
    column_rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Write codes by the scales of rows, of columns or both."""
    programs = tl.num_programs(0)
    program = programs - 1 - tl.program_id(0)  # what line_amax_kernel read last is still in the cache
    strips = programs // parts
    strip = program % strips
    part = program // strips
    cols = strip * tiling.tile_c + tl.arange(0, tiling.tile_c)
    column_scale = 1.0
    scale_of_half = 1.0
    if column_rounding is not None:
        column_scale = tl.load(scales[1] + cols, mask=cols < x.C, other=1.0)[None, :]
        scale_of_half = column_scale
        if tiling.halves:
            scale_of_half = tl.load(scales[1] + x.C + cols, mask=cols < x.C, other=1.0)[None, :]
    total = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    total_of_half = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = (part * tiling.tiles + i) * tiling.tile_r + tl.arange(0, tiling.tile_r)
        tile, other_half = produce(x, extra, rows, cols, function, tiling.even)
        if row_rounding is not None:
            scale = tl.load(scales[0] + rows, mask=rows < x.R, other=1.0)[:, None]
            store_tiles(tile, other_half, scale, scale, by_row.codes, rows, cols, x, row_rounding.e5m2, tiling)
        if column_rounding is not None:
            codes = by_column.codes
            store_tiles(
                tile, other_half, column_scale, scale_of_half, codes, rows, cols, x, column_rounding.e5m2, tiling
            )
        if sums is not None:
            total += tile
            if tiling.halves:
                total_of_half += other_half
    if sums is not None:
        total = tl.sum(total, 0)
        total_of_half = tl.sum(total_of_half, 0)
        finish_column_sums(total, total_of_half, sums, work_ptr + strip, part, parts, cols, x.C, tiling.halves)


def cast_by_line(inputs: CastInput, sums: Tensor | None, *scalings: tuple[Scaling, Outputs]) -> None:
    """Cast with a scale for each row, with one for each column, or once with each; two launches."""
    by_line = {scaling.tile: (rounding_of(scaling), out) for scaling, out in scalings}
    roundings, outs = zip(*(by_line.get(line, (None, None)) for line in LINES), strict=True)
    scales = tuple(inputs.x.new_empty(size, dtype=torch.float32) for size in inputs.shape)
    chosen = inputs.config("amax_lines")
    strips, parts, tiling = inputs.tiling(*chosen[:3])
    work = workspace(inputs.x, sum(inputs.shape) + strips + parts)
    amax_arguments = (*(out and out._replace(codes=None) for out in outs), scales, work, parts)
    inputs.launch(line_amax_kernel, strips * parts, chosen.num_warps, amax_arguments, (*roundings, tiling))
    if sums is not None or any(out.codes.q is not None or out.codes.t is not None for _, out in scalings):
        chosen = inputs.config("cast_lines")
        strips, parts, tiling = inputs.tiling(*chosen[:3])
        work = workspace(inputs.x, strips)
        arguments = *outs, scales, inputs.with_partial_sums(sums, parts), work, parts
        inputs.launch(cast_lines_kernel, strips * parts, chosen.num_warps, arguments, (*roundings, tiling))
