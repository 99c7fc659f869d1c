"""SGD's arithmetic, with momentum or without: as adam.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.kernels.random_bits import halves
from octavo.kernels.reference.optimizer_state import MomentTensors


class SgdGroup(NamedTuple):
    """Options of some weights: torch.optim.SGD's."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class SgdStep:
    """Step ``number``, from 1, of weights with a group's options; none, or one moment."""

    def __init__(self, group: SgdGroup, number: int) -> None:
        self.group, self.number, self.lr = group, number, float(group.lr)
        self.maximize, self.coupled_decay = group.maximize, group.weight_decay

    def average(self, moments: Sequence[Tensor], g: Tensor) -> None:
        """Have the momentum follow a gradient, in place: the first is the gradient itself, as torch's."""
        for momentum in moments:
            if self.number == 1:
                momentum.copy_(g)
            else:
                momentum.mul_(self.group.momentum).add_(g, alpha=1 - self.group.dampening)

    def move(self, w: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        """Update the master."""
        update = g
        for momentum in moments:
            update = g.add(momentum, alpha=self.group.momentum) if self.group.nesterov else momentum
        w.add_(update, alpha=-self.lr)

    def saturate(self, values: Sequence[Tensor], moments: Sequence[MomentTensors]) -> None:
        """A momentum's codes take any finite number."""

    def bits(
        self, draw: Callable[..., Tensor], moments: Sequence[MomentTensors], master_is_random: bool
    ) -> tuple[Tensor | None, ...]:
        """As AdamStep's."""
        is_random = master_is_random or any(moment.stochastic for moment in moments)
        low, high = halves(draw()) if is_random else (None, None)
        return *(low for _ in moments), high
