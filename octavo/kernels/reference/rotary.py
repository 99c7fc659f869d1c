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
    """``octavo::rotary``."""
    q, k, v, cos, sin, inverse = heads
    result = new_rotary(heads)
    parts = result.unflatten(2, (-1, q.shape[3])).split([q.shape[2], k.shape[2], v.shape[2]], 2)
    for x, part in zip((q, k), parts, strict=False):
        part.copy_(_turned(x.float(), _of_heads(cos, x), _of_heads(sin, x), inverse))
    parts[2].copy_(v)
    return result


def _of_heads(angles: Tensor, x: Tensor) -> Tensor:
    wide = angles.float().unsqueeze(2)
    return wide if wide.shape[3] == x.shape[3] else wide.repeat(1, 1, 1, 2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    (a, b), (c, d), (s, t) = (tensor.chunk(2, -1) for tensor in (x, cos, sin))
    if inverse:
        s, t = -t, -s
    return torch.cat((a * c - b * s, b * d + a * t), -1)
