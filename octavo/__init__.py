"""Octavo trains PyTorch models in 8-bit floating point.

The one idea: an FP8 tensor is the pair (qdata, scale_inv), value = qdata x scale_inv. Whoever writes the codes writes
their scale_inv, and nothing changes the one without the other. A recipe only says how the next cast is made.
"""

import importlib
from typing import Any

from octavo import nn, optim, recipes
from octavo.errors import ExportError, HigherOrderGradientError, MissingExtraError, OctavoError, UnsupportedOpError
from octavo.formats import E4M3, E5M2, Format
from octavo.granularity import Granularity, PerBlock, PerRow, PerTensor
from octavo.nn.convert import convert, restore, set_recipe
from octavo.nn.kept_weights import KeptWeights
from octavo.nn.summary import summary
from octavo.nn.weight_cache import invalidate
from octavo.scaling.delayed import delayed_state_dict, load_delayed_state_dict
from octavo.scaling.recipe import Cast, Delayed, Dynamic, Recipe
from octavo.scaling.recipe_map import RecipeMap
from octavo.schedule import BudgetError, Phase, PrecisionSchedule, Recovery
from octavo.tensor.conversions import quantize
from octavo.tensor.scaled_tensor import ScaledTensor

__version__ = "0.1.0.dev0"

__all__ = [
    "E4M3",
    "E5M2",
    "BudgetError",
    "Cast",
    "Delayed",
    "Dynamic",
    "ExportError",
    "Format",
    "Granularity",
    "HigherOrderGradientError",
    "KeptWeights",
    "MissingExtraError",
    "OctavoError",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "Phase",
    "PrecisionSchedule",
    "Recipe",
    "RecipeMap",
    "Recovery",
    "ScaledTensor",
    "UnsupportedOpError",
    "convert",
    "delayed_state_dict",
    "invalidate",
    "load_delayed_state_dict",
    "nn",
    "optim",
    "quantize",
    "recipes",
    "restore",
    "set_recipe",
    "summary",
]


def __getattr__(name: str) -> Any:
    if name == "export":  # what it needs of torch takes a quarter of a second to import, and few programs export
        return importlib.import_module("octavo.export")
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
