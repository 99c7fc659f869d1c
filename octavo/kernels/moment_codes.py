"""Eight-bit codes of an optimizer's moments, to nearest or stochastically, signed or not; bf16 and float16.

A float32 number times 2^(bias - 127) has the bits of its code in its upper bits, subnormals included; below them are
those that rounding drops. To nearest, the number is rounded before that: added to 2^(23 - mantissa bits) times its own
power of two, or the smallest normal, it loses them. (After it, a subnormal would be rounded twice.) Stochastically, as
many random bits as are dropped are added to these, so that a number goes up with exactly the probability of the part
that is dropped: with fewer bits the lowest would never carry, and numbers would shrink by rounding alone. The digits
of a subnormal below 2^-20 of a step are rounded before, by the product.

The hybrid of both rounds to nearest, but stochastically where that would leave the stored code as it is: the smaller
error of nearest where a number moves by more than half a step, and none stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.step_numbers import upper_bits

_EXPONENT = 0x7F800000  # of a float32's bits


def encode_moment(y: Tensor, fmt: Format, bits: Tensor | None, stored: Tensor | None = None) -> Tensor:
    """Round scaled numbers to codes, uint8.

    Args:
        y: float32, overwritten; not negative where the format has no sign. Numbers past the format's max saturate;
            NaN and inf become NaN.
        fmt: E4M3, E5M2 or E4M4.
        bits: int32, 32 random bits for each, for stochastic rounding; None rounds to nearest, ties to even.
        stored: uint8, the codes that these replace, for the hybrid; None rounds all numbers in one way.
    """
    if stored is not None:
        nearest = encode_moment(y.clone(), fmt, None)
        is_unchanged = (nearest ^ stored).bitwise_and_(0x7F if fmt.signed else 0xFF) == 0  # 0 is -0, too
        return torch.where(is_unchanged, encode_moment(y, fmt, bits), nearest)
    dropped = 23 - fmt.mantissa_bits
    sign = (y.view(torch.int32) >> 24).bitwise_and_(0x80) if fmt.signed else None
    faults = None if _is_finite(y) else ~torch.isfinite(y)
    y.abs_()
    if bits is None:
        power = y.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
        power.clamp_(fmt.smallest_normal, fmt.max).mul_(2.0**dropped)
        y.add_(power).sub_(power)
    codes = y.mul_(2.0 ** (fmt.bias - 127)).view(torch.int32)
    if bits is not None:
        codes.add_(upper_bits(bits, dropped))
    codes.bitwise_right_shift_(dropped).clamp_(0, fmt.max_code)
    if sign is not None:
        codes.bitwise_or_(sign)
    if faults is not None:
        codes.masked_fill_(faults, fmt.nan_code)
    return codes.to(torch.uint8)


def decode_moment(codes: Tensor, fmt: Format) -> Tensor:
    """Read codes, uint8, as float32, exactly."""
    # as the upper bits of a float16, whose exponent reads too small
    half = (codes.view(torch.int8) if fmt.signed else codes).to(torch.int16).mul_(1 << (10 - fmt.mantissa_bits))
    if fmt.signed and fmt.exponent_bits == 4:  # the sign was spread over the exponent's upper bit
        half.bitwise_and_(-0x4080)
    wide = half.view(torch.float16).to(torch.float32)
    if fmt.bias != 15:
        wide.mul_(2.0 ** (15 - fmt.bias))
    if not fmt.has_inf and codes.numel() > 0:
        magnitude = codes.bitwise_and(0x7F) if fmt.signed else codes
        if not codes.is_cpu or int(magnitude.max()) == fmt.nan_code:  # a GPU would be waited for
            wide.masked_fill_(magnitude == fmt.nan_code, float("nan"))
    return wide


def round_to_bf16(wide: Tensor, bits: Tensor, stored: Tensor | None = None) -> Tensor:
    """Round float32 to bf16 stochastically, or by the hybrid; NaN and inf stay what they are.

    ``bits``: int32, 32 random bits for each; ``stored``: the bf16 numbers that these replace, for the hybrid.
    """
    rounded = wide.view(torch.int32).add(upper_bits(bits, 16)) >> 16
    stochastic = _with_faults(wide, rounded.to(torch.int16).view(torch.bfloat16))
    if stored is None:
        return stochastic
    nearest = wide.to(torch.bfloat16)
    return torch.where(nearest.abs() == stored.abs(), stochastic, nearest)


def round_to_half(wide: Tensor, bits: Tensor) -> Tensor:
    """Round float32, below float16's max, to float16 stochastically; NaN and inf stay what they are; bits as above."""
    sign = (wide.view(torch.int32) >> 16) & -0x8000
    rounded = wide.abs().mul_(2.0**-112).view(torch.int32).add_(upper_bits(bits, 13)) >> 13
    return _with_faults(wide, (rounded | sign).to(torch.int16).view(torch.float16))


def _is_finite(y: Tensor) -> bool:
    """Whether all are known to be finite: not if their sum overflows, nor on a GPU, which would be waited for."""
    return y.is_cpu and bool(torch.isfinite(y.sum()))


def _with_faults(wide: Tensor, rounded: Tensor) -> Tensor:
    """Return the rounded numbers, with NaN and inf as they are in ``wide``."""
    return rounded if _is_finite(wide) else torch.where(torch.isfinite(wide), rounded, wide.to(rounded.dtype))
