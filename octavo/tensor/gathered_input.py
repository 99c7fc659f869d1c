"""GatheredInput: the input of products, of which each rank of a tensor-parallel group had some of the tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.tensor.pair import MOVES, Facade, Operands


class Wire(NamedTuple):
    """How an input's tokens were gathered: by the process group of this name, of so many ranks, along a dimension.

    ``memo``: what the first of its readers has gathered in backward, for the others; None in compiled graphs.
    """

    group: str
    ranks: int
    dim: int
    memo: list[tuple[Tensor, Tensor]] | None


class GatheredInput(Facade):
    """The facade of a whole input [..., K], to which gradients flow: its pairs, see autograd/gather_input.py.

    Attributes:
        qdata, scale_inv: the pair as it lies, of [T, K].
        transposed_qdata, transposed_scale_inv: the pair transposed; None where backward gathers it, from ``shard``.
        shard: what this rank had [..., K]; None where all is gathered.
        found_amax: of the whole input, for a Delayed rule; or None.
        casts, wire: what it was cast by, and how it was gathered.
    """

    qdata: Tensor
    scale_inv: Tensor
    transposed_qdata: Tensor | None
    transposed_scale_inv: Tensor | None
    shard: Tensor | None
    found_amax: Tensor | None
    casts: Any
    wire: Wire
    TENSORS = ("qdata", "scale_inv", "transposed_qdata", "transposed_scale_inv", "shard", "found_amax")
    REMEDY = (
        "of an input that was gathered in FP8: octavo's layers under octavo.distributed.ColwiseParallel read it. Where "
        "others do too, gather it by torch's own PrepareModuleInput"
    )

    @staticmethod
    def __new__(
        cls, tensors: dict[str, Tensor | None], shape: Any, dtype: torch.dtype, casts: Any, wire: Wire
    ) -> GatheredInput:
        """Make the facade of tensors by their names."""
        device = tensors["qdata"].device  # type: ignore[union-attr]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        for name in cls.TENSORS:
            setattr(self, name, tensors.get(name))
        self.casts, self.wire = casts, wire
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in self.TENSORS if getattr(self, name) is not None]
        return names, (self.dtype, self.casts, self.wire)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> GatheredInput:
        return GatheredInput(dict(inner), outer_size, *context)

    def operands(self) -> Operands:
        """Its pairs, as products read them."""
        transposed = None
        if self.transposed_qdata is not None and self.transposed_scale_inv is not None:
            transposed = self.transposed_qdata, self.transposed_scale_inv
        return Operands((self.qdata, self.scale_inv), transposed, self.found_amax)

    def moved(self, move: Any) -> GatheredInput:
        """The same again, of the very same tensors."""
        tensors = {name: getattr(self, name) for name in self.TENSORS}
        return GatheredInput(tensors, self.shape, self.dtype, self.casts, self.wire)


GatheredInput.RULES = dict(MOVES)
