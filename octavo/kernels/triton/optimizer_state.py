"""reference/optimizer_state.py in Triton: tiles of masters and moments, found through a table, read and written.

A tile is [NB, 128]: NB blocks of a tensor's rows, the last of a row shorter. TABLE, int64 [tensors, WIDTH], has a
TableRow for each tensor. A tensor's step is compiled for a TensorClass, TENSOR.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from octavo import granularity
from octavo.formats import E4M3
from octavo.kernels.reference.optimizer_state import Master, MomentTensors
from octavo.kernels.triton.moment_codes import (
    decode_moment,
    encode_hybrid,
    encode_moment,
    round_to_bf16,
    round_to_bf16_hybrid,
    round_to_half,
)
from octavo.kernels.triton.step_numbers import KEPT, upper_bits
from octavo.kernels.triton.table import DTYPES, to_pointer
from octavo.kernels.triton.tiles import finite_abs, narrow, scale_from_amax, scale_inv_from_scale

BLOCK: tl.constexpr = tl.constexpr(granularity.BLOCK)


class TableRow(NamedTuple):
    """A tensor's row of the table; two entries of step_numbers.py follow. Addresses are 0 where there is no tensor.

    Attributes:
        first, second: of moments' data.
        low_bits, master_scale_inv, master_amax: of the master's.
        lr: of a learning rate that the kernel reads; 0: the group's row has it.
        tensor_class: the number of the TensorClass among those of the launch's StepClass.
        start: the index of the first element in the whole tensor.
        key: key_of the update's.
        first_program: the number of the tensor's first program.
        measured: whether the update counts for the resolution.
        gap: how many of the whole tensor's columns other ranks have.
    """

    weight: int = 0
    first: int = 0
    first_scale_inv: int = 0
    first_amax: int = 0
    second: int = 0
    second_scale_inv: int = 0
    second_amax: int = 0
    low_bits: int = 0
    master_scale_inv: int = 0
    master_amax: int = 0
    step: int = 0
    lr: int = 0
    group: int = 0
    tensor_class: int = 0
    rows: int = 0
    cols: int = 0
    start: int = 0
    key: int = 0
    first_program: int = 0
    measured: int = 0
    gap: int = 0


def _columns(names: str) -> list[Any]:
    """Return the numbers of columns, as kernels take them."""
    return [tl.constexpr(TableRow._fields.index(name)) for name in names.split()]


WEIGHT, FIRST, SECOND = _columns("weight first second")
LOW_BITS, MASTER_SCALE_INV, MASTER_AMAX = _columns("low_bits master_scale_inv master_amax")
SCALE_INV, AMAX = tl.constexpr(1), tl.constexpr(2)  # columns after FIRST, SECOND and LOW_BITS, which are 3 apart
STEP_COUNT, LR, GROUP, CLASS = _columns("step lr group tensor_class")
ROWS, COLS, START, KEY, FIRST_PROGRAM, MEASURED, GAP = _columns("rows cols start key first_program measured gap")
KEPT_CORRECTIONS = tl.constexpr(len(TableRow._fields))
WIDTH = tl.constexpr(len(TableRow._fields) + 2 * KEPT.value)


@dataclass(frozen=True)
class MomentClass:
    """The properties of a moment that a kernel is compiled for; Triton's cache tells kernels apart by these alone.

    Attributes:
        dtype: Triton's dtype of the stored moment; None: there is no such moment.
        fmt: octavo's Format of codes; None for floats.
        root, rounding: as MomentTensors's.
        scale: where codes' scales come from: "block": each block's amax; "previous": the tensor's amax of the step
            before; "amax_known": the tensor's amax, which a launch before found.
    """

    dtype: Any = None
    fmt: Any = None
    root: bool = False
    rounding: str = "nearest"
    scale: str = "block"

    @classmethod
    def of(cls, moment: MomentTensors) -> MomentClass:
        """Return a moment's class."""
        scale = "previous" if moment.amax is not None else "amax_known" if moment.needs_amax_first else "block"
        return cls(DTYPES[moment.data.dtype], moment.fmt, moment.root, moment.rounding, scale)

    @property
    def has_one_scale(self) -> bool:
        """Whether one scale serves the whole tensor."""
        return self.scale != "block"


