"""The cross entropy of rows of logits and its gradient, in float32.

    z = x, or softcap tanh(x / softcap);   lse = log(sum(exp(z)));   s = label_smoothing, V logits a row
    loss     = lse - (1 - s) z[target] - s mean(z)
    gradient = g (exp(z - lse) - (1 - s) [target] - s / V) (1, or 1 - tanh(x / softcap)^2)     in [-g, g]

A row whose target is ignore_index has a loss and a gradient of 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.granularity import ALL
from octavo.kernels.arguments import LossRows, new_losses
from octavo.kernels.reference.codes import encode
from octavo.numerics import scale_of_unit

WHOLE = (slice(None),)


def cross_entropy(rows: LossRows, chunks: Sequence[slice] = WHOLE) -> tuple[Tensor, Tensor]:
    """Compute the op ``octavo::cross_entropy``, in chunks of rows; its contract is in signatures.py."""
    logits, _, _, smoothing, softcap = rows
    (losses, lse), (counts, places) = new_losses(rows), _targets(rows)
    for chunk in chunks:
        z, _ = _capped(logits[chunk], softcap)
        lse[chunk] = torch.logsumexp(z, 1)
        if smoothing:
            losses[chunk] = z.mean(1)
    lse.masked_fill_(lse == torch.inf, torch.nan)  # of a logit of +inf: there is no softmax, as in torch
    likely = _capped(logits.gather(1, places), softcap)[0][:, 0] if logits.shape[1] else lse
    exact = lse - (1 - smoothing) * likely
    if smoothing:
        exact -= smoothing * losses
    return losses.copy_(exact).masked_fill_(~counts, 0.0), lse


def cross_entropy_backward(rows: LossRows, lse: Tensor, grad: Tensor, chunks: Sequence[slice] = WHOLE) -> Tensor:
    """Compute the op ``octavo::cross_entropy_backward``, in chunks of rows; its contract is in signatures.py."""
    out, targets = rows.logits.new_empty(rows.logits.shape), _targets(rows)
    for chunk in chunks:
        out[chunk] = _gradient(rows, targets, lse, grad, chunk)
    return out


def cross_entropy_codes(
    rows: LossRows, lse: Tensor, codes: Tensor, transposed: Tensor, first: int, chunks: Sequence[slice] = WHOLE
) -> None:
    """Compute the op ``octavo::cross_entropy_codes``, in chunks of rows; its contract is in signatures.py."""
    (count, columns), targets, dtype = rows.logits.shape, _targets(rows), codes.dtype
    ones = lse.new_ones(1).expand(count)
    scale = lse.new_full((1, 1), scale_of_unit(format_of(dtype).max))
    here = transposed[:, first:].view(torch.uint8)
    for padding in (codes[:, columns:].view(torch.uint8), here[:, count:]):
        padding.zero_()
    for chunk in chunks:
        q = encode(_gradient(rows, targets, lse, ones, chunk), scale, (ALL, ALL), dtype).view(torch.uint8)
        if codes.numel():
            codes[chunk, :columns].view(torch.uint8).copy_(q)
        if transposed.numel():
            here[:, :count][:, chunk] = q.t()


def _gradient(rows: LossRows, targets: Sequence[Tensor], lse: Tensor, grad: Tensor, chunk: slice) -> Tensor:
    """Return the gradient of a chunk of rows of logits, float32; ``targets``: see _targets."""
    (logits, _, _, smoothing, softcap), (counts, places) = rows, targets
    z, slope = _capped(logits[chunk], softcap)
    gradient = (z - lse[chunk, None]).exp_()
    gradient.scatter_add_(1, places[chunk], gradient.new_full((1, 1), smoothing - 1).expand(len(z), 1))
    if smoothing:
        gradient.sub_(smoothing / max(logits.shape[1], 1))
    gradient.mul_(grad[chunk, None].to(torch.float32))
    if slope is not None:
        gradient.mul_(slope)
    # not by masked_fill_, which takes a CPU longer than all the above
    return gradient.index_fill_(0, (~counts[chunk]).nonzero()[:, 0], 0.0)


def _targets(rows: LossRows) -> tuple[Tensor, Tensor]:
    """Return (whether each row counts [T], the column of its target, or 0 [T, 1]).

    Raise IndexError for a target that is neither a column nor ignore_index.
    """
    target, columns = rows.target, rows.logits.shape[1]
    counts = target != rows.ignore_index
    outside = counts & ((target < 0) | (target >= columns))
    if not outside.is_meta and bool(outside.any()):
        raise IndexError(f"target {int(target[outside][0])} is none of the {columns} columns of logits")
    return counts, torch.where(counts, target, 0)[:, None]


def _capped(x: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Return z, which is x where that is float32 and uncapped, and z's slope, None where that is 1; float32."""
    wide = x.to(torch.float32)
    if not softcap:
        return wide, None
    bent = (wide / softcap).tanh_()
    return bent * softcap, 1 - bent.square()
