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
    found = {role: amax for role, amax in enumerate((amax_input, amax_weight, amax_grad_output)) if amax is not None}
    if not found:
        return
    roles = list(found)
    rows = slice(roles[0], roles[-1] + 1, 2 if roles == [0, 2] else 1)
    history, previous = delayed_amax_history[rows], delayed_scale[rows]
    newest = previous.new_tensor([float(amax) for amax in found.values()])
    history.copy_(torch.cat((newest[:, None], history[:, :-1]), dim=1))
    reduced = history.amax(dim=1) if reduce == "max" else newest
    limit = previous.new_tensor([limits[role] * 2.0 ** -margins[role] for role in roles])
    scale = scale_from_amax(reduced, limit, powers_of_two[roles[0]], previous=previous)
    if len({powers_of_two[role] for role in roles}) > 1:
        for row, role in enumerate(roles):
            scale[row] = scale_from_amax(reduced[row], limit[row], powers_of_two[role], previous=previous[row])
    previous.copy_(scale)
