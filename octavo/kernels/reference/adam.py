"""Adam's arithmetic: how gradients enter its moments, and how these move the weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.random_bits import halves
from octavo.kernels.reference.optimizer_state import MomentTensors
from octavo.kernels.step_numbers import adam_max_update, bound_after, power

LARGEST_ROOT = 2.0**63  # that moments in codes hold: what is twice as large has no finite square in float32
LARGEST_SQUARE = LARGEST_ROOT**2


class AdamGroup(NamedTuple):
    """Options of some weights: torch.optim.AdamW's, or Adam's where the decay is not ``decoupled``.

    ``lr``: a number, or a tensor of one on the weights' device. ``clip``: whether updates are clipped to R_t.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool
    clip: bool


class AdamStep:
    """Step ``number``, from 1, of weights with a group's options."""

    def __init__(self, group: AdamGroup, number: int) -> None:
        self.group, self.number, self.lr, self.maximize = group, number, float(group.lr), group.maximize
        self.coupled_decay, self.decoupled_decay = 0.0, group.weight_decay
        if not group.decoupled:
            self.coupled_decay, self.decoupled_decay = group.weight_decay, 0.0
        self.correction1 = 1 - power(group.beta1, number)
        self.correction2 = math.sqrt(1 - power(group.beta2, number))
        self.max_update = adam_max_update(number, group.beta1, group.beta2) if group.clip else None

    def average(self, moments: Sequence[Tensor], g: Tensor) -> None:
        """Have moments follow a gradient, in place."""
        m, v = moments
        m.lerp_(g, 1 - self.group.beta1)
        v.mul_(self.group.beta2).addcmul_(g, g, value=1 - self.group.beta2)

    def move(self, w: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        """Update the master; unclipped, the operations and their order are torch's."""
        m, v = moments
        if self.decoupled_decay:
            w.mul_(1 - self.lr * self.decoupled_decay)
        root = v.sqrt()
        if self.max_update is None:
            w.addcdiv_(m, root.div_(self.correction2).add_(self.group.eps), value=-self.lr / self.correction1)
            return
        # a division less than torch, which is a tenth of the GPU kernel's instructions
        denominator = root.mul_(1 / self.correction2).add_(self.group.eps)
        limit = self.max_update * self.correction1
        update = torch.div(m, denominator, out=denominator).clamp_(-limit, limit)
        w.add_(update, alpha=-self.lr / self.correction1)

    def saturate(self, values: Sequence[Tensor], moments: Sequence[MomentTensors]) -> None:
        """Keep new moments within what codes are for: |m| and the root of v up to 2^63, in place.

        Gradients beyond that make v infinite, which no code can say. In their own step it is so, and nothing moves, as
        with float32 moments; from then on both moments are as large as each other, and the update is bounded. A NaN
        stays one.
        """
        if moments[0].fmt is not None:
            values[0].clamp_(-LARGEST_ROOT, LARGEST_ROOT)
        if moments[1].fmt is not None:
            values[1].clamp_(max=LARGEST_SQUARE)

    def bits(
        self, draw: Callable[..., Tensor], moments: Sequence[MomentTensors], master_is_random: bool
    ) -> tuple[Tensor | None, ...]:
        """16 random bits an element for each moment and for the master, where these are rounded stochastically."""
        low, high = halves(draw(0)) if any(moment.stochastic for moment in moments) else (None, None)
        return low, high, draw(1).bitwise_and_(0xFFFF) if master_is_random else None

    def bound(self, amax: Tensor) -> Tensor:
        """The most that a master of this amax can be after the step."""
        assert self.max_update is not None
        return bound_after(amax, self.lr, self.max_update, self.decoupled_decay)
