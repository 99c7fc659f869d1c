"""Rotary positions of queries and keys (Su et al. 2021, arXiv 2104.09864), in float32, rounded once.

Of a head x with halves (a, b) and the angles' cosines (c, d) and sines (s, t), each half of them its own,

    (a, b) -> (a c - b s, b d + a t)          inverse: (a, b) -> (a c + b t, b d - a s)

The inverse is the transpose, which takes the gradient of the result to that of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.arguments import RotaryHeads, new_rotary


def rotary(heads: RotaryHeads) -> Tensor:
    """Compute the op ``octavo::rotary``; its contract is in signatures.py."""
    result = new_rotary(heads)
    sizes = [x.shape[2] for x in heads[:3]]
    for x, part in zip(turned(heads), result.unflatten(2, (-1, heads.q.shape[3])).split(sizes, 2), strict=True):
        part.copy_(x)
    return result


def turned(heads: RotaryHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k turned by their angles, float32, and v as it is: [B, S, heads, D] each."""
    q, k, v, cos, sin, inverse = heads
    q, k = (_turned(x.float(), _for_heads(cos, x), _for_heads(sin, x), inverse) for x in (q, k))
    return q, k, v


def _for_heads(angles: Tensor, x: Tensor) -> Tensor:
    """Return angles [B, S, 1, D], float32, of angles [B, S, D or D / 2], to multiply heads like x."""
    wide = angles.float().unsqueeze(2)
    return wide if wide.shape[3] == x.shape[3] else wide.repeat(1, 1, 1, 2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return heads turned by angles of these cosines and sines, or turned back."""
    (a, b), (c, d), (s, t) = (tensor.chunk(2, -1) for tensor in (x, cos, sin))
    if inverse:
        s, t = -t, -s
    return torch.cat((a * c - b * s, b * d + a * t), -1)
