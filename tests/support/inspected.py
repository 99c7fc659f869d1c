"""A small network and its training, which a recorder looks at."""

from typing import Any

import torch
from torch import nn

import octavo


def network(recipe: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        octavo.nn.Linear(32, 48, recipe=recipe),
        octavo.nn.RMSNormMLP(48, 64, recipe=recipe),
        octavo.nn.LayerNormLinear(48, 16, recipe=recipe),
    ).to(dtype)


def train(model: nn.Module, steps: range, recorder: Any = None, called: Any = None) -> list[float]:
    optimizer = octavo.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = (model if called is None else called)(torch.randn(40, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss=loss)
    return losses
