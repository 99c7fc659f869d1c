"""reference/moment_codes.py in Triton: by bits, so that it runs on GPUs without FP8 too.

KIND names what is stored: 0 nothing, 1 float32, 2 bf16, 3 E4M3, 4 E5M2, 5 E4M4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.tiles import finite_abs, narrow


@triton.jit
def decode_moment(codes, KIND: tl.constexpr):
    """Codes, uint8, as float32, exactly."""
    MANTISSA: tl.constexpr = 3 if KIND == 3 else (2 if KIND == 4 else 4)
    UNBIASED: tl.constexpr = 2.0**112 if KIND == 4 else 2.0**120
    bits = codes.to(tl.int32)
    if KIND == 5:
        magnitude = bits
    else:
        magnitude = bits & 0x7F
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * UNBIASED
    if KIND == 4:
        special = tl.where(magnitude == 0x7C, float("inf"), float("nan"))
        value = tl.where(magnitude >= 0x7C, special, value)
    else:
        value = tl.where(magnitude == (0xFF if KIND == 5 else 0x7F), float("nan"), value)
    if KIND != 5:
        value = (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def encode_moment(y, bits16, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Scaled numbers, float32, to codes, uint8; bits16: int32 below 2^16, where STOCHASTIC."""
    MANTISSA: tl.constexpr = 3 if KIND == 3 else (2 if KIND == 4 else 4)
    DROPPED: tl.constexpr = 23 - MANTISSA
    BIASED: tl.constexpr = 2.0**-112 if KIND == 4 else 2.0**-120
    LARGEST: tl.constexpr = 0x7E if KIND == 3 else (0x7B if KIND == 4 else 0xFE)
    magnitude = tl.abs(y)
    is_finite = magnitude < float("inf")
    if not STOCHASTIC:
        SMALLEST: tl.constexpr = 2.0**-14 if KIND == 4 else 2.0**-6
        STEP: tl.constexpr = 2.0**DROPPED
        power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power < SMALLEST, SMALLEST, tl.where(power > 65536.0, 65536.0, power)) * STEP
        magnitude = (magnitude + power) - power
    bits = (magnitude * BIASED).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        bits += bits16 << (DROPPED - 16)
    code = bits >> DROPPED
    code = tl.where(code > LARGEST, LARGEST, code)
    if KIND != 5:
        code |= (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(is_finite, code, 0xFF if KIND == 5 else 0x7F).to(tl.uint8)


@triton.jit
def round_to_bf16(wide, bits16):
    """float32 to bf16, stochastically; NaN and inf stay what they are."""
    rounded = ((wide.to(tl.int32, bitcast=True) + bits16) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where(finite_abs(wide) == tl.abs(wide), rounded, narrow(wide, tl.bfloat16))


@triton.jit
def round_to_half(wide, bits16):
    """float32, below float16's max, to float16, stochastically; NaN and inf stay what they are."""
    sign = (wide.to(tl.int32, bitcast=True) >> 16) & -0x8000
    bits = ((tl.abs(wide) * 2.0**-112).to(tl.int32, bitcast=True) + (bits16 >> 3)) >> 13
    rounded = (bits | sign).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(finite_abs(wide) == tl.abs(wide), rounded, wide.to(tl.float16))
