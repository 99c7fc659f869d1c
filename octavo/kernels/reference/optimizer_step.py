"""A step of many weights, one after the other: what the kernel does in one launch (triton/optimizer_step.py).

A weight is read and written once, piece by piece: no temporary is as large as the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.layouts import BLOCK
from octavo.kernels.moment_codes import decode_moment
from octavo.kernels.random_bits import key_of, random_bits
from octavo.kernels.reference.adam import AdamGroup, AdamStep
from octavo.kernels.reference.master_weights import Fp8Weight, Master
from octavo.kernels.reference.optimizer_state import MomentTensors, Piece, finite_amax, pieces, rows_of
from octavo.kernels.reference.resolution import add_resolution
from octavo.kernels.reference.sgd import SgdGroup, SgdStep


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
        measured: whether its update counts for the resolution (resolution.py).
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
