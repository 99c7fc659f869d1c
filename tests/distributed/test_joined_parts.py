"""Checkpoints of layers with named splits, which tensor parallelism parts, are read by any layout of ranks."""

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
from octavo.distributed.joined_parts import by_file, is_common, parts_of
from octavo.distributed.ranks import Ranks
from tests.support.parallel_tasks import RECIPES, whole
from tests.support.sharded_weights import save_later


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


def of_file(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return whole values of a model's or its optimizer's tensors by a checkpoint's names; a state's by one name each.

    Of what parts have in common, which has to be equal, one.
    """

    def read(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {key: read([part[key] for part in parts]) for key in parts[0]}
        if is_common(parts[0]):
            assert all(torch.equal(parts[0], part) for part in parts)
            return parts[0].clone()
        return torch.cat([whole(part) for part in parts])

    return {
        name: read([state[one] for one in names_of_parts])
        for name, names_of_parts in by_file(state, parts_of(model)).items()
    }


def values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All that a checkpoint holds of them, by its names."""
    tensors = of_file(model, get_model_state_dict(model))
    for name, state in of_file(model, get_optimizer_state_dict(model, optimizer)["state"]).items():
        tensors |= {f"{name} {key}": value for key, value in state.items()}
    return tensors


def save(mesh: Any, path: str, recipe: str, *how: Any) -> dict[str, Tensor]:
    model, optimizer = trained(mesh, recipe, 2, *how)
    tensors = values(model, optimizer)
    with save_later(path, model, optimizer, {"step": 2}, ranks=Ranks(dist.new_group())):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return tensors


def load(mesh: Any, path: str, recipe: str, *how: Any) -> tuple[dict[str, Tensor], bool]:
    """Return (the loaded tensors, whether all steps are 2 after one more)."""
    model, optimizer = trained(mesh, recipe, 1, *how)
    assert load_checkpoint(path, model, optimizer) == {"step": 2}
    tensors = values(model, optimizer)
    optimizer.step()
    return tensors, all(bool(state["step"] == 2) for state in optimizer.state.values())


LAYOUTS = [(2, 2), (4, 1), (1, 4)]  # data x tensor, of all ranks of the pool


@pytest.mark.parametrize(
    ("saved", "read"),
    [((2, 2), [(1, 4)]), *(pytest.param(saved, LAYOUTS, marks=pytest.mark.full) for saved in LAYOUTS)],
)
def test_from_any_layout_to_any(pool, saved, read, tmp_path):
    """Weights and the optimizer's moments bit for bit, on these ranks and on one."""
    wanted = pool.run(save, saved, str(tmp_path), "delayed")[0]
    answers = [answer for layout in read for answer in pool.run(load, layout, str(tmp_path), "delayed")]
    for loaded, _ in [*answers, load(None, str(tmp_path), "delayed")]:
        assert loaded.keys() == wanted.keys() and "attention.qkv.linear.weight exp_avg" in loaded
        assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def test_names():
    parted = {"a.weight": ["a.q.weight", "a.k.weight"]}
    names = ["a.q.weight", "a.k.weight", "b"]
    assert by_file(names, parted) == parted | {"b": ["b"]}
    assert by_file(names[1:], parted) == {name: [name] for name in names[1:]}  # only one is trained
    assert parts_of(octavo.nn.Linear(8, {"q": 4, "k": 4})) == {}
