"""Modules whose weight is a StoredWeight: which recipes can read it, and its making."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.granularity import Granularity, PerTensor
from octavo.scaling.recipe import Recipe
from octavo.tensor.fsdp2 import on_this_rank
from octavo.tensor.scaled_tensor import dequantized
from octavo.tensor.stored_weight import GRANULARITIES, StoredWeight, local_stored, store


def widened(weight: Any) -> Tensor:
    """A weight for a product in high precision; stored ones are dequantised, and gradients flow to them."""
    if not hasattr(on_this_rank(weight), "operands"):
        return weight
    if not hasattr(weight, "to_local"):
        return dequantized(weight)
    from torch.distributed.tensor import DTensor

    how = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(dequantized(weight.to_local()), weight.device_mesh, weight.placements, **how)


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
    shape = shape[-2:]
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
    """How a weight, or each expert's, is stored that a recipe scales so: PerTensor() where one block is all."""
    return PerTensor() if granularity.scale_shape(shape[-2:]) == (1, 1) else granularity


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """A module's weight, which may be another's parameter; None where it is computed from others (weight_norm)."""
    holder, key = getattr(module, "weight_place", (module, "weight"))
    return holder._parameters.get(key)


def store_weight(weight: nn.Parameter, granularity: Granularity) -> None:
    """Put a weight into FP8, unless it is stored so already; the parameter stays the same object."""
    stored = local_stored(weight)
    if stored is None or stored.granularity != granularity:
        store(weight, granularity)


def widen_weight(weight: nn.Parameter | None) -> None:
    """Put a stored weight back into its high precision; the parameter stays the same object."""
    if weight is not None and local_stored(weight) is not None:
        store(weight, None)


@contextlib.contextmanager
def moved_stored(module: nn.Module, keys: Iterable[str], fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it Module._apply(fn) of a module finds none of these weights that live in FP8: they are moved here.

    torch would lose their attributes and hooks, as of any tensor of a class of its own.
    """
    found = {key: weight for key in keys if isinstance(weight := module._parameters.get(key), StoredWeight)}
    for weight in found.values():
        _move(weight, fn)
    module._parameters.update(dict.fromkeys(found))
    try:
        yield
    finally:
        module._parameters.update(found)


def _move(weight: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """What Module._apply does, to a stored weight and its gradient; the parameter stays the same object."""
    with torch.no_grad():
        moved = fn(weight)
        if moved is weight:
            return
        grad, weight.grad = weight.grad, None
        weight.become(moved)
        weight.grad = None if grad is None else fn(grad).requires_grad_(grad.requires_grad)
