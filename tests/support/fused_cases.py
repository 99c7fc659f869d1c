"""Fused modules, the same in parts, and the truth in float64, for the tests that compare them."""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import E4M3, Cast, PerBlock, Recipe, RecipeMap, recipes
from octavo.nn.fused import activate
from tests.support.helpers import FP8_RECIPES, gradients

LINEARS = {"layer_norm": octavo.nn.LayerNormLinear, "rms_norm": octavo.nn.RMSNormLinear}
MLPS = {"layer_norm": octavo.nn.LayerNormMLP, "rms_norm": octavo.nn.RMSNormMLP}
SAVED = Cast(E4M3, PerBlock(1, 128))


def named(recipe: str | Recipe | RecipeMap, saved: bool = False) -> Recipe | RecipeMap:
    """Return a recipe by its name."""
    if not isinstance(recipe, str):
        return recipe
    return dataclasses.replace(FP8_RECIPES[recipe](), saved=SAVED if saved else None)


def linear(norm: str = "rms_norm", recipe: Any = "dynamic", k: int = 64, n: Any = 48, **options: Any) -> nn.Module:
    return shaken(LINEARS[norm](k, n, recipe=named(recipe), **options))


def mlp(
    norm: str = "rms_norm",
    recipe: Any = "dynamic",
    width: int = 64,
    inside: int = 96,
    saved: bool = False,
    **options: Any,
) -> nn.Module:
    return shaken(MLPS[norm](width, inside, recipe=named(recipe, saved), **options))


@torch.no_grad()
def shaken(module: nn.Module) -> nn.Module:
    """Return the module after changing its norms' parameters and biases from the ones and zeros they begin with."""
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.25 * torch.randn(parameter.shape))
    return module


def in_parts(module: nn.Module) -> nn.Module:
    """Return a copy whose parts run one after the other."""
    apart = copy.deepcopy(module)
    if getattr(apart, "fc2", None) is not None and apart.fc2.recipe.saved is not None:
        return _Stored(apart)
    apart.norm.register_forward_hook(lambda module, args, output: None)
    return apart


def in_float64(module: nn.Module) -> nn.Module:
    return octavo.set_recipe(copy.deepcopy(module), recipes.high_precision()).double()


def results(module: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output (named splits side by side), and the gradients of x and of each parameter."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y = torch.cat(y, dim=-1) if isinstance(y, tuple) else y
    y.backward(grad)
    return {"y": y.detach(), "x": leaf.grad, **gradients(module)}


class _Stored(nn.Module):
    """An MLP's parts, one after the other; backward reads the activation's input as ``saved`` keeps it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2, self.activation = mlp.norm, mlp.fc1, mlp.fc2, mlp.activation

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(self.norm(x))
        h = torch.cat(h, dim=-1) if isinstance(h, tuple) else h
        with torch.autograd.graph.saved_tensors_hooks(self._quantized, octavo.ScaledTensor.dequantize):
            y = checkpoint(activate, h, self.activation, use_reentrant=True)  # saves h alone
        return self.fc2(y)

    def _quantized(self, h: Tensor) -> octavo.ScaledTensor:
        cast = self.fc2.recipe.saved
        return octavo.quantize(h.detach(), cast.format, cast.granularity, cast.power_of_two)
