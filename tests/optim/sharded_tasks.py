"""What ranks do for test_agreement.py: weights that live in FP8, sharded, beside the same ones whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.optim import AdamW, update_in_backward
from octavo.tensor.sharded_weight import on_this_rank
from octavo.tensor.stored_weight import StoredWeight, stored_part
from tests.optim.situations import part_of

RECIPES = {"dynamic": octavo.recipes.dynamic, "blockwise": octavo.recipes.blockwise}
SIZES = {"dynamic": (140, 37, 5, 1), "blockwise": (140, 512, 256, 256)}  # rows of 2 ranks: uneven, or whole blocks


def model(recipe: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = SIZES[recipe]
    layers = [nn.Linear(k, n, bias=False) for k, n in zip(sizes, sizes[1:], strict=False)]
    net = nn.Sequential(layers[0], nn.Tanh(), *layers[1:]).bfloat16()
    return octavo.convert(net, RECIPES[recipe](), lambda module, name: True, "fp8")


def sharded(recipe: str, mesh: Any, seed: int = 0) -> nn.Sequential:
    net = model(recipe, seed)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def steps(net: nn.Module, optimizer: AdamW, first: int, last: int) -> None:
    """Steps with gradients that do not depend on the weights, so that a rank's are a part of the whole one's."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in net.parameters():
            whole = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = part_of(whole, p) if isinstance(p, DTensor) else whole
        optimizer.step()


def held(net: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """All that training depends on, of this rank's part."""
    optimizer.state_dict()  # waits for what ranks agree on
    found: dict[str, Tensor] = {}
    for name, p in net.named_parameters():
        part = stored_part(p)
        if part is None:
            found[name] = on_this_rank(p).detach()
        else:
            found |= {f"{name} codes": part.q.view(torch.uint8), f"{name} scale_inv": part.scale_inv}
        for key, value in optimizer.state[p].items():
            found[f"{name} {key}"] = on_this_rank(value)
    return {name: value.clone() for name, value in found.items()}


def part(whole: Tensor, like: Tensor, mesh: Any) -> Tensor:
    """This rank's rows of what the whole model holds; scalars and what has as many rows as it is whole."""
    if whole.ndim == 0 or whole.shape == like.shape == (1, 1):
        return whole
    parts = [*whole.chunk(mesh.size()), *[whole[:0]] * mesh.size()]
    return parts[mesh.get_local_rank()]


def differences(found: dict[str, Tensor], whole: dict[str, Tensor], mesh: Any) -> list[str]:
    """The names of tensors that are not the whole ones' part."""
    assert found.keys() == whole.keys(), found.keys() ^ whole.keys()
    return [name for name, value in found.items() if not torch.equal(value, part(whole[name], value, mesh))]


def beside_whole(mesh: Any, recipe: str, moments: Any, master: str | None) -> list[str]:
    """What differs between steps of a sharded model and of the whole one."""
    runs = []
    for net in (sharded(recipe, mesh), model(recipe)):
        optimizer = AdamW(net.parameters(), lr=0.05, moments=moments, master=master, weight_decay=0.1)
        steps(net, optimizer, 0, 4)
        runs.append(held(net, optimizer))
    return differences(*runs, mesh)
