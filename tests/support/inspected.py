"""Trainings that ranks record together."""

from __future__ import annotations

import errno
import warnings
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import distributed as ours
from octavo import recipes
from octavo.inspect.record import RecordWriter
from tests.support.expert_models import batch, built
from tests.support.parallel_tasks import Pair, convert, small


def record_sharded(mesh: Any, recipe: str, folder: str) -> None:
    """Two steps under FSDP2, each rank with its rows of one batch; rank 0 leaves the record in the folder."""
    _train(recipe, folder, mesh)


def record_on_a_full_disk(mesh: Any, folder: str) -> list[str]:
    """The same where rank 0 can't write what it counts; what is warned of."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(RecordWriter, "add_counts", side_effect=full), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _train("dynamic", folder, mesh)
    return [str(each.message) for each in said if "recorded" in str(each.message)]


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


def record_tensor_parallel(mesh: Any, recipe: str, folder: str) -> None:
    """A step of two layers under tensor and sequence parallelism; rank 0 leaves the record in the folder."""
    rank, group = mesh.get_local_rank(), mesh.get_group()
    model = Pair(64, 96, True)
    x, grad = small(3, 64, 64), small(3, 64, 64)
    convert(model, recipe)
    up = ours.ColwiseParallel(input_layouts=Shard(1), exact=True)
    plan = {"up": up, "down": ours.RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, mesh, plan)
    with octavo.inspect.record(model, folder, every=1, group=group) as recorder:
        own = slice(rank * 64 // mesh.size(), (rank + 1) * 64 // mesh.size())
        model(x[:, own].clone().requires_grad_()).backward(grad[:, own])
        recorder.step()


def record_whole(recipe: str, folder: str) -> None:
    """The same on one rank."""
    torch.manual_seed(0)
    model = Pair(64, 96, True)
    x, grad = small(3, 64, 64), small(3, 64, 64)
    convert(model, recipe)
    with octavo.inspect.record(model, folder, every=1) as recorder:
        model(x.requires_grad_()).backward(grad)
        recorder.step()


def record_experts(mesh: Any, recipe: str, folder: str, sharded: bool = False, storage: Any = None) -> tuple[Any, ...]:
    """A step of experts on several ranks; rank 0 leaves the record. What a fault of rank 1 is then traced to.

    ``sharded``: by FSDP2, and not computed by the ranks that have them; ``storage``: of their weights.
    """
    rank, group = mesh.get_local_rank(), mesh.get_group()
    net = built("stored", recipe, 8, storage=storage)
    if sharded:
        fully_shard(net, mesh=mesh)
    else:
        ours.expert_parallel(net, mesh, exact=True)
    with octavo.inspect.record(net, folder, every=1, group=group) as recorder:
        net(batch(0, rank).requires_grad_()).square().sum().backward()
        recorder.step()
    x, trace = batch(0, rank), octavo.inspect.trace_faults(net, raises=False, group=group)
    x[3, 5] += torch.nan if rank == 1 else 0
    net(x.requires_grad_()).square().sum().backward()
    trace.step()
    trace.close()
    chosen = built("stored", recipe, 8).router(batch(0, 1)).topk(2).indices[3].tolist()
    return trace.fault.layer, trace.fault.role, trace.fault.expert in chosen


def faulty_matrix(mesh: Any) -> tuple[Any, ...]:
    """The fault found in the weight of a layer of one expert, which rank 0 has."""
    layer = octavo.nn.GroupedLinear(1, 32, 48, bias=False, recipe=recipes.dynamic())
    fully_shard(layer, mesh=mesh)
    trace = octavo.inspect.trace_faults(layer, raises=False, group=mesh.get_group())
    with torch.no_grad():
        layer.weight.to_local().fill_(torch.nan)
    for _ in range(2):
        trace.step()
    trace.close()
    return trace.fault.layer, trace.fault.role, trace.fault.expert


def record_all_experts(recipe: str, folder: str, storage: Any = None) -> None:
    """The same step on one rank."""
    net = built("stored", recipe, 8, storage=storage)
    with octavo.inspect.record(net, folder, every=1) as recorder:
        net(torch.cat([batch(0, rank) for rank in range(2)]).requires_grad_()).square().sum().backward()
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
