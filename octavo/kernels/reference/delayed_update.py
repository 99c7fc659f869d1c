"""The delayed state's update: roll the histories, write the next scales; all three roles at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.numerics import scale_from_amax


def delayed_update(
    delayed_scale: Tensor,
    delayed_amax_history: Tensor,
    amax_input: Tensor | None,
    amax_weight: Tensor | None,
    amax_grad_output: Tensor | None,
    limits: Sequence[float],
    powers_of_two: Sequence[bool],
    margins: Sequence[int],
    reduce: str,
) -> None:
    """``octavo::delayed_update``."""
    amaxes = (amax_input, amax_weight, amax_grad_output)
    newest = torch.tensor([0.0 if amax is None else float(amax) for amax in amaxes])
    rolled = torch.cat((newest[:, None], delayed_amax_history[:, :-1]), dim=1)
    reduced = rolled.amax(dim=1) if reduce == "max" else newest
    limit = torch.tensor([limit * 2.0**-margin for limit, margin in zip(limits, margins, strict=True)])
    scale = scale_from_amax(reduced, limit, powers_of_two[0], previous=delayed_scale)
    if len(set(powers_of_two)) > 1:
        other = scale_from_amax(reduced, limit, not powers_of_two[0], previous=delayed_scale)
        scale = torch.where(torch.tensor(powers_of_two) == powers_of_two[0], scale, other)
    if any(amax is None for amax in amaxes):
        given = torch.tensor([amax is not None for amax in amaxes])
        rolled = torch.where(given[:, None], rolled, delayed_amax_history)
        scale = torch.where(given, scale, delayed_scale)
    delayed_amax_history.copy_(rolled)
    delayed_scale.copy_(scale)
