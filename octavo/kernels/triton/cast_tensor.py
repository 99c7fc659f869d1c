"""The kernels of one scale a tensor: amax, and the cast with both layouts, amax, column sums and the delayed roll.

A program works down a strip of columns, TILES tiles of [BLOCK_R, BLOCK_C], so that few programs meet at the shared amax
and a strip's column sums have few parts. What spans programs is finished by the last of them, in the same launch.

SHAPE is (EVEN, TILES, BLOCK_R, BLOCK_C); EVEN: x is made of whole programs' tiles, so nothing is masked.

work (int32, all 0 before and after): [0] the bits of the shared amax, [1] its counter, [2...] a counter a strip.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.delayed_update import roll, roll_others
from octavo.kernels.triton.tiles import (
    encode,
    encode_finite,
    finish_column_sum,
    finite_abs,
    is_last_program,
    load_tile,
    raise_amax,
    scale_from_amax,
    scale_inv_from_scale,
    store_codes,
    take_amax,
)


@triton.jit
def strip_amax(x, first_row, cols, SHAPE: tl.constexpr):
    """The amax of a program's tiles, a scalar."""
    EVEN: tl.constexpr = SHAPE[0]
    TILES: tl.constexpr = SHAPE[1]
    BLOCK_R: tl.constexpr = SHAPE[2]
    BLOCK_C: tl.constexpr = SHAPE[3]
    largest = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for i in range(TILES):
        rows = first_row + i * BLOCK_R + tl.arange(0, BLOCK_R)
        # NaN loses; inf is looked for once at the end, which costs a third of a look at each element
        largest = tl.maximum(largest, tl.abs(load_tile(x, rows, cols, EVEN)))
    amax = tl.max(tl.max(largest, 1), 0)
    if amax == float("inf"):
        largest = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for i in range(TILES):
            rows = first_row + i * BLOCK_R + tl.arange(0, BLOCK_R)
            largest = tl.maximum(largest, finite_abs(load_tile(x, rows, cols, EVEN)))
        amax = tl.max(tl.max(largest, 1), 0)
    return amax


@triton.jit
def cast_strip(x, out, scale, first_row, cols, E5M2: tl.constexpr, SUMS: tl.constexpr, SHAPE: tl.constexpr):
    """Write the codes of a program's tiles: (their amax, the sums of their columns [BLOCK_C] if SUMS)."""
    EVEN: tl.constexpr = SHAPE[0]
    TILES: tl.constexpr = SHAPE[1]
    BLOCK_R: tl.constexpr = SHAPE[2]
    BLOCK_C: tl.constexpr = SHAPE[3]
    largest = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    sums = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for i in range(TILES):
        rows = first_row + i * BLOCK_R + tl.arange(0, BLOCK_R)
        tile = load_tile(x, rows, cols, EVEN)
        largest = tl.maximum(largest, tl.abs(tile))
        if SUMS:
            sums += tile
        store_codes(encode_finite(tile, scale, E5M2), out, rows, cols, x, EVEN)
    amax = tl.max(tl.max(largest, 1), 0)
    if amax == float("inf"):  # then once more, with care
        tl.debug_barrier()
        amax = 0.0
        for i in range(TILES):
            rows = first_row + i * BLOCK_R + tl.arange(0, BLOCK_R)
            tile = load_tile(x, rows, cols, EVEN)
            amax = tl.maximum(amax, tl.max(tl.max(finite_abs(tile), 1), 0))
            store_codes(encode(tile, scale, E5M2), out, rows, cols, x, EVEN)
    return amax, tl.sum(sums, 0)


@triton.jit(do_not_specialize=["groups"])
def amax_kernel(
    x,
    amax_ptr,
    delayed_scale_ptr,  # None, or: return at once where a scale exists
    work_ptr,
    groups,  # of TILES tiles in a strip
    ROLE: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """The amax of all of x."""
    if delayed_scale_ptr is not None:
        if tl.load(delayed_scale_ptr + ROLE) != 0:
            return
    STRIP_ROWS: tl.constexpr = SHAPE[1] * SHAPE[2]
    BLOCK_C: tl.constexpr = SHAPE[3]
    strips = tl.num_programs(0) // groups
    program = tl.program_id(0)
    cols = (program % strips) * BLOCK_C + tl.arange(0, BLOCK_C)
    raise_amax(work_ptr, strip_amax(x, (program // strips) * STRIP_ROWS, cols, SHAPE))
    if is_last_program(work_ptr + 1, tl.num_programs(0)):
        tl.store(amax_ptr, take_amax(work_ptr))


@triton.jit(do_not_specialize=["groups"])
def cast_tensor_kernel(
    x,
    out,
    scale_inv_ptr,
    amax_ptr,  # written if Delayed
    own_amax_ptr,  # what amax_kernel found: for Dynamic, or where there may be no history; else None
    delayed_scale_ptr,  # None for Dynamic
    history_ptr,  # not None: the last program rolls the histories
    amax_input_ptr,
    amax_weight_ptr,
    sums,  # None, or (column sums [C], their parts [groups, C])
    work_ptr,
    groups,  # of TILES tiles in a strip
    ROLE: tl.constexpr,
    ROUNDING: tl.constexpr,  # (E5M2, limit, power_of_two)
    UPDATE: tl.constexpr,  # see delayed_update.py
    SHAPE: tl.constexpr,
):
    """One scale for all of x: codes in one or both layouts, scale_inv, and what else is asked for."""
    E5M2: tl.constexpr = ROUNDING[0]
    LIMIT: tl.constexpr = ROUNDING[1]
    POWER_OF_TWO: tl.constexpr = ROUNDING[2]
    STRIP_ROWS: tl.constexpr = SHAPE[1] * SHAPE[2]
    BLOCK_C: tl.constexpr = SHAPE[3]
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    if delayed_scale_ptr is not None:
        scale = tl.load(delayed_scale_ptr + ROLE)
        if scale == 0:
            if own_amax_ptr is not None:
                scale = scale_from_amax(tl.load(own_amax_ptr), LIMIT, POWER_OF_TWO)
            else:  # a CUDA graph replayed after the state was emptied
                scale = 1.0
    else:
        scale = scale_from_amax(tl.load(own_amax_ptr), LIMIT, POWER_OF_TWO)
        program = programs - 1 - program  # what amax_kernel read last is still in the cache
    if program == 0:
        tl.store(scale_inv_ptr, scale_inv_from_scale(scale, False))
    strips = programs // groups
    strip = program % strips
    group = program // strips
    cols = strip * BLOCK_C + tl.arange(0, BLOCK_C)
    amax, parts = cast_strip(x, out, scale, group * STRIP_ROWS, cols, E5M2, sums is not None, SHAPE)
    if sums is not None:
        finish_column_sum(parts, sums[0], sums[1], work_ptr + 2 + strip, group, groups, cols, x.C)
    if delayed_scale_ptr is not None:
        raise_amax(work_ptr, amax)
        if is_last_program(work_ptr + 1, programs):
            amax = take_amax(work_ptr)
            tl.store(amax_ptr, amax)
            if history_ptr is not None:  # all programs have read their scale
                roll_others(delayed_scale_ptr, history_ptr, amax_input_ptr, amax_weight_ptr, UPDATE)
                roll(delayed_scale_ptr, history_ptr, amax, ROLE, UPDATE)
