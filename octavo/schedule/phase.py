"""Phase: what a model computes in and how its weights and state are kept, for a part of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from octavo.optim import Moment
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap

SAME: Any = "same"
TRIGGERS = ("from_step", "from_tokens", "when_lr_below", "when_update_below_resolution")


@dataclass(frozen=True)
class Phase:
    """A part of a training: its recipe, the form of weights and optimizer state, and when it begins.

    Args:
        recipe: of the converted layers, as octavo.set_recipe takes it.
        moments: as octavo.optim's optimizers take them; "same": as in the phase before.
        master: as octavo.optim's optimizers take it; "same": as in the phase before.
        weight_storage: "fp8": converted weights live in FP8; None: they are plain tensors; "same": as before.
        from_step: it begins once so many optimizer steps were done.
        from_tokens: once so many tokens were trained on, as ``PrecisionSchedule.step(tokens)`` counts them.
        when_lr_below: once the learning rate, the largest of all groups', is below this and no longer its highest.
        when_update_below_resolution: once the root mean square of a step's update has fallen below this many times the
            rounding noise of the weights' E4M3 grid (a step of it / sqrt(12)), having been above; see docs/adaptive.md.

    The first phase of a schedule begins with it and has no trigger; each of the others has one.

    Raises:
        TypeError, ValueError: for fields out of range, or two triggers.

    Example:
        >>> from octavo import recipes
        >>> Phase(recipes.high_precision(), moments="fp32", from_step=9000)
        Phase(high_precision, moments=fp32, from_step=9000)
    """

    recipe: Recipe | RecipeMap
    moments: str | Moment | tuple[Moment, Moment] = SAME
    master: str | None = SAME
    weight_storage: Literal["fp8", "same"] | None = SAME
    from_step: int | None = None
    from_tokens: int | None = None
    when_lr_below: float | None = None
    when_update_below_resolution: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe | RecipeMap):
            raise TypeError(f"Phase: recipe={self.recipe!r} is no octavo.Recipe; try octavo.recipes.default()")
        if self.weight_storage not in ("fp8", None, SAME):
            raise ValueError(f"Phase: weight_storage={self.weight_storage!r}: use 'fp8', None or 'same'")
        given = [name for name in TRIGGERS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"Phase: {' and '.join(given)}: a phase begins by one of them")
        for name in given:
            value = getattr(self, name)
            whole = name.startswith("from_")
            kinds = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0 or value == math.inf:
                raise ValueError(f"Phase: {name}={value!r} must be {'a whole number' if whole else 'a number'} above 0")

    @property
    def trigger(self) -> str | None:
        """The name of the field that says when it begins, or None."""
        return next((name for name in TRIGGERS if getattr(self, name) is not None), None)

    @property
    def name(self) -> str:
        """Its recipe's name; of a RecipeMap "map of" its default's."""
        return self.recipe.name if isinstance(self.recipe, Recipe) else f"map of {self.recipe.default.name}"

    def __repr__(self) -> str:
        rest = [(field.name, getattr(self, field.name)) for field in fields(self)[1:]]
        kept = [f"{name}={value}" for name, value in rest if value != (None if name in TRIGGERS else SAME)]
        return f"Phase({', '.join([self.name, *kept])})"
