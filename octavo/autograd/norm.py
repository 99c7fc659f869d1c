"""Norms: the kind that a chain's first cast computes, and an RMS norm by itself, for layers of other libraries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import as_rows
from octavo.autograd.products import is_recorded
from octavo.private import has_storage


class Norm(NamedTuple):
    """A norm without its parameters: kind is "layer_norm" or "rms_norm"."""

    kind: str
    eps: float
    zero_centered: bool


class _LeanNorm(torch.autograd.Function):
    """An RMS norm of x, or of x + residual, and that sum itself, for the branch around the layers that read the norm.

    It saves its input and a number a row, and computes in float32 with one rounding. Written in torch's operations a
    norm in bf16 saves its input in float32, the normalised rows, and their factor: 6 bytes an element beside the
    result. The branch's gradient is added to the norm's as that is written.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, mean, rstd, total = kernels.norm(x, gamma, None, "rms_norm", eps, False, residual)
        total = x.view_as(x) if residual is None else total
        ctx.eps = eps
        ctx.save_for_backward(x if residual is None else total, gamma, mean, rstd)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, gamma, mean, rstd = ctx.saved_tensors
        dy, dtotal = grads
        dgamma, create_graph = None, torch.is_grad_enabled()
        if dy is None:
            dx = dtotal
        elif not torch.compiler.is_compiling() and (create_graph or not has_storage(dy)):  # or in batches (vmap)
            with torch.enable_grad():
                wide = total.float()
                y = wide * (wide.square().mean(1, keepdim=True) + ctx.eps).rsqrt() * gamma.float()
            leaves = [leaf for leaf in (total, gamma) if leaf.requires_grad]
            grads_of_leaves = iter(torch.autograd.grad(y.to(total.dtype), leaves, dy, create_graph=create_graph))
            dx, dgamma = (next(grads_of_leaves) if leaf.requires_grad else None for leaf in (total, gamma))
            dx = dtotal if dx is None else dx if dtotal is None else dx + dtotal
        else:
            dx, dgamma, _ = kernels.norm_backward(dy, total, gamma, mean, rstd, "rms_norm", False, False, dtotal)
        _, needs_dresidual, *_ = ctx.needs_input_grad
        return dx, dx if needs_dresidual else None, dgamma, None


def norm_and_branch(x: Tensor, gamma: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (the RMS norm of t, t for the branch around its readers), of the dtype of all, over the last dimension.

    t is x [..., K], or x + residual in their dtype; the norm is t / sqrt(mean(t^2) + eps) . gamma.
    """
    rows, added = as_rows(x), None if residual is None else as_rows(residual)
    if is_recorded(x, gamma, residual):
        y, total = _LeanNorm.apply(rows, added, gamma, eps)
    else:
        y, _, _, total = kernels.norm(rows, gamma, None, "rms_norm", eps, False, added)
        total = rows if added is None else total
    return (y, total) if x.ndim == 2 else (y.view(x.shape), total.view(x.shape))
