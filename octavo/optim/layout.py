"""Where a shard lies in the whole weight, how the weight's state is sharded, and how its ranks share amaxes.

A weight is seen as a matrix of its first dimension by all others. Ranks may share its rows (FSDP2, ColwiseParallel),
its columns (RowwiseParallel: the second dimension), or both, over as many dimensions of a mesh. Moments in codes have
blocks of 128 along a row, the same on any number of ranks; if a block would lie on several, moments have no codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.granularity import BLOCK
from octavo.kernels.layouts import blocks_in_row
from octavo.private import is_dtensor
from octavo.tensor.collectives import check_ranks_agree, maximum_over_ranks
from octavo.weights.fsdp2 import groups_of, is_sharded, like_sharded, on_this_rank, own_slices, sharded_dims
from octavo.weights.stored import StoredWeight, local_stored


def is_sharded_vector(param: Tensor) -> bool:
    """Whether a parameter is a sharded vector: kernels take it as a column, so its indices are the whole vector's."""
    return param.ndim < 2 and is_sharded(param)


def ranks_share_blocks(param: Tensor) -> bool:
    """Whether a block of 128 may lie on several ranks: of a vector, or if shards' columns are no multiples of 128."""
    if (mesh_dim := dict(sharded_dims(param)).get(1)) is None:
        return is_sharded_vector(param)
    columns = -(-param.shape[1] // param.device_mesh.size(mesh_dim))  # type: ignore[attr-defined]
    return columns < param.shape[1] and columns * math.prod(param.shape[2:]) % BLOCK != 0


def check_layout(param: Tensor) -> None:
    """Raise ValueError for a weight whose shards are neither rows nor columns."""
    columns = [dim for dim, _ in sharded_dims(param) if dim]
    if any(placement.is_partial() for placement in getattr(param, "placements", ())):
        raise ValueError(f"a weight with placements {param.placements}: its values are sums over ranks")  # type: ignore[attr-defined]
    if columns not in ([], [1]):
        raise ValueError(
            f"a weight {tuple(param.shape)} with placements {param.placements}: octavo's optimizers take rows (the "  # type: ignore[attr-defined]
            "first dimension) over any dimensions of a mesh, and columns (the second) over one"
        )


def is_fp8_experts(weight: Tensor) -> bool:
    """Whether a weight, or this rank's shard, is experts in FP8 [E, N, K], each with scales of its own."""
    return weight.ndim == 3 and local_stored(weight) is not None


def fp8_shards(weights: Iterable[Tensor]) -> list[StoredWeight]:
    """Return those of these weights, or of this rank's shards of them, that live in FP8."""
    return [shard for weight in weights if (shard := local_stored(weight)) is not None]


class Place(NamedTuple):
    """The place where a shard begins in its weight's matrix, and the number of columns of that."""

    first_row: int
    first_column: int
    row_length: int


def place_of(param: Tensor) -> Place:
    """Return the place of this rank's shard in the weight's matrix: [E * N, K] of experts in FP8, [n, 1] of a vector.

    A vector that is not sharded is one row.
    """
    starts = [dimension.start for dimension in own_slices(param.shape, param)]
    first_row = starts[0] if starts else 0
    if is_fp8_experts(param):
        return Place(first_row * param.shape[1], 0, param.shape[2])
    first_column = starts[1] * math.prod(param.shape[2:]) if len(starts) > 1 else 0
    columns = 1 if is_sharded_vector(param) else math.prod(param.shape[1:] if param.ndim > 1 else param.shape)
    return Place(first_row, first_column, columns)


def like_param(tensor: Tensor, param: Tensor) -> Tensor:
    """Shard a tensor of this rank's state as the weight is sharded, so that checkpoints can reshard it."""
    shard_shape = on_this_rank(param).shape
    if tensor.shape[:1] != shard_shape[:1]:
        return tensor
    if tensor.shape[: param.ndim] == shard_shape:
        whole = *param.shape, *tensor.shape[param.ndim :]
    elif all(dim == 0 for dim, _ in sharded_dims(param)):
        whole = param.shape[0], *tensor.shape[1:]
    else:  # the tensor has a scale for each block
        whole = param.shape[0], blocks_in_row(math.prod(param.shape[1:]))
    return like_sharded(tensor, param, torch.Size(whole))


def bytes_of_shard(tensor: Tensor) -> int:
    """Return the bytes of a tensor's largest shard, so that all ranks count the same; of a plain tensor its bytes."""
    shape = list(tensor.shape)
    for dim, mesh_dim in sharded_dims(tensor):
        shape[dim] = -(-shape[dim] // tensor.device_mesh.size(mesh_dim))  # type: ignore[attr-defined]
    return math.prod(shape) * tensor.element_size()


def settle_gradient(param: nn.Parameter) -> Tensor | None:
    """Return a weight's gradient, after giving it the weight's placements; collective if it has others.

    For a replicated norm torch leaves each rank with the sum over its own tokens.
    """
    weight: Any = param
    if is_dtensor(weight) and is_dtensor(weight.grad) and weight.grad.placements != weight.placements:
        weight.grad = weight.grad.redistribute(placements=weight.placements)
    return param.grad


def ranks_share_amax(param: Tensor) -> bool:
    """Whether ranks must agree on a parameter's amax: their shards live in FP8 with one scale for all."""
    shard = local_stored(param)  # each expert lies whole on one rank, and so has no scale that is shared
    return shard is not None and shard.has_one_scale and any(group.size() > 1 for group in groups_of(param))


@torch.no_grad()
def share_amaxes(params: Iterable[nn.Parameter], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Write the maxima over ranks of masters' amaxes to the states of these weights, sharded in FP8 with one scale.

    The next scale is computed before the update, from that amax and the most that a step can add. Each rank has found
    the amax of its shard; one collective for each layout, of 4 bytes a weight, finds the largest. On a GPU the device
    waits for it, not the host.

    All of these weights take part, in their order, even without gradients, so that ranks call the same collectives; a
    state without a ``master_amax`` [1, 1] takes part with 0.
    """
    params_by_groups: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        params_by_groups.setdefault(groups_of(param), []).append(param)
    for groups, params_here in params_by_groups.items():
        device = params_here[0].device_mesh.device_type  # type: ignore[attr-defined]
        none_yet = torch.zeros(1, 1, device=device, dtype=torch.float32)
        amaxes = [states.get(param, {}).get("master_amax", none_yet) for param in params_here]
        largest = maximum_over_ranks(torch.cat([amax.to(device) for amax in amaxes]), *groups)
        for amax, largest_amax in zip(amaxes, largest, strict=True):
            amax.copy_(largest_amax.view(1, 1))


def check_options_agree(optimizer: Any) -> None:
    """Raise RanksDifferError if ranks that share an optimizer's weights or replicas of shards have other options."""
    meshes: Any = dict.fromkeys(param.device_mesh for param in optimizer.all_params() if is_sharded(param))
    if groups := dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()):
        name = type(optimizer).__name__
        check_ranks_agree({f"{name}'s {key}": value for key, value in optimizer.shared_options().items()}, groups)
