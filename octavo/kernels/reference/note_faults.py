"""How many rows of a product's operand have an inf or a NaN, found from one column of the product's result.

A fault in a row of the operand makes the whole row of the result faulty. So a row of the operand is read only where the
first element of the result's row is not finite: that may also come from an overflow or from the other operand.

``found``, float32, is that of a layer's role in a step: the number of faulty rows and of all rows, added up over calls;
the largest scale_inv and amax.
"""

from __future__ import annotations

import torch
from torch import Tensor


def note_faults(
    y: Tensor,
    operand: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    place: Tensor,
    found: Tensor,
    first: Tensor,
    offsets: Tensor | None = None,
) -> None:
    """``octavo::note_faults``."""
    if y.numel() == 0:
        return
    found[1] += y.shape[0]
    if offsets is not None and scale_inv is not None and len(scale_inv) == len(offsets):
        scale_inv = scale_inv[offsets.diff(prepend=offsets.new_zeros(1)) > 0]
    for at, values in ((2, scale_inv), (3, amax)):
        if values is not None and values.numel() > 0:
            found[at] = torch.maximum(found[at], values.max())
    suspects = y[:, 0].isfinite().logical_not_()
    if suspects.any():
        faulty = suspects.nonzero()[operand[suspects].float().isfinite().all(1).logical_not_()].flatten()
        found[0] += len(faulty)
        if len(faulty) and first == 0:
            group = 0 if offsets is None else torch.searchsorted(offsets, faulty[0].to(torch.int32), right=True)
            first.copy_(place + group)
