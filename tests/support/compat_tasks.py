"""What ranks of tests/support/pool.py run for octavo.compat."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def sharded_program(mesh: Any, library_name: str, recipe: str) -> list[float]:
    """Losses of torchao's program for FSDP2, by this library."""
    library = importlib.import_module(library_name)
    gathers = recipe == "tensorwise"
    config = dataclasses.replace(
        library.Float8LinearConfig.from_recipe_name(recipe), emulate=True, enable_fsdp_float8_all_gather=gathers
    )
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 8))
    library.convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: fqn != "4")
    for layer in model[0], model[2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(5):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + mesh.get_local_rank()))
        loss = (model(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if gathers:
            library.precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    return losses
