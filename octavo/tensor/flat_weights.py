"""FlatWeights: what torch's vectors of parameters are where some of these live in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.tensor.pair import Facade

aten = torch.ops.aten

WRITES = (aten.uniform_.default, aten.normal_.default, aten.fill_.Scalar, aten.zero_.default)


class FlatWeights(Facade):
    """A vector [sum of elements] over ``pieces``, of any shapes.

    One piece is the weight itself, to which writes go; several are copies, as torch.cat's result is.
    """

    REMEDY = "of a vector of parameters, of which some are stored in FP8: read it with .dequantize()"
    pieces: list[Any]

    @staticmethod
    def __new__(cls, pieces: list[Any]) -> FlatWeights:
        size, first = sum(piece.numel() for piece in pieces), pieces[0]
        self = torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=first.dtype, device=first.device)
        self.pieces = pieces
        return self

    def dequantize(self) -> Tensor:
        """Its values as a plain vector."""
        plain = [piece.dequantize() if isinstance(piece, Facade) else piece for piece in self.pieces]
        return torch.cat([piece.detach().reshape(-1) for piece in plain])


def flat_cat(func: Any, tensors: list[Tensor], dim: int = 0) -> Any:
    """The rule of torch.cat of vectors."""
    pieces = [piece for one in tensors for piece in getattr(one, "pieces", [one])]
    return FlatWeights([piece.clone() for piece in pieces]) if all(one.ndim == 1 for one in tensors) else NotImplemented


def _view(func: Any, flat: FlatWeights, size: Any) -> Any:
    if tuple(size) in ((-1,), tuple(flat.shape)):
        return FlatWeights(flat.pieces)
    return func(flat.pieces[0], size) if len(flat.pieces) == 1 else NotImplemented


def _slice(func: Any, flat: FlatWeights, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    """Of whole pieces."""
    at, found = 0, []
    start, stop, _ = slice(start, stop).indices(flat.numel())
    for piece in flat.pieces:
        if start <= at and at + piece.numel() <= stop:
            found.append(piece)
        at += piece.numel()
    if not found or step != 1 or sum(piece.numel() for piece in found) != stop - start:
        return NotImplemented
    return FlatWeights(found) if len(found) > 1 or isinstance(found[0], Facade) else found[0]


def _broadcast(func: Any, tensors: list[FlatWeights], *arguments: Any) -> Any:
    work = None
    for piece in tensors[0].pieces:
        if work is not None:
            work.wait()
        _, work = func([piece], *arguments)
    return tensors, work


def _write(func: Any, flat: Any, *arguments: Any) -> Any:
    """The rule of writes: of values, a scalar's or another vector's, which its one piece takes."""
    if not isinstance(flat, FlatWeights) or len(flat.pieces) > 1:
        return NotImplemented
    func(flat.pieces[0], *(one.view(flat.pieces[0].shape) if isinstance(one, Tensor) else one for one in arguments))
    return flat


FlatWeights.RULES = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda func, flat: FlatWeights(flat.pieces)),
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.cat.default: flat_cat,
    **dict.fromkeys((aten.copy_.default, *WRITES), _write),
}
if torch.distributed.is_available():  # some builds of torch have none
    FlatWeights.RULES[torch.ops.c10d.broadcast_.default] = _broadcast
