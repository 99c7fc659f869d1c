"""Adam of one tensor, read and written once, piece by piece: no temporary is as large as the tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.reference.fp8_weights import Fp8Weight
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import (
    LARGEST_ROOT,
    LARGEST_SQUARE,
    Gradient,
    MomentTensors,
    Piece,
    gradient_of,
    pieces,
    scales_of_all,
)
from octavo.kernels.reference.random_bits import key_of, random_bits
from octavo.kernels.reference.resolution import add_resolution
from octavo.kernels.reference.step_numbers import bound_after, power

Master = MasterWeight | Fp8Weight


class AdamStep(NamedTuple):
    """The numbers of a step.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: as torch.optim.AdamW's.
        step: counted from 1.
        decoupled: decay multiplies the weight (AdamW); else it is added to the gradient (Adam).
        maximize: go up.
        max_update: |m_hat / sqrt(v_hat)| is clipped to it; None: not.
        key: of random bits: of the seed and the tensor.
        grad_scale: what the gradient is divided by.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    maximize: bool
    max_update: float | None
    key: int
    grad_scale: float = 1.0


class _Scales(NamedTuple):
    """Scales that serve whole tensors, [1, 1], and where their next amax is gathered; None where blocks have theirs."""

    first: tuple[Tensor | None, Tensor | None]
    second: tuple[Tensor | None, Tensor | None]
    master: tuple[Tensor | None, Tensor | None]


def adam_update(
    master: Master,
    amax: Tensor | None,
    grad: Gradient,
    first: MomentTensors,
    second: MomentTensors,
    h: AdamStep,
    first_row: int = 0,
    sums: Tensor | None = None,
) -> None:
    """Update a weight and its state in place.

    Args:
        master: the weight [R, C] and its master.
        amax: float32 of scale_inv's shape, a scaled master's amax after the last step; becomes the new one. Else None.
        grad: [R, C], any float dtype or coded.
        first, second: exp_avg and exp_avg_sq.
        h: the step's numbers.
        first_row: the row of the whole tensor that this one begins with; random bits depend on it.
        sums: resolution.py's, or None.
    """
    rows, cols = master.weight.shape
    if rows * cols == 0:
        return
    scales = _Scales(first.begin(), second.begin(), _master_scale(master, amax, h))
    if first.needs_amax_first or second.needs_amax_first:
        new = (_moments(piece, master, grad, first, second, h, keep=True) for piece in pieces(rows, cols, first_row))
        for name, scale in zip(("first", "second"), scales_of_all((first, second), new), strict=True):
            scales = scales if scale is None else scales._replace(**{name: (scale, None)})
    for piece in pieces(rows, cols, first_row):
        m, v, w = _moments(piece, master, grad, first, second, h)
        before = None if sums is None else w.clone()
        _apply(w, m, v, h)
        if sums is not None and before is not None:
            add_resolution(sums, piece, before, w, master)
        saturate(m, v, first, second)
        low, high, bits = _bits(piece, m, first, second, master, h)
        first.write(piece, m, low, *scales.first)
        second.write(piece, v, high, *scales.second)
        master.write(piece, w, bits, *scales.master)
    first.end(*scales.first)
    second.end(*scales.second)
    if amax is not None:
        assert scales.master[0] is not None and scales.master[1] is not None
        master.end(scales.master[0], scales.master[1], amax)


def _moments(
    piece: Piece,
    master: Master,
    grad: Gradient,
    first: MomentTensors,
    second: MomentTensors,
    h: AdamStep,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The piece's new moments, unrounded, and its master; ``keep``: what is stored stays as it is."""
    g = gradient_of(piece, grad, h.grad_scale, h.maximize)
    w = master.read(piece)
    if h.weight_decay and not h.decoupled:
        g = g.add(w, alpha=h.weight_decay)
    m, v = first.read(piece), second.read(piece)
    if keep:
        m, v = m.clone(), v.clone()
    m.lerp_(g, 1 - h.beta1)
    v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
    if keep:
        saturate(m, v, first, second)
    return m, v, w


def saturate(m: Tensor, v: Tensor, first: MomentTensors, second: MomentTensors) -> None:
    """Keep new moments within what codes are for: |m| and the root of v up to 2^63, in place.

    Gradients beyond that make v infinite, which no code can say. In their own step it is so, and nothing moves, as with
    float32 moments; from then on both moments are as large as each other, and the update is bounded. A NaN stays one.
    """
    if first.fmt is not None:
        m.clamp_(-LARGEST_ROOT, LARGEST_ROOT)
    if second.fmt is not None:
        v.clamp_(max=LARGEST_SQUARE)


def _apply(w: Tensor, m: Tensor, v: Tensor, h: AdamStep) -> None:
    """Update the master; unclipped, the operations and their order are torch's."""
    correction1 = 1 - power(h.beta1, h.step)
    correction2 = math.sqrt(1 - power(h.beta2, h.step))
    if h.weight_decay and h.decoupled:
        w.mul_(1 - h.lr * h.weight_decay)
    root = v.sqrt()
    if h.max_update is None:
        w.addcdiv_(m, root.div_(correction2).add_(h.eps), value=-h.lr / correction1)
        return
    denominator = root.mul_(1 / correction2).add_(
        h.eps
    )  # a division less, which is a tenth of the GPU kernel's instructions
    limit = h.max_update * correction1
    w.add_(torch.div(m, denominator, out=denominator).clamp_(-limit, limit), alpha=-h.lr / correction1)


def _bits(
    piece: Piece, like: Tensor, first: MomentTensors, second: MomentTensors, master: Master, h: AdamStep
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """16 random bits an element for each that is rounded stochastically."""
    low = high = bits = None
    if first.stochastic or second.stochastic:
        drawn = random_bits(key_of(h.key, h.step, 0), piece.index(like.device))
        low, high = drawn & 0xFFFF, (drawn >> 16).bitwise_and_(0xFFFF)
    if master.is_random:
        bits = random_bits(key_of(h.key, h.step, 1), piece.index(like.device)).bitwise_and_(0xFFFF)
    return low, high, bits


def _master_scale(master: Master, amax: Tensor | None, h: AdamStep) -> tuple[Tensor | None, Tensor | None]:
    """(scale, found) of a scaled master, by the bound of what this step can make of it."""
    if not master.needs_bound:
        return None, None
    assert amax is not None and h.max_update is not None
    return master.begin(bound_after(amax, h.lr, h.max_update, h.weight_decay if h.decoupled else 0.0))
