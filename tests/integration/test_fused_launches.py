"""What a fused module launches on a GPU, in order; the kernels are bound, not compiled."""

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import octavo
from octavo import E4M3, Cast, PerBlock, Recipe, recipes
from octavo.scaling.delayed import state_of

pytest.importorskip("triton")
gpu_host = importlib.import_module("benchmarks.host.gpu_host")
uncompiled = importlib.import_module("tests.support.uncompiled").uncompiled

W, F, T = 64, 128, 32
NAMES = {
    "norm_tensor_kernel": "norm",
    "norm_rows_kernel": "norm",
    "norm_blocks_kernel": "norm",
    "cast_tensor_kernel": "cast",
    "cast_rows_kernel": "cast",
    "cast_lines_kernel": "cast",
    "cast_blocks_kernel": "cast",
    "amax_kernel": "amax",
    "line_amax_kernel": "amax",
    "matmul_kernel": "product",
    "norm_backward_kernel": "norm backward",
}


def launches_of(module: nn.Module, x: torch.Tensor) -> tuple[list[str], list[str]]:
    """The launches of a forward and of its backward, once scales exist."""
    for part in module.modules():
        gpu_host.fill(state_of(part))
    with gpu_host.on_gpu_path(record=True) as launches, uncompiled():
        product = gpu_host._scaled_mm

        def library(*args: Any) -> torch.Tensor:
            launches.append(SimpleNamespace(kernel=SimpleNamespace(name="matmul_kernel")))
            return product(*args)

        def take() -> list[str]:
            names = [NAMES.get(launch.kernel.name, launch.kernel.name) for launch in launches]
            launches.clear()
            return names

        with mock.patch.object(torch, "_scaled_mm_v2", library):
            for _ in range(3):
                launches.clear()
                y = module(x)
                forward = take()
                y.backward(torch.ones_like(y))
                backward = take()
    return forward, backward


def mlp(recipe: Recipe, activation: str = "swiglu") -> tuple[nn.Module, torch.Tensor]:
    module = octavo.nn.RMSNormMLP(W, F, activation, recipe=recipe, dtype=torch.bfloat16)
    return module, torch.randn(T, W, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(
    ("recipe", "norm", "activation"),
    [
        (recipes.delayed(), ["norm"], ["cast"]),
        (recipes.dynamic(), ["norm", "cast"], ["amax", "cast"]),
        (recipes.rowwise(), ["norm", "amax", "cast"], ["amax", "cast"]),
        (recipes.blockwise(), ["norm", "cast"], ["cast"]),
        (recipes.mx(), ["norm"], ["cast"]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_mlps(recipe: Recipe, norm: list[str], activation: list[str]) -> None:
    """The weights, and then what is read; grad_output, its two products, the activation's gradient, its two."""
    for kind in ("swiglu", "gelu"):
        forward, backward = launches_of(*mlp(recipe, kind))
        weights = activation * 2
        assert forward == [*weights, *norm, "product", *activation, "product"]
        assert backward[:-2] == [*activation, "product", "product"] * 2
        assert backward[-2] == "norm backward"


def test_saved_costs_one_cast() -> None:
    recipe = dataclasses.replace(recipes.delayed(), saved=Cast(E4M3, PerBlock(1, 128)))
    forward, backward = launches_of(*mlp(recipe))
    assert forward[:5] == ["cast", "cast", "norm", "product", "cast"] and sorted(forward[5:]) == ["cast", "product"]
    assert len(backward) == 8


def test_delayed_norm_linear() -> None:
    layer = octavo.nn.LayerNormLinear(W, {"query": 64, "key": 32, "value": 32}, recipe=recipes.delayed())
    layer.bfloat16()

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.layer(x)
            return torch.cat((query, key, value), dim=-1)

    forward, backward = launches_of(Joined(), torch.randn(T, W, dtype=torch.bfloat16, requires_grad=True))
    assert forward == ["cast", "norm", "product"]
    assert backward[:3] == ["cast", "product", "product"] and len(backward) == 5
