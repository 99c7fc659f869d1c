"""Transformer Engine's contexts: which recipe the layers inside follow, and how the ones made inside hold weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.utils.checkpoint

from octavo import recipes
from octavo.compat.transformer_engine.options import refuse
from octavo.compat.transformer_engine.recipe import DelayedScaling, Recipe
from octavo.scaling.recipe import Recipe as OctavoRecipe


class Around:
    """What the contexts around say."""

    recipe: OctavoRecipe = recipes.high_precision()
    storage: OctavoRecipe | None = None  # that weights made here are stored in FP8 for


@contextlib.contextmanager
def _following(recipe: OctavoRecipe) -> Iterator[None]:
    before, Around.recipe = Around.recipe, recipe
    try:
        yield
    finally:
        Around.recipe = before


def _checked(recipe: Recipe | None) -> Recipe:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe={recipe!r}: take one of octavo.compat.transformer_engine, DelayedScaling() for instance"
        )
    return DelayedScaling() if recipe is None else recipe


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
) -> contextlib.AbstractContextManager[None]:
    """Layers of this package that run in the block follow the recipe, DelayedScaling() by default; outside, none.

    Delayed state stays as it is where a layer runs outside, and where it is evaluated by another recipe.

    Warns:
        UserWarning: where several ranks would find one amax together, which octavo's don't.

    Example:
        >>> import torch
        >>> from octavo.compat import transformer_engine as te
        >>> layer = te.Linear(32, 32, device="cpu")
        >>> with te.autocast(recipe=te.Float8CurrentScaling()):
        ...     layer(torch.ones(16, 32)).sum().backward()
        >>> layer.recipe.name
        'Float8CurrentScaling'
    """
    refuse("autocast", {"calibrating": calibrating, "amax_reduction_group": amax_reduction_group})
    if not enabled:
        return _following(recipes.high_precision())
    recipe = _checked(recipe)
    if getattr(recipe, "reduce_amax", False) and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn("DelayedScaling: each rank keeps its own amax and scales: write reduce_amax=False", stacklevel=2)
    return _following(recipe.octavo())


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None
) -> contextlib.AbstractContextManager[None]:
    """The former name of ``autocast``.

    Example:
        >>> from octavo.compat import transformer_engine as te
        >>> layer = te.Linear(32, 32)
        >>> with te.fp8_autocast(enabled=True, fp8_recipe=te.Float8CurrentScaling()):
        ...     y = layer(torch.randn(16, 32))
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Layers made in the block hold their weights in FP8 alone, as octavo.convert's ``weight_storage="fp8"``.

    Example:
        >>> from octavo.compat import transformer_engine as te
        >>> with te.quantized_model_init(recipe=te.Float8CurrentScaling()):
        ...     layer = te.Linear(32, 32)
        >>> layer.weight.qdata.dtype
        torch.float8_e4m3fn
    """
    refuse("quantized_model_init", {"preserve_high_precision_init_val": preserve_high_precision_init_val})
    before, Around.storage = Around.storage, _checked(recipe).octavo() if enabled else None
    try:
        yield
    finally:
        Around.storage = before


fp8_model_init = quantized_model_init
"""The former name of ``quantized_model_init``."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint whose second forward, in backward, follows the recipe of the first.

    Example:
        >>> from octavo.compat import transformer_engine as te
        >>> layer, x = te.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
        >>> with te.autocast(recipe=te.Float8CurrentScaling()):
        ...     y = te.checkpoint(layer, x)
        >>> y.sum().backward()
    """
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        if name in kwargs:
            refuse("checkpoint", {name: kwargs.pop(name)})
    recipe = Around.recipe

    def run(*inputs: Any, **options: Any) -> Any:
        with _following(recipe):
            return function(*inputs, **options)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=kwargs.pop("use_reentrant", True), **kwargs)
