"""The delayed state's update: roll the histories, write the next scales; all three roles at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.numerics import scale_of


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
    history, scale = delayed_amax_history[rows], delayed_scale[rows]
    rolled = [[float(found[role]), *old[:-1]] for role, old in zip(roles, history.tolist(), strict=True)]
    next_scales = [
        scale_of(max(row) if reduce == "max" else row[0], limits[role], powers_of_two[role], margins[role], previous)
        for role, row, previous in zip(roles, rolled, scale.tolist(), strict=True)
    ]
    history.copy_(history.new_tensor(rolled))
    scale.copy_(scale.new_tensor(next_scales))
