"""A small model that an optimizer of octavo trains: whole, or sharded by FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from octavo.formats import E4M3, E4M4
from octavo.granularity import PerTensor
from octavo.optim import AdamW, Moment

FULL = StateDictOptions(full_state_dict=True)

PLAIN = ("step", "master_kind")  # the same on all ranks


def model(master: str | None) -> nn.Module:
    """Weights of which the ranks hold uneven parts: 37 and 5 rows, and 1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(140, 37), nn.Tanh(), nn.Linear(37, 5, bias=False), nn.Linear(5, 1, bias=False))
    return net.to(torch.float32 if master == "auto" else torch.bfloat16)


def optimizer_of(net: nn.Module, moments: Any, master: str | None) -> AdamW:
    return AdamW(net.parameters(), lr=0.01, moments=moments, master=master)


def train(net: nn.Module, optimizer: AdamW, steps: int, seed: int = 0) -> None:
    """Gradients do not depend on the weights, so that those of a rank are a part of the whole one's."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in net.parameters():
            whole = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = part_of(whole, p) if isinstance(p, DTensor) else whole
        optimizer.step()


def part_of(whole: Tensor, like: DTensor) -> DTensor:
    rank, size = like.device_mesh.get_local_rank(), like.device_mesh.size()
    parts = list(whole.chunk(size)) + [whole[:0]] * size
    local = parts[rank].contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in net.named_parameters()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor], but: str = " ") -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if not name.endswith(but))


def unsharded(moments: Any, master: str | None, steps: int = 4) -> dict[str, Tensor]:
    net = model(master)
    train(net, optimizer_of(net, moments, master), steps)
    return weights(net)


def sharded(mesh: Any, moments: Any, master: str | None, steps: int = 4) -> dict[str, Tensor]:
    net = model(master)
    fully_shard(net, mesh=mesh)
    versions = [p._version for p in net.parameters()]
    train(net, optimizer_of(net, moments, master), steps)
    assert all(p._version > version for p, version in zip(net.parameters(), versions, strict=True))
    return weights(net)


def reloaded(mesh: Any, moments: Any, master: str | None, full: bool) -> bool:
    """Whether a sharded state that was saved, in parts or gathered, and loaded goes on as if it had not been."""
    found = []
    for interrupted in (False, True):
        net = model(master)
        fully_shard(net, mesh=mesh)
        optimizer = optimizer_of(net, moments, master)
        train(net, optimizer, 3)
        if interrupted:
            saved = get_optimizer_state_dict(net, optimizer, options=FULL if full else None)
            saved = {"state": {n: dict(s) for n, s in saved["state"].items()}, "param_groups": saved["param_groups"]}
            for state in saved["state"].values():
                assert full or all(isinstance(v, DTensor) for k, v in state.items() if k not in PLAIN), state.keys()
            optimizer = optimizer_of(net, moments, master)
            net.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                set_optimizer_state_dict(net, optimizer, saved, options=FULL if full else None)
        train(net, optimizer, 3, seed=1)
        found.append(weights(net))
    return same(*found)


def resharded(mesh: Any) -> bool:
    """Whether a state goes from one rank to all and back, and on as if it had stayed on one."""
    net = model("split24")
    del net[0].bias  # a vector's blocks end with the rank's part
    net[0].register_parameter("bias", None)
    optimizer = optimizer_of(net, "fp8", "split24")
    train(net, optimizer, 2)
    before, saved = weights(net), get_optimizer_state_dict(net, optimizer, options=FULL)
    saved = {"state": {n: {k: v.clone() for k, v in s.items()} for n, s in saved["state"].items()}} | {
        "param_groups": saved["param_groups"]
    }
    train(net, optimizer, 2, seed=1)
    train(net, optimizer, 2, seed=2)

    parts = model("split24")
    parts[0].register_parameter("bias", None)
    fully_shard(parts, mesh=mesh)
    set_model_state_dict(parts, before, options=FULL)
    on_ranks = optimizer_of(parts, "fp8", "split24")
    set_optimizer_state_dict(parts, on_ranks, saved, options=FULL)
    train(parts, on_ranks, 2, seed=1)

    again = model("split24")
    again[0].register_parameter("bias", None)
    again.load_state_dict(weights(parts))
    back = optimizer_of(again, "fp8", "split24")
    state = get_optimizer_state_dict(parts, on_ranks, options=FULL)
    if mesh.get_local_rank():  # torch gathers on the first rank only
        return True
    set_optimizer_state_dict(again, back, state, options=FULL)
    train(again, back, 2, seed=2)
    return same(weights(net), weights(again))


def refused(mesh: Any) -> bool:
    one = (Moment(E4M3, granularity=PerTensor()), Moment(E4M4, root=True))
    net = model("split24")
    fully_shard(net, mesh=mesh)
    try:
        optimizer_of(net, one, "split24")
    except ValueError as error:
        return "sharded weights do not share" in str(error)
    return False
