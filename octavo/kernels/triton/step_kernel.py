"""The kernel of an optimizer's step: every tile of every tensor read, updated and written once.

Adam's and SGD's arithmetic and the resolution's sums are those of reference/optimizer_step.py, for a tile; n:
AdamNumbers or SgdNumbers.

A launch is compiled for its StepClass. That holds a TensorClass for each way in which tensors differ: code is compiled
for each, and a program runs that of its tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from octavo.kernels.triton.optimizer_state import (
    AMAX,
    BLOCK,
    CLASS,
    COLS,
    FIRST,
    FIRST_PROGRAM,
    GAP,
    GROUP,
    KEPT_CORRECTIONS,
    KEY,
    LR,
    MASTER_AMAX,
    MASTER_SCALE_INV,
    MEASURED,
    SCALE_INV,
    SECOND,
    START,
    STEP_COUNT,
    WIDTH,
    GradientPlace,
    Scales,
    TensorClass,
    gradient_tile,
    place_in_rows,
    place_in_square,
    read_master,
    read_moment,
    write_master,
    write_moment,
)
from octavo.kernels.triton.step_numbers import (
    adam_numbers,
    keep_corrections,
    kept_corrections,
    random_bits,
    sgd_numbers,
    swapped,
    with_number,
)
from octavo.kernels.triton.table import find_tensor, row_of, to_pointer
from octavo.kernels.triton.tiles import finite_abs, is_last_program, raise_amax, scale_from_amax, scale_inv_from_scale


class StepRule(NamedTuple):
    """The properties of a step's rule that its groups decide.

    Attributes:
        is_adam: else SGD.
        decoupled, bounds_update: as AdamGroup's; SGD's is decoupled where it averages.
        averages: SgdGroup's.
        ascends: whether any group does, by ``maximize``.
        share_below_half: whether 1 - beta1, a gradient's share in the first moment, is below a half in all groups: then
            ``lerp`` needs one of its branches.
    """

    is_adam: bool
    decoupled: bool
    ascends: bool
    bounds_update: bool = False
    share_below_half: bool = False
    averages: bool = False


@dataclass(frozen=True)
class StepClass:
    """The properties of a step that a launch is compiled for.

    Attributes:
        tensors: one for each way in which tensors differ.
        rule: of all groups.
        blocks: how many blocks a tile has.
        finds_amaxes: the launch only finds the amaxes of moments that need them before their first code.
    """

    tensors: tuple[TensorClass, ...]
    rule: StepRule
    blocks: int
    finds_amaxes: bool

    @property
    def has_one_scale(self) -> bool:
        """Whether any tensor's moment or master has one scale for the whole tensor."""
        return any(tensor.has_one_scale for tensor in self.tensors)


@triton.jit
def lerp(a, b, weight, BELOW_HALF: tl.constexpr):
    """Return a + weight (b - a), as torch's; BELOW_HALF: whether the weight is known to be."""
    near = weight < 0.5
    factor = weight if BELOW_HALF else tl.where(near, weight, weight - 1.0)
    return tl.fma(tl.zeros_like(a) + factor, b - a, a if BELOW_HALF else tl.where(near, a, b))


@triton.jit
def adam_moments(m, v, g, n, BELOW_HALF: tl.constexpr):
    """Return the moments after a gradient; BELOW_HALF: as ``lerp``'s."""
    return lerp(m, g, n.first_share, BELOW_HALF), tl.fma(g * n.second_share, g, v * n.beta2)


@triton.jit
def adam_weight(w, m, root, n, DECOUPLED: tl.constexpr, CLIP: tl.constexpr):
    """Return the updated master; unclipped, operations and their order are torch's. ``root``: of the second moment."""
    if DECOUPLED:
        w = w * n.decay_factor
    if CLIP:
        u = tl.math.div_rn(m, root * n.correction2_inv + n.eps)
        u = tl.clamp(u, -n.limit, n.limit, tl.PropagateNan.ALL)
        result = tl.fma(tl.zeros_like(w) + n.rate, u, w)
    else:
        denominator = tl.math.div_rn(root, tl.zeros_like(root) + n.correction2) + n.eps
        result = w + tl.math.div_rn(m * n.rate, denominator)
    return result


