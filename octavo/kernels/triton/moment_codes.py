"""kernels/moment_codes.py in Triton: by bits, or by conversions that the GPU has. FMT is an octavo Format."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from octavo.kernels.triton.step_numbers import upper_bits
from octavo.kernels.triton.tiles import finite_abs, narrow


@triton.constexpr_function
def converts(fmt):
    """Whether what is compiled converts codes of a Format itself; Triton's interpreter rounds wrongly (tiles.py)."""
    return fmt.signed and cuda_capability_geq(8, 9) and not triton.knobs.runtime.interpret


@triton.jit
def decode_moment(codes, FMT: tl.constexpr, scale_inv=1.0):
    """Return codes, uint8, times their scale_inv, in float32; scale_inv: below 2^120 of a format without a sign."""
    if converts(FMT):
        value = codes.to(tl.float8e5 if FMT.has_inf else tl.float8e4nv, bitcast=True).to(tl.float32) * scale_inv
    elif FMT.signed:
        bits = codes.to(tl.int32)
        magnitude = bits & 0x7F
        value = (magnitude << (23 - FMT.mantissa_bits)).to(tl.float32, bitcast=True) * 2.0 ** (127 - FMT.bias)
        if FMT.has_inf:
            special = tl.where(magnitude == FMT.max_code + 1, float("inf"), float("nan"))
            value = tl.where(magnitude > FMT.max_code, special, value)
        else:
            value = tl.where(magnitude == FMT.nan_code, float("nan"), value)
        value = (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * scale_inv
    else:  # as a float16's upper bits, whose exponent reads too small
        half = (codes.to(tl.int16) << (10 - FMT.mantissa_bits)).to(tl.float16, bitcast=True)
        value = half.to(tl.float32) * (scale_inv * 2.0 ** (15 - FMT.bias))
        value = tl.where(codes == FMT.nan_code, float("nan"), value)
    return value


@triton.jit
def encode_moment(y, drawn, FMT: tl.constexpr, STOCHASTIC: tl.constexpr, BOUNDED: tl.constexpr = False):
    """Return the codes, uint8, of scaled numbers, float32; drawn: uint32, 32 random bits for each, where STOCHASTIC.

    BOUNDED: none is inf, or past the format's max by more than its last bit.
    """
    DROPPED: tl.constexpr = 23 - FMT.mantissa_bits
    SIGN: tl.constexpr = -(2**31)
    magnitude = tl.abs(y)
    if not STOCHASTIC:
        if converts(FMT):
            value = tl.where(magnitude < float("inf"), y, float("nan"))
        else:
            SMALLEST: tl.constexpr = FMT.smallest_normal
            power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            power = tl.where(power < SMALLEST, SMALLEST, tl.where(power > 65536.0, 65536.0, power)) * 2.0**DROPPED
            magnitude = (magnitude + power) - power
    elif BOUNDED and not FMT.signed:  # a number past the max must not be carried to the next code, NaN
        magnitude = tl.minimum(magnitude, FMT.max, tl.PropagateNan.ALL)
    bits = (magnitude * 2.0 ** (FMT.bias - 127)).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        bits += upper_bits(drawn, DROPPED)
    if converts(FMT) and (BOUNDED or not STOCHASTIC):
        if STOCHASTIC:  # the rounded number but for a power of two; a NaN's bits may have overflowed
            bits = tl.minimum(bits.to(tl.uint32, bitcast=True), 0x7FFFFFFF).to(tl.int32, bitcast=True)
            bits = (bits & (0x7FFFFFFF - (1 << DROPPED) + 1)) | (y.to(tl.int32, bitcast=True) & SIGN)
            value = bits.to(tl.float32, bitcast=True) * 2.0 ** (127 - FMT.bias)
        result = narrow(value, tl.float8e5 if FMT.has_inf else tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif BOUNDED and not FMT.signed:
        result = tl.minimum(bits.to(tl.uint32, bitcast=True) >> DROPPED, FMT.nan_code).to(tl.uint8)
    else:
        code = bits >> DROPPED
        code = tl.where(code > FMT.max_code, FMT.max_code, code)
        if FMT.signed:
            code |= (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        result = tl.where(tl.abs(y) < float("inf"), code, FMT.nan_code).to(tl.uint8)
    return result


@triton.jit
def encode_hybrid(y, drawn, stored, FMT: tl.constexpr, BOUNDED: tl.constexpr):
    """Return ``encode_moment`` to nearest, but stochastically where that gives the magnitude of ``stored``, uint8."""
    nearest = encode_moment(y, drawn, FMT, False, BOUNDED)
    stochastic = encode_moment(y, drawn, FMT, True, BOUNDED)
    return tl.where(((nearest ^ stored) & (0x7F if FMT.signed else 0xFF)) == 0, stochastic, nearest)


@triton.jit
def round_to_bf16(wide, drawn):
    """Round float32 to bf16, stochastically, by 32 random bits for each; NaN and inf stay what they are."""
    rounded = (wide.to(tl.int32, bitcast=True) + upper_bits(drawn, 16)) >> 16
    rounded = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where(finite_abs(wide) == tl.abs(wide), rounded, narrow(wide, tl.bfloat16))


@triton.jit
def round_to_bf16_hybrid(wide, drawn, stored):
    """Round float32 to bf16, to nearest, but stochastically where that gives the magnitude of ``stored``, bf16."""
    nearest = narrow(wide, tl.bfloat16)
    is_unchanged = ((nearest.to(tl.int16, bitcast=True) ^ stored.to(tl.int16, bitcast=True)) & 0x7FFF) == 0
    return tl.where(is_unchanged, round_to_bf16(wide, drawn), nearest)


@triton.jit
def round_to_half(wide, drawn):
    """Round float32, below float16's max, to float16, stochastically; NaN and inf stay what they are."""
    sign = (wide.to(tl.int32, bitcast=True) >> 16) & -0x8000
    bits = ((tl.abs(wide) * 2.0**-112).to(tl.int32, bitcast=True) + upper_bits(drawn, 13)) >> 13
    rounded = (bits | sign).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(finite_abs(wide) == tl.abs(wide), rounded, wide.to(tl.float16))
