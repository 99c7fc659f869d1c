"""reference/master_weights.py in Triton; MASTER is a MasterClass (optimizer_state.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.moment_codes import decode_moment, encode_moment, round_to_bf16, round_to_half
from octavo.kernels.triton.optimizer_state import REST, WEIGHT_COLUMN, load_at, load_float, store_at
from octavo.kernels.triton.table import to_pointer
from octavo.kernels.triton.tiles import finite_abs, narrow, scale_inv_from_scale


@triton.jit
def read_fp8_master(row, place, scale_inv, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """The master's tile in float32."""
    FMT: tl.constexpr = MASTER.fmt
    if MASTER.kind == "fp8_fp32":
        result = load_float(row, REST, place, MASTER.rest, EVEN)
    elif MASTER.kind == "fp8_fp16":
        result = load_float(row, REST, place, MASTER.rest, EVEN) * (scale_inv * (1.0 / 128.0))
    else:
        codes = load_at(to_pointer(row[WEIGHT_COLUMN], tl.uint8, EVEN), place)
        if MASTER.rest is None:
            result = decode_moment(codes, FMT) * scale_inv
        else:
            BITS: tl.constexpr = MASTER.rest.primitive_bitwidth
            wide = codes.to(tl.int32)
            rest = load_at(to_pointer(row[REST], MASTER.rest, EVEN), place).to(tl.int32)
            magnitude = ((wide & 0x7F) << BITS) + rest
            value = (magnitude << (20 - BITS)).to(tl.float32, bitcast=True) * 2.0**120
            value = (value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
            result = tl.where((wide & 0x7F) == 0x7F, float("nan"), value * scale_inv)
    return result


@triton.jit
def largest_inside(x, place):
    """The largest of a tile's numbers, which are not negative."""
    return tl.max(tl.max(tl.where(place.inside, x, 0), 1), 0)


@triton.jit
def write_fp8_master(row, place, w, bits16, scale, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Store the master's tile and the codes; returns the largest absolute value that the master holds."""
    FMT: tl.constexpr = MASTER.fmt
    weight_ptr = to_pointer(row[WEIGHT_COLUMN], tl.uint8, EVEN)
    y = w * scale
    if MASTER.rest is None:
        codes = encode_moment(y, bits16, FMT, True)
        store_at(weight_ptr, place, codes)
        largest = largest_inside(finite_abs(decode_moment(codes, FMT)), place)
    elif MASTER.rest.is_floating():
        rest_ptr = to_pointer(row[REST], MASTER.rest, EVEN)
        store_at(weight_ptr, place, encode_moment(y, bits16, FMT, False))
        if MASTER.kind == "fp8_fp16":
            half = round_to_half(y * 128.0, bits16)
            store_at(rest_ptr, place, half)
            largest = largest_inside(finite_abs(half.to(tl.float32)), place) * (1.0 / 128.0)
        else:
            store_at(rest_ptr, place, w)
            largest = largest_inside(finite_abs(w), place) * scale
    else:
        BITS: tl.constexpr = MASTER.rest.primitive_bitwidth
        DROPPED: tl.constexpr = 20 - BITS
        LARGEST: tl.constexpr = 0x7E << BITS
        is_finite = tl.abs(y) < float("inf")
        magnitude = ((tl.abs(y) * 2.0**-120).to(tl.int32, bitcast=True) + (bits16 >> (16 - DROPPED))) >> DROPPED
        magnitude = tl.where(is_finite, tl.where(magnitude > LARGEST, LARGEST, magnitude), 0)
        codes = (magnitude + (1 << (BITS - 1))) >> BITS
        rest = magnitude - (codes << BITS)
        store_at(to_pointer(row[REST], MASTER.rest, EVEN), place, rest.to(MASTER.rest))
        codes = tl.where(is_finite, codes | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80), 0x7F)
        store_at(weight_ptr, place, codes.to(tl.uint8))
        largest = (largest_inside(magnitude, place) << DROPPED).to(tl.float32, bitcast=True) * 2.0**120
    return largest * scale_inv_from_scale(scale, True)


@triton.jit
def read_master(row, place, scale_inv, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """The master's tile in float32."""
    if MASTER.fmt is not None:
        result = read_fp8_master(row, place, scale_inv, MASTER, EVEN)
    else:
        result = load_float(row, WEIGHT_COLUMN, place, MASTER.weight, EVEN)
        if MASTER.rest is not None:
            rest = load_at(to_pointer(row[REST], MASTER.rest, EVEN), place).to(tl.int32)
            bits = result.to(tl.int32, bitcast=True) + (rest << (16 - MASTER.rest.primitive_bitwidth))
            result = bits.to(tl.float32, bitcast=True)
    return result


@triton.jit
def write_master(row, place, w, bits16, scale, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Store the master's tile, and the weight's; returns the largest absolute value that a scaled one holds."""
    weight_ptr = to_pointer(row[WEIGHT_COLUMN], MASTER.weight, EVEN)
    found = 0.0
    if MASTER.fmt is not None:
        found = write_fp8_master(row, place, w, bits16, scale, MASTER, EVEN)
    elif MASTER.kind == "weight":
        store_at(weight_ptr, place, narrow(w, weight_ptr.dtype.element_ty))
    elif MASTER.kind == "stochastic":
        store_at(weight_ptr, place, round_to_bf16(w, bits16))
    else:
        SPARE: tl.constexpr = 16 - MASTER.rest.primitive_bitwidth  # bits that the remainder has no room for
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)  # a NaN's must not run over into a number's
        if MASTER.is_random:
            bits = (bits + (bits16 >> 8)) & -256
        store_at(weight_ptr, place, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
        rest = bits.to(tl.int16)  # what lies above is the weight's
        store_at(to_pointer(row[REST], MASTER.rest, EVEN), place, (rest >> SPARE).to(MASTER.rest))
    return found
