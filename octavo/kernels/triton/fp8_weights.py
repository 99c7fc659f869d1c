"""reference/fp8_weights.py in Triton.

MASTER names the kind: 5 split16, 6 split24, 7 fp16, 8 fp32, 9 the code alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.moment_codes import decode_moment, encode_moment, round_to_half
from octavo.kernels.triton.optimizer_state import REST, WEIGHT_COLUMN, load_at, load_float, store_at, typed
from octavo.kernels.triton.tiles import finite_abs, scale_inv_from_scale


@triton.jit
def read_fp8_master(row_ptr, place, scale_inv, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """The master's tile in float32."""
    if MASTER == 8:
        result = load_float(row_ptr, REST, place, 1, EVEN)
    elif MASTER == 7:
        result = load_float(row_ptr, REST, place, 6, EVEN) * (scale_inv * (1.0 / 128.0))
    else:
        codes = load_at(typed(row_ptr, WEIGHT_COLUMN, 3, EVEN), place)
        if MASTER == 9:
            result = decode_moment(codes, 3) * scale_inv
        else:
            BITS: tl.constexpr = 8 if MASTER == 5 else 16
            wide = codes.to(tl.int32)
            rest = load_at(typed(row_ptr, REST, 8 if MASTER == 5 else 7, EVEN), place).to(tl.int32)
            magnitude = ((wide & 0x7F) << BITS) + rest
            value = (magnitude << (20 - BITS)).to(tl.float32, bitcast=True) * 2.0**120
            value = (value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
            result = tl.where((wide & 0x7F) == 0x7F, float("nan"), value * scale_inv)
    return result


@triton.jit
def write_fp8_master(row_ptr, place, w, bits16, scale, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Store the master's tile and the codes; returns the largest absolute value that the master holds."""
    weight_ptr = typed(row_ptr, WEIGHT_COLUMN, 3, EVEN)
    y = w * scale
    if MASTER == 5 or MASTER == 6:
        BITS: tl.constexpr = 8 if MASTER == 5 else 16
        DROPPED: tl.constexpr = 20 - BITS
        LARGEST: tl.constexpr = 0x7E << BITS
        is_finite = tl.abs(y) < float("inf")
        magnitude = ((tl.abs(y) * 2.0**-120).to(tl.int32, bitcast=True) + (bits16 >> (16 - DROPPED))) >> DROPPED
        magnitude = tl.where(is_finite, tl.where(magnitude > LARGEST, LARGEST, magnitude), 0)
        codes = (magnitude + (1 << (BITS - 1))) >> BITS
        rest = magnitude - (codes << BITS)
        rest_ptr = typed(row_ptr, REST, 8 if MASTER == 5 else 7, EVEN)
        store_at(rest_ptr, place, rest.to(tl.int8) if MASTER == 5 else rest.to(tl.int16))
        codes = tl.where(is_finite, codes | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80), 0x7F)
        store_at(weight_ptr, place, codes.to(tl.uint8))
        held = (magnitude << DROPPED).to(tl.float32, bitcast=True) * 2.0**120
    elif MASTER == 9:
        codes = encode_moment(y, bits16, 3, True)
        store_at(weight_ptr, place, codes)
        held = finite_abs(decode_moment(codes, 3))
    else:
        store_at(weight_ptr, place, encode_moment(y, bits16, 3, False))
        if MASTER == 7:
            half = round_to_half(y * 128.0, bits16)
            store_at(typed(row_ptr, REST, 6, EVEN), place, half)
            held = finite_abs(half.to(tl.float32)) * (1.0 / 128.0)
        else:
            store_at(typed(row_ptr, REST, 1, EVEN), place, w)
            held = finite_abs(w) * scale
    return tl.max(tl.max(tl.where(place.inside, held, 0.0), 1), 0) * scale_inv_from_scale(scale, True)
