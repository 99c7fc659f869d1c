"""reference/resolution.py in Triton: a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def resolution_tile(place, before, after, smallest):
    """(sum of squares of the updates, of the grid's steps); ``smallest``: of these, 0 for a weight without a scale."""
    moved = after - before
    exponent = before.to(tl.int32, bitcast=True) & 0x7F800000
    grid = tl.maximum(exponent.to(tl.float32, bitcast=True) * 0.125, tl.zeros_like(before) + smallest)
    is_finite = place.inside & (tl.abs(moved) < float("inf")) & (tl.abs(before) < float("inf"))
    moved = tl.where(is_finite, moved, 0.0)
    grid = tl.where(is_finite, grid, 0.0)
    return tl.sum(tl.sum(moved * moved, 1), 0), tl.sum(tl.sum(grid * grid, 1), 0)


@triton.jit
def add_resolution(sums_ptr, moved, grid):
    """Add a program's sums to float64 [2]."""
    tl.atomic_add(sums_ptr, moved.to(tl.float64), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, grid.to(tl.float64), sem="relaxed")
