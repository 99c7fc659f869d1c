"""The granularities by which weights are stored in FP8, and the ranks over which such a weight can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.granularity import ALL, BLOCK, MX, Granularity, PerBlock, PerRow, PerTensor

STORABLE = (PerTensor(), PerBlock(BLOCK, BLOCK))  # elements of a weight in FP8 that share a scale
FROZEN_ONLY = (PerRow(), PerBlock(*MX))  # of frozen weights too: backward's product needs other codes than forward's


def granularity_of_scales(shape: Sequence[int], scales: Sequence[int]) -> Granularity | None:
    """Return the granularity of a weight [N, K] or [E, N, K] by the shape of its scales; None if they don't fit.

    Where two granularities have the same shape, they mean the same elements, and this is the first of them: of a weight
    that is one block PerTensor().
    """
    matching = (one for one in STORABLE + FROZEN_ONLY if one.of_matrices(shape).scale_shape(shape) == tuple(scales))
    return next(matching, None)


def stored_granularity(granularity: Granularity, shape: Sequence[int]) -> Granularity:
    """Return how a weight (or experts) that a recipe scales so is stored: PerTensor() if one block covers a matrix."""
    if granularity in FROZEN_ONLY:  # their scales have dtypes of their own
        return granularity
    return granularity_of_scales(shape, granularity.of_matrices(shape).scale_shape(shape)) or granularity


def why_not_shardable(shape: Sequence[int], granularity: Granularity, ranks: int, dim: int = 0) -> str | None:
    """Return why a weight [N, K] of this granularity can't be cut over ranks by rows (columns: ``dim`` 1), or None."""
    size, each, step = shape[dim], -(-shape[dim] // ranks), granularity.tile[dim]
    each_has_whole_blocks = step != ALL and each % step == 0 and size % each == 0
    if granularity == PerTensor() or each == size or each_has_whole_blocks:
        return None
    what = "rows" if dim == 0 else "columns"
    if granularity in FROZEN_ONLY:
        return (
            f"a weight {tuple(shape)} stored {granularity} can't be sharded over {ranks} ranks by its {what}: shard it "
            f"by rows over ranks that each get as many{'' if step == ALL else f', by columns in multiples of {step}'}"
        )
    return (
        f"a weight {tuple(shape)} stored in blocks of 128 x 128 can't be sharded over {ranks} ranks: {each} {what} "
        "each are no whole blocks, or the last rank has fewer. Shard over ranks that each get the same multiple of "
        f"128 {what} (HSDP), or use a recipe with one scale a weight (dynamic, delayed)"
    )


def why_cut_blocks(weight: Any, granularity: Granularity) -> str | None:
    """Return why a DTensor can't be stored by this granularity, if its shards would cut blocks; or None."""
    ranks = [1] * max(weight.ndim, 2)
    for mesh_dim, placement in enumerate(getattr(weight, "placements", ())):
        if (dim := getattr(placement, "dim", None)) is not None:
            ranks[dim] *= weight.device_mesh.size(mesh_dim)
    if weight.ndim == 3:
        return uneven_experts(weight) if weight.shape[0] % ranks[0] or max(ranks[1:]) > 1 else None
    reasons = [why_not_shardable(weight.shape, granularity, count, dim) for dim, count in enumerate(ranks)]
    return reasons[0] or reasons[1]


def uneven_experts(weight: Any) -> str:
    """Return why these experts can't be sharded in other ways than as many on each rank."""
    return (
        f"{weight.shape[0]} experts that are stored in FP8 are sent with their scales, which FSDP2 takes of ranks that "
        "have as many each: shard by experts, Shard(0), over a number of ranks that divides them (HSDP)"
    )


def first_reason(*reasons: tuple[bool, str]) -> str | None:
    """Return the first reason that applies, of pairs (whether it applies, the reason), or None."""
    return next((reason for applies, reason in reasons if applies), None)
