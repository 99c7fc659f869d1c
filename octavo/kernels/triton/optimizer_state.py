"""reference/optimizer_state.py in Triton: tiles of weights and moments, found through a table, read and written.

A tile is [NB, 128]: NB blocks of a tensor's rows, the last of a row shorter. TABLE, int64 [tensors, 20]: the columns
below; 0 for an address that is not there.

KIND names what is stored: 0 nothing, 1 float32, 2 bf16, 3 E4M3, 4 E5M2, 5 E4M4; and, of weights, gradients and
remainders, 6 float16, 7 int16, 8 int8. SCALE names where codes' scales come from: 0 each block's amax, 1 the tensor's
amax of the step before, 2 the tensor's amax, found by a launch before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from octavo.kernels.triton.moment_codes import decode_moment, encode_moment, round_to_bf16
from octavo.kernels.triton.table import pointer
from octavo.kernels.triton.tiles import finite_abs, narrow, scale_from_amax, scale_inv_from_scale

WEIGHT_COLUMN: tl.constexpr = tl.constexpr(0)
FIRST: tl.constexpr = tl.constexpr(1)  # a moment's data, scale_inv, amax
SECOND: tl.constexpr = tl.constexpr(4)
REST: tl.constexpr = tl.constexpr(7)  # the master's, and its scale_inv, amax
STEP: tl.constexpr = tl.constexpr(10)
LR: tl.constexpr = tl.constexpr(11)
GROUP: tl.constexpr = tl.constexpr(12)
CLASS: tl.constexpr = tl.constexpr(13)
ROWS: tl.constexpr = tl.constexpr(14)
COLS: tl.constexpr = tl.constexpr(15)
START: tl.constexpr = tl.constexpr(16)  # the index of the first element
KEY: tl.constexpr = tl.constexpr(17)  # key_of the update's
FIRST_PROGRAM: tl.constexpr = tl.constexpr(18)
ONE_SCALE: tl.constexpr = tl.constexpr(19)  # bits: the first moment, the second, the master have one scale for all
WIDTH: tl.constexpr = tl.constexpr(20)


class Place(NamedTuple):
    """Where a tile lies: its elements at ``base + offsets`` [NB, 128], its blocks at ``first + blocks`` [NB]."""

    base: Any
    offsets: Any
    inside: Any
    first: Any
    blocks: Any
    is_block: Any


@triton.jit
def place_of(row_ptr, tile, BLOCKS: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr):
    """The place of a tensor's tile number ``tile``. EVEN: it is one row, or rows of whole blocks, all aligned."""
    lanes = tl.arange(0, 128)
    blocks = tl.arange(0, BLOCKS)
    rows = tl.load(row_ptr + ROWS)
    cols = tl.load(row_ptr + COLS)
    first = tile.to(tl.int64) * BLOCKS
    if EVEN:
        base = first * 128
        left = rows * cols - base
        left = tl.multiple_of(tl.where(left > BLOCKS * 128, BLOCKS * 128, left).to(tl.int32), 16)
        offsets = blocks[:, None] * 128 + lanes[None, :]
        inside = offsets < left
        is_block = blocks * 128 < left
    else:
        a_row = tl.cdiv(cols, 128)
        index = first + blocks
        row = index // a_row
        col = (index - row * a_row)[:, None] * 128 + lanes[None, :]
        base = first // a_row * cols
        offsets = (row[:, None] * cols - base) + col
        is_block = row < rows
        inside = is_block[:, None] & (col < cols)
        if not LARGE:
            offsets = offsets.to(tl.int32)
    return Place(base, offsets, inside, first, blocks, is_block)


