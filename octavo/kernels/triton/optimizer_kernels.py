"""The kernel of an optimizer's step: every tile of every tensor read, updated and written once.

CLASSES, a tuple of FIELDS integers for each way in which tensors of a launch differ: gradient, weight (KINDs), master,
its layout (1 EVEN, 2 in squares of 128 x 128 as
their scales, 3 both, else 0), whether its indices pass 2^31; then of each moment its KIND, root, stochastic, SCALE (see
optimizer_state.py and master_weights.py). Each class is compiled apart, and a program runs the one of its tensor.
"""

from __future__ import annotations

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
    ONE_SCALE,
    REST,
    SECOND,
    STEP,
    WIDTH,
    Gradient,
    Scales,
    place_in_square,
    place_of,
)
from octavo.kernels.triton.random_bits import with_number
from octavo.kernels.triton.sgd import sgd_tile
from octavo.kernels.triton.step_numbers import adam_numbers, sgd_numbers
from octavo.kernels.triton.table import find_tensor, pointer
from octavo.kernels.triton.tiles import is_last_program, raise_amax, scale_from_amax, scale_inv_from_scale

FIELDS: tl.constexpr = tl.constexpr(13)


@triton.jit
def moment_scale(row_ptr, COLUMN: tl.constexpr, found_ptr, KIND: tl.constexpr, SCALE: tl.constexpr):
    """The new scale of a moment that has one; else 1."""
    LIMIT: tl.constexpr = 448.0 if KIND == 3 else (57344.0 if KIND == 4 else 480.0)
    scale = 1.0
    if SCALE == 1:
        scale = scale_from_amax(tl.load(pointer(row_ptr, COLUMN + 2, tl.float32, False)), LIMIT, False)
    if SCALE == 2:
        scale = scale_from_amax(tl.load(found_ptr).to(tl.float32, bitcast=True), LIMIT, False)
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
        step_ptr = tl.load(row_ptr + STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        tl.store(step_ptr, tl.load(step_ptr, mask=inside, other=0.0) + 1.0, mask=inside)
        if ANY_ONE:
            flags = tl.load(row_ptr + ONE_SCALE, mask=inside, other=0)
            for k in tl.static_range(3):
                has = inside & ((flags >> k) & 1 != 0)
                note_scale(row_ptr + FIRST + 1 + 3 * k, work_ptr + 1 + 2 * k * COUNT + index, has, COUNT)


@triton.jit
def leave_scales(
    found_ptr, scales, COUNT: tl.constexpr, FIRST_HAS: tl.constexpr, SECOND_HAS: tl.constexpr, MASTER_HAS: tl.constexpr
):
    """Leave a tensor's new scales for ``finish``; until then programs read the old ones."""
    if FIRST_HAS:
        tl.store(found_ptr + COUNT, scales.first.to(tl.int32, bitcast=True))
    if SECOND_HAS:
        tl.store(found_ptr + 3 * COUNT, scales.second.to(tl.int32, bitcast=True))
    if MASTER_HAS:
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
    CLASSES: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    FIND: tl.constexpr,
):
    """A tile's step: (the amax found of the first moment, of the second, of the master)."""
    LAYOUT: tl.constexpr = CLASSES[I + 3]
    if LAYOUT >= 2:
        tl.static_assert(TILE[0] <= 128)
        place = place_in_square(row_ptr, program.to(tl.int64), i, TILE[0], LAYOUT == 3)
    else:
        place = place_of(row_ptr, program * TILE[1] + i, TILE[0], LAYOUT == 1, CLASSES[I + 4])
    if RULE[0] == 1:
        found = adam_tile(row_ptr, gradient, place, n, scales, key, CLASSES, I, RULE[1], RULE[2], FIND)
    else:
        found = sgd_tile(row_ptr, gradient, place, n, scales, key, CLASSES, I, FIND)
    return found


