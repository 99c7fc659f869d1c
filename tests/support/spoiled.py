"""A small model into which infs and NaNs are put, forward or backward, between its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes

PLACES = ("before first", "before mlp", "before last")  # of a model; these and others for train_spoiled


class _Spoil(torch.autograd.Function):
    """x, with these added to an element of it, and to one of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return _added(x, added[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _added(grads[0], ctx.saved_tensors[0][1]), None


def _added(x: Tensor, value: Tensor) -> Tensor:
    at = torch.zeros_like(x)
    at[3, 5] = 1
    return torch.where(at == 1, x + value, x)


class Spoiled(nn.Module):
    """Three layers; ``added`` [3, 2] is put in before each, forward and backward."""

    added: Tensor

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = octavo.nn.Linear(32, 48, recipe=recipe)
        self.mlp = octavo.nn.RMSNormMLP(48, 64, activation="silu", recipe=recipe)
        self.last = octavo.nn.LayerNormLinear(48, 16, recipe=recipe)
        self.register_buffer("added", torch.zeros(3, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(_Spoil.apply(x, self.added[0]))
        x = x + self.mlp(_Spoil.apply(x, self.added[1]))
        return self.last(_Spoil.apply(x, self.added[2]))


def train_spoiled(
    model: nn.Module,
    steps: range,
    trace: Any = None,
    faults: dict[int, tuple[str, float]] | None = None,
    called: Any = None,
    update: bool = True,
) -> list[float]:
    """Train, with a fault of a value put into a place in some steps; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for step in steps:
        place, value = (faults or {}).get(step, ("", 0.0))
        _put(model, place, value)
        torch.manual_seed(step)
        loss = (model if called is None else called)(torch.randn(40, 32)).square().mean()
        if place == "loss":
            loss = loss * value
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if update:
            optimizer.step()
        if place == "weight":
            with torch.no_grad():
                model.mlp.fc2.weight[-1, 3] = value
        optimizer.zero_grad()
        losses.append(loss.item())
        if trace is not None:
            trace.step(loss, value if place == "grad_norm" else norm)
    return losses


@torch.no_grad()
def _put(model: nn.Module, place: str, value: float) -> None:
    """Put a value into a place, or take it out again."""
    model.added.zero_()
    where, _, backward = place.partition(", ")
    if where in PLACES:
        model.added[PLACES.index(where), int(bool(backward))] = value
    elif place == "in mlp":
        model.mlp.fc1.bias[7] = value  # one column of what comes out of it


def spoiled_rank(mesh: Any) -> tuple[Any, ...]:
    """A training under FSDP2 in which rank 1 has a fault; what each rank reads of it."""
    model = Spoiled(recipes.delayed())
    for layer in (model.first, model.mlp, model.last, model):
        fully_shard(layer, mesh=mesh)
    fault = {3: ("before mlp", torch.nan)} if mesh.get_local_rank() == 1 else None
    trace = octavo.inspect.trace_faults(model, raises=False, group=mesh.get_group())
    train_spoiled(model, range(5), trace, fault)
    trace.close()
    found = trace.fault
    return found.layer, found.role, found.step, found.rank, len(found.before), found.share
