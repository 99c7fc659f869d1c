"""reference/master_weights.py in Triton.

MASTER names the kind: 0 the weight itself, 1 split32, 2 split24, 3 fp16_scaled, 4 stochastic; from 5 on see
fp8_weights.py. WEIGHT is the weight's dtype as in optimizer_state.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.fp8_weights import read_fp8_master, write_fp8_master
from octavo.kernels.triton.moment_codes import round_to_bf16, round_to_half
from octavo.kernels.triton.optimizer_state import REST, WEIGHT_COLUMN, load_at, load_float, store_at, typed
from octavo.kernels.triton.tiles import finite_abs, narrow


@triton.jit
def read_master(row_ptr, place, scale_inv, WEIGHT: tl.constexpr, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """The master's tile in float32."""
    if MASTER >= 5:
        result = read_fp8_master(row_ptr, place, scale_inv, MASTER, EVEN)
    elif MASTER == 3:
        result = load_float(row_ptr, REST, place, 6, EVEN) * scale_inv
        weight_ptr = typed(row_ptr, WEIGHT_COLUMN, WEIGHT, EVEN)
        weight = load_at(weight_ptr, place).to(tl.float32)
        rounded = narrow(result, weight_ptr.dtype.element_ty).to(tl.float32)
        result = tl.where(rounded == weight, result, weight)
    else:
        result = load_float(row_ptr, WEIGHT_COLUMN, place, WEIGHT, EVEN)
        if MASTER == 1 or MASTER == 2:
            rest = load_at(typed(row_ptr, REST, 7 if MASTER == 1 else 8, EVEN), place).to(tl.int32)
            bits = result.to(tl.int32, bitcast=True) + (rest << (0 if MASTER == 1 else 8))
            result = bits.to(tl.float32, bitcast=True)
    return result


@triton.jit
def write_master(row_ptr, place, w, bits16, scale, WEIGHT: tl.constexpr, MASTER: tl.constexpr, EVEN: tl.constexpr):
    """Store the master's tile, and the weight's; returns the largest absolute value that a scaled one holds."""
    weight_ptr = typed(row_ptr, WEIGHT_COLUMN, WEIGHT, EVEN)
    found = 0.0
    if MASTER >= 5:
        found = write_fp8_master(row_ptr, place, w, bits16, scale, MASTER, EVEN)
    if MASTER == 0:
        store_at(weight_ptr, place, narrow(w, weight_ptr.dtype.element_ty))
    if MASTER == 3:
        rest = round_to_half(w * scale, bits16)
        store_at(typed(row_ptr, REST, 6, EVEN), place, rest)
        held = tl.math.div_rn(rest.to(tl.float32), tl.full(w.shape, 1.0, tl.float32) * scale)
        store_at(weight_ptr, place, narrow(held, weight_ptr.dtype.element_ty))
        found = tl.max(tl.max(finite_abs(tl.where(place.inside, held, 0)), 1), 0)
    if MASTER == 4:
        store_at(weight_ptr, place, round_to_bf16(w, bits16))
    if MASTER == 1 or MASTER == 2:
        bits = w.to(tl.int32, bitcast=True)
        if MASTER == 2:
            bits = (bits + (bits16 >> 8)) & -256
        upper = (bits + 0x8000) >> 16
        rest = bits - (upper << 16)
        is_finite = tl.abs(w) < float("inf")  # else its bits must not run over into another number's
        weight = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
        store_at(weight_ptr, place, tl.where(is_finite, weight, narrow(w, tl.bfloat16)))
        rest = tl.where(is_finite, rest, 0)
        rest_ptr = typed(row_ptr, REST, 7 if MASTER == 1 else 8, EVEN)
        store_at(rest_ptr, place, rest.to(tl.int16) if MASTER == 1 else (rest >> 8).to(tl.int8))
    return found
