"""What of a model is converted, with which casts, and what is not and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from octavo.nn.convert import MIN_FEATURES, class_of, fp8_class, large_enough, why_left_alone
from octavo.nn.gather import way
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import Recipe


@dataclass(frozen=True)
class ModuleSummary:
    """One module that holds a matrix.

    Attributes:
        name: its name in the model, "" for the model itself.
        kind: its class's name.
        shape: of its weight, as stored.
        recipe: what it is converted with, or None.
        reason: why it is left alone; "" for a converted one.
        gathered: under FSDP2 how its weight is gathered: "in FP8", "cast after" (sent in the parameter's dtype, or the
            mixed-precision policy's, and cast once an unshard) or "as it is", and why not in FP8; "" elsewhere.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str
    gathered: str = ""


@dataclass(frozen=True)
class Summary:
    """All of a model's matrices. ``str()`` of it is a table."""

    modules: tuple[ModuleSummary, ...]

    @property
    def converted(self) -> tuple[ModuleSummary, ...]:
        """Those that follow a recipe."""
        return tuple(m for m in self.modules if m.recipe is not None)

    @property
    def left_alone(self) -> tuple[ModuleSummary, ...]:
        """The others."""
        return tuple(m for m in self.modules if m.recipe is None)

    def __str__(self) -> str:
        in_fp8 = [m for m in self.converted if m.recipe is not None and not m.recipe.is_high_precision]
        total = sum(math.prod(m.shape) for m in self.modules) or 1
        share = 100 * sum(math.prod(m.shape) for m in in_fp8) / total
        lines = [f"{len(in_fp8)} of {len(self.modules)} matrices in FP8 ({share:.1f} % of their elements)"]
        width = max((len(m.name or "(model)") for m in self.modules), default=0)
        for m in self.modules:
            state = f"recipe {m.recipe.name}" if m.recipe is not None else f"left alone: {m.reason}"
            state += f", gathered {m.gathered}" if m.gathered else ""
            lines.append(f"  {m.name or '(model)':<{width}}  {m.kind} {list(m.shape)}  {state}")
        recipes = {m.recipe: None for m in self.converted if m.recipe is not None}
        return "\n".join([*lines, *map(str, recipes)])

    __repr__ = __str__


def summary(model: nn.Module) -> Summary:
    """What is converted, with which casts, and what isn't and why.

    Args:
        model: any module.

    Returns:
        a Summary; print it, or read ``.converted`` and ``.left_alone``. It lists every module that holds a parameter of
        two or more dimensions: 3-D expert weights, embeddings and convolutions among those left alone.

    Example:
        >>> import torch, octavo
        >>> print(octavo.summary(torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8))))
        0 of 2 matrices in FP8 (0.0 % of their elements)
          0  Embedding [16, 8]  left alone: Embedding is not a linear layer
          1  Linear [8, 8]  left alone: 8 x 8 features; the default select converts from 512 on
    """
    rows = []
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            recipe = module.recipe if isinstance(module, RecipeModule) else None
            label = name if parameter_name == "weight" else f"{name}.{parameter_name}".lstrip(".")
            reason = "" if recipe is not None else _reason(module, parameter)
            kind, gathered = class_of(module).__name__, _gathered(module) if parameter_name == "weight" else ""
            rows.append(ModuleSummary(label, kind, tuple(parameter.shape), recipe, reason, gathered))
    return Summary(tuple(rows))


def _gathered(module: nn.Module) -> str:
    if not isinstance(module, RecipeModule) or module.gather.parameter is None:
        return ""
    found = way(module)
    return f"{found.kind} ({found.why})" if found.why else found.kind


def _reason(module: nn.Module, parameter: torch.Tensor) -> str:
    if fp8_class(module) is not None:
        if (why := why_left_alone(module)) is not None:
            return why
        if not large_enough(module, ""):
            shape = " x ".join(map(str, parameter.shape))
            return f"{shape} features; the default select converts from {MIN_FEATURES} on"
        return "not selected"
    if isinstance(module, nn.Linear):
        return f"a subclass of Linear ({type(module).__qualname__}) may mean something else"
    if parameter.ndim == 3:
        return "a 3-D parameter (expert weights) is not a linear layer"
    return f"{type(module).__name__} is not a linear layer"
