"""amax: the largest absolute finite value of each tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.granularity import Tile, scale_shape
from octavo.kernels.arguments import laid_scales
from octavo.kernels.layouts import as_tiles


def amax_of(x: Tensor, tile: Sequence[int]) -> Tensor:
    """An element a tile, float32."""
    shape = scale_shape(x.shape, tile)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    x_RC = torch.where(x.isfinite(), x, 0).to(torch.float32).abs_().view(-1, x.shape[-1])
    return as_tiles(x_RC, tile).amax(dim=(1, 3)).view(shape)


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``; see signatures.py."""
    return laid(amax_of(x, tile), (tile[0], tile[1]))


def laid(found: Tensor, tile: Tile, transpose: bool = False) -> Tensor:
    """An element a tile as the ops return it."""
    given = found.t() if transpose else found
    out = laid_scales(given, found.shape, tile, transpose)
    return given if not transpose and given.stride() == out.stride() else out.copy_(given)
