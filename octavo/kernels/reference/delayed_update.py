"""The update of the delayed state: roll the histories and write the next scales, for all three roles at once."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.arguments import Commit
from octavo.kernels.backward_pass import backward_pass, enters_again
from octavo.numerics import scale_of


def delayed_update(commit: Commit, amax_grad_output: Tensor | None) -> None:
    """Compute the op ``octavo::delayed_update``; its contract is in signatures.py."""
    delayed_scale, delayed_amax_history, delayed_before, *amaxes_of_forward = commit[:5]
    limits, powers_of_two, margins, reduce = commit[5:]
    amaxes = {role: amax for role, amax in enumerate((*amaxes_of_forward, amax_grad_output)) if amax is not None}
    if not amaxes:
        return
    roles = list(amaxes)
    rows = slice(roles[0], roles[-1] + 1, 2 if roles == [0, 2] else 1)
    history, scale, before = delayed_amax_history[rows], delayed_scale[rows], delayed_before[:, rows]
    numbers = backward_pass(delayed_scale.device)
    again = enters_again(before, numbers)
    last_commit, scale_before, last_roll = before.unbind()  # see backward_pass.py
    scale_before.copy_(torch.where(last_commit == numbers[0], scale_before, scale.view(torch.int32)))
    last_roll.copy_(torch.where(again, last_roll, numbers[0]))
    last_commit.copy_(numbers[0])
    rolled = []
    for role, raises, (newest, *older) in zip(roles, again.tolist(), history.tolist(), strict=True):
        amax = float(amaxes[role])
        rolled.append([max(amax, newest), *older] if raises else [amax, newest, *older][: history.shape[1]])
    next_scales = [
        scale_of(max(row) if reduce == "max" else row[0], limits[role], powers_of_two[role], margins[role], previous)
        for role, row, previous in zip(roles, rolled, scale.tolist(), strict=True)
    ]
    history.copy_(history.new_tensor(rolled))
    scale.copy_(scale.new_tensor(next_scales))
