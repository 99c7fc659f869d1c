"""The casts of one scale a tensor: the amax, and the cast with both layouts, amax, column sums and the delayed roll.

A program works down a strip of columns, some tiles, so that few programs meet at the shared amax
and a strip's column sums have few parts. What spans programs is finished by the last of them, in the same launch.

work (int32, all 0 before and after): [0] the bits of the shared amax, [1] its counter, [2...] a counter a strip.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.arguments import Scaling
from octavo.kernels.triton.cast_input import CastInput, rounding_of
from octavo.kernels.triton.delayed_update import StateTensors, Update, roll, roll_others, scale_of_pass
from octavo.kernels.triton.known_scales import scale_exists
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
    take_amax,
)


@triton.jit
def finite_largest(largest, tile, second, tiling: tl.constexpr):
    """``largest`` raised to the finite magnitudes of what ``produce`` made."""
    largest = tl.maximum(largest, finite_abs(tile))
    if tiling.halves:
        largest = tl.maximum(largest, finite_abs(second))
    return largest


@triton.jit
def strip_amax(x, h, first_row, cols, function: tl.constexpr, tiling: tl.constexpr):
    """The amax of a program's tiles, a scalar."""
    largest = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = first_row + i * tiling.block_r + tl.arange(0, tiling.block_r)
        tile, second = produce(x, h, rows, cols, function, tiling.even)
        largest = finite_largest(largest, tile, second, tiling)
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def cast_strip(
    x,
    h,
    out,
    scale,
    first_row,
    cols,
    function: tl.constexpr,
    E5M2: tl.constexpr,
    SUMS: tl.constexpr,
    tiling: tl.constexpr,
):
    """Write the codes of a program's tiles: (their amax, their columns' sums [BLOCK_C], those of the second tiles)."""
    largest = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    sums = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    second_sums = tl.full([tiling.block_r, tiling.block_c], 0.0, tl.float32)
    for i in range(tiling.tiles):
        rows = first_row + i * tiling.block_r + tl.arange(0, tiling.block_r)
        tile, second = produce(x, h, rows, cols, function, tiling.even)
        largest = finite_largest(largest, tile, second, tiling)
        if SUMS:
            sums += tile
            if tiling.halves:
                second_sums += second
        store_tiles(tile, second, scale, scale, out, rows, cols, x, E5M2, tiling)
    return tl.max(tl.max(largest, 1), 0), tl.sum(sums, 0), tl.sum(second_sums, 0)


