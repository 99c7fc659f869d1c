"""amax of each tile: of a tensor by a kernel of its own, of rows and blocks by the casts' kernels, which find it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.reference.amax import amax as reference_amax
from octavo.kernels.triton.cast import NO_CODES, cast_by_tile
from octavo.kernels.triton.cast_input import CastInput
from octavo.kernels.triton.cast_tensor import find_amax


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``."""
    given, scaling = CastInput(x, *x.shape), NO_CODES._replace(tile=(tile[0], tile[1]))
    if not given.fits(scaling.tile):
        return reference_amax(x, tile)
    out = given.outputs(scaling)
    if scaling.tile == (ALL, ALL):
        find_amax(given, out.amax)
    else:
        cast_by_tile(given, scaling, out, False)
    return out.amax
