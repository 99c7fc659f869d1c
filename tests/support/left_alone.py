"""Modules that convert takes, and those that it leaves as they are."""

import pytest
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size, bias=False)
        self.up_again = self.up  # a second name for the same module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up_again(self.down(self.up(x)))))


class Special(nn.Linear):
    pass


def legacy_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(8, 8))


def with_own_forward() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    return layer


LEFT_ALONE = {
    "subclass": lambda: Special(8, 8),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "weight_norm": legacy_weight_norm,
    "own forward": with_own_forward,
    "float64": lambda: nn.Linear(8, 8, dtype=torch.float64),
    "float8": lambda: nn.Linear(8, 8).requires_grad_(False).to(torch.float8_e4m3fn),
    "embedding": lambda: nn.Embedding(8, 8),
    "bilinear": lambda: nn.Bilinear(8, 8, 8),
    "conv": lambda: nn.Conv2d(8, 8, 1),
    "lazy": lambda: nn.LazyLinear(8),
}
