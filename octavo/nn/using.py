"""using: a model under another recipe for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from octavo.nn.convert import gather_anew, set_recipe
from octavo.nn.recipe_module import RecipeModule, device_of
from octavo.scaling.delayed import ASIDE, LOADED, STATE, state_of
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
    converted = [module for module in modules if isinstance(module, RecipeModule)]
    with contextlib.ExitStack() as afterwards:
        if converted:
            afterwards.callback(gather_anew, model)
        for module in converted:
            afterwards.enter_context(_put_aside(module))
        set_recipe(model, recipe)
        yield model


@contextlib.contextmanager
def _put_aside(module: RecipeModule) -> Iterator[None]:
    """Put back at the end what a module has now: the very objects, which graphs built before the block may write."""
    recipe, loaded, state = module.recipe, module.__dict__.get(LOADED), state_of(module)
    writes, kept = module.weight_writes, module.kept_operands
    module.__dict__.setdefault(ASIDE, []).append(state)
    if state is not None:
        module.__dict__[STATE] = state.clone()
    try:
        yield
    finally:
        aside = module.__dict__[ASIDE]
        aside.pop()
        if not aside:
            del module.__dict__[ASIDE]
        if isinstance(module, RecipeModule):  # else octavo.restore has made it torch's meanwhile
            writes.replaced |= module.weight_writes.replaced
            module.recipe = recipe
            # which know the weight of before, and so notice what wrote it meanwhile
            module.weight_writes, module.kept_operands = writes, kept
            if state is not None:
                module.__dict__[STATE] = state.on(device_of(module))
            if loaded is not None:
                module.__dict__[LOADED] = loaded
