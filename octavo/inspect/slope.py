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
from octavo.inspect.weight_updates import local_gradient
from octavo.weights.fsdp2 import on_this_rank

# --- limits: by how much the loss should change: far more than it is rounded by, and so little that its curvature
# changes the slope by less than the limits that rules.py has for "backward"

LOSS_CHANGE = 0.01  # of a loss that the model returns
OUTPUTS_CHANGE = 0.5  # of other outputs: of the root mean square of the terms of their product with their gradients
FLOAT32_SHARE = 0.2  # of these in a model of float32, which rounds less


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of products, float64; of large tensors in parts, whose products are float32."""
    if x.numel() < 1 << 16:
        return (x.double() * y.double()).sum()
    parts = zip(x.flatten().split(1 << 24), y.flatten().split(1 << 24), strict=True)
    return torch.stack([(a.float() * b.float()).sum(dtype=torch.float64) for a, b in parts]).sum()


def aimed_change(y: Tensor, grad: Tensor, is_float32: bool) -> Tensor:
    """Return by how much an output's product with its gradient should change, in a model of float32 or of bfloat16."""
    product = (dot(y, y) * dot(grad, grad)).sqrt() * (FLOAT32_SHARE if is_float32 else 1.0)
    return product * (LOSS_CHANGE if y.numel() == 1 else OUTPUTS_CHANGE / math.sqrt(max(1, y.numel())))


def _moved(weight: Tensor, grad: Tensor, step: Tensor) -> Tensor:
    """Return a weight moved along its gradient; in bf16 rounded by chance, as most moves are below its distances."""
    moved = weight - (grad.to(torch.promote_types(weight.dtype, torch.float32)) * step).nan_to_num(0.0, 0.0, 0.0)
    if weight.dtype != torch.bfloat16:
        return moved
    bits = moved.view(torch.int32) + torch.randint(1 << 16, weight.shape, dtype=torch.int32, device=weight.device)
    return (bits & -(1 << 16)).view(torch.float32)


def _copies(parameter: Tensor, ranks: int) -> int:
    """Return on how many ranks each element of a parameter lies, in a model some of whose parameters are sharded."""
    if not hasattr(parameter, "placements"):
        return ranks
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_replicate())


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
    is_sharded = any(hasattr(p, "to_local") for p in model.parameters())
    movable: list[tuple[Tensor, Tensor, int]] = []  # weight and gradient of this rank; how many ranks have the same
    for p in model.parameters():
        grad, weight = local_gradient(p), on_this_rank(p).data
        if grad is not None and type(weight) is Tensor and weight.element_size() > 1:
            movable.append((weight, grad, _copies(p, ranks.size) if is_sharded else 1))
    if not movable:
        return aim.new_zeros(2)
    squares = torch.stack([torch.stack([dot(grad, grad), dot(weight, weight)]) / n for weight, grad, n in movable])
    grad_norms, weight_norms = (ranks.sum(squares) if is_sharded else squares).sqrt().unbind(1)
    shares = torch.where(grad_norms > 0, weight_norms / grad_norms, 0.0)  # each weight by the same part of its size
    # of gradients that are inf or NaN, or all 0, no weight moves: the forward gets no NaN
    steps = (aim * shares / (grad_norms * weight_norms).sum()).nan_to_num(0.0, 0.0, 0.0)
    unmoved_weights = [weight.clone() for weight, _, _ in movable]
    try:
        for (weight, grad, _), step in zip(movable, steps, strict=True):
            weight.copy_(_moved(weight, grad, step))
        pairs = zip(movable, unmoved_weights, strict=True)
        predicted = torch.stack([dot(grad, weight - unmoved) / n for (weight, grad, n), unmoved in pairs]).sum()
        reshard(model)
        changed = change()
    finally:
        for (weight, _, _), unmoved in zip(movable, unmoved_weights, strict=True):
            weight.copy_(unmoved)
        reshard(model)
    return torch.stack([changed, predicted * (ranks.size if is_sharded else 1)])  # of sharded weights the losses' mean


def reshard(model: nn.Module) -> None:
    """Make FSDP2 gather weights anew for the next forward."""
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
