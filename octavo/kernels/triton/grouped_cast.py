"""The casts of rows in groups: each group has scales for itself, and one launch casts all groups.

    one scale a group, a column and group   Delayed one launch; Dynamic two, the first for the amaxes
    one scale a row                         one launch
    blocks of powers of two up to 128       one launch; of other sizes: the reference, which waits for the groups' sizes

The kernels of rows and blocks are those of all casts, in cast_kernels.py and cast_blocks.py. A program works on some
rows of one group (groups.py). Codes that belong to no group are written by programs without one, so no launch clears
anything.

work (int32, all 0 before and after): the bits of amaxes, a group or column and group each, and counters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import CastSource, Output, Scaling, new_cast
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.triton.cast_blocks import cast_by_block
from octavo.kernels.triton.cast_input import CastInput, cast_input, codes_to, outputs_to, rounding_of
from octavo.kernels.triton.cast_kernels import (
    cast_by_row,
    finish_lines,
    finite_magnitudes,
)
from octavo.kernels.triton.delayed_update import scale_exists
from octavo.kernels.triton.groups import Grouping, Groups, locate, on_device, places_of_codes, produce_of_group
from octavo.kernels.triton.launch import workspace
from octavo.kernels.triton.prologue import Input
from octavo.kernels.triton.tiles import (
    Outputs,
    finite_abs,
    is_last_program,
    raise_amax,
    scale_inv_from_scale,
    store_tiles,
)


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
        lines_of_half = lines + x.C
    else:
        lines, lines_of_half, inside = group, group, is_group
    return group, width, lines, lines_of_half, inside


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


@triton.jit(do_not_specialize=["parts"])
def group_amax_kernel(
    x,
    extra,
    groups,
    out,  # Outputs of the scaling
    scales_ptr,  # the scales that the cast reads: one a group, or one for each column of a group
    delayed_scale_ptr,  # None, or: return at once where a scale exists
    work_ptr,
    parts,  # of a strip, each a program's
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping
    COLUMNS: tl.constexpr,  # a scale for each column of a group
    ROLE: tl.constexpr,
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Write the amaxes and scales of groups, or of their columns."""
    if delayed_scale_ptr is not None and tl.load(delayed_scale_ptr + ROLE) != 0:
        return
    HEIGHT: tl.constexpr = tiling.tiles * tiling.tile_r
    strips = tl.num_programs(0) // parts
    strip = tl.program_id(0) % strips
    place = locate(groups, tl.program_id(0) // strips, x.R, HEIGHT, grouping)
    cols = strip * tiling.tile_c + tl.arange(0, tiling.tile_c)
    largest = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    largest_of_half = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    for first in range(place.first, tl.minimum(place.first + HEIGHT, place.size), tiling.tile_r):
        local = first + tl.arange(0, tiling.tile_r)
        tile, other_half = produce_of_group(x, extra, place, local, cols, function, grouping, tiling)
        largest = tl.maximum(largest, finite_abs(tile))
        if tiling.halves:
            largest_of_half = tl.maximum(largest_of_half, finite_abs(other_half))
    _, width, lines, lines_of_half, inside = lines_of_group(x, groups, place, cols, COLUMNS, tiling)
    if COLUMNS:
        raise_amax(work_ptr + lines, tl.max(largest, 0), inside)
        if tiling.halves:
            raise_amax(work_ptr + lines_of_half, tl.max(largest_of_half, 0), inside)
        if is_last_program(work_ptr + groups.count * width + strip, parts):
            finish_groups(work_ptr, groups, cols, x.C, width, out, scales_ptr, rounding)
            if tiling.halves:
                finish_groups(work_ptr, groups, x.C + cols, width, width, out, scales_ptr, rounding)
    else:
        raise_amax(work_ptr + lines, tl.max(tl.max(tl.maximum(largest, largest_of_half), 1), 0))
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


@triton.jit(do_not_specialize=["parts"])
def cast_group_kernel(
    x,
    extra,
    groups,
    out,  # Outputs; of a delayed scale its amax and scale_inv are written too
    scales_ptr,  # that group_amax_kernel wrote, or None
    delayed_scale_ptr,  # None for Dynamic
    work_ptr,
    parts,  # of a strip, each a program's
    function: tl.constexpr,  # Function
    grouping: tl.constexpr,  # Grouping
    COLUMNS: tl.constexpr,  # a scale for each column of a group
    ROLE: tl.constexpr,
    rounding: tl.constexpr,
    tiling: tl.constexpr,  # Tiling
):
    """Write codes by the scales of groups or of their columns."""
    HEIGHT: tl.constexpr = tiling.tiles * tiling.tile_r
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    if delayed_scale_ptr is None:
        program = programs - 1 - program  # what group_amax_kernel read last is still in the cache
    strips = programs // parts
    place = locate(groups, program // strips, x.R, HEIGHT, grouping)
    cols = (program % strips) * tiling.tile_c + tl.arange(0, tiling.tile_c)
    group, _, lines, lines_of_half, inside = lines_of_group(x, groups, place, cols, COLUMNS, tiling)
    scale = known_scale(delayed_scale_ptr, scales_ptr, lines, inside, ROLE)
    if COLUMNS:
        scale = scale[None, :]
    scale_of_half = scale
    if COLUMNS and tiling.halves:
        scale_of_half = known_scale(delayed_scale_ptr, scales_ptr, lines_of_half, inside, ROLE)[None, :]
    largest = tl.full([tiling.tile_r, tiling.tile_c], 0.0, tl.float32)
    last = tl.minimum(place.first + HEIGHT, tl.maximum(place.height, place.columns))
    for first in range(place.first, last, tiling.tile_r):
        local = first + tl.arange(0, tiling.tile_r)
        tile, other_half = produce_of_group(x, extra, place, local, cols, function, grouping, tiling)
        if delayed_scale_ptr is not None:
            largest = tl.maximum(largest, finite_magnitudes(tile, other_half, tiling))
        rows, columns, end = places_of_codes(x, out.codes, place, local, tiling)
        store_tiles(
            tile, other_half, scale, scale_of_half, out.codes, rows, cols, x, rounding.e5m2, tiling, columns, end
        )
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


def grouped_cast(source: CastSource, scaling: Scaling, output: Output, offsets: Tensor) -> tuple[Tensor, ...]:
    """Compute the op ``octavo::cast`` of rows in groups; its contract is in signatures.py."""
    inputs, block = cast_input(source), scaling.tile
    if not inputs.fits(block) and not (inputs.rows * inputs.cols == 0 and is_small_block(block)):
        return reference_cast(source, scaling, None, output, offsets)
    q, t, scale_inv, amax = new_cast(source, scaling, None, output, offsets)
    inputs.clear_padding(q, output.pad)
    out = outputs_to(codes_to(q, t), scale_inv, amax)
    h_block_r = inputs.function.block_r if isinstance(inputs.extra, Input) and inputs.extra.scale_inv is not None else 1
    ragged = output.transpose or block[0] != 1 or h_block_r != 1
    sizes = {"columns": t.shape[1], "scale_rows": scale_inv.shape[0]}
    groups, grouping = on_device(offsets, output.pad, block_r=block[0], h_block_r=h_block_r, ragged=ragged, **sizes)
    inputs = inputs._replace(groups=(groups, grouping))
    if block == (1, ALL):
        cast_by_row(inputs, scaling, out)
    elif block[0] == ALL:
        _cast_by_group(inputs, groups, grouping, scaling, out)
    else:
        cast_by_block(inputs, None, (scaling, out))
    return q, t, scale_inv, amax


def _cast_by_group(inputs: CastInput, groups: Groups, grouping: Grouping, scaling: Scaling, out: Outputs) -> None:
    """Cast with a scale for each group, or each column of a group."""
    delayed_scale, role, by_column = scaling.delayed_scale, scaling.role, scaling.tile[1] != ALL
    lines = groups.count * (inputs.shape[1] if by_column else 1)
    constants = grouping, by_column, role, rounding_of(scaling)
    scales = None
    if delayed_scale is None or not scale_exists(delayed_scale, role):
        scales = inputs.x.new_empty(lines, dtype=torch.float32)
        chosen = inputs.config("amax_lines" if by_column else "amax")
        strips, parts, tiling = inputs.tiling(*chosen[:3])
        work = workspace(inputs.x, lines + strips)
        amax_arguments = groups, out._replace(codes=None), scales, delayed_scale, work, parts
        num_warps = chosen.num_warps * (inputs.halves if by_column else 1)  # registers hold both halves' amaxes
        inputs.launch(group_amax_kernel, strips * parts, num_warps, amax_arguments, (*constants, tiling))
    if delayed_scale is not None or out.codes.q is not None or out.codes.t is not None:
        chosen = inputs.config("cast" if out.codes.t is None else "cast_transpose")
        strips, parts, tiling = inputs.tiling(*chosen[:3])
        arguments = groups, out, scales, delayed_scale, workspace(inputs.x, lines + 1), parts
        inputs.launch(cast_group_kernel, strips * parts, chosen.num_warps, arguments, (*constants, tiling))
