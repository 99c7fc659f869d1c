"""reference/adam.py in Triton, for a tile; n: AdamNumbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lerp(a, b, weight, IS_SMALL: tl.constexpr):
    """a + weight (b - a), as torch's; IS_SMALL: the weight is known to be below a half."""
    near = weight < 0.5
    factor = weight if IS_SMALL else tl.where(near, weight, weight - 1.0)
    return tl.fma(tl.zeros_like(a) + factor, b - a, a if IS_SMALL else tl.where(near, a, b))


@triton.jit
def adam_moments(m, v, g, n, IS_SMALL: tl.constexpr):
    """The moments after a gradient; IS_SMALL: as ``lerp``'s."""
    return lerp(m, g, n.weight1, IS_SMALL), tl.fma(g * n.square, g, v * n.beta2)


@triton.jit
def adam_weight(w, m, root, n, DECOUPLED: tl.constexpr, CLIP: tl.constexpr):
    """The updated master; unclipped, the operations and their order are torch's. ``root``: of the second moment."""
    if DECOUPLED:
        w = w * n.kept
    if CLIP:
        u = tl.math.div_rn(m, root * n.correction2_inv + n.eps)
        u = tl.clamp(u, -n.limit, n.limit, tl.PropagateNan.ALL)
        result = tl.fma(tl.zeros_like(w) + n.rate, u, w)
    else:
        denominator = tl.math.div_rn(root, tl.zeros_like(root) + n.correction2) + n.eps
        result = w + tl.math.div_rn(m * n.rate, denominator)
    return result


@triton.jit
def saturate(m, v, FIRST_MOMENT: tl.constexpr, SECOND_MOMENT: tl.constexpr):
    """What is stored of moments that become codes, v's root where that is, within what codes are for; NaN stays NaN."""
    MOST: tl.constexpr = 2.0**63
    if FIRST_MOMENT.fmt is not None:
        m = tl.clamp(m, -MOST, MOST, tl.PropagateNan.ALL)
    if SECOND_MOMENT.fmt is not None:
        v = tl.minimum(v, MOST if SECOND_MOMENT.root else MOST * MOST, tl.PropagateNan.ALL)
    return m, v
