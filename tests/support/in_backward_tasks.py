"""What ranks do for test_in_backward.py."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from octavo.optim import AdamW, LastStepNorm, update_in_backward
from octavo.optim.gradient_norms import squared_norms
from octavo.optim.state import local
from tests.support import sharded_weights as cases


def sharded_equals(mesh: Any, dtype: torch.dtype) -> list[str]:
    """What differs between updates in backward and a step after it, for a few thresholds."""
    found, runs = [], {}
    for threshold in (None, 0, 1000):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 37), nn.Linear(37, 5)).to(dtype)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if threshold is not None:
            update_in_backward(optimizer, threshold)
        torch.manual_seed(1 + mesh.get_local_rank())
        for _ in range(2):
            model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
        runs[threshold] = {name: local(p).detach().clone() for name, p in model.named_parameters()} | {"norm": norm}
        for name, p in model.named_parameters():
            runs[threshold] |= {f"{name} {key}": local(value).clone() for key, value in optimizer.state[p].items()}
    for threshold, tensors in runs.items():
        found += [f"{threshold} {name}" for name, x in tensors.items() if not torch.equal(x, runs[None][name])]
    return found


def squares_of_sharded(mesh: Any) -> tuple[list[float], list[float]]:
    """(squared norms, what they have to be) of two sharded gradients and a plain one between them."""
    torch.manual_seed(0)
    tensors = [torch.randn(5, 3), torch.randn(4), torch.randn(1, 6, dtype=torch.bfloat16)]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    gradients = [distribute_tensor(tensor, mesh, placements) for tensor in tensors]
    gradients[1] = tensors[1]
    return squared_norms(gradients).tolist(), [float(tensor.float().square().sum()) for tensor in tensors]


CROSSED_EARLY = {"dynamic": 200, "blockwise": 100_000}  # bytes, by the second of three gradients


def stored_equals(mesh: Any, recipe: str, clip: Any = None) -> list[str]:
    """The same of weights that live in FP8, with micro-batches; the thresholds part ranks' updates differently."""
    found, runs = [], {}
    for threshold in (*((None,) if clip is None else ()), 0, CROSSED_EARLY[recipe]):
        net = cases.sharded(recipe, mesh)
        optimizer = cases.adamw(net)
        handle = None if threshold is None else update_in_backward(optimizer, threshold, clip)
        for step in range(2):
            for last in (False, True):
                net.set_requires_gradient_sync(last)
                with nullcontext() if handle is None or last else handle.accumulate():
                    net(cases.batch(2 * step + last, mesh.get_local_rank())).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs[threshold] = cases.held(net, optimizer)
    expected = next(iter(runs.values()))
    for threshold, tensors in runs.items():
        found += [f"{threshold} {name}" for name, x in tensors.items() if not torch.equal(x, expected[name])]
    return found


def norms_of_ranks(mesh: Any) -> list[float]:
    """The last step's norm by thresholds; ranks without rows have no bytes of a gradient."""
    found = []
    for threshold in (0, CROSSED_EARLY["dynamic"]):
        net = cases.sharded("dynamic", mesh)
        optimizer = cases.adamw(net)
        handle = update_in_backward(optimizer, threshold, LastStepNorm(0.1))
        for step in range(2):
            net(cases.batch(step, mesh.get_local_rank())).float().square().mean().backward()
            optimizer.step()
        assert handle.last_norm is not None
        found.append(float(handle.last_norm))
    return found
