"""ReceivedRows: rows that other ranks sent in FP8, until a product reads their codes.

They are a pair behind the facade of high-precision rows in groups (kernels/groups.py), tokens on the way to experts or
gradients on the way back, to and from which gradients flow. Products read codes and scales as they were sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.granularity import Tile
from octavo.tensor.pair import MOVES, Facade

aten = torch.ops.aten


class ReceivedRows(Facade):
    """Rows [R, C] in groups.

    Args:
        qdata: float8 [R, C], contiguous.
        scale_inv: float32 as ``grouped_cast`` returns it for this tile.
        tile: (-1, -1), a scale a group, or (1, columns).
        offsets: int32 [G], where each group's rows end.
        amax: [1, 1] what a Delayed rule is to roll, or None.
        dtype: what they stand for.

    Example:
        >>> import torch
        >>> codes = torch.ones(3, 4).to(torch.float8_e4m3fn)
        >>> ReceivedRows(codes, torch.ones(3, 1), (1, -1), torch.tensor([3], dtype=torch.int32), None, torch.bfloat16)
        ReceivedRows((3, 4), torch.bfloat16)
    """

    qdata: Tensor
    scale_inv: Tensor
    scale_tile: Tile
    offsets: Tensor
    found_amax: Tensor | None
    REMEDY = (
        "of rows that another rank sent in FP8 for this one's experts: only products read them. Take hooks off the "
        "parts of the experts, or give these a recipe with products in high precision, and rows are sent so"
    )

    @staticmethod
    def __new__(
        cls, qdata: Tensor, scale_inv: Tensor, tile: Tile, offsets: Tensor, amax: Tensor | None, dtype: torch.dtype
    ) -> ReceivedRows:
        """Make the facade."""
        self = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)
        self.qdata, self.scale_inv, self.scale_tile = qdata, scale_inv, tile
        self.offsets, self.found_amax = offsets, amax
        return self

    def moved(self, move: Any) -> ReceivedRows:
        """The same again, of the very same tensors."""
        return ReceivedRows(self.qdata, self.scale_inv, self.scale_tile, self.offsets, self.found_amax, self.dtype)


def _same(func: Any, own: ReceivedRows, dtype: torch.dtype, *_: Any, **__: Any) -> Any:
    """The rule of ``rows.to(their dtype)``, which inference mode brings here."""
    return own if dtype == own.dtype else NotImplemented


def _isnan(func: Any, own: ReceivedRows) -> Tensor:
    """What torch.autograd.detect_anomaly asks of gradients."""
    return own.qdata.to(torch.float32).isnan()


ReceivedRows.RULES = {**MOVES, aten.to.dtype: _same, aten.isnan.default: _isnan}
