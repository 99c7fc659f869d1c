"""What ranks of tests/support/pool.py run for octavo.compat."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.compat import transformer_engine as te


def sharded_te_layers(mesh: Any) -> tuple[dict[str, list[float]], set[str], str]:
    """Losses of layers that are whole and of the same sharded; how weights were gathered; what a late recipe raises."""
    recipe = te.Float8CurrentScaling()
    whole = nn.Sequential(te.LayerNormMLP(64, 128, device="cpu"), te.Linear(64, 32, device="cpu"))
    sharded, late = copy.deepcopy(whole), copy.deepcopy(whole)
    octavo.convert(sharded, recipe.octavo(), select=lambda module, name: isinstance(module, octavo.nn.Linear))
    for model in (sharded, late):
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x, losses = torch.randn(16, 64), {}
    for name, model in (("whole", whole), ("sharded", sharded)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[name] = []
        for _ in range(3):
            with te.autocast(recipe=recipe):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    ways = {module.gather.used[0] for module in sharded.modules() if isinstance(module, octavo.nn.Linear)}
    try:
        with te.autocast(recipe=recipe):
            late(x)
    except octavo.UnsupportedOptionError as error:
        return losses, ways, str(error)
    return losses, ways, ""


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
