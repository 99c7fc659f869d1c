"""The arithmetic of a scale. Nothing else in Python computes one; kernels in C++ and Triton have the same arithmetic.

    scale     = clamp(round_down_to_power_of_two?((format.max / 2^margin) / amax), 2^-126, 2^126)
    scale_inv = 1 / scale

in float32, each step rounded to nearest. Both bounds keep scale and scale_inv normal numbers: 1 / 2^127 is subnormal,
which GPUs flush in fused code. An amax of 0 has no scale of its own: Dynamic takes 1, Delayed keeps the previous one.

NVFP4 has scales of two levels: an outer one for the tensor, a power of two that brings its amax to 448 x 6, and one for
each block of 16, rounded to E4M3. Their product is ``scale_inv``, which bfloat16 holds exactly, as it does each value:

    inner     = E4M3(amax of the block x (outer / 6))        outer = the scale of the above, clamped to [2^-117, 2^117]
    scale_inv = inner / outer                                scale = min(1 / scale_inv, largest float32)

Twice the same: ``scale_from_amax`` for tensors, ``scale_of`` for one number, where a call of torch costs more than all
the arithmetic. A quotient of float32 numbers taken in float64 and rounded to float32 is the correctly rounded one
(53 >= 2 x 24 + 2 bits; Figueroa 1995).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.formats import E2M1, E4M3
from octavo.granularity import MX

MAX_SCALE = 2.0**126
MIN_SCALE = 2.0**-126
E8M0 = torch.float8_e8m0fnu  # float32's exponent and nothing else; 255 is NaN
_MIN_OUTER, _MAX_OUTER = 2.0**-117, 2.0**117  # E4M3's 2^-9 over the outer scale is a normal number
_SIGN_AND_EXPONENT = -(1 << 23)  # bits of a float32 above its mantissa


def check_scale_options(power_of_two: object, margin: object, where: str = "") -> None:
    """Raise TypeError or ValueError, whose text begins with ``where``, for options that no scale has."""
    if type(power_of_two) is not bool:  # text such as "False" would be true
        raise TypeError(f"{where}power_of_two={power_of_two!r} must be True or False")
    if type(margin) is not int or not 0 <= margin <= 64:
        raise ValueError(f"{where}margin={margin!r} must be an integer from 0 to 64 (the scale is divided by 2^margin)")


def scale_inv_dtype(tile: Sequence[int], power_of_two: bool, is_packed: bool = False) -> torch.dtype:
    """Return the dtype of a cast's scale_inv for this tile: E8M0, exact in a byte, or float32; of NVFP4 bfloat16.

    E8M0 is for the blocks of 32 that MX formats have, whose scales are an eighth of the codes' bytes in float32. Blocks
    of 128 stay float32, as torch's products of those take no other. A pair is read by its own scale_inv's dtype.

    Example:
        >>> scale_inv_dtype((1, 32), power_of_two=True), scale_inv_dtype((1, 128), power_of_two=True)
        (torch.float8_e8m0fnu, torch.float32)
    """
    if is_packed:
        return torch.bfloat16
    return E8M0 if power_of_two and tuple(tile) in (MX, MX[::-1]) else torch.float32


def scale_from_amax(
    amax: Tensor, limit: float, power_of_two: bool, margin: int, delayed: Tensor | None = None
) -> Tensor:
    """Return the scale that brings each ``amax`` to the format's largest value; 1 for an amax of 0.

    Args:
        amax: float32, any shape, finite and not negative.
        limit: ``Format.limit`` of the codes' format.
        power_of_two: round the scale down to a power of two.
        margin: divide the scale by 2^margin.
        delayed: scales that replace those of ``amax``, but where they are 0, which says that there is no history yet.

    Returns:
        float32, shape of ``amax``, broadcast with that of ``delayed``.

    Example:
        >>> import torch
        >>> scale_from_amax(torch.tensor([0.0, 1.0, 100.0]), 448.0, power_of_two=True, margin=1).tolist()
        [1.0, 128.0, 2.0]
    """
    # 448.0 / tensor is 448 * reciprocal in torch, wrong in the last bit for 27 % of all amax: divide tensor by tensor
    scale = torch.div(torch.full_like(amax, limit * 2.0**-margin), amax)
    if power_of_two:
        scale = floor_power_of_two(scale)
    scale = torch.where(amax > 0, scale.clamp(MIN_SCALE, MAX_SCALE), 1.0)
    return scale if delayed is None else torch.where(delayed == 0, scale, delayed)


def scale_of(amax: float, limit: float, power_of_two: bool, margin: int, previous: float = 1.0) -> float:
    """Return ``scale_from_amax`` for one float32 number; ``previous`` is the scale for an amax of 0.

    Example:
        >>> scale_of(100.0, 448.0, power_of_two=False, margin=0) == float(torch.tensor(4.48))
        True
    """
    if amax == 0.0:
        return previous
    scale = ctypes.c_float(limit * 2.0**-margin / amax).value  # rounds to float32, to inf if need be
    scale = min(max(scale, MIN_SCALE), MAX_SCALE)
    return 2.0 ** (math.frexp(scale)[1] - 1) if power_of_two else scale


def floor_power_of_two(scale: Tensor) -> Tensor:
    """Return the largest power of two not above each element (float32, positive normal or inf)."""
    return scale.view(torch.int32).bitwise_and(_SIGN_AND_EXPONENT).view(torch.float32)


def exponents_of(powers: Tensor) -> Tensor:
    """Return powers of two (float32, 2^-126 to 2^126, or E8M0) as their exponents' bytes, uint8: the bits of E8M0.

    In graphs by integers, since Inductor has no C++ for that dtype but conversions from and to float32 (torch 2.13).

    Example:
        >>> import torch
        >>> exponents_of(torch.tensor([1.0, 2.0**-126])).tolist()
        [127, 1]
    """
    if not torch.compiler.is_compiling():
        return powers.to(E8M0).view(torch.uint8)
    return (powers.to(torch.float32).view(torch.int32) >> 23).to(torch.uint8)


def powers_of(exponents: Tensor) -> Tensor:
    """Return the powers of two, float32, that ``exponents_of`` takes to these bytes; NaN for 255."""
    if not torch.compiler.is_compiling():
        return exponents.view(E8M0).to(torch.float32)
    # float32 has the exponent 0 for 0 and 255 for inf: the mantissa's upper bit makes 2^-127 and NaN of these
    upper_bit = (((exponents == 0) | (exponents == 255)).to(torch.int32)) << 22
    return (exponents.to(torch.int32) << 23 | upper_bit).view(torch.float32)


def floor_power_of_two_by_comparison(scale: Tensor) -> Tensor:
    """Return ``floor_power_of_two`` without reading bits, for exported graphs (float32 from 2^-126 to 2^126)."""
    power = torch.exp2(torch.floor(torch.log2(scale)))  # near a power of two the logarithm may round to the wrong side
    power = torch.where(power > scale, power * 0.5, power)
    return torch.where(power * 2.0 <= scale, power * 2.0, power)


def scale_of_unit(limit: float) -> float:
    """Return the power of two by which numbers in [-1, 1] are cast to a format whose largest is ``limit``.

    Example:
        >>> scale_of_unit(57344.0), scale_of_unit(448.0)
        (32768.0, 256.0)
    """
    return 2.0 ** (math.frexp(limit)[1] - 1)


def nvfp4_scale_inv(amax: Tensor, outer: Tensor) -> Tensor:
    """Return the scale_inv of NVFP4's blocks, float32 numbers that bfloat16 holds exactly.

    Args:
        amax: float32, any shape: of each block, finite and not negative.
        outer: a power of two, float32, that broadcasts with ``amax``.

    Example:
        >>> import torch
        >>> nvfp4_scale_inv(torch.tensor([6.0, 1.0, 0.0]), torch.tensor(64.0)).tolist()
        [1.0, 0.171875, 0.0]
    """
    outer = outer.clamp(_MIN_OUTER, _MAX_OUTER)
    inner = (amax * (outer * (1.0 / E2M1.max))).clamp(max=E4M3.max).to(torch.float8_e4m3fn)
    return inner.to(torch.float32) / outer


def nvfp4_scale(scale_inv: Tensor) -> Tensor:
    """Return what NVFP4's blocks are multiplied by before rounding: 1 / scale_inv, or the largest float32 for 0."""
    return torch.reciprocal(scale_inv).clamp(max=torch.finfo(torch.float32).max)


def scale_inv_from_scale(scale: Tensor) -> Tensor:
    """Return 1 / scale, rounded to nearest (float32)."""
    return torch.reciprocal(scale)
