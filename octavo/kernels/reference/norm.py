"""LayerNorm and RMSNorm, forward with the cast and backward, in float32.

    layer_norm   y = (x - mean) rstd g + beta,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
    rms_norm     y = x rstd g (+ beta),          rstd = 1 / sqrt(mean(x^2) + eps)

over each row of x [R, C]; g is gamma, or 1 + gamma where it is zero-centred. With n = (x - mean) rstd and w = dy g,

    dx = rstd (w - n mean(w n) - mean(w)),   dgamma = sum over rows of dy n,   dbeta = sum over rows of dy

where rms_norm has no mean(w). Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.arguments import NormGradient, NormSource, new_norm


def normalise(
    x: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [R, C], mean [R], or [0] for rms_norm, and rstd [R], float32."""
    wide = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if kind == "layer_norm":
        mean = wide.mean(1, keepdim=True)  # subtracted first: torch's layer norm loses digits to a large mean
        y, correction, rstd = torch.native_layer_norm(wide.sub_(mean), (wide.shape[1],), None, None, eps)
        mean, rstd = mean.add_(correction).flatten(), rstd.flatten()
    else:
        mean = wide.new_empty(0)
        rstd = torch.reciprocal(wide.square().mean(1).add_(eps).sqrt_())
        y = wide.mul_(rstd[:, None])
    y.mul_(_factor(gamma, zero_centered))
    return y if beta is None else y.add_(beta), mean, rstd


def normalised(
    x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor | None, kind: str, zero_centered: bool
) -> Tensor:
    """Return ``normalise``'s y, computed from the rows' mean and rstd."""
    wide = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if kind == "layer_norm":
        wide.sub_(mean[:, None])
    y = wide.mul_(rstd[:, None]).mul_(_factor(gamma, zero_centered))
    return y if beta is None else y.add_(beta)


def _factor(gamma: Tensor, zero_centered: bool) -> Tensor:
    """Return the factor that a norm multiplies by, float32: gamma, or 1 + gamma where it is zero-centred."""
    wide = gamma.to(torch.float32)
    return wide + 1.0 if zero_centered else wide


def norm(
    source: NormSource, residual: Tensor | None, chunks: Sequence[slice] = (slice(None),)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the op ``octavo::norm``, in chunks of rows; its contract is in signatures.py."""
    y, mean, rstd, total = new_norm(source, residual)
    for chunk in chunks:
        x = source.x[chunk]
        if residual is not None:
            total[chunk] = x.to(torch.float32) + residual[chunk]
            x = total[chunk]
        y[chunk], mean_of_chunk, rstd[chunk] = normalise(*source._replace(x=x))
        if mean.numel():
            mean[chunk] = mean_of_chunk
    return y, mean, rstd, total


def norm_backward(gradient: NormGradient, chunks: Sequence[slice] = (slice(None),)) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op ``octavo::norm_backward``, in chunks of rows; its contract is in signatures.py."""
    dy, x, gamma, mean, rstd, kind, zero_centered, with_beta, residual = gradient
    mean, rstd = mean.contiguous(), rstd.contiguous()  # torch's op assumes that they are
    dx, factor = x.new_empty(x.shape), _factor(gamma, zero_centered)
    sums = torch.zeros(2, x.shape[1], dtype=torch.float32, device=x.device)
    for chunk in chunks:
        wide = x[chunk].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        wide_dy, rstd_of_rows = dy[chunk].to(torch.float32).contiguous(), rstd[chunk, None]
        if kind == "layer_norm":
            # the mean is subtracted first: torch's backward, too, loses digits to a large one
            centred, no_mean = wide.sub_(mean[chunk, None]), torch.zeros_like(rstd_of_rows)
            args = centred, factor.shape, no_mean, rstd_of_rows, factor, factor, [True] * 3
            dx_of_rows, *sums_of_rows = torch.ops.aten.native_layer_norm_backward(wide_dy, *args)
        else:
            n = wide.mul_(rstd_of_rows)
            sums_of_rows = (wide_dy * n).sum(0), wide_dy.sum(0)
            w = wide_dy * factor
            dx_of_rows = torch.addcmul(w, n, (w * n).mean(1, keepdim=True), value=-1).mul_(rstd_of_rows)
        sums[0].add_(sums_of_rows[0])
        sums[1].add_(sums_of_rows[1])
        dx[chunk] = dx_of_rows if residual is None else dx_of_rows.add_(residual[chunk])
    dgamma, dbeta = sums.to(gamma.dtype)
    return dx, dgamma.clone(), dbeta.clone() if with_beta else gamma.new_empty(0)
