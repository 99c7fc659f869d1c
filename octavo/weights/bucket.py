"""BroadcastBucket: what DistributedDataParallel broadcasts of weights that are stored in FP8, from rank 0."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from octavo.tensor.pair import Facade

aten = torch.ops.aten

FLATTENED = """FSDP1 and DeepSpeed, which flatten weights, can't shard one that is stored in FP8: use \
torch.distributed.fsdp.fully_shard (FSDP2), or leave weights in high precision (weight_storage=None)"""


class BroadcastBucket(Facade):
    """A vector of the weights in ``pieces``, which DistributedDataParallel joins, broadcasts and cuts again.

    Nothing else may be done with it: no vector can hold codes and scales, see ``REMEDY``.
    """

    REMEDY = (
        "of a vector of parameters, of which some are stored in FP8: make one of their values, parameters_to_vector("
        f"weight.dequantize() for weight in model.parameters()), or call octavo.restore(model) first. {FLATTENED}"
    )
    pieces: list[Any]

    @staticmethod
    def __new__(cls, pieces: list[Any]) -> BroadcastBucket:
        size, first = sum(piece.numel() for piece in pieces), pieces[0]
        self = torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=first.dtype, device=first.device)
        self.pieces = pieces
        return self


def join(func: Any, tensors: list[Tensor], dim: int = 0) -> Any:
    """Join vectors: of copies, as torch.cat's result is."""
    pieces = [piece.clone() for one in tensors for piece in getattr(one, "pieces", [one])]
    return BroadcastBucket(pieces) if all(one.ndim == 1 for one in tensors) else NotImplemented


def _view(func: Any, bucket: BroadcastBucket, size: Any) -> Any:
    if len(bucket.pieces) == 1:
        return func(bucket.pieces[0], size)
    return BroadcastBucket(bucket.pieces) if tuple(size) in ((-1,), tuple(bucket.shape)) else NotImplemented


def _slice(func: Any, bucket: BroadcastBucket, dim: int = 0, start: int = 0, stop: int = 0) -> Any:
    """Cut out one piece."""
    ends = itertools.accumulate(piece.numel() for piece in bucket.pieces)
    pieces = zip(bucket.pieces, ends, strict=True)
    matching = (BroadcastBucket([piece]) for piece, end in pieces if (end - piece.numel(), end) == (start, stop))
    return next(matching, NotImplemented)


def _broadcast(func: Any, tensors: list[BroadcastBucket], *arguments: Any) -> Any:
    work = None
    for piece in tensors[0].pieces:
        if work is not None:
            work.wait()
        _, work = func([piece], *arguments)
    return tensors, work


BroadcastBucket.RULES = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda func, bucket: BroadcastBucket(bucket.pieces)),
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.cat.default: join,
}

if torch.distributed.is_available():  # some builds of torch have none
    BroadcastBucket.RULES[torch.ops.c10d.broadcast_.default] = _broadcast
