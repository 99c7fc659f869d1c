"""A step of many weights, one after the other: what the kernel does in one launch (triton/optimizer_step.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.kernels.reference.adam import AdamStep, Master, adam_update
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import CodedGradient, Gradient, MomentTensors
from octavo.kernels.reference.sgd import SgdStep, sgd_update
from octavo.kernels.reference.step_numbers import adam_max_update


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


class SgdGroup(NamedTuple):
    """Options of some weights: torch.optim.SGD's."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class WeightUpdate(NamedTuple):
    """What a step of one weight reads and writes.

    Attributes:
        master: the weight [R, C] and its master.
        moments: as many as the rule has, all [R, C].
        amax: float32, of a scaled master, in scale_inv's shape, no less than the weight's; else None.
        gradient: [R, C] of any float dtype, or uint8: codes of E4M3.
        step: float32, one number on the weight's device: the steps before this one.
        key: of random bits: of the seed and the weight's number.
        group: the index of its options.
        first_row: of the whole weight that these rows begin with.
        gradient_scale_inv: of a gradient in codes, see CodedGradient; else None.
        measured: whether its update counts for the resolution (resolution.py).
    """

    master: Master
    moments: tuple[MomentTensors, ...]
    amax: Tensor | None
    gradient: Tensor
    step: Tensor
    key: int
    group: int
    first_row: int
    gradient_scale_inv: Tensor | None = None
    measured: bool = False

    @property
    def read_gradient(self) -> Gradient:
        """The gradient as ``gradient_of`` takes it."""
        if self.gradient_scale_inv is None:
            return self.gradient
        return CodedGradient(self.gradient, self.gradient_scale_inv)


def optimizer_step(
    updates: Sequence[WeightUpdate],
    groups: Sequence[AdamGroup] | Sequence[SgdGroup],
    skip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    resolution: Tensor | None = None,
) -> None:
    """Update weights and their state in place.

    Args:
        updates: of one device, with gradients that are neither transposed nor strided.
        groups: all of one kind.
        skip: one number; where it is not 0, nothing is done.
        grad_scale: one number that gradients are divided by.
        resolution: float64 [2], to which the measured weights' sums are added; None: nothing is measured.
    """
    if skip is not None and bool(skip != 0):
        return
    divisor = 1.0 if grad_scale is None else float(grad_scale)
    for update in updates:
        group = groups[update.group]
        number = int(update.step) + 1
        sums = resolution if update.measured else None
        if isinstance(group, AdamGroup):
            first, second = update.moments
            h = adam_step(group, number, update.key, divisor)
            adam_update(update.master, update.amax, update.read_gradient, first, second, h, update.first_row, sums)
        else:
            assert isinstance(update.master, MasterWeight)  # others need a bound of the update
            buffer = update.moments[0] if update.moments else None
            rest = group.momentum, group.dampening, group.weight_decay, group.nesterov, group.maximize
            numbers = SgdStep(float(group.lr), *rest, number, update.key, divisor)
            sgd_update(update.master, update.read_gradient, buffer, numbers, update.first_row, sums)
        update.step.fill_(number)


def adam_step(group: AdamGroup, number: int, key: int, grad_scale: float) -> AdamStep:
    """The numbers of step ``number``."""
    return AdamStep(
        float(group.lr),
        group.beta1,
        group.beta2,
        group.eps,
        group.weight_decay,
        number,
        group.decoupled,
        group.maximize,
        adam_max_update(number, group.beta1, group.beta2) if group.clip else None,
        key,
        grad_scale,
    )
