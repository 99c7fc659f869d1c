"""Modules whose weight is a StoredWeight: which recipes can read it, and its making."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.granularity import Granularity, PerTensor
from octavo.scaling.recipe import Recipe
from octavo.tensor.parameters import put_into
from octavo.tensor.scaled_tensor import dequantized
from octavo.tensor.sharded_weight import on_this_rank
from octavo.tensor.stored_weight import GRANULARITIES, StoredWeight, local_stored


def widened(weight: Tensor) -> Tensor:
    """A weight for a product in high precision; stored ones are dequantised, and gradients flow to them."""
    return dequantized(weight) if hasattr(weight, "operands") else weight


def why_not_stored(recipe: Recipe) -> str | None:
    """Why weights can't be stored in FP8 under a recipe, or None."""
    casts = recipe.weight_casts
    if casts.as_is is None or casts.transposed is None:
        return "a product reads the weight in high precision"
    if not casts.once:
        return "its two layouts have different scales, so that one set of codes can't serve both"
    if casts.as_is.format != E4M3:
        return f"its weights are {casts.as_is.format}, and stored ones E4M3"
    if casts.as_is.granularity not in GRANULARITIES:
        return f"its weights are scaled {casts.as_is.granularity}, and stored ones per tensor or 128 x 128"
    return None


def why_unreadable(weight: Tensor) -> str | None:
    """What keeps FP8 products from reading a weight, by its class ("weights that are ..."); or None."""
    kind = type(on_this_rank(weight))  # of a DTensor: what each rank has
    if not hasattr(kind, "__tensor_flatten__") or hasattr(kind, "operands"):
        return None
    return f"{kind.__module__}.{kind.__qualname__} (another library's, quantised perhaps)"


def check_recipe(recipe: Recipe, weight: Tensor | None) -> None:
    """Raise ValueError where a recipe can't read a weight as it is stored."""
    if weight is None or recipe.is_high_precision:
        return
    if what := why_unreadable(weight):
        raise ValueError(
            f"the recipe {recipe.name!r} can't read weights that are {what}. Take this layer out of FP8 first: "
            "octavo.restore(layer), or octavo.set_recipe(layer, octavo.recipes.high_precision())"
        )
    if (stored := local_stored(weight)) is not None:
        check_granularity(recipe, weight.shape, stored.granularity)


def check_granularity(recipe: Recipe, shape: torch.Size, stored: Granularity) -> None:
    """Raise ValueError where a recipe can't read a weight that is stored so."""
    if recipe.is_high_precision:
        return
    if reason := why_not_stored(recipe):
        raise ValueError(f"the recipe {recipe.name!r} can't read weights that are stored in FP8: {reason}")
    wanted = stored_granularity(recipe.weight_casts.as_is.granularity, shape)  # type: ignore[union-attr]
    if wanted.scale_shape(shape) != stored.scale_shape(shape):
        raise ValueError(
            f"the recipe {recipe.name!r} reads weights scaled {wanted}, but they are stored {stored}; "
            "octavo.convert(model, recipe, weight_storage='fp8') stores them anew"
        )


def stored_granularity(granularity: Granularity, shape: torch.Size) -> Granularity:
    """How a weight is stored that a recipe scales so: PerTensor() where one block is all."""
    return PerTensor() if granularity.scale_shape(shape) == (1, 1) else granularity


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """A module's weight; None where it is computed from other parameters (weight_norm)."""
    return module._parameters.get("weight")


def store_weight(weight: nn.Parameter, granularity: Granularity) -> None:
    """Put a weight into FP8, unless it is stored so already; the parameter stays the same object."""
    stored = local_stored(weight)
    if stored is None:
        put_into(weight, StoredWeight.cast(weight.detach(), granularity, keep_rest=weight.requires_grad))
    elif stored.granularity != granularity:
        put_into(weight, StoredWeight.cast(stored.detach().dequantize(), granularity))


def widen_weight(weight: nn.Parameter | None) -> None:
    """Put a stored weight back into its high precision; the parameter stays the same object."""
    if weight is not None and (stored := local_stored(weight)) is not None:
        put_into(weight, stored.detach().dequantize())