@triton.jit(do_not_specialize=["groups"])
def amax_kernel(
    x,
    h,
    amax_ptr,
    delayed,  # with a ROLE, a State: return at once where a scale exists
    work_ptr,
    groups,  # of tiling.tiles tiles in a strip
    function: tl.constexpr,  # Function
    ROLE: tl.constexpr,  # None for Dynamic; a State that holds None is nothing that Triton 3.6 compares with None
    tiling: tl.constexpr,  # Tiling
):
    """The amax of all that is to be cast."""
    if ROLE is not None:
        if scale_of_pass(delayed, ROLE) != 0:
            return
    strips = tl.num_programs(0) // groups
    program = tl.program_id(0)
    first_row = (program // strips) * (tiling.tiles * tiling.block_r)
    cols = (program % strips) * tiling.block_c + tl.arange(0, tiling.block_c)
    raise_amax(work_ptr, strip_amax(x, h, first_row, cols, function, tiling))
    if is_last_program(work_ptr + 1, tl.num_programs(0)):
        tl.store(amax_ptr, take_amax(work_ptr))


@triton.jit
def scale_of(delayed, own_amax_ptr, ROLE: tl.constexpr, rounding: tl.constexpr):
    """The delayed scale, or where there is none yet, or for Dynamic, that of the tensor's own amax."""
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


@triton.jit(do_not_specialize=["groups"])
def cast_tensor_kernel(
    x,
    h,
    out,  # Outputs; its amax is written if Delayed
    own_amax_ptr,  # the same, if amax_kernel found it: for Dynamic, or where there may be no history; else None
    delayed,  # with a ROLE, a State, of which the scale alone is read without an update
    rolled,  # with an update, what the last program rolls besides: (amax of the input, of the weight)
    sums,  # None, or (column sums [C], their parts [groups, C])
    work_ptr,
    groups,  # of tiling.tiles tiles in a strip
    function: tl.constexpr,  # Function
    ROLE: tl.constexpr,  # None for Dynamic
    rounding: tl.constexpr,
    update: tl.constexpr,  # Update, or None
    tiling: tl.constexpr,  # Tiling
):
    """One scale for all that is cast: codes in one or both layouts, scale_inv, and what else is asked for."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    scale = scale_of(delayed, own_amax_ptr, ROLE, rounding)
    if ROLE is None:
        program = programs - 1 - program  # what amax_kernel read last is still in the cache
    if program == 0:
        tl.store(out.scale_inv, scale_inv_from_scale(scale, False))
    strips = programs // groups
    strip = program % strips
    group = program // strips
    cols = strip * tiling.block_c + tl.arange(0, tiling.block_c)
    first_row = group * (tiling.tiles * tiling.block_r)
    amax, parts, second_parts = cast_strip(
        x, h, out.codes, scale, first_row, cols, function, rounding.e5m2, sums is not None, tiling
    )
    if sums is not None:
        counters = work_ptr + 2 + strip
        finish_column_sum(parts, sums[0], sums[1], counters, group, groups, cols, x.C)
        if tiling.halves:
            sum_ptr = sums[0] + x.C
            finish_column_sum(
                second_parts, sum_ptr, sums[1] + groups * x.C, counters + strips, group, groups, cols, x.C
            )
    if ROLE is not None:
        raise_amax(work_ptr, amax)
        if is_last_program(work_ptr + 1, programs):
            amax = take_amax(work_ptr)
            tl.store(out.amax, amax)
            if update is not None:  # all programs have read their scale
                roll_others(delayed, rolled[0], rolled[1], update)
                roll(delayed, amax, ROLE, update)


def find_amax(given: CastInput, amax: Tensor, delayed: StateTensors | None = None, role: int | None = None) -> None:
    """Write amax [1, 1]; but given ``delayed`` and a role, not where that has a scale for it."""
    chosen = given.config("amax")
    strips, groups, tiling = given.tiling(*chosen[:3])
    arguments = amax, delayed, workspace(given.x, 2), groups
    given.launch(amax_kernel, strips * groups, chosen.num_warps, arguments, (role, tiling))


def cast_by_tensor(
    given: CastInput,
    scaling: Scaling,
    out: Outputs,
    sums: Tensor | None,
    state: StateTensors | None = None,  # that the last program rolls
    rolled: Sequence[Tensor | None] = (None, None),  # beside this cast's: amax of input, amax of weight
    update: Update | None = None,
    knows_amax: bool = False,  # out's, and may be
) -> None:
    """One scale for all."""
    delayed_scale, role = scaling.delayed_scale, None if scaling.delayed_scale is None else scaling.role
    delayed = StateTensors(delayed_scale, None, None, None) if state is None and delayed_scale is not None else state
    chosen = given.config("cast" if out.codes.t is None else "cast_transpose")
    strips, groups, tiling = given.tiling(*chosen[:3])
    needs_amax = knows_amax or delayed_scale is None or not scale_exists(delayed_scale, scaling.role)
    if needs_amax and not knows_amax:
        find_amax(given, out.amax, delayed, role)
    arguments = (
        out,
        out.amax if needs_amax else None,
        delayed,
        tuple(rolled),
        given.with_parts(sums, groups),
        workspace(given.x, 2 + strips * given.halves),
        groups,
    )
    constants = role, rounding_of(scaling), update, tiling
    given.launch(cast_tensor_kernel, strips * groups, chosen.num_warps, arguments, constants)