@dataclass(frozen=True)
class MasterClass:
    """The properties of a weight and its master that a kernel is compiled for.

    Attributes:
        kind: the reference's.
        weight: Triton's dtype of the weight; uint8: codes of E4M3.
        low_bits: Triton's dtype of the master's low_bits; None without them.
        is_random: the reference's.
    """

    kind: str
    weight: Any
    low_bits: Any
    is_random: bool

    @classmethod
    def of(cls, master: Master) -> MasterClass:
        """Return a master's class."""
        low_bits = None if master.low_bits is None else DTYPES[master.low_bits.dtype]
        return cls(master.kind, DTYPES[master.weight.dtype], low_bits, master.is_random)

    @property
    def fmt(self) -> Any:
        """The Format of a weight in codes, else None."""
        return E4M3 if self.weight == tl.uint8 else None


@dataclass(frozen=True)
class TensorClass:
    """The properties of all that a step reads and writes of a tensor, for which a kernel is compiled.

    Attributes:
        gradient: Triton's dtype; uint8: codes of E4M3.
        master: of the weight.
        first, second: moments.
        even: whether it is one row, or rows of whole blocks, all aligned.
        square: whether tiles lie in squares of 128 x 128, as its scales do.
        large: whether indices pass 2^31.
        apart: whether there are other columns of the whole tensor between its rows.
    """

    gradient: Any
    master: MasterClass
    first: MomentClass = MomentClass()
    second: MomentClass = MomentClass()
    even: bool = False
    square: bool = False
    large: bool = False
    apart: bool = False

    @property
    def gradient_fmt(self) -> Any:
        """The Format of a gradient in codes, else None."""
        return E4M3 if self.gradient == tl.uint8 else None

    @property
    def master_has_one_scale(self) -> bool:
        """Whether one scale, which the bound gives, serves the whole master."""
        return self.master.fmt is not None and not self.square

    @property
    def has_one_scale(self) -> bool:
        """Whether anything of it has one scale for the whole tensor."""
        return self.first.has_one_scale or self.second.has_one_scale or self.master_has_one_scale

    @property
    def has_random_moment(self) -> bool:
        """Whether writing a moment takes random bits."""
        return any(moment.rounding != "nearest" for moment in (self.first, self.second))


class TilePlace(NamedTuple):
    """A tile's place: its elements are at ``base + offsets`` [NB, 128], its blocks at ``first + blocks`` [NB]."""

    base: Any
    offsets: Any
    inside: Any
    first: Any
    blocks: Any
    is_block: Any


@triton.jit
def place_in_rows(row, tile, BLOCKS: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr):
    """Return the place of a tensor's tile number ``tile``. EVEN: it is one row, or aligned rows of whole blocks."""
    lanes = tl.arange(0, BLOCK)
    blocks = tl.arange(0, BLOCKS)
    rows = row[ROWS]
    cols = row[COLS]
    first = tile.to(tl.int64) * BLOCKS
    if EVEN:
        base = first * BLOCK
        left = rows * cols - base
        left = tl.multiple_of(tl.where(left > BLOCKS * BLOCK, BLOCKS * BLOCK, left).to(tl.int32), 16)
        offsets = blocks[:, None] * BLOCK + lanes[None, :]
        inside = offsets < left
        is_block = blocks * BLOCK < left
    else:
        a_row = tl.cdiv(cols, BLOCK)
        index = first + blocks
        tile_row = index // a_row
        col = (index - tile_row * a_row)[:, None] * BLOCK + lanes[None, :]
        base = first // a_row * cols
        offsets = (tile_row[:, None] * cols - base) + col
        is_block = tile_row < rows
        inside = is_block[:, None] & (col < cols)
        if not LARGE:
            offsets = offsets.to(tl.int32)
    return TilePlace(base, offsets, inside, first, blocks, is_block)


