"""Octavo trains PyTorch models in 8-bit floating point.

The one idea: an FP8 tensor is the pair (qdata, scale_inv), value = qdata x scale_inv. Whoever writes the codes writes
their scale_inv, and nothing changes the one without the other. A recipe only says how the next cast is made.
"""

import importlib
from typing import TYPE_CHECKING, Any

from octavo import nn, recipes
from octavo.errors import (
    ExportError,
    HigherOrderGradientError,
    MissingExtraError,
    OctavoError,
    RanksDifferError,
    UnsupportedOpError,
    UnsupportedOptionError,
)
from octavo.formats import E4M3, E5M2
from octavo.granularity import PerBlock, PerRow, PerTensor
from octavo.nn.convert import convert, restore, set_recipe
from octavo.nn.summary import summary
from octavo.nn.using import using
from octavo.scaling.recipe import Cast, Delayed, Dynamic, Recipe
from octavo.scaling.recipe_map import RecipeMap
from octavo.tensor.scaled_tensor import ScaledTensor, quantize

if TYPE_CHECKING:
    from octavo import compat, distributed, export, inspect, integrations, optim, schedule

__version__ = "0.1.0.dev0"

__all__ = [
    "E4M3",
    "E5M2",
    "Cast",
    "Delayed",
    "Dynamic",
    "ExportError",
    "HigherOrderGradientError",
    "MissingExtraError",
    "OctavoError",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "RanksDifferError",
    "Recipe",
    "RecipeMap",
    "ScaledTensor",
    "UnsupportedOpError",
    "UnsupportedOptionError",
    "compat",
    "convert",
    "distributed",
    "export",
    "inspect",
    "integrations",
    "nn",
    "optim",
    "quantize",
    "recipes",
    "restore",
    "schedule",
    "set_recipe",
    "summary",
    "using",
]

# Imported when named: the import stays light.
_ROOMS = ("compat", "distributed", "export", "inspect", "integrations", "optim", "schedule")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"octavo.{name}")
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
