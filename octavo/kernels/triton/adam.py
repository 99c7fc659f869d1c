"""reference/adam.py in Triton: a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.master_weights import read_master, write_master
from octavo.kernels.triton.optimizer_state import FIRST, SECOND, START, gradient_tile, read_moment, write_moment
from octavo.kernels.triton.random_bits import half, random_bits, with_number
from octavo.kernels.triton.resolution import resolution_tile
from octavo.kernels.triton.tiles import finite_abs


@triton.jit
def lerp(a, b, weight):
    """a + weight (b - a), as torch's."""
    near = weight < 0.5
    factor = tl.where(near, weight, weight - 1.0)
    return tl.fma(tl.zeros_like(a) + factor, b - a, tl.where(near, a, b))


@triton.jit
def adam_weight(w, m, v, n, DECOUPLED: tl.constexpr, CLIP: tl.constexpr):
    """The updated master; unclipped, the operations and their order are torch's."""
    if DECOUPLED:
        w = w * n.kept
    if CLIP:
        u = tl.math.div_rn(m, tl.sqrt_rn(v) * n.correction2_inv + n.eps)
        u = tl.where(u > n.limit, n.limit, tl.where(u < -n.limit, -n.limit, u))
        result = tl.fma(tl.zeros_like(w) + n.rate, u, w)
    else:
        denominator = tl.math.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + n.correction2) + n.eps
        result = w + tl.math.div_rn(m * n.rate, denominator)
    return result


@triton.jit
def saturate(m, v, FIRST_MOMENT: tl.constexpr, SECOND_MOMENT: tl.constexpr):
    """Moments that become codes, within what these are for; a NaN stays one."""
    MOST: tl.constexpr = 2.0**63
    if FIRST_MOMENT.fmt is not None:
        m = tl.where(m > MOST, MOST, tl.where(m < -MOST, -MOST, m))
    if SECOND_MOMENT.fmt is not None:
        v = tl.where(v > MOST * MOST, MOST * MOST, v)
    return m, v


@triton.jit
def adam_tile(row_ptr, gradient, place, n, scales, key, OF: tl.constexpr, STEP: tl.constexpr, MEASURE: tl.constexpr):
    """A tile's step: (the amax found of the first moment, of the second, of the master), and resolution_tile's."""
    MASTER: tl.constexpr = OF.master
    FIRST_MOMENT: tl.constexpr = OF.first
    SECOND_MOMENT: tl.constexpr = OF.second
    w = read_master(row_ptr, place, scales.master_inv, MASTER, OF.even)
    g = gradient_tile(gradient, place, n, scales, w, OF, not STEP.decoupled)
    m = read_moment(row_ptr, FIRST, place, FIRST_MOMENT, OF.even)
    v = read_moment(row_ptr, SECOND, place, SECOND_MOMENT, OF.even)
    m = lerp(m, g, n.weight1)
    v = tl.fma(g * n.square, g, v * n.beta2)
    moved = 0.0
    grid = 0.0
    if STEP.find:
        m, v = saturate(m, v, FIRST_MOMENT, SECOND_MOMENT)
        found1 = tl.max(tl.max(finite_abs(m), 1), 0)
        found2 = tl.max(tl.max(finite_abs(tl.sqrt_rn(v) if SECOND_MOMENT.root else v), 1), 0)
        found_w = 0.0
    else:
        before = w
        w = adam_weight(w, m, v, n, STEP.decoupled, STEP.clip)
        m, v = saturate(m, v, FIRST_MOMENT, SECOND_MOMENT)
        if MEASURE:
            moved, grid = resolution_tile(
                place, before, w, scales.master_inv * 2.0**-9 if MASTER.fmt is not None else 0.0
            )
        start = tl.load(row_ptr + START) + place.base
        bits1 = 0
        bits2 = 0
        bits_w = 0
        if OF.has_random_moment:
            drawn = random_bits(with_number(key, tl.full((), 0, tl.int64)), start, place.offsets, OF.large)
            bits1 = half(drawn, False)
            bits2 = half(drawn, True)
        if MASTER.is_random:
            drawn = random_bits(with_number(key, tl.full((), 1, tl.int64)), start, place.offsets, OF.large)
            bits_w = half(drawn, False)
        found1 = write_moment(row_ptr, FIRST, place, m, bits1, scales.first, FIRST_MOMENT, OF.even)
        found2 = write_moment(row_ptr, SECOND, place, v, bits2, scales.second, SECOND_MOMENT, OF.even)
        found_w = write_master(row_ptr, place, w, bits_w, scales.master, MASTER, OF.even)
    return found1, found2, found_w, moved, grid