@triton.jit
def update_tensor(
    row_ptr,
    gradient_ptr,  # to its address, and COUNT further to its scale_inv's, of codes
    group_ptr,
    grad_scale_ptr,
    found_ptr,  # int32, the tensor's: found amax and new scale of the first moment, the second, the master
    program,  # of the tensor's
    CLASSES: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    COUNT: tl.constexpr,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    FIND: tl.constexpr,
):
    """A program's tiles of a tensor of class I / FIELDS."""
    SCALE1: tl.constexpr = CLASSES[I + 8]
    SCALE2: tl.constexpr = CLASSES[I + 12]
    SCALED: tl.constexpr = CLASSES[I + 2] == 3 or CLASSES[I + 2] >= 5
    SQUARE: tl.constexpr = CLASSES[I + 3] >= 2
    number = tl.load(pointer(row_ptr, STEP, tl.float32, False)).to(tl.int64) + 1
    key = with_number(tl.load(row_ptr + KEY).to(tl.uint32), number)
    if RULE[0] == 1:
        n = adam_numbers(group_ptr, tl.load(row_ptr + LR), number)
    else:
        n = sgd_numbers(group_ptr, tl.load(row_ptr + LR), number)
    master = 1.0
    master_inv = 1.0
    if SCALED:
        LIMIT: tl.constexpr = 65504.0 if CLASSES[I + 2] == 3 else 448.0
        master, master_inv = master_scales(row_ptr, n, program if SQUARE else 0, RULE[1], LIMIT)
    grad_scale = None
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr)
    gradient_scale_inv = None
    if CLASSES[I] == 3:
        gradient_scale_inv = tl.load(gradient_ptr + COUNT)
    gradient = Gradient(tl.load(gradient_ptr), gradient_scale_inv)
    first = moment_scale(row_ptr, FIRST, found_ptr, CLASSES[I + 5], SCALE1)
    second = moment_scale(row_ptr, SECOND, found_ptr + 2 * COUNT, CLASSES[I + 9], SCALE2)
    scales = Scales(first, second, master, master_inv, grad_scale)
    largest1 = 0.0
    largest2 = 0.0
    largest_w = 0.0
    for i in range(128 // TILE[0] if SQUARE else TILE[1]):
        found1, found2, found_w = tile_step(row_ptr, gradient, program, i, n, scales, key, CLASSES, I, RULE, TILE, FIND)
        largest1 = tl.maximum(largest1, found1)
        largest2 = tl.maximum(largest2, found2)
        largest_w = tl.maximum(largest_w, found_w)
    LOOKED: tl.constexpr = 2 if FIND else 1
    if SCALE1 == LOOKED:
        raise_amax(found_ptr, largest1)
    if SCALE2 == LOOKED:
        raise_amax(found_ptr + 2 * COUNT, largest2)
    if not FIND:
        if SQUARE:
            note_square(row_ptr, program, master, largest_w)
        elif SCALED:
            raise_amax(found_ptr + 4 * COUNT, largest_w)
        if program == 0:
            leave_scales(found_ptr, scales, COUNT, SCALE1 != 0, SCALE2 != 0, SCALED and not SQUARE)


@triton.jit(do_not_specialize=["programs"])
def optimizer_step_kernel(
    table_ptr,
    gradients_ptr,  # int64 [1 or 2, tensors], addresses; the second row, where any has codes, is of their scale_inv
    groups_ptr,  # float64 [groups, 8], see step_numbers.py
    skip_ptr,  # None, or: return at once where it is not 0
    grad_scale_ptr,  # None, or what gradients are divided by
    work_ptr,  # int32, zeros: a counter; of each tensor, found amax and new scale of each that has one
    programs,
    TENSORS: tl.constexpr,
    CLASSES: tl.constexpr,
    RULE: tl.constexpr,  # (1 Adam or 2 SGD, decoupled, clip)
    TILE: tl.constexpr,  # (blocks a tile, tiles a program)
    ANY_ONE: tl.constexpr,  # whether any tensor's moment or master has one scale
    FIND: tl.constexpr,  # only find the amaxes of moments of SCALE 2
):
    """A step of all tensors."""
    if skip_ptr is not None:
        if tl.load(skip_ptr) != 0:
            return
    COUNT: tl.constexpr = TENSORS[0]
    KINDS: tl.constexpr = len(CLASSES) // FIELDS
    tensor, row_ptr = find_tensor(table_ptr, tl.program_id(0), TENSORS, WIDTH, FIRST_PROGRAM)
    program = tl.program_id(0) - tl.load(row_ptr + FIRST_PROGRAM).to(tl.int32)
    group_ptr = groups_ptr + tl.load(row_ptr + GROUP) * 8
    kind = tl.load(row_ptr + CLASS)
    found_ptr = work_ptr + 1 + tensor
    for i in tl.static_range(KINDS):
        if kind == i:
            update_tensor(
                row_ptr,
                gradients_ptr + tensor,
                group_ptr,
                grad_scale_ptr,
                found_ptr,
                program,
                CLASSES,
                i * FIELDS,
                COUNT,
                RULE,
                TILE,
                FIND,
            )
    if not FIND:
        if is_last_program(work_ptr, programs):
            finish(table_ptr, work_ptr, COUNT, ANY_ONE)
