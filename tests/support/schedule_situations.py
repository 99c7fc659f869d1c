"""A small training: a model of two layers, an optimizer of octavo's, a target that it can learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.optim import AdamW
from octavo.schedule import Phase
from tests.support.definitions import same_bits

LOW, HIGH = recipes.dynamic(), recipes.high_precision()
SWITCHING = [Phase(recipes.delayed()), Phase(recipes.blockwise(), from_step=1), Phase(recipes.delayed(), from_step=3)]
PROMOTING = [
    Phase(recipes.delayed(), moments="fp8", master="split24"),
    Phase(recipes.blockwise(), moments="fp32", master="split32", from_step=1),
]


def net(recipe: Any = LOW, dtype: torch.dtype = torch.bfloat16, storage: Any = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 8, bias=False), nn.LayerNorm(8)).to(dtype)
    octavo.convert(model, recipe, select=lambda *_: True, weight_storage=storage)
    return model


def optimizer_of(model: nn.Module, **options: Any) -> AdamW:
    return AdamW(model.parameters(), **{"lr": 3e-3, "moments": "fp8", "master": "split24"} | options)


def batch(step: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 + step))
    return x.to(dtype), x[:, :8].tanh().to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x).float(), y.float())


def train(model: nn.Module, optimizer: Any, schedule: Any, steps: range) -> None:
    """Train some steps, of 32 tokens each."""
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if schedule.recovery is not None:
            schedule.observe(loss)
        optimizer.step()
        schedule.step(tokens=32)


def tensors(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return copies of all tensors that decide how a training continues."""
    states = [optimizer.state[param] for group in optimizer.param_groups for param in group["params"]]
    values = [*model.state_dict().values(), *(value for state in states for value in state.values())]
    return [value.detach().clone() for value in values]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
