"""What ranks that share layers must have been told alike of these: asked before the layers' first collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from octavo.nn.tensor_parallel import sending_of
from octavo.nn.weight import stored_as, weight_of
from octavo.tensor.collectives import agree


def told_of(module: Any, name: str) -> dict[str, object]:
    """What a RecipeModule was told, by this name: its recipe, how its weight is stored, how it sends tokens."""
    recipe, sending, exchange = module.recipe, sending_of(module), getattr(module, "exchange", None)
    told = {f"recipe.{field.name}": getattr(recipe, field.name) for field in fields(recipe) if field.compare}
    weights = module.gather.parameter, weight_of(module), *getattr(module, "weights", ())  # of splits on several ranks
    weight = next((weight for weight in weights if weight is not None), None)
    if weight is not None:
        granularity = stored_as(weight)
        told["weight_storage"] = weight.dtype if granularity is None else f"fp8 {granularity}"
    if sending is not None:
        told |= {"exact": sending.exact, "reduction in FP8": sending.reduce is not None}
    if exchange is not None:
        told |= {"exact": exchange.exact, "average": exchange.average}
    return {f"{name}: {what}": value for what, value in told.items()}


def ask_of(told: Mapping[str, object], mesh: Any) -> None:
    """Ask the ranks of a mesh, all together, whether they were told the same."""
    agree(told, [mesh.get_group(dim) for dim in range(mesh.ndim)])


def ask(modules: Sequence[Any], mesh: Any, **told: object) -> None:
    """Ask the ranks of a mesh about these RecipeModules, unless they have agreed since the last change of any.

    All of them call it with the same modules; ``told``: what else is to be alike. A compiled graph does not ask.

    Raises:
        RanksDifferError: on all ranks, naming layer and option, where one was told something else.
    """
    if torch.compiler.is_compiling() or all(module.gather.agreed for module in modules):
        return
    for number, module in enumerate(modules):
        told |= told_of(module, module.gather.name or f"{type(module).__name__} {number}")
    ask_of(told, mesh)
    for module in modules:
        module.gather.agreed = True
