"""amax of each tile: of a tensor by a kernel of its own, of rows and blocks by the casts' kernels, which find it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.triton.cast import amax_by_tile


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``."""
    return amax_by_tile(x, tile)