@triton.jit
def saturate(m, v, FIRST_MOMENT: tl.constexpr, SECOND_MOMENT: tl.constexpr):
    """Clamp moments that become codes, or v's root where that is stored, to what codes are for; NaN stays NaN."""
    LARGEST_ROOT: tl.constexpr = 2.0**63  # reference/optimizer_step.py's
    if FIRST_MOMENT.fmt is not None:
        m = tl.clamp(m, -LARGEST_ROOT, LARGEST_ROOT, tl.PropagateNan.ALL)
    if SECOND_MOMENT.fmt is not None:
        v = tl.minimum(v, LARGEST_ROOT if SECOND_MOMENT.root else LARGEST_ROOT * LARGEST_ROOT, tl.PropagateNan.ALL)
    return m, v


@triton.jit
def sgd_moment(momentum, g, n, AVERAGES: tl.constexpr):
    """Return the momentum after a gradient."""
    if AVERAGES:
        result = lerp(momentum, g, n.average_share, False)
    else:
        result = tl.where(n.is_first, g, tl.fma(tl.zeros_like(g) + n.share, g, momentum * n.momentum))
    return result


@triton.jit
def sgd_weight(w, momentum, g, n, HAS_MOMENTUM: tl.constexpr, AVERAGES: tl.constexpr):
    """Return the updated master."""
    update = g
    if HAS_MOMENTUM:
        if AVERAGES:
            ahead = lerp(g, momentum, n.momentum, False)
        else:
            ahead = tl.fma(tl.zeros_like(g) + n.momentum, momentum, g)
        update = tl.where(n.nesterov, ahead, momentum)
    if AVERAGES:
        w = w * n.decay_factor
    return tl.fma(tl.zeros_like(w) + n.minus_lr, update, w)


@triton.jit
def resolution_tile(place, before, after, smallest):
    """Return (sum of squares of the updates, of the grid's steps); ``smallest``: the least step, 0 without a scale."""
    update = after - before
    exponent = before.to(tl.int32, bitcast=True) & 0x7F800000
    grid = tl.maximum(exponent.to(tl.float32, bitcast=True) * 0.125, tl.zeros_like(before) + smallest)
    is_finite = place.inside & (tl.abs(update) < float("inf")) & (tl.abs(before) < float("inf"))
    update = tl.where(is_finite, update, 0.0)
    grid = tl.where(is_finite, grid, 0.0)
    return tl.sum(tl.sum(update * update, 1), 0), tl.sum(tl.sum(grid * grid, 1), 0)


class SharedNumbers(NamedTuple):
    """The places of what a tensor's programs share, int32, 0 before and after a launch.

    They are the bits of the amax, which programs raise, and of the new scale, which the first program leaves, of each
    moment or master that has one scale for the whole tensor.
    """

    first_amax: Any
    first_scale: Any
    second_amax: Any
    second_scale: Any
    master_amax: Any
    master_scale: Any


@triton.jit
def shared_numbers(work_ptr, tensor, COUNT: tl.constexpr):
    """Return the SharedNumbers of tensors by their index, of COUNT; the first number of ``work_ptr`` is a counter."""
    ptr = work_ptr + 1 + tensor
    return SharedNumbers(ptr, ptr + COUNT, ptr + 2 * COUNT, ptr + 3 * COUNT, ptr + 4 * COUNT, ptr + 5 * COUNT)


@triton.jit
def moment_scale(row, COLUMN: tl.constexpr, amax_ptr, MOMENT: tl.constexpr):
    """Return the new scale of a moment that has one; else 1. ``amax_ptr``: to the amax that a launch before found."""
    scale = 1.0
    if MOMENT.scale == "previous":
        amax = tl.load(to_pointer(row[COLUMN + AMAX], tl.float32, False))
        scale = scale_from_amax(amax, MOMENT.fmt.max, False)
    if MOMENT.scale == "amax_known":
        scale = scale_from_amax(tl.load(amax_ptr).to(tl.float32, bitcast=True), MOMENT.fmt.max, False)
    return scale


@triton.jit
def scales_of(row, n, shared, square, TENSOR: tl.constexpr, DECOUPLED: tl.constexpr):
    """Return a tensor's Scales: the master's new scale by its bound, for a master in squares that of one square."""
    master = 1.0
    master_inv = 1.0
    if TENSOR.master.fmt is not None:
        SLACK: tl.constexpr = 1 + 2.0**-20
        amax = tl.load(to_pointer(row[MASTER_AMAX], tl.float32, False) + square)
        if DECOUPLED:
            amax = amax * tl.abs(n.decay_factor)
        master = scale_from_amax((amax + n.bound) * SLACK, TENSOR.master.fmt.max, True)
        master_inv = tl.load(to_pointer(row[MASTER_SCALE_INV], tl.float32, False) + square)
    FIRST_MOMENT: tl.constexpr = TENSOR.first  # Triton 3.6 takes no object's field as an argument
    SECOND_MOMENT: tl.constexpr = TENSOR.second
    first = moment_scale(row, FIRST, shared.first_amax, FIRST_MOMENT)
    second = moment_scale(row, SECOND, shared.second_amax, SECOND_MOMENT)
    return Scales(first, second, master, master_inv)


