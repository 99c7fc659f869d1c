"""A sharded weight cast to FP8 where its rows lie, with the scale of the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import kernels
from octavo.formats import E4M3
from octavo.granularity import Granularity, PerTensor
from octavo.kernels.reference.fp8_weights import remainder_of
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.tensor.quantize import quantize
from octavo.tensor.sharded_weight import largest_of_ranks
from octavo.tensor.stored_weight import StoredWeight


def cast_shard(values: Tensor, weight: Tensor, granularity: Granularity, dtype: torch.dtype) -> StoredWeight:
    """Some rows of a sharded weight in FP8, with the scale that the whole one's amax gives: all ranks call it.

    Args:
        values: high-precision [n, K], this rank's rows.
        weight: the DTensor.
        granularity: of GRANULARITIES.
        dtype: what it stands for.
    """
    values = values.detach().contiguous()
    if granularity != PerTensor():
        pair = quantize(values, E4M3, granularity, power_of_two=True)
        codes, scale_inv = pair.qdata, pair.scale_inv
    else:
        codes, scale_inv = _cast_with_ranks(values, weight)
    part = StoredWeight(codes, scale_inv, dtype, granularity, is_shard=True)
    if weight.requires_grad:
        part.rest = remainder_of(values, codes.view(torch.uint8), scale_inv)
    return part


def _cast_with_ranks(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale_inv) with one scale for all ranks' parts."""
    tile = PerTensor().tile
    amax = kernels.amax(values, tile) if values.numel() else values.new_zeros(1, 1, dtype=torch.float32)
    scale = scale_from_amax(largest_of_ranks(amax, weight), E4M3.max, True, 0)
    codes = torch.empty_like(values, dtype=E4M3.dtype)
    if values.numel():
        codes, *_ = kernels.cast(values, scale.view(1), 0, E4M3.dtype, tile, True, 0, 1, False)
    return codes, scale_inv_from_scale(scale).view(1, 1)
