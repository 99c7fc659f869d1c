"""Read a pair back: value = qdata x scale_inv."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.reference.codes import decode
from octavo.kernels.reference.tiles import as_tiles, from_tiles, over_tiles


def dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``octavo::dequantize``."""
    return times_scale_inv(decode(qdata, torch.float32), scale_inv, tile).to(dtype).contiguous()


def times_scale_inv(values: Tensor, scale_inv: Tensor, tile: Sequence[int]) -> Tensor:
    """values [R, C] times each tile's scale_inv, rounded to their dtype; in place where no tile is ragged."""
    if all(size == ALL or size == 1 for size in tile):
        return values.mul_(scale_inv)
    tiled = as_tiles(values, tile)
    return from_tiles(tiled.mul_(over_tiles(scale_inv)), values.shape)
