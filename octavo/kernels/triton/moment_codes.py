"""reference/moment_codes.py in Triton: by bits, or by conversions that the GPU has. FMT is an octavo Format."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from octavo.kernels.triton.tiles import finite_abs, narrow


@triton.constexpr_function
def converts(fmt):
    """Whether what is compiled converts codes of a Format itself; Triton's interpreter rounds wrongly (tiles.py)."""
    return fmt.signed and cuda_capability_geq(8, 9) and not triton.knobs.runtime.interpret


@triton.jit
def as_float8(codes, FMT: tl.constexpr):
    """Codes, uint8, in their own dtype."""
    return codes.to(tl.float8e5 if FMT.mantissa_bits == 2 else tl.float8e4nv, bitcast=True)


@triton.jit
def decode_moment(codes, FMT: tl.constexpr):
    """Codes, uint8, as float32, exactly."""
    if converts(FMT):
        value = as_float8(codes, FMT).to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        magnitude = bits & 0x7F if FMT.signed else bits
        value = (magnitude << (23 - FMT.mantissa_bits)).to(tl.float32, bitcast=True) * 2.0 ** (127 - FMT.bias)
        if FMT.has_inf:
            special = tl.where(magnitude == FMT.max_code + 1, float("inf"), float("nan"))
            value = tl.where(magnitude > FMT.max_code, special, value)
        else:
            value = tl.where(magnitude == FMT.nan_code, float("nan"), value)
        if FMT.signed:
            value = (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def encode_moment(y, bits16, FMT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Scaled numbers, float32, to codes, uint8; bits16: int32 below 2^16, where STOCHASTIC."""
    DROPPED: tl.constexpr = 23 - FMT.mantissa_bits
    magnitude = tl.abs(y)
    is_finite = magnitude < float("inf")
    if not STOCHASTIC:
        SMALLEST: tl.constexpr = FMT.smallest_normal
        power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power < SMALLEST, SMALLEST, tl.where(power > 65536.0, 65536.0, power)) * 2.0**DROPPED
        magnitude = (magnitude + power) - power
    bits = (magnitude * 2.0 ** (FMT.bias - 127)).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        bits += bits16 << (DROPPED - 16)
    code = bits >> DROPPED
    code = tl.where(code > FMT.max_code, FMT.max_code, code)
    if FMT.signed:
        code |= (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(is_finite, code, FMT.nan_code).to(tl.uint8)


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
