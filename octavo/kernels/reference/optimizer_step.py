"""A step of many weights, one after the other: what the kernel does in one launch (triton/optimizer_step.py).

A weight is read and written once, piece by piece: no temporary is as large as the tensor. Its rule is Adam's or SGD's:
how gradients enter the moments, and how these move the weight.

The step also measures its resolution, which tells when FP8 has become too coarse: how far an update moves weights,
beside the grid that E4M3 has for them. The grid's step at a weight w is 2^(floor(log2 |w|) - 3), and no less than the
smallest step at the weight's scale where it lives in FP8. Rounding to it is noise of step / sqrt(12).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.layouts import BLOCK
from octavo.kernels.moment_codes import decode_moment
from octavo.kernels.reference.master_weights import Fp8Weight, Master
from octavo.kernels.reference.optimizer_state import MomentTensors, Piece, finite_amax, pieces, rows_of
from octavo.kernels.step_numbers import adam_max_update, bound_after, halves, key_of, power, random_bits

LARGEST_ROOT = 2.0**63  # that moments in codes hold: what is twice as large has no finite square in float32
LARGEST_SQUARE = LARGEST_ROOT**2
SMALLEST = 2.0**-9  # E4M3's step at scale 1


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


class WeightUpdate(NamedTuple):
    """What a step of one weight reads and writes.

    Attributes:
        master: the weight [R, C] and its master; experts in FP8 [E, N, K] are [E * N, K].
        moments: as many as the rule has, all [R, C].
        gradient: [R, C] of any float dtype, or uint8: codes of E4M3.
        step: float32, one number on the weight's device: the steps before this one.
        key: of random bits: of the seed and the weight's number.
        group: the index of its options.
        first_row: of the whole weight that these rows begin with; random bits depend on it.
        gradient_scale_inv: of a gradient in codes, float32 [R, blocks]; of a vector that is seen as [n, 1], of blocks
            along it: [1, ceil(n / 128)]. Else None.
        measured: whether its update counts for the resolution.
        first_col: of the whole weight that these columns begin with.
        row_length: how many columns that has; 0: as many as this.
    """

    master: Master
    moments: tuple[MomentTensors, ...]
    gradient: Tensor
    step: Tensor
    key: int
    group: int
    first_row: int
    gradient_scale_inv: Tensor | None = None
    measured: bool = False
    first_col: int = 0
    row_length: int = 0

    def matrices(self) -> list[WeightUpdate]:
        """The updates of all experts, each with scales of its own, over the same memory; of other weights itself.

        They share ``step``, which counts once for all.
        """
        count = self.master.matrices
        if not isinstance(self.master, Fp8Weight) or self.master.scale_inv.ndim == 2:
            return [self]
        rows = self.gradient.shape[0] // count
        return [
            self._replace(
                master=self.master.matrix(index),
                moments=tuple(moment.matrix(index, count) for moment in self.moments),
                gradient=self.gradient[index * rows : (index + 1) * rows],
                first_row=self.first_row + index * rows,
                gradient_scale_inv=rows_of(self.gradient_scale_inv, index, count),
            )
            for index in range(count)
        ]

    def gradient_of(self, piece: Piece, divisor: float, maximize: bool) -> Tensor:
        """A piece of the gradient in float32, divided, its sign turned to go up; not to be written to."""
        g, scale_inv = piece.of(self.gradient), self.gradient_scale_inv
        if scale_inv is None:
            g = g.to(torch.float32)
        elif scale_inv.shape[0] == self.gradient.shape[0]:
            g = decode_moment(g, E4M3).mul_(piece.scales_of(scale_inv))
        else:
            rows = torch.arange(piece.rows.start, piece.rows.stop, device=g.device)
            g = decode_moment(g, E4M3).mul_(scale_inv.view(-1)[rows // BLOCK].view(-1, 1, 1))
        if divisor != 1.0:
            g = g / divisor
        return -g if maximize else g


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
        group, number = groups[update.group], int(update.step) + 1
        step = AdamStep(group, number) if isinstance(group, AdamGroup) else SgdStep(group, number)
        for one in update.matrices() if update.master.weight.numel() else ():
            _update_weight(one, step, divisor, resolution if update.measured else None)
        update.step.fill_(number)


def _update_weight(update: WeightUpdate, step: AdamStep | SgdStep, divisor: float, sums: Tensor | None) -> None:
    master, moments = update.master, update.moments

    def read(piece: Piece, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(master, gradient, new moments, unrounded) of a piece; ``keep``: what is stored stays as it is."""
        w, g = master.read(piece), update.gradient_of(piece, divisor, step.maximize)
        if step.coupled_decay:
            g = g.add(w, alpha=step.coupled_decay)
        new = [moment.read(piece).clone() if keep else moment.read(piece) for moment in moments]
        step.average(new, g)
        return w, g, new

    rows, cols = master.weight.shape
    all_pieces = list(pieces(rows, cols, update.first_row, update.first_col, update.row_length))
    for moment in moments:
        if moment.amax is not None:
            moment.begin(moment.amax)
    if any(moment.needs_amax_first for moment in moments):  # then new moments are computed twice
        found = [torch.zeros(1, 1, device=moment.data.device) for moment in moments]
        for piece in all_pieces:
            _, _, new = read(piece, keep=True)
            step.saturate(new, moments)
            for amax, moment, wide in zip(found, moments, new, strict=True):
                torch.maximum(amax, finite_amax(wide.sqrt() if moment.root else wide).max(), out=amax)
        for moment, amax in zip(moments, found, strict=True):
            if moment.needs_amax_first:
                moment.begin(amax)
    if master.amax is not None:
        assert isinstance(step, AdamStep)  # only Adam bounds its updates
        master.begin(step.bound(master.amax))
    for piece in all_pieces:
        w, g, new = read(piece, keep=False)
        before = w if sums is None else w.clone()
        step.move(w, g, new)
        if sums is not None:
            add_resolution(sums, piece, before, w, master)
        step.saturate(new, moments)

        def draw(*stream: int, piece: Piece = piece) -> Tensor:
            key = key_of(update.key, step.number, *stream)
            return random_bits(key, piece.index(master.weight.device))

        bits = step.bits(draw, moments, master.is_random)
        for stored, wide, bits16 in zip((*moments, master), (*new, w), bits, strict=True):
            stored.write(piece, wide, bits16)
    for stored in (*moments, master):
        stored.end()


def add_resolution(sums: Tensor, piece: Piece, before: Tensor, after: Tensor, master: Master) -> None:
    """Add a piece's squares of updates and of the grid's steps to float64 [2].

    ``before``, ``after``: the master's piece in float32. Elements that are not finite count for nothing.
    """
    moved = after - before
    grid = (before.view(torch.int32) & 0x7F800000).view(torch.float32) * 0.125
    if isinstance(master, Fp8Weight):
        grid = torch.maximum(grid, master.scale_inv_of(piece) * SMALLEST)
    is_finite = torch.isfinite(moved) & torch.isfinite(before)
    for place, values in enumerate((moved, grid)):
        sums[place] += values.masked_fill(~is_finite, 0.0).square_().sum(dtype=torch.float64)
