"""reference/sgd.py in Triton: a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.master_weights import read_master, write_master
from octavo.kernels.triton.optimizer_state import FIRST, START, gradient_tile, read_moment, write_moment
from octavo.kernels.triton.random_bits import half, random_bits
from octavo.kernels.triton.resolution import resolution_tile
from octavo.kernels.triton.tiles import finite_abs


@triton.jit
def sgd_tile(row_ptr, gradient, place, n, scales, key, OF: tl.constexpr, FIND: tl.constexpr, MEASURE: tl.constexpr):
    """A tile's step: (the amax found of the momentum, 0, 0), and resolution_tile's."""
    MASTER: tl.constexpr = OF.master
    MOMENTUM: tl.constexpr = OF.first
    w = read_master(row_ptr, place, scales.master_inv, MASTER, OF.even)
    g = gradient_tile(gradient, place, n, scales, w, OF, True)
    update = g
    average = g
    if MOMENTUM.dtype is not None:
        stored = read_moment(row_ptr, FIRST, place, MOMENTUM, OF.even)
        average = tl.where(n.is_first, g, tl.fma(tl.zeros_like(g) + n.new, g, stored * n.momentum))
        update = tl.where(n.nesterov, tl.fma(tl.zeros_like(g) + n.momentum, average, g), average)
    found = 0.0
    moved = 0.0
    grid = 0.0
    if FIND:
        found = tl.max(tl.max(finite_abs(average), 1), 0)
    else:
        before = w
        w = tl.fma(tl.zeros_like(w) + n.lr, update, w)
        if MEASURE:
            moved, grid = resolution_tile(place, before, w, 0.0)
        bits = 0
        bits_w = 0
        if OF.is_random:
            start = tl.load(row_ptr + START) + place.base
            drawn = random_bits(key, start, place.offsets, OF.large)
            bits = half(drawn, False)
            bits_w = half(drawn, True)
        if MOMENTUM.dtype is not None:
            found = write_moment(row_ptr, FIRST, place, average, bits, scales.first, MOMENTUM, OF.even)
        write_master(row_ptr, place, w, bits_w, scales.master, MASTER, OF.even)
    return found, 0.0, 0.0, moved, grid
