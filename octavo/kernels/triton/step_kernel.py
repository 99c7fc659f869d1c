"""The kernel of an optimizer's step: every tile of every tensor read, updated and written once.

What a launch is compiled for is its StepClass. Each way in which tensors differ, a TensorClass, is compiled apart, and
a program runs the one of its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from octavo.kernels.triton.adam import adam_tile
from octavo.kernels.triton.optimizer_state import (
    CLASS,
    FIRST,
    FIRST_PROGRAM,
    GROUP,
    KEY,
    LR,
    MEASURED,
    ONE_SCALE,
    REST,
    SECOND,
    STEP_COUNT,
    WIDTH,
    Gradient,
    Scales,
    place_in_square,
    place_of,
)
from octavo.kernels.triton.random_bits import with_number
from octavo.kernels.triton.resolution import add_resolution
from octavo.kernels.triton.sgd import sgd_tile
from octavo.kernels.triton.step_numbers import adam_numbers, sgd_numbers
from octavo.kernels.triton.table import find_tensor, pointer
from octavo.kernels.triton.tiles import is_last_program, raise_amax, scale_from_amax, scale_inv_from_scale


@dataclass(frozen=True)
class StepClass:
    """What a launch is compiled for.

    Attributes:
        tensors: a TensorClass for each way in which tensors differ.
        is_adam: else SGD.
        decoupled, clip: as AdamGroup's.
        blocks: a tile.
        tiles: a program.
        any_one_scale: whether any tensor's moment or master has one scale.
        find: only find the amaxes of moments whose scale is "found".
    """

    tensors: tuple[Any, ...]
    is_adam: bool
    decoupled: bool
    clip: bool
    blocks: int
    tiles: int
    any_one_scale: bool
    find: bool


@triton.jit
def moment_scale(row_ptr, COLUMN: tl.constexpr, found_ptr, MOMENT: tl.constexpr):
    """The new scale of a moment that has one; else 1."""
    scale = 1.0
    if MOMENT.scale == "previous":
        amax = tl.load(pointer(row_ptr, COLUMN + 2, tl.float32, False))
        scale = scale_from_amax(amax, MOMENT.fmt.max, False)
    if MOMENT.scale == "found":
        scale = scale_from_amax(tl.load(found_ptr).to(tl.float32, bitcast=True), MOMENT.fmt.max, False)
    return scale


@triton.jit
def master_scales(row_ptr, n, square, DECOUPLED: tl.constexpr, LIMIT: tl.constexpr):
    """(a scaled master's new scale, by its bound; its scale_inv until now), of the tensor or a square."""
    amax = tl.load(pointer(row_ptr, REST + 2, tl.float32, False) + square)
    if DECOUPLED:
        amax = amax * tl.abs(n.kept)
    else:
        amax = amax * 1.0
    SLACK: tl.constexpr = 1 + 2.0**-20
    scale = scale_from_amax((amax + n.bound) * SLACK, LIMIT, True)
    return scale, tl.load(pointer(row_ptr, REST + 1, tl.float32, False) + square)


@triton.jit
def note_square(row_ptr, square, scale, amax):
    """Write a square's scale_inv and amax: no other program reads them."""
    tl.store(pointer(row_ptr, REST + 1, tl.float32, False) + square, scale_inv_from_scale(scale, True))
    tl.store(pointer(row_ptr, REST + 2, tl.float32, False) + square, amax)


@triton.jit
def note_scale(column_ptr, found_ptr, has, COUNT: tl.constexpr):
    """Write the scale_inv and amax of tensors that have one, and clear where they were gathered."""
    scale = tl.load(found_ptr + COUNT, mask=has, other=1, cache_modifier=".cg").to(tl.float32, bitcast=True)
    scale_inv_ptr = tl.load(column_ptr, mask=has, other=0).to(tl.pointer_type(tl.float32))
    tl.store(scale_inv_ptr, tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), mask=has)
    found = tl.atomic_xchg(found_ptr, 0, mask=has, sem="relaxed").to(tl.float32, bitcast=True)
    amax = tl.load(column_ptr + 1, mask=has, other=0)
    tl.store(amax.to(tl.pointer_type(tl.float32)), found, mask=has & (amax != 0))
    tl.store(found_ptr + COUNT, 0, mask=has)