@triton.jit
def note_scales(column_ptr, amax_ptr, scale_ptr, inside):
    """Write the scale_inv and amax of tensors that left a scale, and clear both.

    ``column_ptr``: to the address of their scale_inv in the table, which that of their amax follows.
    """
    scale = tl.load(scale_ptr, mask=inside, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
    has_scale = scale > 0
    scale_inv_ptr = tl.load(column_ptr, mask=has_scale, other=0).to(tl.pointer_type(tl.float32))
    scale_inv = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(has_scale, scale, 1.0))
    tl.store(scale_inv_ptr, scale_inv, mask=has_scale)
    tensor_amax = tl.atomic_xchg(amax_ptr, 0, mask=has_scale, sem="relaxed").to(tl.float32, bitcast=True)
    amax_address = tl.load(column_ptr + 1, mask=has_scale, other=0)
    tl.store(amax_address.to(tl.pointer_type(tl.float32)), tensor_amax, mask=has_scale & (amax_address != 0))
    tl.store(scale_ptr, 0, mask=has_scale)


@triton.jit
def finish(table_ptr, work_ptr, COUNT: tl.constexpr, ANY_ONE: tl.constexpr):
    """Count the step of all tensors, and write the scale_inv and amax of those that have one scale.

    A weight's experts, rows of the table that follow each other, count one step together.
    """
    for begin in range(0, COUNT, 128):
        index = begin + tl.arange(0, 128)
        inside = index < COUNT
        row_ptr = table_ptr + index * WIDTH
        step = tl.load(row_ptr + STEP_COUNT, mask=inside, other=0)
        is_first = inside & (step != tl.load(row_ptr - WIDTH + STEP_COUNT, mask=inside & (index > 0), other=0))
        step_ptr = step.to(tl.pointer_type(tl.float32))
        tl.store(step_ptr, tl.load(step_ptr, mask=is_first, other=0.0) + 1.0, mask=is_first)
        if ANY_ONE:
            shared = shared_numbers(work_ptr, index, COUNT)
            note_scales(row_ptr + FIRST + SCALE_INV, shared.first_amax, shared.first_scale, inside)
            note_scales(row_ptr + SECOND + SCALE_INV, shared.second_amax, shared.second_scale, inside)
            note_scales(row_ptr + MASTER_SCALE_INV, shared.master_amax, shared.master_scale, inside)


@triton.jit
def leave_scales(shared, scales, TENSOR: tl.constexpr):
    """Leave a tensor's new scales, of those that have one, for ``finish``; until then programs read the old ones."""
    if TENSOR.first.has_one_scale:
        tl.store(shared.first_scale, scales.first.to(tl.int32, bitcast=True))
    if TENSOR.second.has_one_scale:
        tl.store(shared.second_scale, scales.second.to(tl.int32, bitcast=True))
    if TENSOR.master_has_one_scale:
        tl.store(shared.master_scale, scales.master.to(tl.int32, bitcast=True))


@triton.jit
def tile_bits(row, place, key, TENSOR: tl.constexpr, IS_ADAM: tl.constexpr):
    """Return 32 random bits for each element of the first moment, the second and the master; 0 where none are taken."""
    start = row[START] + place.base  # in the whole tensor
    offsets = place.offsets
    if TENSOR.apart:
        rows = (place.first + place.blocks) // tl.cdiv(row[COLS], BLOCK)
        offsets = offsets + (rows * row[GAP])[:, None]
    bits1 = 0
    bits2 = 0
    bits_w = 0
    if IS_ADAM:
        if TENSOR.has_random_moment:
            bits1 = random_bits(with_number(key, tl.full((), 0, tl.int64)), start, offsets, TENSOR.large)
            bits2 = swapped(bits1)
        if TENSOR.master.is_random:
            bits_w = random_bits(with_number(key, tl.full((), 1, tl.int64)), start, offsets, TENSOR.large)
    elif TENSOR.has_random_moment or TENSOR.master.is_random:
        bits1 = random_bits(key, start, offsets, TENSOR.large)
        bits_w = swapped(bits1)
    return bits1, bits2, bits_w


