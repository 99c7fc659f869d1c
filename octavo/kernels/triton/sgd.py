"""reference/sgd.py in Triton: a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.master_weights import read_master, write_master
from octavo.kernels.triton.optimizer_state import FIRST, START, gradient_tile, read_moment, write_moment
from octavo.kernels.triton.random_bits import half, random_bits
from octavo.kernels.triton.tiles import finite_abs


@triton.jit
def sgd_tile(
    row_ptr,
    gradient,
    place,
    n,
    scales,
    key,
    CLASSES: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FIND: tl.constexpr,
):
    """A tile's step: (the amax found of the momentum, 0, 0)."""
    WEIGHT: tl.constexpr = CLASSES[I + 1]
    MASTER: tl.constexpr = CLASSES[I + 2]
    EVEN: tl.constexpr = CLASSES[I + 3] % 2 == 1
    KIND: tl.constexpr = CLASSES[I + 5]
    STOCHASTIC: tl.constexpr = CLASSES[I + 7]
    w = read_master(row_ptr, place, scales.master_inv, WEIGHT, MASTER, EVEN)
    g = gradient_tile(gradient, place, n, scales, w, CLASSES[I], EVEN, True)
    update = g
    average = g
    if KIND != 0:
        stored = read_moment(row_ptr, FIRST, place, KIND, False, CLASSES[I + 8], EVEN)
        average = tl.where(n.is_first, g, tl.fma(tl.zeros_like(g) + n.new, g, stored * n.momentum))
        update = tl.where(n.nesterov, tl.fma(tl.zeros_like(g) + n.momentum, average, g), average)
    found = 0.0
    if FIND:
        found = tl.max(tl.max(finite_abs(average), 1), 0)
    else:
        w = tl.fma(tl.zeros_like(w) + n.lr, update, w)
        bits = 0
        bits_w = 0
        if STOCHASTIC or (MASTER >= 2 and MASTER != 8):
            start = tl.load(row_ptr + START) + place.base
            drawn = random_bits(key, start, place.offsets, CLASSES[I + 4])
            bits = half(drawn, False)
            bits_w = half(drawn, True)
        if KIND != 0:
            found = write_moment(
                row_ptr, FIRST, place, average, bits, scales.first, KIND, False, STOCHASTIC, CLASSES[I + 8], EVEN
            )
        write_master(row_ptr, place, w, bits_w, scales.master, WEIGHT, MASTER, EVEN)
    return found, 0.0, 0.0