@triton.jit
def place_in_square(row_ptr, square, part, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """The place of some rows of a tensor's block of 128 x 128: part number ``part`` of BLOCKS rows."""
    lanes = tl.arange(0, 128)
    blocks = tl.arange(0, BLOCKS)
    rows = tl.load(row_ptr + ROWS)
    cols = tl.load(row_ptr + COLS)
    if EVEN:
        cols = tl.multiple_of(cols, 128)
    a_row = tl.cdiv(cols, 128)
    top = square // a_row * 128 + part * BLOCKS
    left = square % a_row * 128
    base = top * cols + left
    offsets = (blocks.to(tl.int64)[:, None] * cols) + lanes[None, :]
    is_block = top + blocks < rows
    inside = is_block[:, None] & (left + lanes < cols)[None, :]
    if EVEN:
        inside = is_block[:, None] & (lanes >= 0)[None, :]
    return Place(base, offsets, inside, top * a_row + square % a_row, blocks * a_row, is_block)


@triton.jit
def typed(row_ptr, COLUMN: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr):
    """A column's address as a pointer to what KIND names."""
    if KIND == 1:
        result = pointer(row_ptr, COLUMN, tl.float32, EVEN)
    elif KIND == 2:
        result = pointer(row_ptr, COLUMN, tl.bfloat16, EVEN)
    elif KIND == 6:
        result = pointer(row_ptr, COLUMN, tl.float16, EVEN)
    elif KIND == 7:
        result = pointer(row_ptr, COLUMN, tl.int16, EVEN)
    elif KIND == 8:
        result = pointer(row_ptr, COLUMN, tl.int8, EVEN)
    else:
        result = pointer(row_ptr, COLUMN, tl.uint8, EVEN)
    return result


@triton.jit
def load_at(ptr, place):
    """A tile of what begins at ptr, 0 outside."""
    return tl.load(ptr + place.base + place.offsets, mask=place.inside, other=0)


@triton.jit
def store_at(ptr, place, values):
    """Write a tile of what begins at ptr."""
    tl.store(ptr + place.base + place.offsets, values, mask=place.inside)


@triton.jit
def load_float(row_ptr, COLUMN: tl.constexpr, place, KIND: tl.constexpr, EVEN: tl.constexpr):
    """A tile of floats in float32, 0 outside."""
    return load_at(typed(row_ptr, COLUMN, KIND, EVEN), place).to(tl.float32)


@triton.jit
def block_scales(scale_inv_ptr, place):
    """The scale_inv of a tile's blocks, [NB, 1]."""
    return tl.load(scale_inv_ptr + place.first + place.blocks, mask=place.is_block, other=1.0)[:, None]


@triton.jit
def read_moment(
    row_ptr,
    COLUMN: tl.constexpr,
    place,
    KIND: tl.constexpr,
    ROOT: tl.constexpr,
    SCALE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A moment's tile in float32."""
    if KIND <= 2:
        result = load_float(row_ptr, COLUMN, place, KIND, EVEN)
    else:
        codes = load_at(typed(row_ptr, COLUMN, KIND, EVEN), place)
        scale_inv_ptr = pointer(row_ptr, COLUMN + 1, tl.float32, False)
        if SCALE == 0:
            scale_inv = block_scales(scale_inv_ptr, place)
        else:
            scale_inv = tl.load(scale_inv_ptr)
        result = decode_moment(codes, KIND) * scale_inv
        if ROOT:
            result = result * result
    return result


@triton.jit
def write_moment(
    row_ptr,
    COLUMN: tl.constexpr,
    place,
    wide,
    bits16,
    scale,  # where SCALE != 0
    KIND: tl.constexpr,
    ROOT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Store what ``read_moment`` gave, updated; returns its amax where the next step asks for it."""
    data_ptr = typed(row_ptr, COLUMN, KIND, EVEN)
    found = 0.0
    if KIND <= 2:
        if KIND == 2 and STOCHASTIC:
            stored = round_to_bf16(wide, bits16)
        else:
            stored = narrow(wide, data_ptr.dtype.element_ty)
        store_at(data_ptr, place, stored)
    else:
        if ROOT:
            wide = tl.sqrt_rn(wide)
        if SCALE == 0:
            LIMIT: tl.constexpr = 448.0 if KIND == 3 else (57344.0 if KIND == 4 else 480.0)
            scales = scale_from_amax(tl.max(finite_abs(wide), 1), LIMIT, False)
            scale_inv_ptr = pointer(row_ptr, COLUMN + 1, tl.float32, False) + place.first
            tl.store(scale_inv_ptr + place.blocks, scale_inv_from_scale(scales, False), mask=place.is_block)
            codes = encode_moment(wide * scales[:, None], bits16, KIND, STOCHASTIC)
        else:
            if SCALE == 1:
                found = tl.max(tl.max(finite_abs(wide), 1), 0)
            codes = encode_moment(wide * scale, bits16, KIND, STOCHASTIC)
        store_at(data_ptr, place, codes)
    return found


class Gradient(NamedTuple):
    """Where a gradient lies, and the scale_inv of its codes, else None: two addresses."""

    address: Any
    scale_inv: Any


class Scales(NamedTuple):
    """What serves a whole tensor: new scales of those that have one, the master's scale_inv, what gradients are
    divided by.
    """

    first: Any
    second: Any
    master: Any
    master_inv: Any
    grad: Any


@triton.jit
def gradient_tile(gradient, place, n, scales, w, GRAD: tl.constexpr, EVEN: tl.constexpr, COUPLED: tl.constexpr):
    """The gradient in float32, unscaled, up where that is asked for, and with its share of the weight."""
    if GRAD == 1:
        ptr = gradient.address.to(tl.pointer_type(tl.float32))
    elif GRAD == 2:
        ptr = gradient.address.to(tl.pointer_type(tl.bfloat16))
    elif GRAD == 3:
        ptr = gradient.address.to(tl.pointer_type(tl.uint8))
    else:
        ptr = gradient.address.to(tl.pointer_type(tl.float16))
    if EVEN:
        ptr = tl.multiple_of(ptr, 16)
    stored = load_at(ptr, place)
    if GRAD == 3:
        g = decode_moment(stored, GRAD) * block_scales(gradient.scale_inv.to(tl.pointer_type(tl.float32)), place)
    else:
        g = stored.to(tl.float32)
    if scales.grad is not None:
        g = tl.math.div_rn(g, tl.zeros_like(g) + scales.grad)
    g = tl.where(n.maximize, -g, g)
    if COUPLED:
        g = tl.where(n.weight_decay != 0, tl.fma(tl.zeros_like(g) + n.weight_decay, w, g), g)
    return g
