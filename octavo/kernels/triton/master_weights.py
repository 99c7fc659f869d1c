"""reference/master_weights.py in Triton; MASTER is a MasterClass (optimizer_state.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.fp8_weights import read_fp8_master, write_fp8_master
from octavo.kernels.triton.moment_codes import round_to_bf16, round_to_half
from octavo.kernels.triton.optimizer_state import REST, WEIGHT_COLUMN, load_at, load_float, store_at
from octavo.kernels.triton.table import pointer
from octavo.kernels.triton.tiles import finite_abs, narrow


@triton.jit
def read_master(row_ptr, place, scale_inv, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """The master's tile in float32."""
    if MASTER.fmt is not None:
        result = read_fp8_master(row_ptr, place, scale_inv, MASTER, EVEN)
    elif MASTER.kind == "fp16_scaled":
        result = load_float(row_ptr, REST, place, MASTER.rest, EVEN) * scale_inv
        weight_ptr = pointer(row_ptr, WEIGHT_COLUMN, MASTER.weight, EVEN)
        weight = load_at(weight_ptr, place).to(tl.float32)
        rounded = narrow(result, weight_ptr.dtype.element_ty).to(tl.float32)
        result = tl.where(rounded == weight, result, weight)
    else:
        result = load_float(row_ptr, WEIGHT_COLUMN, place, MASTER.weight, EVEN)
        if MASTER.rest is not None:
            rest = load_at(pointer(row_ptr, REST, MASTER.rest, EVEN), place).to(tl.int32)
            bits = result.to(tl.int32, bitcast=True) + (rest << (16 - MASTER.rest.primitive_bitwidth))
            result = bits.to(tl.float32, bitcast=True)
    return result


@triton.jit
def write_master(row_ptr, place, w, bits16, scale, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Store the master's tile, and the weight's; returns the largest absolute value that a scaled one holds."""
    weight_ptr = pointer(row_ptr, WEIGHT_COLUMN, MASTER.weight, EVEN)
    found = 0.0
    if MASTER.fmt is not None:
        found = write_fp8_master(row_ptr, place, w, bits16, scale, MASTER, EVEN)
    elif MASTER.kind == "weight":
        store_at(weight_ptr, place, narrow(w, weight_ptr.dtype.element_ty))
    elif MASTER.kind == "stochastic":
        store_at(weight_ptr, place, round_to_bf16(w, bits16))
    elif MASTER.kind == "fp16_scaled":
        rest = round_to_half(w * scale, bits16)
        store_at(pointer(row_ptr, REST, MASTER.rest, EVEN), place, rest)
        held = tl.math.div_rn(rest.to(tl.float32), tl.full(w.shape, 1.0, tl.float32) * scale)
        store_at(weight_ptr, place, narrow(held, weight_ptr.dtype.element_ty))
        found = tl.max(tl.max(finite_abs(tl.where(place.inside, held, 0)), 1), 0)
    else:
        SPARE: tl.constexpr = 16 - MASTER.rest.primitive_bitwidth  # bits that the remainder has no room for
        bits = w.to(tl.int32, bitcast=True)
        if MASTER.is_random:
            bits = (bits + (bits16 >> 8)) & -256
        upper = (bits + 0x8000) >> 16
        rest = bits - (upper << 16)
        is_finite = tl.abs(w) < float("inf")  # else its bits must not run over into another number's
        weight = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
        store_at(weight_ptr, place, tl.where(is_finite, weight, narrow(w, tl.bfloat16)))
        rest = tl.where(is_finite, rest, 0)
        store_at(pointer(row_ptr, REST, MASTER.rest, EVEN), place, (rest >> SPARE).to(MASTER.rest))
    return found
