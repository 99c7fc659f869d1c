"""Small trainings that are broken on purpose, recorded; each breaks in one layer or at one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import octavo
from octavo import E4M3, Cast, PerTensor, Recipe, RecipeMap, recipes
from octavo.inspect import Record
from octavo.scaling.recipe_map import Rule

NAMES = ("first", "second", "third")
BROKEN = "second"
OUTLIER = 2.0**14


class Network(nn.Module):
    """Three layers, each behind a norm; the input of one may be given an outlier channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(256, 256) for name in NAMES})
        self.outlier = 1.0
        with torch.no_grad():  # what an outlier channel adds to the layer's output is no more than others do
            self.layers[BROKEN].weight[:, 0] /= OUTLIER

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            h = nn.functional.rms_norm(x, x.shape[-1:])
            if name == BROKEN and self.outlier != 1.0:
                h = h * torch.cat([torch.tensor([self.outlier]), torch.ones(255)])
            x = x + nn.functional.gelu(layer(h))
        return x


def recorded(
    folder: Path,
    recipe: Recipe | RecipeMap,
    steps: int = 24,
    every: int = 2,
    lr: float = 1e-2,
    outlier_at: int | None = None,
    spike_at: int | None = None,
    before_step: str = "",
) -> Record:
    """The record of a training whose tokens weigh from 1 down to 2^-16; ``before_step``: Python, run before each."""
    model = Network()
    octavo.convert(model, recipe, select=lambda *_: True)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with octavo.inspect.record(model, folder, every=every) as recorder:
        for step in range(steps):
            torch.manual_seed(step)
            model.outlier = OUTLIER if outlier_at is not None and step >= outlier_at else 1.0
            optimizer.param_groups[0]["lr"] = 100.0 if step == spike_at else lr
            x = torch.randn(64, 256)
            loss = (torch.logspace(0, -16, 64, 2) * (model(x) - x.flip(-1)).square().mean(-1)).mean()
            loss.backward()
            exec(before_step)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss, lr=optimizer.param_groups[0]["lr"])
    return octavo.inspect.load(folder)


def narrow_gradients() -> RecipeMap:
    """Gradients of one layer in E4M3 with a margin of 8."""
    normal = recipes.dynamic()
    forward = Cast(E4M3, PerTensor())
    narrow = dataclasses.replace(forward, margin=8)
    changes = {"grad_input": (narrow, forward), "grad_weight": (narrow, forward)}
    return RecipeMap(normal, {f"layers.{BROKEN}": changes})


def mended(recipe: Recipe | RecipeMap, rules: Mapping[str, Rule]) -> RecipeMap:
    """A recipe with a finding's rules after its own."""
    if isinstance(recipe, Recipe):
        return RecipeMap(recipe, rules)
    return RecipeMap(recipe.default, {**recipe.rules, **rules})