@triton.jit
def place_in_square(row, square, part, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """Return the place of rows of a tensor's block of 128 x 128: part number ``part`` of BLOCKS rows."""
    lanes = tl.arange(0, BLOCK)
    blocks = tl.arange(0, BLOCKS)
    rows = row[ROWS]
    cols = row[COLS]
    if EVEN:
        cols = cols // BLOCK * BLOCK  # as the compiler can see
    a_row = tl.cdiv(cols, BLOCK)
    top = square // a_row * BLOCK + part * BLOCKS
    left = square % a_row * BLOCK
    base = top * cols + left
    offsets = (blocks.to(tl.int64)[:, None] * cols) + lanes[None, :]
    is_block = top + blocks < rows
    inside = is_block[:, None] & (left + lanes < cols)[None, :]
    if EVEN:
        inside = is_block[:, None] & (lanes >= 0)[None, :]
    return TilePlace(base, offsets, inside, top * a_row + square % a_row, blocks * a_row, is_block)


@triton.jit
def load_at(ptr, place):
    """Load a tile of the tensor that begins at ptr, 0 outside."""
    return tl.load(ptr + place.base + place.offsets, mask=place.inside, other=0)


@triton.jit
def store_at(ptr, place, values):
    """Write a tile of the tensor that begins at ptr."""
    tl.store(ptr + place.base + place.offsets, values, mask=place.inside)


@triton.jit
def load_float(row, COLUMN: tl.constexpr, place, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile of floats in float32, 0 outside."""
    return load_at(to_pointer(row[COLUMN], dtype, EVEN), place).to(tl.float32)


@triton.jit
def block_scales(scale_inv_ptr, place):
    """Load the scale_inv of a tile's blocks, [NB, 1]."""
    return tl.load(scale_inv_ptr + place.first + place.blocks, mask=place.is_block, other=1.0)[:, None]


@triton.jit
def read_moment(row, COLUMN: tl.constexpr, place, MOMENT: tl.constexpr, EVEN: tl.constexpr):
    """Load a moment's tile: (in float32, as it is stored)."""
    stored = load_at(to_pointer(row[COLUMN], MOMENT.dtype, EVEN), place)
    if MOMENT.fmt is None:
        value = stored.to(tl.float32)
    else:
        scale_inv_ptr = to_pointer(row[COLUMN + SCALE_INV], tl.float32, False)
        scale_inv = tl.load(scale_inv_ptr) if MOMENT.has_one_scale else block_scales(scale_inv_ptr, place)
        FMT: tl.constexpr = MOMENT.fmt
        value = decode_moment(stored, FMT, scale_inv)
        if MOMENT.root:
            value = value * value
    return value, stored


@triton.jit
def write_moment(
    row,
    COLUMN: tl.constexpr,
    place,
    wide,  # the moment, or its root where MOMENT.root
    drawn,  # uint32, 32 random bits for each element, where MOMENT takes any
    replaced,  # the stored moment, as ``read_moment`` read it
    scale,  # the new scale, where MOMENT.has_one_scale
    MOMENT: tl.constexpr,
    EVEN: tl.constexpr,
    MAY_BE_INF: tl.constexpr = True,
):
    """Store a moment; return its amax where the next step reads one, else 0."""
    data_ptr = to_pointer(row[COLUMN], MOMENT.dtype, EVEN)
    largest = 0.0
    if MOMENT.fmt is None:
        if MOMENT.rounding == "hybrid":
            stored = round_to_bf16_hybrid(wide, drawn, replaced)
        elif MOMENT.rounding == "stochastic":
            stored = round_to_bf16(wide, drawn)
        else:
            stored = narrow(wide, data_ptr.dtype.element_ty)
        store_at(data_ptr, place, stored)
    else:
        FMT: tl.constexpr = MOMENT.fmt
        BOUNDED: tl.constexpr = not (MAY_BE_INF or MOMENT.has_one_scale)
        if MOMENT.has_one_scale:
            if MOMENT.scale == "previous":
                largest = tl.max(tl.max(finite_abs(wide), 1), 0)
            scaled = wide * scale
        else:
            if MAY_BE_INF:
                amax = tl.max(finite_abs(wide), 1)
            else:  # a maximum of NaN and a number is the number
                amax = tl.maximum(tl.max(tl.abs(wide), 1), 0.0)
            scales = scale_from_amax(amax, FMT.max, False)
            scale_inv_ptr = to_pointer(row[COLUMN + SCALE_INV], tl.float32, False) + place.first
            tl.store(scale_inv_ptr + place.blocks, scale_inv_from_scale(scales, False), mask=place.is_block)
            scaled = wide * scales[:, None]
        if MOMENT.rounding == "hybrid":
            codes = encode_hybrid(scaled, drawn, replaced, FMT, BOUNDED)
        else:
            codes = encode_moment(scaled, drawn, FMT, MOMENT.rounding == "stochastic", BOUNDED)
        store_at(data_ptr, place, codes)
    return largest


class GradientPlace(NamedTuple):
    """A gradient's address, that of its codes' scale_inv or None, and the gradient's divisor or None."""

    address: Any
    scale_inv: Any
    divisor: Any


class Scales(NamedTuple):
    """The new scales of a whole tensor or square, of moments and master that have one; and the master's scale_inv."""

    first: Any
    second: Any
    master: Any
    master_inv: Any


@triton.jit
def gradient_tile(gradient, place, n, w, TENSOR: tl.constexpr, ASCENDS: tl.constexpr, COUPLED: tl.constexpr):
    """Load the gradient in float32, divided; ASCENDS: negated where maximize; COUPLED: with weight decay added."""
    stored = load_at(to_pointer(gradient.address, TENSOR.gradient, TENSOR.even), place)
    if TENSOR.gradient_fmt is not None:
        FMT: tl.constexpr = TENSOR.gradient_fmt
        scale_inv_ptr = to_pointer(gradient.scale_inv, tl.float32, False)
        g = decode_moment(stored, FMT, block_scales(scale_inv_ptr, place))
    else:
        g = stored.to(tl.float32)
    if gradient.divisor is not None:
        g = tl.math.div_rn(g, tl.zeros_like(g) + gradient.divisor)
    if ASCENDS:
        g = tl.where(n.maximize, -g, g)
    if COUPLED:
        g = tl.where(n.weight_decay != 0, tl.fma(tl.zeros_like(g) + n.weight_decay, w, g), g)
    return g


@triton.jit
def largest_inside(x, place):
    """Return the largest of a tile's numbers, which are not negative."""
    return tl.max(tl.max(tl.where(place.inside, x, 0), 1), 0)


@triton.jit
def write_fp8_master(row, place, w, drawn, scale, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Store the master's tile and the codes; return the largest absolute value that the master holds."""
    FMT: tl.constexpr = MASTER.fmt
    weight_ptr = to_pointer(row[WEIGHT], tl.uint8, EVEN)
    y = w * scale
    if MASTER.low_bits is None:
        codes = encode_moment(y, drawn, FMT, True)
        store_at(weight_ptr, place, codes)
        largest = largest_inside(finite_abs(decode_moment(codes, FMT)), place)
    elif MASTER.low_bits.is_floating():
        low_bits_ptr = to_pointer(row[LOW_BITS], MASTER.low_bits, EVEN)
        store_at(weight_ptr, place, encode_moment(y, drawn, FMT, False))
        if MASTER.kind == "fp8_fp16":
            half = round_to_half(y * 128.0, drawn)
            store_at(low_bits_ptr, place, half)
            largest = largest_inside(finite_abs(half.to(tl.float32)), place) * (1.0 / 128.0)
        else:
            store_at(low_bits_ptr, place, w)
            largest = largest_inside(finite_abs(w), place) * scale
    else:
        BITS: tl.constexpr = MASTER.low_bits.primitive_bitwidth
        DROPPED: tl.constexpr = 20 - BITS
        LARGEST: tl.constexpr = 0x7E << BITS
        is_finite = tl.abs(y) < float("inf")
        magnitude = ((tl.abs(y) * 2.0**-120).to(tl.int32, bitcast=True) + upper_bits(drawn, DROPPED)) >> DROPPED
        magnitude = tl.where(is_finite, tl.where(magnitude > LARGEST, LARGEST, magnitude), 0)
        codes = (magnitude + (1 << (BITS - 1))) >> BITS
        remainder = magnitude - (codes << BITS)
        store_at(to_pointer(row[LOW_BITS], MASTER.low_bits, EVEN), place, remainder.to(MASTER.low_bits))
        codes = tl.where(is_finite, codes | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80), 0x7F)
        store_at(weight_ptr, place, codes.to(tl.uint8))
        largest = (largest_inside(magnitude, place) << DROPPED).to(tl.float32, bitcast=True) * 2.0**120
    return largest * scale_inv_from_scale(scale, True)


@triton.jit
def read_master(row, place, scale_inv, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Load the master's tile in float32."""
    if MASTER.kind == "fp8_fp32":
        result = load_float(row, LOW_BITS, place, MASTER.low_bits, EVEN)
    elif MASTER.kind == "fp8_fp16":
        result = load_float(row, LOW_BITS, place, MASTER.low_bits, EVEN) * (scale_inv * (1.0 / 128.0))
    elif MASTER.fmt is not None:
        FMT: tl.constexpr = MASTER.fmt
        codes = load_at(to_pointer(row[WEIGHT], tl.uint8, EVEN), place)
        if MASTER.low_bits is None:
            result = decode_moment(codes, FMT) * scale_inv
        else:
            BITS: tl.constexpr = MASTER.low_bits.primitive_bitwidth
            wide = codes.to(tl.int32)
            remainder = load_at(to_pointer(row[LOW_BITS], MASTER.low_bits, EVEN), place).to(tl.int32)
            magnitude = ((wide & 0x7F) << BITS) + remainder
            value = (magnitude << (20 - BITS)).to(tl.float32, bitcast=True) * 2.0**120
            value = (value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
            result = tl.where((wide & 0x7F) == 0x7F, float("nan"), value * scale_inv)
    elif MASTER.low_bits is None:
        result = load_float(row, WEIGHT, place, MASTER.weight, EVEN)
    else:  # the bits themselves: conversion to float32 may change a NaN's, and adding to them may then give a number's
        bits = load_at(to_pointer(row[WEIGHT], tl.int16, EVEN), place).to(tl.int32) << 16
        remainder = load_at(to_pointer(row[LOW_BITS], MASTER.low_bits, EVEN), place).to(tl.int32)
        bits += remainder << (16 - MASTER.low_bits.primitive_bitwidth)
        result = bits.to(tl.float32, bitcast=True)
    return result


@triton.jit
def write_master(row, place, w, drawn, scale, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Store the master's tile, and the weight's; return the largest absolute value of a master with scales, else 0."""
    weight_ptr = to_pointer(row[WEIGHT], MASTER.weight, EVEN)
    largest = 0.0
    if MASTER.fmt is not None:
        largest = write_fp8_master(row, place, w, drawn, scale, MASTER, EVEN)
    elif MASTER.kind == "weight":
        store_at(weight_ptr, place, narrow(w, weight_ptr.dtype.element_ty))
    elif MASTER.kind == "stochastic":
        store_at(weight_ptr, place, round_to_bf16(w, drawn))
    else:
        SPARE: tl.constexpr = 16 - MASTER.low_bits.primitive_bitwidth  # bits that the remainder has no room for
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)  # a NaN that rounding can't make a number
        if MASTER.is_random:
            bits = (bits + upper_bits(drawn, 8)) & -256
        store_at(weight_ptr, place, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
        remainder = bits.to(tl.int16)  # the bits above are the weight's
        store_at(to_pointer(row[LOW_BITS], MASTER.low_bits, EVEN), place, (remainder >> SPARE).to(MASTER.low_bits))
    return largest
