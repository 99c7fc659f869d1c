"""A 2-D tensor seen as tiles, so that one scale broadcasts over its tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.granularity import ALL, tiles_along


def as_tiles(x_RC: Tensor, tile: Sequence[int]) -> Tensor:
    """View [R, C] as [R / r, r, C / c, c]; a copy padded with zeros where a tile is ragged."""
    rows, cols = x_RC.shape
    r = rows if tile[0] == ALL else tile[0]
    c = cols if tile[1] == ALL else tile[1]
    n_r, n_c = tiles_along(rows, tile[0]), tiles_along(cols, tile[1])
    if (rows, cols) != (n_r * r, n_c * c):
        x_RC = torch.nn.functional.pad(x_RC, (0, n_c * c - cols, 0, n_r * r - rows))
    return x_RC.unflatten(1, (n_c, c)).unflatten(0, (n_r, r))


def from_tiles(tiled: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo ``as_tiles``: [R / r, r, C / c, c] -> [R, C], a view."""
    return tiled.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]


def over_tiles(scale: Tensor) -> Tensor:
    """A scale tensor [R / r, C / c] shaped to broadcast over ``as_tiles``."""
    return scale[:, None, :, None]
