"""reference/sgd.py in Triton, for a tile; n: SgdNumbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sgd_moment(momentum, g, n):
    """The momentum after a gradient."""
    return tl.where(n.is_first, g, tl.fma(tl.zeros_like(g) + n.new, g, momentum * n.momentum))


@triton.jit
def sgd_weight(w, momentum, g, n, HAS_MOMENTUM: tl.constexpr):
    """The updated master."""
    update = g
    if HAS_MOMENTUM:
        update = tl.where(n.nesterov, tl.fma(tl.zeros_like(g) + n.momentum, momentum, g), momentum)
    return tl.fma(tl.zeros_like(w) + n.lr, update, w)
