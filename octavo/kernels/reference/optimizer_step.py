"""A step of many weights, one after the other, which the kernel does in one launch (triton/optimizer_step.py).

A weight is read and written once, piece by piece: no temporary is as large as the tensor. Its rule is Adam's or SGD's:
how gradients enter the moments, and how these move the weight.

The step also measures its resolution, which tells when FP8 has become too coarse: how far an update moves weights,
compared with E4M3's grid. The grid's step at a weight w is 2^(floor(log2 |w|) - 3); for a weight that lives in FP8 it
is no less than the smallest step at its scale. Rounding to the grid is noise of step / sqrt(12).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.granularity import BLOCK
from octavo.kernels.checks import check_shape
from octavo.kernels.moment_codes import decode_moment
from octavo.kernels.reference.optimizer_state import (
    Fp8Weight,
    Master,
    MomentTensors,
    Piece,
    finite_amax,
    pieces,
    rows_of,
)
from octavo.kernels.step_numbers import adam_max_update, bound_after, key_of, power, random_bits, root_of, swapped

LARGEST_ROOT = 2.0**63  # of a second moment in codes: a root twice as large has no finite square in float32
LARGEST_SQUARE = LARGEST_ROOT**2
SMALLEST = 2.0**-9  # E4M3's step at scale 1

RandomBits = tuple[Tensor | None, ...]  # for each moment and the master, int32 [rows, blocks, width]; None: none


class AdamGroup(NamedTuple):
    """Options of some weights: torch.optim.AdamW's, or Adam's where the decay is not ``decoupled``.

    ``lr``: a number, or a tensor of one on the weights' device. ``bounds_update``: whether updates
    are clipped to R_t, the largest that exact Adam can make.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool
    bounds_update: bool


