"""What a product's result says of the operand that it was made of: how many of its rows had an inf or a NaN.

A product carries a fault to the whole row of its result, whatever it multiplies, so that the first and the last element
of each row tell of all the elements that were multiplied and summed. Both must be faulty, since one may have overflowed
by itself.

FOUND, float32, a layer's role in a step: the faulty rows and all rows, added up; the largest scale_inv and amax.
"""

from __future__ import annotations

import torch
from torch import Tensor

FOUND = ("faulty", "rows", "scale_inv", "amax")


def note_faults(
    y: Tensor, scale_inv: Tensor | None, amax: Tensor | None, place: Tensor, found: Tensor, first: Tensor
) -> None:
    """``octavo::note_faults``."""
    if y.numel() == 0:
        return
    ends = y[:, :: max(1, y.shape[1] - 1)]
    faulty = ends.isfinite().logical_not_().all(1).sum()
    found[0] += faulty
    found[1] += y.shape[0]
    for at, values in ((2, scale_inv), (3, amax)):
        if values is not None and values.numel() > 0:
            found[at] = torch.maximum(found[at], values.max())
    first.copy_(torch.where((first == 0) & (faulty > 0), place, first))
