"""A block saved by one layout of ranks, data x tensor, and loaded by another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import distributed as ours
from octavo.distributed.checkpoint import load_checkpoint, save_checkpoint
from octavo.distributed.joined_parts import Joined, join, names_of
from tests.support.parallel_tasks import RECIPES, whole


def trained(mesh: Any, recipe: str, steps: int) -> tuple[nn.Module, Any]:
    """A block with named splits and biases, on a mesh (data, tensor) or alone, and its optimizer."""
    torch.manual_seed(0)
    data, tensor = (1, 1) if mesh is None else mesh.shape
    model = octavo.nn.TransformerBlock(32, 64, 4, bias=True, recipe=RECIPES[recipe])
    row = column = 0
    if mesh is not None:
        first, second = ours.ColwiseParallel(input_layouts=Shard(1)), ours.RowwiseParallel(output_layouts=Shard(1))
        plan: dict[str, Any] = dict.fromkeys(("attention.qkv.norm", "mlp.norm"), ours.SequenceParallel())
        plan |= dict.fromkeys(("attention.qkv.linear", "mlp.fc1"), first)
        plan |= dict.fromkeys(("attention.out", "mlp.fc2"), second)
        parallelize_module(model, mesh["shard"], plan)
        fully_shard(model, mesh=mesh["replicate"])
        row, column = (mesh[name].get_local_rank() for name in mesh.mesh_dim_names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, g = torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    x, g = (one.chunk(data)[row].chunk(tensor, 1)[column].contiguous() for one in (x, g))
    for _ in range(steps):
        model(x).backward(g)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All that a checkpoint holds of them, by its names."""
    names = names_of(model)

    def read(value: Any) -> Tensor:
        return torch.cat([whole(part) for part in value.parts]) if isinstance(value, Joined) else whole(value).clone()

    found = {name: read(value) for name, value in join(get_model_state_dict(model), names).items()}
    for name, state in join(get_optimizer_state_dict(model, optimizer)["state"], names).items():
        found |= {f"{name} {key}": read(value) for key, value in state.items()}
    return found


def save(mesh: Any, path: str, recipe: str) -> dict[str, Tensor]:
    model, optimizer = trained(mesh, recipe, 2)
    save_checkpoint(path, model, optimizer, {"step": 2})
    return values(model, optimizer)


def load(mesh: Any, path: str, recipe: str) -> tuple[dict[str, Tensor], bool]:
    """(what was loaded; whether it trains on)."""
    model, optimizer = trained(mesh, recipe, 1)
    assert load_checkpoint(path, model, optimizer) == {"step": 2}
    found = values(model, optimizer)
    optimizer.step()
    return found, all(bool(state["step"] == 2) for state in optimizer.state.values())
