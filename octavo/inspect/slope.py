"""The slope of a model along the gradients that its backward computes, beside what these say.

Gradients say by how much a loss changes where weights move along them. So weights are moved by a little, and the
forward runs again: if the loss changes by another share of that than in earlier steps, backward computes something else
than the gradient of what forward computes. It takes no gradient from before, which weights' updates change.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.distributed.ranks import Ranks
from octavo.weights.fsdp2 import on_this_rank

OF_LOSS = 0.01  # the change of a loss that is aimed at, as a share of it
OF_OUTPUTS = 0.5  # of other outputs' products with their gradients: in root mean squares of their terms


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of products, float64; of large tensors in parts, whose products are float32."""
    if x.numel() < 1 << 16:
        return (x.double() * y.double()).sum()
    parts = zip(x.flatten().split(1 << 24), y.flatten().split(1 << 24), strict=True)
    return torch.stack([(a.float() * b.float()).sum(dtype=torch.float64) for a, b in parts]).sum()


def aimed_change(y: Tensor, grad: Tensor) -> Tensor:
    """Return by how much an output's product with its gradient should change: far more than it is rounded by."""
    product = (dot(y, y) * dot(grad, grad)).sqrt()
    return product * (OF_LOSS if y.numel() == 1 else OF_OUTPUTS / math.sqrt(max(1, y.numel())))


def _moved(weight: Tensor, grad: Tensor, step: Tensor) -> Tensor:
    """Return a weight moved along its gradient; in bf16 rounded by chance, as most moves are below its distances."""
    moved = weight - grad.to(torch.promote_types(weight.dtype, torch.float32)) * step
    if weight.dtype != torch.bfloat16:
        return moved
    bits = moved.view(torch.int32) + torch.randint(1 << 16, weight.shape, dtype=torch.int32, device=weight.device)
    return (bits & -(1 << 16)).view(torch.float32)


@torch.no_grad()
def changes_along(model: nn.Module, ranks: Ranks, aim: Tensor, change: Callable[[], Tensor]) -> Tensor:
    """Return by how much a loss changes where weights move along their gradients, and by how much these say it does.

    Float64 [2], whose sums over ranks have the slope as their ratio: 1 if backward is right. Zeros where there are no
    gradients; weights that are stored in FP8 stay. The weights have the same bits then.

    Args:
        model: whose parameters have the gradients.
        ranks: that train together, all of which call this if their weights are sharded.
        aim: a float64 number: by how much the loss should change.
        change: runs the forward, and returns the change of the loss.
    """
    params = [(on_this_rank(p).data, on_this_rank(p.grad)) for p in model.parameters() if p.grad is not None]
    moved = [(weight, grad) for weight, grad in params if type(weight) is Tensor and weight.element_size() > 1]
    if not moved:
        return aim.new_zeros(2)
    is_sharded = any(hasattr(p, "to_local") for p in model.parameters())
    squares = torch.stack([dot(grad, grad) for _, grad in moved]).sum()
    step = aim / (ranks.sum(squares) if is_sharded else squares)
    weights = [weight.clone() for weight, _ in moved]
    try:
        for weight, grad in moved:
            weight.copy_(_moved(weight, grad, step))
        says = torch.stack([dot(grad, weight - w) for (weight, grad), w in zip(moved, weights, strict=True)]).sum()
        reshard(model)
        changed = change()
    finally:
        for (weight, _), w in zip(moved, weights, strict=True):
            weight.copy_(w)
        reshard(model)
    return torch.stack([changed, says * (ranks.size if is_sharded else 1)])  # of sharded weights the losses' mean


def reshard(model: nn.Module) -> None:
    """Make FSDP2 gather weights anew for the next forward."""
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
