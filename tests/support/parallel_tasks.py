"""Layers under tensor parallelism beside the same layers on one rank: what each rank runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import octavo
from octavo import recipes

RECIPES = {
    "dynamic": recipes.dynamic(),
    "power of two": recipes.dynamic(power_of_two=True),
    "delayed": recipes.delayed(history_length=2),
    "rowwise": recipes.rowwise(power_of_two=True),
    "gw_hp": recipes.rowwise_with_gw_hp(),
    "blockwise": recipes.blockwise(),
    "mx": recipes.mx(),
    "high_precision": recipes.high_precision(),
}


def small(*shape: int) -> Tensor:
    """Eighths up to 1: sums of their products are exact in float32, in any order."""
    return torch.randint(-8, 9, shape) / 8


class Pair(nn.Module):
    """Two layers, as of an MLP."""

    def __init__(self, k: int, n: int, bias: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(k, n, bias, dtype=dtype), nn.Linear(n, k, bias, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.copy_(small(*parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


def convert(model: nn.Module, recipe: str) -> nn.Module:
    return octavo.convert(model, RECIPES[recipe], select=lambda module, name: True)


def parallel(model: nn.Module, mesh: Any, recipe: str, before: bool, plan: Any = PLAN) -> nn.Module:
    """Converted before it is parallelized, or after."""
    if before:
        convert(model, recipe)
    parallelize_module(model, mesh, {name: style() for name, style in plan.items()})
    return model if before else convert(model, recipe)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """A forward and backward: the output, the gradients of the input and of all parameters, whole."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = whole(model(x))
    y.backward(g)
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return found | {"y": y.detach(), "x": whole(x.grad)}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, of its largest element."""
    assert one.keys() == other.keys()
    return {name: ((one[name] - other[name]).abs().max() / one[name].abs().max()).item() for name in one}


def compare(mesh: Any, recipe: str, before: bool, bias: bool) -> tuple[Any, Any, Any]:
    """(differences from one rank of two steps, of evaluation, whether delayed state is equal on all ranks)."""
    alone = Pair(256, 512, bias)
    model = parallel(copy.deepcopy(alone), mesh, recipe, before)
    convert(alone, recipe)
    x, g = small(3, 8, 256), small(3, 8, 256)
    found = []
    for count in range(3):
        if count == 1 and recipe == "delayed":  # the first step, without history, takes each part's own amax
            octavo.nn.load_delayed_state_dict(model, octavo.nn.delayed_state_dict(alone))
        found.append(differences(step(alone, x, g), step(model, x, g)))
    states = octavo.nn.delayed_state_dict(model)
    same = all(torch.equal(states[name], own) for name, own in octavo.nn.delayed_state_dict(alone).items())
    alone.eval(), model.eval()
    with torch.no_grad():
        y = alone(x)
        evaluated = ((whole(model(x)) - y).abs().max() / y.abs().max()).item()
    return found, evaluated, same


LAYOUTS = {  # of the input, of the weight
    "tokens, rows": (Shard(1), Shard(0)),
    "features, rows": (Shard(2), Shard(0)),
    "whole, columns": (Replicate(), Shard(1)),
    "tokens, columns": (Shard(0), Shard(1)),
    "tokens, whole": (Shard(1), Replicate()),
    "features, whole": (Shard(2), Replicate()),
    "whole, whole": (Replicate(), Replicate()),
}


def lies_otherwise(mesh: Any, recipe: str, layouts: str) -> dict[str, float]:
    """The differences from one rank of a layer whose weight and input are DTensors made by hand."""
    of_input, of_weight = LAYOUTS[layouts]
    alone = Pair(256, 256, True).up
    layer = copy.deepcopy(alone)
    of_bias = of_weight if of_weight == Shard(0) else Replicate()
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [of_weight]))
    layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [of_bias]))
    convert(alone, recipe), convert(layer, recipe)
    x, g = small(4, 256, 256), small(4, 256, 256)
    wanted = step(alone, x, g)
    placed = distribute_tensor(x, mesh, [of_input]).requires_grad_()
    y = layer(placed)
    y.full_tensor().backward(g)
    found = {"weight": whole(layer.weight.grad), "bias": whole(layer.bias.grad)}
    return differences(wanted, found | {"y": whole(y).detach(), "x": whole(placed.grad)})


def refused(mesh: Any) -> list[str]:
    """What a layer says to a plain input, to a weight on a mesh of two dimensions, to strided shards."""
    found, x = [], torch.randn(2, 16)
    placements = [
        (mesh["shard"], [Shard(0)]),
        (mesh, [Replicate(), Shard(0)]),
        (mesh["shard"], [_StridedShard(0, split_factor=2)]),
    ]
    for own, placed in placements:
        layer = convert(nn.Linear(16, 16, False), "dynamic")
        spread = [Shard(0) if isinstance(one, _StridedShard) else one for one in placed]
        local = distribute_tensor(layer.weight.detach(), own, spread).to_local()
        layer.weight = nn.Parameter(DTensor.from_local(local, own, placed, run_check=False))
        with pytest.raises(ValueError) as caught:
            layer(x if not found else DTensor.from_local(x, own, [Replicate()] * own.ndim))
        found.append(str(caught.value))
    return found
