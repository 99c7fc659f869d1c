"""How far an update moves weights, beside the grid that E4M3 has for them: what tells when FP8 has become too coarse.

The grid's step at a weight w is 2^(floor(log2 |w|) - 3), and no less than the smallest step at the weight's scale where
it lives in FP8. Rounding to it is noise of step / sqrt(12).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.master_weights import Fp8Weight, Master
from octavo.kernels.reference.optimizer_state import Piece

SMALLEST = 2.0**-9  # E4M3's step at scale 1


def add_resolution(sums: Tensor, piece: Piece, before: Tensor, after: Tensor, master: Master) -> None:
    """Add a piece's squares of updates and of the grid's steps to float64 [2].

    ``before``, ``after``: the master's piece in float32. Elements that are not finite count for nothing.
    """
    moved = after - before
    grid = (before.view(torch.int32) & 0x7F800000).view(torch.float32) * 0.125
    if isinstance(master, Fp8Weight):
        grid = torch.maximum(grid, master.scale_inv_of(piece) * SMALLEST)
    is_finite = torch.isfinite(moved) & torch.isfinite(before)
    for place, values in enumerate((moved, grid)):
        sums[place] += values.masked_fill(~is_finite, 0.0).square_().sum(dtype=torch.float64)