class AdamStep:
    """Adam's step ``number``, counted from 1, of weights with a group's options."""

    def __init__(self, group: AdamGroup, number: int) -> None:
        self.group, self.number, self.lr, self.maximize = group, number, float(group.lr), group.maximize
        self.coupled_decay = 0.0 if group.decoupled else group.weight_decay
        self.decoupled_decay = group.weight_decay if group.decoupled else 0.0
        self.correction1 = 1 - power(group.beta1, number)
        self.correction2 = math.sqrt(1 - power(group.beta2, number))
        self.max_update = adam_max_update(number, group.beta1, group.beta2) if group.bounds_update else None

    def average(self, moments: Sequence[Tensor], g: Tensor) -> None:
        """Update the moments by a gradient, in place."""
        m, v = moments
        m.lerp_(g, 1 - self.group.beta1)
        v.mul_(self.group.beta2).addcmul_(g, g, value=1 - self.group.beta2)

    def move(self, w: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        """Update the decayed master; unless it is bounded, by torch's operations in torch's order."""
        m, v = moments
        if self.max_update is None:
            w.addcdiv_(m, v.sqrt().div_(self.correction2).add_(self.group.eps), value=-self.lr / self.correction1)
            return
        # one division fewer than torch, which saves a tenth of the GPU kernel's instructions
        denominator = root_of(v).mul_(1 / self.correction2).add_(self.group.eps)
        limit = self.max_update * self.correction1
        update = torch.div(m, denominator, out=denominator)
        if limit <= torch.finfo(torch.float32).max:  # torch refuses a larger one, which would limit nothing
            update.clamp_(-limit, limit)
        w.add_(update, alpha=-self.lr / self.correction1)

    def saturate(self, values: Sequence[Tensor], moments: Sequence[MomentTensors]) -> None:
        """Clamp new moments, in place, to what codes can store: |m| and the root of v up to 2^63. A NaN stays NaN.

        Larger gradients make v infinite, which no code can store. In that step v is infinite and nothing moves, as with
        float32 moments; from the next step on m and the root of v are the same, so that the update is bounded.
        """
        if moments[0].fmt is not None:
            values[0].clamp_(-LARGEST_ROOT, LARGEST_ROOT)
        if moments[1].fmt is not None:
            values[1].clamp_(max=LARGEST_SQUARE)

    def bits(self, draw: Callable[..., Tensor], moments: Sequence[MomentTensors], master_is_random: bool) -> RandomBits:
        """Return 32 random bits an element for each moment and for the master; None where none of those takes any."""
        first = draw(0) if any(moment.is_random for moment in moments) else None
        return first, None if first is None else swapped(first), draw(1) if master_is_random else None


class SgdGroup(NamedTuple):
    """Options of some weights: torch.optim.SGD's, or, with ``averages``, how torch.optim.Muon treats its matrices.

    ``averages``: the momentum is the gradients' exponential average, ``nesterov`` goes on from it towards the gradient,
    and weight decay is decoupled. ``max_update``: the most that the rule moves an element, by the learning rate.
    """

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    averages: bool = False
    max_update: float = math.inf


class SgdStep:
    """SGD's step ``number``, counted from 1, of weights with a group's options, which have one moment or none."""

    def __init__(self, group: SgdGroup, number: int) -> None:
        self.group, self.number, self.lr, self.maximize = group, number, float(group.lr), group.maximize
        self.max_update = group.max_update
        self.coupled_decay = 0.0 if group.averages else group.weight_decay
        self.decoupled_decay = group.weight_decay if group.averages else 0.0

    def average(self, moments: Sequence[Tensor], g: Tensor) -> None:
        """Update the momentum by a gradient, in place: it begins as the gradient itself, an average as 0."""
        for momentum in moments:
            if self.group.averages:
                momentum.lerp_(g, 1 - self.group.momentum)
            elif self.number == 1:
                momentum.copy_(g)
            else:
                momentum.mul_(self.group.momentum).add_(g, alpha=1 - self.group.dampening)

    def move(self, w: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        """Update the decayed master."""
        update, beta = g, self.group.momentum
        for momentum in moments:
            update = momentum
            if self.group.nesterov:
                update = g.lerp(momentum, beta) if self.group.averages else g.add(momentum, alpha=beta)
        w.add_(update, alpha=-self.lr)

    def saturate(self, values: Sequence[Tensor], moments: Sequence[MomentTensors]) -> None:
        """Do nothing: a momentum's codes can store any finite number."""

    def bits(self, draw: Callable[..., Tensor], moments: Sequence[MomentTensors], master_is_random: bool) -> RandomBits:
        """Return random bits for each moment and for the master, as AdamStep does."""
        first = draw() if master_is_random or any(moment.is_random for moment in moments) else None
        return *(first for _ in moments), None if first is None else swapped(first)


class BitNumbers(NamedTuple):
    """The numbers that a shard's random bits depend on: a key, and the elements' indices in the whole weight.

    ``key``: of the seed and the weight's number. The shard begins with the whole weight's ``first_row`` and
    ``first_col``; ``row_length``: how many columns the whole has, 0: as many as the shard.
    """

    key: int
    first_row: int = 0
    first_col: int = 0
    row_length: int = 0


class WeightUpdate(NamedTuple):
    """The tensors that a step of one weight reads and writes, and which options apply.

    Attributes:
        master: the weight [R, C] and its master; experts in FP8 [E, N, K] are [E * N, K].
        moments: as many as the rule has, all [R, C].
        gradient: [R, C] of any float dtype, or uint8: codes of E4M3.
        step: float32, one number on the weight's device: the steps before this one.
        bits: the random bits of its elements.
        group: the index of its options.
        gradient_scale_inv: of a gradient in codes, float32 [R, blocks]; where a vector is seen as [n, 1], blocks lie
            along it: [1, ceil(n / 128)]. None for other gradients.
        measured: whether its update counts for the resolution.
    """

    master: Master
    moments: tuple[MomentTensors, ...]
    gradient: Tensor
    step: Tensor
    bits: BitNumbers
    group: int
    gradient_scale_inv: Tensor | None = None
    measured: bool = False

    def matrices(self) -> list[WeightUpdate]:
        """Return an update for each expert, over the same memory and with one ``step``; for other weights this one."""
        count = self.master.matrices
        if not isinstance(self.master, Fp8Weight) or self.master.scale_inv.ndim == 2:
            return [self]
        rows = self.gradient.shape[0] // count
        return [
            self._replace(
                master=self.master.matrix(index),
                moments=tuple(moment.matrix(index, count) for moment in self.moments),
                gradient=self.gradient[index * rows : (index + 1) * rows],
                bits=self.bits._replace(first_row=self.bits.first_row + index * rows),
                gradient_scale_inv=rows_of(self.gradient_scale_inv, index, count),
            )
            for index in range(count)
        ]

    def gradient_of(self, piece: Piece, divisor: float, maximize: bool) -> Tensor:
        """Return a piece of the gradient in float32, divided, and negated to maximize; not to be written to."""
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


def check_update(update: WeightUpdate) -> None:
    """Raise ValueError for a weight, remainder or moment that is not shaped as the gradient.

    Scales are checked where a state is made or loaded, in octavo/optim/state.py.
    """
    tensors = update.master.weight, update.master.low_bits, *(moment.data for moment in update.moments)
    for tensor in tensors:
        check_shape("a weight, remainder or moment", tensor, update.gradient.shape)


# (an update, its rule, the gradient's divisor) -> whether it has done the pass over the weight
StepInPlace = Callable[[WeightUpdate, AdamStep | SgdStep, float], bool]


def optimizer_step(
    updates: Sequence[WeightUpdate],
    groups: Sequence[AdamGroup] | Sequence[SgdGroup],
    skip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    resolution: Tensor | None = None,
    step_in_place: StepInPlace = lambda *_: False,
) -> None:
    """Update weights and their state in place.

    Args:
        updates: of one device, with gradients that are neither transposed nor strided.
        groups: all of one kind.
        skip: one number; where it is not 0, nothing is done.
        grad_scale: one number that gradients are divided by.
        resolution: float64 [2], to which the measured weights' sums are added; None: nothing is measured.
        step_in_place: a device's own pass over a weight that is not measured; False where it does not take it.
    """
    if skip is not None and bool(skip != 0):
        return
    divisor = 1.0 if grad_scale is None else float(grad_scale)
    for update in updates:
        group, number = groups[update.group], int(update.step) + 1
        step = AdamStep(group, number) if isinstance(group, AdamGroup) else SgdStep(group, number)
        for matrix_update in update.matrices() if update.master.weight.numel() else ():
            check_update(matrix_update)
            _update_weight(matrix_update, step, divisor, resolution if update.measured else None, step_in_place)
        update.step.fill_(number)


def _update_weight(
    update: WeightUpdate, step: AdamStep | SgdStep, divisor: float, sums: Tensor | None, step_in_place: StepInPlace
) -> None:
    """Do a step of one matrix: read, update and write its master and moments piece by piece."""
    master, moments = update.master, update.moments

    def read(piece: Piece, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return (master, gradient, unrounded new moments) of a piece; ``keep``: do not change the stored moments."""
        w, g = master.read(piece), update.gradient_of(piece, divisor, step.maximize)
        if step.coupled_decay:
            g = g.add(w, alpha=step.coupled_decay)
        new = [moment.read(piece).clone() if keep else moment.read(piece) for moment in moments]
        step.average(new, g)
        return w, g, new

    rows, cols = master.weight.shape
    all_pieces = list(pieces(rows, cols, *update.bits[1:]))
    for moment in moments:
        if moment.amax is not None:
            moment.begin(moment.amax)
    if any(moment.needs_amax_first for moment in moments):  # then new moments are computed twice
        amaxes = [torch.zeros(1, 1, device=moment.data.device, dtype=torch.float32) for moment in moments]
        for piece in all_pieces:
            _, _, new = read(piece, keep=True)
            step.saturate(new, moments)
            for amax, moment, wide in zip(amaxes, moments, new, strict=True):
                torch.maximum(amax, finite_amax(root_of(wide) if moment.root else wide).max(), out=amax)
        for moment, amax in zip(moments, amaxes, strict=True):
            if moment.needs_amax_first:
                moment.begin(amax)
    if master.amax is not None:
        assert step.max_update is not None
        master.begin(bound_after(master.amax, step.lr, step.max_update, step.decoupled_decay))
    for piece in () if sums is None and step_in_place(update, step, divisor) else all_pieces:
        w, g, new = read(piece, keep=False)
        old_w = w if sums is None else w.clone()
        if step.decoupled_decay:
            w.mul_(1 - step.lr * step.decoupled_decay)
        step.move(w, g, new)
        if sums is not None:
            add_resolution(sums, piece, old_w, w, master)
        step.saturate(new, moments)

        def draw(*stream: int, piece: Piece = piece) -> Tensor:
            return random_bits(key_of(update.bits.key, step.number, *stream), piece.index(master.weight.device))

        bits = step.bits(draw, moments, master.is_random)
        for stored, wide, random in zip((*moments, master), (*new, w), bits, strict=True):
            stored.write(piece, wide, random)
    for stored in (*moments, master):
        stored.end()


def add_resolution(sums: Tensor, piece: Piece, before: Tensor, after: Tensor, master: Master) -> None:
    """Add the squares of a piece's updates and of its grid's steps to float64 [2].

    ``before``, ``after``: the master's piece in float32. Elements that are not finite do not count.
    """
    moved = after - before
    grid = (before.view(torch.int32) & 0x7F800000).view(torch.float32) * 0.125
    if isinstance(master, Fp8Weight):
        grid = torch.maximum(grid, master.scale_inv_of(piece) * SMALLEST)
    is_finite = torch.isfinite(moved) & torch.isfinite(before)
    for place, values in enumerate((moved, grid)):
        sums[place] += values.masked_fill(~is_finite, 0.0).square_().sum(dtype=torch.float64)
