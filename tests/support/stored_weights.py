"""A small model whose weights are stored in FP8, and functions that several tests use on it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo import Recipe, recipes
from octavo.weights.stored import StoredWeight, local_stored
from tests.support.helpers import every_layer, gradients, to_fp8

STORED: dict[str, Callable[[], Recipe]] = {
    "dynamic": recipes.dynamic,
    "dynamic by powers of two": lambda: recipes.dynamic(power_of_two=True),
    "delayed": recipes.delayed,
    "blockwise": recipes.blockwise,
    "blockwise, any scale": lambda: recipes.blockwise(power_of_two=False),
}
K, H, N, T = 160, 288, 96, 16  # blocks are ragged


def plain(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, N, bias=False)).to(dtype)


def store(model: nn.Module, recipe: Any = None) -> Any:
    return octavo.convert(model, recipe or recipes.dynamic(), select=every_layer, weight_storage="fp8")


def net(recipe: str = "dynamic", **options: Any) -> Any:
    return store(plain(**options), STORED[recipe]())


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*(shape or (T, K)), dtype=dtype).requires_grad_()


def of_codes(model: nn.Module) -> Any:
    """Return a copy that keeps of its FP8 weights only the codes and scales that products read."""
    model_of_codes = copy.deepcopy(model)
    for weight in model_of_codes.parameters():
        if (stored := local_stored(weight)) is not None:
            stored.extra_bits = None
    return model_of_codes


def widened(model: nn.Module, recipe: Recipe | None = None) -> Any:
    """Return a converted copy whose weights are plain, with the values that the stored ones have."""
    plain = octavo.restore(of_codes(model))
    return plain if recipe is None else to_fp8(plain, recipe)


def trace(model: nn.Module, x: Tensor, call: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Run forward and backward; return the output and all gradients."""
    model.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    y = (model if call is None else call)(leaf)
    y.float().square().mean().backward()
    return {"y": y.detach(), "dx": leaf.grad} | gradients(model)


def codes(model: nn.Module) -> dict[str, Tensor]:
    stored = {name: weight for name, weight in model.named_parameters() if isinstance(weight, StoredWeight)}
    tensors = {name: weight.qdata.view(torch.uint8).clone() for name, weight in stored.items()}
    return tensors | {f"{name} scales": weight.scale_inv.clone() for name, weight in stored.items()}
