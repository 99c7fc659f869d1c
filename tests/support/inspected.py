"""Trainings that ranks record together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import recipes


def record_sharded(mesh: Any, recipe: str, folder: str) -> None:
    """Two steps under FSDP2, each rank with its rows of one batch; rank 0 leaves the record in the folder."""
    _train(recipe, folder, mesh)


def record_alone(recipe: str, folder: str) -> None:
    """The same on one rank."""
    _train(recipe, folder, None)


def _train(name: str, folder: str, mesh: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    octavo.convert(model, getattr(recipes, name)(), select=lambda *_: True)
    ranks = 1
    if mesh is not None:
        fully_shard(model, mesh=mesh)
        ranks = mesh.size()
    optimizer = octavo.optim.AdamW(model.parameters(), 0.0)  # inputs are cast apart: gradients differ
    group = None if mesh is None else mesh.get_group()
    with octavo.inspect.record(model, folder, every=1, group=group, optimizer=optimizer) as recorder:
        for _ in range(2):
            batch = torch.randn(16, 32).chunk(ranks)[0 if mesh is None else mesh.get_local_rank()]
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()


def network(recipe: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        octavo.nn.Linear(32, 48, recipe=recipe),
        octavo.nn.RMSNormMLP(48, 64, recipe=recipe),
        octavo.nn.LayerNormLinear(48, 16, recipe=recipe),
    ).to(dtype)


def train(model: nn.Module, steps: range, recorder: Any = None, called: Any = None) -> list[float]:
    optimizer = octavo.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = (model if called is None else called)(torch.randn(40, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss=loss)
    return losses
