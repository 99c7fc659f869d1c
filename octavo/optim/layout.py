"""Where the shard of a weight lies in the whole of it, and how what is kept beside it is sharded.

A weight is a matrix of its first dimension by all others. Ranks may share its rows (FSDP2, ColwiseParallel), its
columns (RowwiseParallel: the second dimension), or both, over as many dimensions of a mesh. Blocks of 128 along a row
are the same on any number of ranks: of a weight whose blocks ranks would share moments are not in codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.kernels.layouts import BLOCK, blocks_of
from octavo.tensor.sharded_weight import like_sharded, on_this_rank
from octavo.tensor.stored_weight import local_stored


class Place(NamedTuple):
    """Of the whole matrix: the row and column that a shard begins with, and how many columns a row has."""

    first_row: int
    first_col: int
    row_length: int


def sharded_dims(tensor: Tensor) -> Iterator[tuple[int, int, Any]]:
    """(dimension of the tensor, of the mesh, placement) of each sharding; none of a plain or replicated tensor."""
    for mesh_dim, placement in enumerate(getattr(tensor, "placements", ())):
        if not placement.is_replicate():
            yield getattr(placement, "dim", 0) % max(tensor.ndim, 1), mesh_dim, placement


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks have parts of it."""
    return any(True for _ in sharded_dims(tensor))


def is_sharded_vector(param: Tensor) -> bool:
    """Whether it is one: kernels take it as a column, so that an element's index is that of the whole vector."""
    return param.ndim < 2 and is_sharded(param)


def ranks_share_blocks(param: Tensor) -> bool:
    """Whether a block of 128 may lie on several ranks: of a vector, or of columns in no multiples of 128."""
    inner = math.prod(param.shape[2:])
    for dim, mesh_dim, _ in sharded_dims(param):
        if dim == 1:
            columns = -(-param.shape[1] // param.device_mesh.size(mesh_dim))  # type: ignore[attr-defined]
            return columns < param.shape[1] and columns * inner % BLOCK != 0
    return is_sharded_vector(param)


def check_layout(param: Tensor) -> None:
    """Raise ValueError for a weight whose shards are neither rows nor columns."""
    found = list(sharded_dims(param))
    columns = [dim for dim, *_ in found if dim]
    if any(placement.is_partial() for _, _, placement in found):
        raise ValueError(f"a weight with placements {param.placements}: its values are sums over ranks")  # type: ignore[attr-defined]
    if columns not in ([], [1]):
        raise ValueError(
            f"a weight {tuple(param.shape)} with placements {param.placements}: octavo's optimizers take rows (the "  # type: ignore[attr-defined]
            "first dimension) over any dimensions of a mesh, and columns (the second) over one"
        )


def is_apart(weight: Tensor) -> bool:
    """Whether a weight, or this rank's part of it, is experts in FP8 [E, N, K], each with scales of its own."""
    return weight.ndim == 3 and local_stored(weight) is not None


def place_of(param: Tensor) -> Place:
    """Where this rank's shard of a weight lies in the matrix; of a sharded vector in one of one column.

    The matrix of experts in FP8 is [E * N, K].
    """
    if is_apart(param):
        first = param.__create_chunk_list__()[0].offsets[0] if is_sharded(param) else 0  # type: ignore[attr-defined]
        return Place(first * param.shape[1], 0, param.shape[2])
    columns = 1 if is_sharded_vector(param) else math.prod(param.shape[1:] if param.ndim > 1 else param.shape)
    if not is_sharded(param):
        return Place(0, 0, columns)
    row, *rest = param.__create_chunk_list__()[0].offsets  # type: ignore[attr-defined]
    return Place(row, rest[0] * math.prod(param.shape[2:]) if rest else 0, columns)


def like_param(tensor: Tensor, param: Tensor) -> Tensor:
    """A tensor of this rank's state as a sharded one, where the weight is: so that checkpoints can reshard it."""
    own = on_this_rank(param).shape
    if getattr(param, "placements", None) is None or tensor.shape[:1] != own[:1]:
        return tensor
    if tensor.shape[: param.ndim] == own:
        return like_sharded(tensor, param, torch.Size((*param.shape, *tensor.shape[param.ndim :])))
    if all(dim == 0 for dim, *_ in sharded_dims(param)):
        return like_sharded(tensor, param, torch.Size((param.shape[0], *tensor.shape[1:])))
    blocks = blocks_of(math.prod(param.shape[1:]))  # it has a scale for each
    return like_sharded(tensor, param, torch.Size((param.shape[0], blocks)))


def like_gradient(whole: Tensor, local: Tensor) -> Tensor:
    """A rank's shard of a gradient, sharded as the gradient is."""
    if getattr(whole, "placements", None) is None:
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = whole.device_mesh, whole.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def bytes_of_shard(tensor: Tensor) -> int:
    """Bytes of the largest shard that a rank has of a tensor, which all ranks count alike; of a plain one its own."""
    shape = list(tensor.shape)
    for dim, mesh_dim, _ in sharded_dims(tensor):
        shape[dim] = -(-shape[dim] // tensor.device_mesh.size(mesh_dim))  # type: ignore[attr-defined]
    return math.prod(shape) * tensor.element_size()


def settle_gradient(param: nn.Parameter) -> Tensor | None:
    """A weight's gradient, from now on as the weight lies: torch leaves a replicated norm's as sums of ranks' tokens.

    Where it does not yet, all ranks of the mesh take part.
    """
    grad, placements = param.grad, getattr(param, "placements", None)
    if grad is not None and placements is not None and getattr(grad, "placements", placements) != placements:
        param.grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
    return param.grad
