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
from octavo.formats import E2M1, E4M3, E5M2
from octavo.granularity import PerBlock, PerRow, PerTensor
from octavo.nn.checkpointing import checkpoint_in_fp8
from octavo.nn.convert import convert, restore, set_recipe, using
from octavo.nn.summary import summary
from octavo.scaling.recipe import Cast, Delayed, Dynamic, Recipe, RecipeMap, Rotation, Stochastic
from octavo.tensor.scaled_tensor import ScaledTensor, quantize

if TYPE_CHECKING:
    from octavo import compat, distributed, export, inspect, integrations, optim, schedule

__version__ = "0.1.0.dev0"

__all__ = ["nn", "recipes", "compat", "distributed", "export", "inspect", "integrations", "optim", "schedule"]
__all__ += ["E4M3", "E5M2", "E2M1", "PerTensor", "PerRow", "PerBlock", "Dynamic", "Delayed", "Stochastic", "Rotation"]
__all__ += ["Cast", "Recipe", "RecipeMap"]
__all__ += ["ScaledTensor", "quantize", "convert", "restore", "set_recipe", "summary", "using", "checkpoint_in_fp8"]
__all__ += ["OctavoError", "ExportError", "HigherOrderGradientError", "MissingExtraError", "RanksDifferError"]
__all__ += ["UnsupportedOpError", "UnsupportedOptionError"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # a room, imported when it is named: the import stays light
        return importlib.import_module(f"octavo.{name}")
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
