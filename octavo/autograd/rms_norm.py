"""An RMS norm that saves its input and a number a row, and computes in float32 with one rounding.

Written in torch's operations a norm in bf16 saves its input in float32, the normalised rows, and what multiplies them:
6 bytes an element beside the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import as_rows
from octavo.autograd.products import is_recorded

_KIND = "rms_norm"


class _LeanNorm(torch.autograd.Function):
    """y [T, K] of x [T, K] and gamma [K], see the file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        y, mean, rstd = kernels.normalise(x, gamma, None, _KIND, eps, False)
        ctx.eps = eps
        ctx.save_for_backward(x, gamma, mean, rstd)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # asked for second derivatives
            wide = x.float()
            y = wide * (wide.square().mean(1, keepdim=True) + ctx.eps).rsqrt() * gamma.float()
            leaves = [one for one in (x, gamma) if one.requires_grad]
            found = iter(torch.autograd.grad(y.to(x.dtype), leaves, grads[0], create_graph=True))
            return *(next(found) if one.requires_grad else None for one in (x, gamma)), None
        dx, dgamma, _ = kernels.norm_backward(grads[0], x, gamma, mean, rstd, _KIND, False, False)
        return dx, dgamma, None


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) . gamma over the last dimension of x [..., K], of the dtype of both."""
    rows = as_rows(x)
    if is_recorded(x, gamma):
        y = _LeanNorm.apply(rows, gamma, eps)
    else:
        y = kernels.normalise(rows, gamma, None, _KIND, eps, False)[0].to(x.dtype)
    return y if x.ndim == 2 else y.view(x.shape)
