"""What products read, of which each rank of a tensor-parallel group had some of the tokens.

GatheredInput is the input of a layer, to which gradients flow; GatheredGradient the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedOpError
from octavo.tensor.pair import ForProducts, Operands

_REMEDY = (
    "of an input that was gathered in FP8: octavo's layers under octavo.distributed.ColwiseParallel read it. Where "
    "others do too, gather it by torch's own PrepareModuleInput"
)


class Wire(NamedTuple):
    """How tokens are gathered and scattered: by the process group of this name, of so many ranks.

    ``runs``: how many runs of consecutive tokens a rank's rows are, one for each sequence where these are sharded.
    ``exact``: whether grad_weight reads what was never rounded before. ``reduce``: what makes sums of a group's ranks,
    of all parts one after the other along dimension 0, this rank's part; None: they are in the tensor's dtype.
    ``memo``: what the first reader of an exact input has gathered in backward, for the others; None in compiled graphs.
    """

    group: str
    ranks: int
    runs: int
    exact: bool = False
    reduce: Callable[[Tensor, str], Tensor] | None = None
    memo: list[tuple[Tensor, Tensor]] | None = None


class GatheredInput:
    """What a layer takes in place of a whole input [..., K] that only its pairs are there of.

    It is no tensor, so that torch.compile traces what holds pairs and gradients as the tensors that they are.

    Attributes:
        carrier: [..., K] without memory; the gradient of the whole input flows to it.
        operands: the pairs, of [T, K]; transposed None where no product reads it, or backward gathers it, from
            ``shard``. The amax of the whole input, for a Delayed rule.
        shard: this rank's rows [R, K]; None where nothing is gathered of it any more.
        casts, wire: what it was cast by, and how it was gathered.
    """

    def __init__(self, carrier: Tensor, operands: Operands, shard: Tensor | None, casts: Any, wire: Wire) -> None:
        self.carrier, self.operands, self.shard, self.casts, self.wire = carrier, operands, shard, casts, wire

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedOpError(f"{getattr(func, '__name__', func)} {_REMEDY}")

    def __getattr__(self, name: str) -> Any:
        """What modules ask of their input; else UnsupportedOpError, or AttributeError of what no tensor has."""
        if name in ("shape", "dtype", "device", "ndim", "size", "is_meta", "requires_grad", "dim"):
            return getattr(self.carrier, name)
        return self.__torch_function__(getattr(torch.Tensor, name), ())


class GatheredGradient(ForProducts):
    """A whole gradient [..., N], on its way to the products, with sums of its columns."""

    REMEDY = _REMEDY
