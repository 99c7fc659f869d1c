"""Modules that convert takes, and those that it leaves as they are."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor


class Block(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size, bias=False)
        self.up_again = self.up  # a second name for the same module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up_again(self.down(self.up(x)))))


class Special(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def legacy_weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


# What makes a layer's weight a result of other parameters.
COMPUTED = {
    "register_parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
    "utils.weight_norm": legacy_weight_norm,
    "utils.spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def with_own_forward() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    return layer


def of_another_library() -> nn.Module:
    """As torchao's quantised weights: tensors that are wrapped."""
    layer = nn.Linear(8, 8)
    layer.weight = foreign(layer.weight)
    return layer


def foreign(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(TwoTensor(weight.detach(), weight.detach().clone()))


LEFT_ALONE = {
    "subclass": lambda: Special(8, 8),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "parametrized bias": lambda: parametrize.register_parametrization(nn.Linear(8, 8), "bias", Twice()),
    "weight_norm": lambda: legacy_weight_norm(nn.Linear(8, 8)),
    "own forward": with_own_forward,
    "float64": lambda: nn.Linear(8, 8, dtype=torch.float64),
    "float8": lambda: nn.Linear(8, 8).requires_grad_(False).to(torch.float8_e4m3fn),
    "embedding": lambda: nn.Embedding(8, 8),
    "bilinear": lambda: nn.Bilinear(8, 8, 8),
    "conv": lambda: nn.Conv2d(8, 8, 1),
    "lazy": lambda: nn.LazyLinear(8),
    "another library": of_another_library,
}
