"""using: a model under another recipe for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from octavo.nn.convert import gather_anew, set_recipe
from octavo.nn.recipe_module import RecipeModule, device_of
from octavo.nn.weight_cache import WeightCache
from octavo.scaling.delayed import ASIDE, BUFFERS, LOADED
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap


@contextlib.contextmanager
def using(model: nn.Module, recipe: Recipe | RecipeMap) -> Iterator[nn.Module]:
    """Run a block with every FP8 module of the model under another recipe, then with its own again.

    Each layer returns to the recipe object that it had, also after an exception; blocks may be nested. Its delayed
    state returns as it was: what the block casts does not enter the history, which is what an evaluation wants. A
    backward in the block of a forward before it does enter it. State whose weights were loaded or initialised anew in
    the block begins empty. To train on under another recipe for many steps take ``octavo.set_recipe``, after which
    delayed state begins anew.

    Args:
        model: a converted model.
        recipe: an octavo.Recipe or RecipeMap, as octavo.set_recipe takes it.

    Returns:
        a context manager that gives ``model``.

    Raises:
        TypeError, ValueError: as octavo.set_recipe; nothing is changed then.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed())
        >>> with octavo.using(layer, octavo.recipes.high_precision()):
        ...     layer.recipe.name
        'high_precision'
        >>> layer.recipe.name
        'delayed'
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    before = [(module, _put_aside(module)) for module in modules if isinstance(module, RecipeModule)]
    try:
        set_recipe(model, recipe)
        yield model
    finally:
        for module, own in before:
            _put_back(module, own)
        if before:
            gather_anew(model)


class _Own(NamedTuple):
    """What a module returns to: the very objects, which graphs built before the block may write."""

    recipe: Recipe
    cache: WeightCache
    buffers: dict[str, Tensor]
    loaded: int | None


def _put_aside(module: RecipeModule) -> _Own:
    """Take what a module returns to; in the block it has copies of its delayed state."""
    buffers = {name: buffer for name in BUFFERS if (buffer := module._buffers.get(name)) is not None}
    module.__dict__.setdefault(ASIDE, []).append(buffers)
    module._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})
    return _Own(module.recipe, module._weight_cache, buffers, module.__dict__.get(LOADED))


def _put_back(module: nn.Module, own: _Own) -> None:
    aside = module.__dict__[ASIDE]
    aside.pop()
    if not aside:
        del module.__dict__[ASIDE]
    if not isinstance(module, RecipeModule):  # octavo.restore has made it torch's meanwhile
        return
    own.cache.replaced |= module._weight_cache.replaced
    module.recipe = own.recipe
    module._weight_cache = own.cache  # which knows the weight of before, and so notices what wrote it meanwhile
    for name, buffer in own.buffers.items():
        module._buffers[name] = buffer.to(device_of(module))
    if own.loaded is not None:
        module.__dict__[LOADED] = own.loaded