@triton.jit
def finish(table_ptr, work_ptr, COUNT: tl.constexpr, ANY_ONE: tl.constexpr):
    """Of all tensors: count the step, note the scales that were written with and the amaxes found."""
    for begin in range(0, COUNT, 128):
        index = begin + tl.arange(0, 128)
        inside = index < COUNT
        row_ptr = table_ptr + index * WIDTH
        step_ptr = tl.load(row_ptr + STEP_COUNT, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        tl.store(step_ptr, tl.load(step_ptr, mask=inside, other=0.0) + 1.0, mask=inside)
        if ANY_ONE:
            flags = tl.load(row_ptr + ONE_SCALE, mask=inside, other=0)
            for k in tl.static_range(3):
                has = inside & ((flags >> k) & 1 != 0)
                note_scale(row_ptr + FIRST + 1 + 3 * k, work_ptr + 1 + 2 * k * COUNT + index, has, COUNT)


@triton.jit
def leave_scales(found_ptr, scales, OF: tl.constexpr, COUNT: tl.constexpr):
    """Leave a tensor's new scales, of those that have one, for ``finish``; until then programs read the old ones."""
    if OF.first.has_one_scale:
        tl.store(found_ptr + COUNT, scales.first.to(tl.int32, bitcast=True))
    if OF.second.has_one_scale:
        tl.store(found_ptr + 3 * COUNT, scales.second.to(tl.int32, bitcast=True))
    if OF.master_has_one_scale:
        tl.store(found_ptr + 5 * COUNT, scales.master.to(tl.int32, bitcast=True))


@triton.jit
def tile_step(
    row_ptr,
    gradient,
    program,
    i,  # which of the program's tiles
    n,
    scales,
    key,
    OF: tl.constexpr,
    STEP: tl.constexpr,
    MEASURE: tl.constexpr,
):
    """A tile's step: see adam_tile."""
    if OF.square:
        tl.static_assert(STEP.blocks <= 128)
        place = place_in_square(row_ptr, program.to(tl.int64), i, STEP.blocks, OF.even)
    else:
        place = place_of(row_ptr, program * STEP.tiles + i, STEP.blocks, OF.even, OF.large)
    if STEP.is_adam:
        found = adam_tile(row_ptr, gradient, place, n, scales, key, OF, STEP, MEASURE)
    else:
        found = sgd_tile(row_ptr, gradient, place, n, scales, key, OF, STEP.find, MEASURE)
    return found


@triton.jit
def numbers_of(row_ptr, group_ptr, number, IS_ADAM: tl.constexpr):
    """The numbers of a tensor's step."""
    if IS_ADAM:
        result = adam_numbers(group_ptr, tl.load(row_ptr + LR), number)
    else:
        result = sgd_numbers(group_ptr, tl.load(row_ptr + LR), number)
    return result


@triton.jit
def raise_moments(found_ptr, largest1, largest2, OF: tl.constexpr, COUNT: tl.constexpr, FIND: tl.constexpr):
    """Raise the amaxes of moments that a launch of this kind looks for."""
    LOOKED: tl.constexpr = "found" if FIND else "previous"
    if OF.first.scale == LOOKED:
        raise_amax(found_ptr, largest1)
    if OF.second.scale == LOOKED:
        raise_amax(found_ptr + 2 * COUNT, largest2)


@triton.jit
def note_resolution(row_ptr, resolution_ptr, moved, grid):
    """Add a program's sums, of a tensor that is measured."""
    if tl.load(row_ptr + ONE_SCALE) >= MEASURED:
        add_resolution(resolution_ptr, moved, grid)


@triton.jit
def update_tensor(
    row_ptr,
    gradient_ptr,  # to its address, and COUNT further to its scale_inv's, of codes
    group_ptr,
    grad_scale_ptr,
    resolution_ptr,
    found_ptr,  # int32, the tensor's: found amax and new scale of the first moment, the second, the master
    program,  # of the tensor's
    OF: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program's tiles of a tensor."""
    MASTER: tl.constexpr = OF.master
    FIRST_MOMENT: tl.constexpr = OF.first
    SECOND_MOMENT: tl.constexpr = OF.second
    number = tl.load(pointer(row_ptr, STEP_COUNT, tl.float32, False)).to(tl.int64) + 1
    key = with_number(tl.load(row_ptr + KEY).to(tl.uint32), number)
    n = numbers_of(row_ptr, group_ptr, number, STEP.is_adam)
    master = 1.0
    master_inv = 1.0
    if MASTER.needs_bound:
        LIMIT: tl.constexpr = 65504.0 if MASTER.fmt is None else MASTER.fmt.max
        master, master_inv = master_scales(row_ptr, n, program if OF.square else 0, STEP.decoupled, LIMIT)
    grad_scale = None
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr)
    gradient = Gradient(tl.load(gradient_ptr), tl.load(gradient_ptr + COUNT) if OF.gradient_fmt is not None else None)
    first = moment_scale(row_ptr, FIRST, found_ptr, FIRST_MOMENT)
    second = moment_scale(row_ptr, SECOND, found_ptr + 2 * COUNT, SECOND_MOMENT)
    scales = Scales(first, second, master, master_inv, grad_scale)
    largest1 = 0.0
    largest2 = 0.0
    largest_w = 0.0
    all_moved = 0.0
    all_grid = 0.0
    MEASURE: tl.constexpr = resolution_ptr is not None
    for i in range(128 // STEP.blocks if OF.square else STEP.tiles):
        found1, found2, found_w, moved, grid = tile_step(
            row_ptr, gradient, program, i, n, scales, key, OF, STEP, MEASURE
        )
        all_moved += moved
        all_grid += grid
        largest1 = tl.maximum(largest1, found1)
        largest2 = tl.maximum(largest2, found2)
        largest_w = tl.maximum(largest_w, found_w)
    raise_moments(found_ptr, largest1, largest2, OF, COUNT, STEP.find)
    if not STEP.find:
        if MEASURE:
            note_resolution(row_ptr, resolution_ptr, all_moved, all_grid)
        if OF.square:
            note_square(row_ptr, program, master, largest_w)
        elif MASTER.needs_bound:
            raise_amax(found_ptr + 4 * COUNT, largest_w)
        if program == 0:
            leave_scales(found_ptr, scales, OF, COUNT)


@triton.jit(do_not_specialize=["programs"])
def optimizer_step_kernel(
    table_ptr,
    gradients_ptr,  # int64 [1 or 2, tensors], addresses; the second row, where any has codes, is of their scale_inv
    groups_ptr,  # float64 [groups, 8], see step_numbers.py
    skip_ptr,  # None, or: return at once where it is not 0
    grad_scale_ptr,  # None, or what gradients are divided by
    resolution_ptr,  # None, or float64 [2], see reference/resolution.py
    work_ptr,  # int32, zeros: a counter; of each tensor, found amax and new scale of each that has one
    programs,
    TENSORS: tl.constexpr,
    STEP: tl.constexpr,
):
    """A step of all tensors."""
    if skip_ptr is not None:
        if tl.load(skip_ptr) != 0:
            return
    COUNT: tl.constexpr = TENSORS.count
    tensor, row_ptr = find_tensor(table_ptr, tl.program_id(0), TENSORS, WIDTH, FIRST_PROGRAM)
    program = tl.program_id(0) - tl.load(row_ptr + FIRST_PROGRAM).to(tl.int32)
    group_ptr = groups_ptr + tl.load(row_ptr + GROUP) * 8
    kind = tl.load(row_ptr + CLASS)
    found_ptr = work_ptr + 1 + tensor
    gradient_ptr = gradients_ptr + tensor
    for i in tl.static_range(len(STEP.tensors)):
        if kind == i:
            OF: tl.constexpr = STEP.tensors[i]
            update_tensor(
                row_ptr, gradient_ptr, group_ptr, grad_scale_ptr, resolution_ptr, found_ptr, program, OF, COUNT, STEP
            )
    if not STEP.find:
        if is_last_program(work_ptr, programs):
            finish(table_ptr, work_ptr, COUNT, STEP.any_one_scale)
