"""The cross entropy of each row of logits, which reads them once forward and once backward, with no copy in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.products import refuse_in_backward
from octavo.private import tracing_state


class _CrossEntropy(torch.autograd.Function):
    """cross_entropy_of_rows with its gradient; it saves the logits and a number a row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float
    ) -> Tensor:
        ctx.options = ignore_index, label_smoothing, softcap
        losses, lse = kernels.cross_entropy(logits, target, *ctx.options)
        ctx.save_for_backward(logits, target, lse)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_in_backward(*grads)
        logits, target, lse = ctx.saved_tensors
        return kernels.cross_entropy_backward(logits, target, *ctx.options, lse, grads[0]), None, None, None, None


def cross_entropy_of_rows(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, softcap: float
) -> Tensor:
    """Return each row's loss [T], float32, of logits [T, V]; target [T] int64: right columns, or ``ignore_index``."""
    if tracing_state() is not None:  # a file of TorchScript holds no autograd function in Python
        return kernels.cross_entropy(logits, target, ignore_index, label_smoothing, softcap)[0]
    return _CrossEntropy.apply(logits, target, ignore_index, label_smoothing, softcap)
