"""The arithmetic of a scale. Nothing else in Octavo computes one.

    scale     = clamp(round_down_to_power_of_two?((format.max / 2^margin) / amax), 2^-126, 2^126)
    scale_inv = 1 / scale

in float32, each step rounded to nearest. Both bounds keep scale and scale_inv normal numbers: 1 / 2^127 is subnormal,
which GPUs flush in fused code. An amax of 0 has no scale of its own: Dynamic takes 1, Delayed keeps the previous one.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SCALE = 2.0**126
MIN_SCALE = 2.0**-126
_SIGN_AND_EXPONENT = -(1 << 23)  # bits of a float32 above its mantissa


def scale_from_amax(
    amax: Tensor, limit: float | Tensor, power_of_two: bool, margin: int = 0, previous: Tensor | None = None
) -> Tensor:
    """The scale that brings ``amax`` to the format's largest value.

    Args:
        amax: float32, any shape, finite and not negative.
        limit: the format's max (448 or 57344), or float32 of amax's shape.
        power_of_two: round the scale down to a power of two.
        margin: divide the scale by 2^margin.
        previous: float32, shape of ``amax``: the scale where amax is 0; 1 without it.

    Returns:
        float32, shape of ``amax``.

    Example:
        >>> import torch
        >>> scale_from_amax(torch.tensor([0.0, 1.0, 100.0]), 448.0, power_of_two=True, margin=1).tolist()
        [1.0, 128.0, 2.0]
    """
    # 448.0 / tensor is 448 * reciprocal in torch, wrong in the last bit for 27 % of all amax: divide tensor by tensor
    limit = limit * 2.0**-margin
    scale = torch.div(limit if isinstance(limit, Tensor) else torch.full_like(amax, limit), amax)
    if power_of_two:
        scale = floor_power_of_two(scale)
    scale = scale.clamp_(MIN_SCALE, MAX_SCALE)
    if amax.numel() > 0 and float(amax.min()) == 0.0:  # asked first, as the answer is nearly always no
        scale = torch.where(amax > 0, scale, 1.0 if previous is None else previous)
    return scale


def floor_power_of_two(scale: Tensor) -> Tensor:
    """The largest power of two not above each element (float32, positive normal or inf)."""
    return scale.view(torch.int32).bitwise_and(_SIGN_AND_EXPONENT).view(torch.float32)


def scale_inv_from_scale(scale: Tensor) -> Tensor:
    """1 / scale, rounded to nearest (float32)."""
    return torch.reciprocal(scale)


def is_power_of_two(scale_inv: Tensor) -> bool:
    """Whether every element (float32, positive) is a power of two."""
    return not bool(scale_inv.view(torch.int32).bitwise_and(~_SIGN_AND_EXPONENT).any())
