"""Checkpoints of layers with named splits, which tensor parallelism separates, are read by any layout of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import distributed as ours
from octavo.distributed.checkpoint import load_checkpoint
from octavo.distributed.ranks import CheckpointError, Ranks
from tests.distributed.test_parallel_storage import unequal
from tests.support.combinations import in_full
from tests.support.parallel_tasks import RECIPES, whole
from tests.support.sharded_weights import save_later


def trained(mesh: Any, steps: int, compact: Any = None, separate: bool = True) -> tuple[nn.Module, Any]:
    """Return a block with named splits and biases, on a mesh (data, tensor) or alone, and its optimizer.

    ``compact``: octavo's optimizer of these arguments, with weights in bf16; None: torch's. ``separate``: whether
    splits are Linears of their own also without tensor parallelism.
    """
    torch.manual_seed(0)
    data, tensor = (1, 1) if mesh is None else mesh.shape
    model = octavo.nn.TransformerBlock(32, 64, 4, bias=True, recipe=RECIPES["delayed"])
    model = model if compact is None else model.bfloat16()
    model = octavo.nn.separate_splits(model) if separate else model
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
    x, g = torch.randn(2, 4, 16, 32).to(next(model.parameters()).dtype)
    x, g = (one.chunk(data)[row].chunk(tensor, 1)[column].contiguous() for one in (x, g))
    for _ in range(steps):
        model(x).backward(g)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return all that a checkpoint holds of them, whole, by name."""
    tensors = {name: whole(value).clone() for name, value in get_model_state_dict(model).items()}
    for name, state in get_optimizer_state_dict(model, optimizer)["state"].items():
        tensors |= {f"{name} {key}": whole(value).clone() for key, value in state.items()}
    return tensors


def save(mesh: Any, path: str, *how: Any) -> dict[str, Tensor]:
    model, optimizer = trained(mesh, 2, *how)
    tensors = values(model, optimizer)
    with save_later(path, model, optimizer, {"step": 2}, ranks=Ranks() if mesh is None else Ranks(dist.new_group())):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return tensors


def load(mesh: Any, path: str, *how: Any) -> tuple[dict[str, Tensor], bool]:
    """Return (what was loaded, whether it trains on)."""
    model, optimizer = trained(mesh, 1, *how)
    assert load_checkpoint(path, model, optimizer) == {"step": 2}
    tensors = values(model, optimizer)
    optimizer.step()
    return tensors, all(bool(state["step"] == 2) for state in optimizer.state.values())


def rows_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a block by the names that they have if splits are separate."""
    splits = {"attention.qkv.linear": ["query", "key", "value"], "mlp.fc1": ["gate", "up"]}
    separate = dict(tensors)
    for layer, names in splits.items():
        for key in [key for key in tensors if key.startswith(f"{layer}.")]:
            value = separate.pop(key)
            parts = value.chunk(len(names)) if value.ndim and len(value) > 1 else [value] * len(names)
            separate |= {key.replace(layer, f"{layer}.{name}"): part for name, part in zip(names, parts, strict=True)}
    return separate


LAYOUTS = [(2, 2), (4, 1), (1, 4)]  # data x tensor, of all ranks of the pool


@pytest.mark.parametrize(("saved", "read"), [((2, 2), []), *in_full(*((saved, LAYOUTS) for saved in LAYOUTS))])
def test_from_any_layout_to_any(pool, saved, read, tmp_path):
    """Weights and the optimizer's moments bit for bit, on one rank and on these; the next test reads on ranks too."""
    wanted = pool.run(save, saved, str(tmp_path))[0]
    answers = [answer for layout in read for answer in pool.run(load, layout, str(tmp_path))]
    for loaded, trains_on in [*answers, load(None, str(tmp_path))]:
        assert unequal(loaded, wanted) == [] and trains_on and "attention.qkv.linear.key.weight exp_avg" in loaded


FEW_BYTES = [{"moments": moments, "master": "split24"} for moments in ("fp32", "fp8")]


@pytest.mark.parametrize("compact", [FEW_BYTES[0], *in_full((None,), FEW_BYTES[1:])], ids=str)
def test_a_checkpoint_of_joined_splits(pool, compact, tmp_path):
    """It is read where splits are separate, moments and delayed state too; moments in FP8 perhaps as float32."""
    wanted = rows_of(save(None, str(tmp_path), compact, False))
    answers = pool.run(load, (2, 2), str(tmp_path), compact)
    for loaded, trains_on in [*answers, load(None, str(tmp_path), compact)]:
        assert all(torch.equal(value, wanted[name]) for name, value in loaded.items() if name in wanted) and trains_on
        assert loaded.keys() == wanted.keys() or compact["moments"] == "fp8"
    joined, _ = trained(None, 0, compact, False)
    separate, _ = trained(None, 0, compact)
    for model in (joined, separate):
        load_checkpoint(str(tmp_path), model)
    fc1 = separate.mlp.fc1
    assert fc1.up.delayed_scale.all() and torch.equal(fc1.up.delayed_scale, joined.mlp.fc1.delayed_scale)


def test_joined_splits_do_not_read_a_checkpoint_of_separate_ones(tmp_path):
    save(None, str(tmp_path))
    model, optimizer = trained(None, 1, None, False)
    with pytest.raises(CheckpointError, match=r"were separate, as under ColwiseParallel: octavo.nn.separate_splits"):
        load_checkpoint(str(tmp_path), model, optimizer)
