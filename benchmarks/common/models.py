"""The models that benchmarks convert, octavo's and torchao's way."""

from __future__ import annotations

from torch import nn

import octavo
from octavo import recipes
from octavo.cost.work import COMPARED

OCTAVO = COMPARED
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def with_octavo(model: nn.Module, recipe: str, fuse: bool = False) -> nn.Module:
    """Every Linear of the model converted, whatever its size."""
    return octavo.convert(model, getattr(recipes, recipe)(), select=lambda module, name: True, fuse=fuse)


def with_torchao(model: nn.Module, recipe: str) -> nn.Module:
    """Every Linear of the model converted by torchao.float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
