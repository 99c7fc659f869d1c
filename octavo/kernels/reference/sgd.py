"""SGD with momentum of one tensor, piece by piece as Adam."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import Gradient, MomentTensors, Piece, gradient_of, pieces, scales_of_all
from octavo.kernels.reference.random_bits import key_of, random_bits
from octavo.kernels.reference.resolution import add_resolution


class SgdStep(NamedTuple):
    """The numbers of a step: torch.optim.SGD's, the step's number from 1, the key of random bits, and AdamStep's."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    step: int
    key: int
    grad_scale: float = 1.0


def sgd_update(
    master: MasterWeight,
    grad: Gradient,
    buffer: MomentTensors | None,
    h: SgdStep,
    first_row: int = 0,
    sums: Tensor | None = None,
) -> None:
    """Update a weight and its momentum in place.

    Args:
        master: the weight [R, C] and its master; not a scaled float16 one.
        grad: [R, C], any float dtype or coded.
        buffer: the momentum; None without.
        h: the step's numbers.
        first_row: the row of the whole tensor that this one begins with.
        sums: resolution.py's, or None.
    """
    rows, cols = master.weight.shape
    if rows * cols == 0:
        return
    scale, found = (None, None) if buffer is None else buffer.begin()
    if buffer is not None and buffer.needs_amax_first:
        new = (
            [_averaged(buffer.read(piece).clone(), _gradient(piece, grad, master.read(piece), h), h)]
            for piece in pieces(rows, cols, first_row)
        )
        (scale,) = scales_of_all([buffer], new)
    for piece in pieces(rows, cols, first_row):
        w = master.read(piece)
        g = _gradient(piece, grad, w, h)
        update, average = g, None
        if buffer is not None:
            average = _averaged(buffer.read(piece), g, h)
            update = g.add(average, alpha=h.momentum) if h.nesterov else average
        before = None if sums is None else w.clone()
        w.add_(update, alpha=-h.lr)
        if sums is not None and before is not None:
            add_resolution(sums, piece, before, w, master)
        drawn = None
        if master.is_random or (buffer is not None and buffer.stochastic):
            drawn = random_bits(key_of(h.key, h.step), piece.index(w.device))
        if buffer is not None:
            assert average is not None
            buffer.write(piece, average, None if drawn is None else drawn & 0xFFFF, scale, found)
        master.write(piece, w, None if drawn is None else (drawn >> 16).bitwise_and_(0xFFFF), None, None)
    if buffer is not None:
        buffer.end(scale, found)


def _gradient(piece: Piece, grad: Gradient, w: Tensor, h: SgdStep) -> Tensor:
    g = gradient_of(piece, grad, h.grad_scale, h.maximize)
    return g.add(w, alpha=h.weight_decay) if h.weight_decay else g


def _averaged(stored: Tensor, g: Tensor, h: SgdStep) -> Tensor:
    """The new momentum: the first is the gradient itself, as torch's."""
    if h.step == 1:
        return stored.copy_(g)
    return stored.mul_(h.momentum).add_(g, alpha=1 - h.dampening)
