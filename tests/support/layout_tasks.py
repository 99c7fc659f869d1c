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
from octavo.optim.layout import like_param
from octavo.optim.state import as_fp32
from tests.support.parallel_tasks import RECIPES, whole


def trained(mesh: Any, recipe: str, steps: int, compact: Any = None, width: int = 32) -> tuple[nn.Module, Any]:
    """A block with named splits and biases, on a mesh (data, tensor) or alone, and its optimizer.

    ``compact``: octavo's, of these arguments, with weights in bf16; None: torch's.
    """
    torch.manual_seed(0)
    data, tensor = (1, 1) if mesh is None else mesh.shape
    model = octavo.nn.TransformerBlock(width, 2 * width, 4, bias=True, recipe=RECIPES[recipe])
    model = model if compact is None else model.bfloat16()
    row = column = 0
    if mesh is not None:
        first, second = ours.ColwiseParallel(input_layouts=Shard(1)), ours.RowwiseParallel(output_layouts=Shard(1))
        plan: dict[str, Any] = dict.fromkeys(("attention.qkv.norm", "mlp.norm"), ours.SequenceParallel())
        plan |= dict.fromkeys(("attention.qkv.linear", "mlp.fc1"), first)
        plan |= dict.fromkeys(("attention.out", "mlp.fc2"), second)
        parallelize_module(model, mesh["shard"], plan)
        fully_shard(model, mesh=mesh["replicate"])
        row, column = (mesh[name].get_local_rank() for name in mesh.mesh_dim_names)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if compact is not None:
        optimizer = octavo.optim.AdamW(model.parameters(), **compact)
    x, g = torch.randn(2, 4, 16, width).to(next(model.parameters()).dtype)
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


def moments(mesh: Any, path: str, saves: bool, compact: Any, width: int) -> dict[str, Tensor]:
    """Weights with their remainders, bit for bit, and moments as they read, of what is saved or loaded."""
    model, optimizer = trained(mesh, "dynamic", 2 if saves else 1, compact, width)
    save_checkpoint(path, model, optimizer) if saves else load_checkpoint(path, model, optimizer)
    found = {name: value for name, value in values(model, optimizer).items() if "exp_avg" not in name}
    wide: dict[str, Any] = {}
    for name, param in model.named_parameters():
        kept = optimizer.settings.moments_of(param)
        own = {one: like_param(as_fp32(one, moment, optimizer.state[param]), param) for one, moment in kept.items()}
        wide[name] = own
    for name, state in join(wide, names_of(model)).items():
        for key, value in state.items():
            parts = value.parts if isinstance(value, Joined) else [value]
            found[f"{name} {key}"] = torch.cat([whole(part) for part in parts])
    return found


def save(mesh: Any, path: str, recipe: str, *how: Any) -> dict[str, Tensor]:
    model, optimizer = trained(mesh, recipe, 2, *how)
    save_checkpoint(path, model, optimizer, {"step": 2})
    return values(model, optimizer)


def load(mesh: Any, path: str, recipe: str, *how: Any) -> tuple[dict[str, Tensor], bool]:
    """(what was loaded; whether it trains on)."""
    model, optimizer = trained(mesh, recipe, 1, *how)
    assert load_checkpoint(path, model, optimizer) == {"step": 2}
    found = values(model, optimizer)
    optimizer.step()
    return found, all(bool(state["step"] == 2) for state in optimizer.state.values())
