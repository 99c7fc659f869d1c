"""LayerNorm and RMSNorm whose gamma may be zero-centred, so that weight decay draws it to 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.autograd.casts import Norm


class _ZeroCentered(nn.Module):
    """What both norms add to torch's; mixed in before it."""

    weight: nn.Parameter  # None with elementwise_affine=False, which torch's annotation does not say either

    def __init__(self, features: int, eps: float = 1e-5, zero_centered_gamma: bool = False, **options: Any) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(features, eps, **options)

    def reset_parameters(self) -> None:
        """As torch, the weight such that it multiplies by 1."""
        super().reset_parameters()  # type: ignore[misc]
        if self.zero_centered_gamma and self.weight is not None:
            nn.init.zeros_(self.weight)

    def factor(self) -> Tensor | None:
        """What the norm multiplies by; None with ``elementwise_affine=False``: by nothing."""
        if not self.zero_centered_gamma or self.weight is None:
            return self.weight
        return torch.ones_like(self.weight) + self.weight  # not 1 + weight, which torch 2.11 cannot export


class LayerNorm(_ZeroCentered, nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension; with ``zero_centered_gamma`` it multiplies by 1 + weight.

    Args:
        features: size of the last dimension.
        eps: added to the variance.
        zero_centered_gamma: see above; the weight then starts at 0.
        options: torch.nn.LayerNorm's ``elementwise_affine``, ``bias``, ``device`` and ``dtype``.

    Shape:
        input [..., features], result the same, of the input's dtype.

    Example:
        >>> LayerNorm(8, zero_centered_gamma=True).weight.sum().item()
        0.0
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.factor(), self.bias, self.eps)

    def norm(self) -> Norm:
        """What the fused kernels do in this module's place."""
        return Norm("layer_norm", self.eps, self.zero_centered_gamma)


class RMSNorm(_ZeroCentered, nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension; with ``zero_centered_gamma`` it multiplies by 1 + weight.

    Args:
        features: size of the last dimension.
        eps: added to the mean square.
        zero_centered_gamma: see above; the weight then starts at 0.
        options: torch.nn.RMSNorm's ``elementwise_affine``, ``device`` and ``dtype``.

    Shape:
        input [..., features], result the same, of the input's dtype.

    Example:
        >>> RMSNorm(8).weight.sum().item()
        8.0
    """

    bias = None

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.factor(), self.eps)

    def norm(self) -> Norm:
        """What the fused kernels do in this module's place."""
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps  # as torch does for None
        return Norm("rms_norm", eps, self.zero_centered_gamma)