@triton.jit
def tile_step(row, gradient, place, n, scales, key, TENSOR: tl.constexpr, STEP: tl.constexpr, MEASURE: tl.constexpr):
    """Do a tile's step. Return (the amax written of the first moment, the second, the master, two resolution sums)."""
    MASTER: tl.constexpr = TENSOR.master
    FIRST_MOMENT: tl.constexpr = TENSOR.first
    SECOND_MOMENT: tl.constexpr = TENSOR.second
    w = read_master(row, place, scales.master_inv, MASTER, TENSOR.even)
    g = gradient_tile(gradient, place, n, w, TENSOR, STEP.rule.ascends, not STEP.rule.decoupled)
    m = g
    v = g
    stored1 = 0
    stored2 = 0
    if FIRST_MOMENT.dtype is not None:
        m, stored1 = read_moment(row, FIRST, place, FIRST_MOMENT, TENSOR.even)
    if STEP.rule.is_adam:
        v, stored2 = read_moment(row, SECOND, place, SECOND_MOMENT, TENSOR.even)
        m, v = adam_moments(m, v, g, n, STEP.rule.share_below_half)
        root = tl.sqrt_rn(v)
    elif FIRST_MOMENT.dtype is not None:
        m = sgd_moment(m, g, n, STEP.rule.averages)
    before = w
    if not STEP.finds_amaxes:
        if STEP.rule.is_adam:
            w = adam_weight(w, m, root, n, STEP.rule.decoupled, STEP.rule.bounds_update)
        else:
            w = sgd_weight(w, m, g, n, FIRST_MOMENT.dtype is not None, STEP.rule.averages)
    if STEP.rule.is_adam:
        m, v = saturate(m, root if SECOND_MOMENT.root else v, FIRST_MOMENT, SECOND_MOMENT)
    moved = 0.0
    grid = 0.0
    amax1 = 0.0
    amax2 = 0.0
    amax_w = 0.0
    if STEP.finds_amaxes:
        if FIRST_MOMENT.scale == "amax_known":
            amax1 = tl.max(tl.max(finite_abs(m), 1), 0)
        if SECOND_MOMENT.scale == "amax_known":
            amax2 = tl.max(tl.max(finite_abs(v), 1), 0)
    else:
        if MEASURE:
            smallest = scales.master_inv * 2.0**-9 if MASTER.fmt is not None else 0.0
            moved, grid = resolution_tile(place, before, w, smallest)
        bits1, bits2, bits_w = tile_bits(row, place, key, TENSOR, STEP.rule.is_adam)
        MAY_BE_INF: tl.constexpr = not STEP.rule.is_adam  # else saturated
        if FIRST_MOMENT.dtype is not None:
            amax1 = write_moment(
                row, FIRST, place, m, bits1, stored1, scales.first, FIRST_MOMENT, TENSOR.even, MAY_BE_INF
            )
        if SECOND_MOMENT.dtype is not None:
            amax2 = write_moment(
                row, SECOND, place, v, bits2, stored2, scales.second, SECOND_MOMENT, TENSOR.even, MAY_BE_INF
            )
        amax_w = write_master(row, place, w, bits_w, scales.master, MASTER, TENSOR.even)
    return amax1, amax2, amax_w, moved, grid


class TensorPointers(NamedTuple):
    """The places of what a step reads of a tensor beside its row; made in the kernel, whose arguments say more."""

    corrections: Any
    gradient: Any  # to its address
    gradient_scale_inv: Any  # to the address of that, of codes
    group: Any
    grad_scale: Any
    resolution: Any


