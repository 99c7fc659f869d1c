"""amax of each tile: of a tensor by a kernel of its own, of rows and blocks by the casts' kernels, which find it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.reference.amax import amax as reference_amax
from octavo.kernels.triton.cast import NO_CODES, cast_by_tile
from octavo.kernels.triton.cast_input import CastInput, codes_to
from octavo.kernels.triton.cast_tensor import amax_of


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``."""
    given, tile = CastInput(x, *x.shape), (tile[0], tile[1])
    if tile == (ALL, ALL):
        return amax_of(given)
    if not given.fits(tile):
        return reference_amax(x, tile)
    return cast_by_tile(given, NO_CODES._replace(tile=tile), codes_to(None), False)[1]