@triton.jit
def update_tensor(row, pointers, shared, program, tiles, TENSOR: tl.constexpr, STEP: tl.constexpr):
    """Update a program's tiles of a tensor; program: its number among the tensor's."""
    number = tl.load(to_pointer(row[STEP_COUNT], tl.float32, False)).to(tl.int64) + 1
    key = with_number(row[KEY].to(tl.uint32), number)
    if STEP.rule.is_adam:
        n = adam_numbers(pointers.group, row[LR], kept_corrections(pointers.corrections, pointers.group, number))
    else:
        n = sgd_numbers(pointers.group, row[LR], number)
    divisor = tl.load(pointers.grad_scale) if pointers.grad_scale is not None else None
    scale_inv = tl.load(pointers.gradient_scale_inv) if TENSOR.gradient_fmt is not None else None
    gradient = GradientPlace(tl.load(pointers.gradient), scale_inv, divisor)
    scales = scales_of(row, n, shared, program if TENSOR.square else 0, TENSOR, STEP.rule.decoupled)
    largest1 = 0.0
    largest2 = 0.0
    largest_w = 0.0
    all_moved = 0.0
    all_grid = 0.0
    MEASURE: tl.constexpr = pointers.resolution is not None
    BLOCKS: tl.constexpr = STEP.blocks if TENSOR.even else (STEP.blocks + 1) // 2  # masks, addresses: registers
    count = 128 // BLOCKS if TENSOR.square else tiles * (STEP.blocks // BLOCKS)
    for i in range(count):
        if TENSOR.square:
            tl.static_assert(BLOCKS <= 128)
            place = place_in_square(row, program.to(tl.int64), i, BLOCKS, TENSOR.even)
        else:
            place = place_in_rows(row, program * count + i, BLOCKS, TENSOR.even, TENSOR.large)
        amax1, amax2, amax_w, moved, grid = tile_step(row, gradient, place, n, scales, key, TENSOR, STEP, MEASURE)
        all_moved += moved
        all_grid += grid
        largest1 = tl.maximum(largest1, amax1)
        largest2 = tl.maximum(largest2, amax2)
        largest_w = tl.maximum(largest_w, amax_w)
    LOOKED: tl.constexpr = "amax_known" if STEP.finds_amaxes else "previous"
    if TENSOR.first.scale == LOOKED:
        raise_amax(shared.first_amax, largest1)
    if TENSOR.second.scale == LOOKED:
        raise_amax(shared.second_amax, largest2)
    if not STEP.finds_amaxes:
        if MEASURE and row[MEASURED] != 0:
            tl.atomic_add(pointers.resolution, tl.cast(all_moved, tl.float64), sem="relaxed")
            tl.atomic_add(pointers.resolution + 1, tl.cast(all_grid, tl.float64), sem="relaxed")
        if TENSOR.square:  # no other program reads the square's scale_inv and amax
            scale_inv_ptr = to_pointer(row[MASTER_SCALE_INV], tl.float32, False)
            tl.store(scale_inv_ptr + program, scale_inv_from_scale(scales.master, True))
            tl.store(to_pointer(row[MASTER_AMAX], tl.float32, False) + program, largest_w)
        elif TENSOR.master.fmt is not None:
            raise_amax(shared.master_amax, largest_w)
        if program == 0:
            leave_scales(shared, scales, TENSOR)
            if STEP.rule.is_adam:
                keep_corrections(pointers.corrections, pointers.group, number + 1)


@triton.jit(do_not_specialize=["programs", "tiles"])
def optimizer_step_kernel(
    table_ptr,
    gradients_ptr,  # int64 [1 or 2, tensors], addresses; the second row, where any has codes, is of their scale_inv
    groups_ptr,  # float64 [groups, 8], see step_numbers.py
    skip_ptr,  # None, or: return at once where it is not 0
    grad_scale_ptr,  # None, or what gradients are divided by
    resolution_ptr,  # None, or float64 [2], see reference/optimizer_step.py
    work_ptr,  # int32, zeros: a counter, and the SharedNumbers of all tensors, COUNT of each kind
    programs,
    tiles,  # a program
    COUNT: tl.constexpr,  # of the tensors
    STEP: tl.constexpr,
):
    """Do a step of all tensors."""
    if skip_ptr is not None and tl.load(skip_ptr) != 0:
        return
    tensor, row_ptr = find_tensor(table_ptr, tl.program_id(0), COUNT, WIDTH, FIRST_PROGRAM)
    row = row_of(row_ptr, KEPT_CORRECTIONS)
    program = tl.program_id(0) - row[FIRST_PROGRAM].to(tl.int32)
    pointers = TensorPointers(
        corrections=row_ptr + KEPT_CORRECTIONS,
        gradient=gradients_ptr + tensor,
        gradient_scale_inv=gradients_ptr + tensor + COUNT,
        group=groups_ptr + row[GROUP] * 8,
        grad_scale=grad_scale_ptr,
        resolution=resolution_ptr,
    )
    shared = shared_numbers(work_ptr, tensor, COUNT)
    for i in tl.static_range(len(STEP.tensors)):
        if row[CLASS] == i:
            TENSOR: tl.constexpr = STEP.tensors[i]
            update_tensor(row, pointers, shared, program, tiles, TENSOR, STEP)
    if not STEP.finds_amaxes and is_last_program(work_ptr, programs):
        finish(table_ptr, work_ptr, COUNT, STEP.has_one_scale)
