"""Phase: a model's recipe and the form of its weights and optimizer state. A switch begins the next phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from octavo.granularity import Granularity
from octavo.nn.convert import gather_anew, set_recipe, storage_after, storage_now
from octavo.nn.recipe_module import RecipeModule
from octavo.optim import Moment
from octavo.optim.base import CompactOptimizer
from octavo.optim.conversion import Conversion
from octavo.optim.state import Settings
from octavo.recipes import as_recipe
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.weights.fsdp2 import on_this_rank

SAME: Any = "same"
TRIGGERS = ("from_step", "from_tokens", "when_lr_below", "when_update_below_resolution")


@dataclass(frozen=True)
class Phase:
    """A stretch of a training: its recipe, the form of weights and optimizer state, and when it begins.

    Args:
        recipe: the converted layers' recipe, as octavo.set_recipe takes it.
        moments: as octavo.optim's optimizers take them; "same": as in the previous phase.
        master: as octavo.optim's optimizers take it; "same": as in the previous phase.
        weight_storage: "fp8": converted weights live in FP8; None: they are plain tensors; "same": as in the previous
            phase.
        from_step: the phase begins after so many optimizer steps.
        from_tokens: after training on so many tokens, as ``PrecisionSchedule.step(tokens)`` counts them.
        when_lr_below: once the learning rate, the largest of all groups', is below this and no longer its highest.
        when_update_below_resolution: once the root mean square of a step's update has fallen from above to below this
            many times the rounding noise of the weights' E4M3 grid (its step / sqrt(12)); see docs/adaptive.md.

    A schedule's first phase begins at once and has no trigger; each of the others has one.

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
        object.__setattr__(self, "recipe", as_recipe(self.recipe))
        if self.weight_storage not in ("fp8", None, SAME):
            raise ValueError(f"Phase: weight_storage={self.weight_storage!r}: use 'fp8', None or 'same'")
        triggers = [name for name in TRIGGERS if getattr(self, name) is not None]
        if len(triggers) > 1:
            raise ValueError(f"Phase: {' and '.join(triggers)}: a phase begins by one of them")
        for name in triggers:
            value = getattr(self, name)
            kinds, wanted = (int, "a whole number") if name.startswith("from_") else (int | float, "a number")
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                raise ValueError(f"Phase: {name}={value!r} must be {wanted} above 0")

    @property
    def trigger(self) -> str | None:
        """The name of the field that says when the phase begins; None: it has no trigger."""
        return next((name for name in TRIGGERS if getattr(self, name) is not None), None)

    @property
    def name(self) -> str:
        """The recipe's name; for a RecipeMap "map of" and the default's name."""
        return self.recipe.name if isinstance(self.recipe, Recipe) else f"map of {self.recipe.default.name}"

    def __repr__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)[1:]]
        changed_fields = [f"{name}={value}" for name, value in values if value != (None if name in TRIGGERS else SAME)]
        return f"Phase({', '.join([self.name, *changed_fields])})"


@dataclass(frozen=True)
class Target:
    """A phase with every "same" replaced by the value that it stands for.

    Attributes:
        phase: the phase.
        settings: of the moments and masters of an optimizer of octavo.optim; None for one of torch's.
        storage: how each weight of an octavo module is stored: granularity of each weight, in the order of
            ``storage_now(model)``.
    """

    phase: Phase
    settings: Settings | None
    storage: tuple[Granularity | None, ...]

    def storage_of(self, model: nn.Module) -> dict[nn.Parameter, Granularity | None]:
        """Return how the phase stores the weights of a model's octavo modules, as ``storage_now`` returns it."""
        return dict(zip(storage_now(model), self.storage, strict=True))

    def recipes_of(self, model: nn.Module) -> list[Recipe]:
        """Return the phase's recipe of each of a model's octavo modules, in their order."""
        return [self.phase.recipe.of(*module.names(name)) for name, module in RecipeModule.named_in(model)]

    def conversion(self, model: nn.Module) -> Conversion:
        """Return the conversion that puts a model's weights, and its optimizer, into the phase."""
        pairs = zip(storage_now(model).items(), self.storage, strict=True)
        return Conversion(self.settings, {weight: new for (weight, present), new in pairs if new != present})


def phase_targets(
    model: nn.Module, optimizer: Optimizer, phases: Sequence[Phase], after: Target | None = None
) -> tuple[Target, ...]:
    """Return the Target of each phase, if they follow one another after the Target ``after`` (None: the present state).

    ValueError or TypeError names the phase that is not possible, and says why.
    """
    settings = optimizer.settings if isinstance(optimizer, CompactOptimizer) else None
    now = storage_now(model)
    if after is not None:
        settings, now = after.settings, dict(zip(now, after.storage, strict=True))
    targets = []
    for index, phase in enumerate(phases):
        try:
            settings = _settings_of(phase, optimizer, settings)
            now = storage_after(model, phase.recipe, phase.weight_storage, now)
            target = Target(phase, settings, tuple(now.values()))
            target.conversion(model).check(optimizer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"phase {index}, {phase}: {error}") from None
        targets.append(target)
    return tuple(targets)


def _settings_of(phase: Phase, optimizer: Optimizer, last: Settings | None) -> Settings | None:
    if isinstance(optimizer, CompactOptimizer) and last is not None:
        moments = last.moments if phase.moments == SAME else optimizer.moments_of(phase.moments)
        return Settings(moments, last.names, last.master if phase.master == SAME else phase.master)
    for name in ("moments", "master", "weight_storage"):
        if getattr(phase, name) != SAME:
            raise ValueError(f"{name} changes with an optimizer of octavo.optim only, not {type(optimizer).__name__}")
    if phase.when_update_below_resolution is not None:
        raise ValueError("when_update_below_resolution is measured by the optimizers of octavo.optim only")
    return None


def fp8_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that products read in FP8, except those of experts."""
    layers = [module for _, module in RecipeModule.named_in(model) if not module.recipe.is_high_precision]
    named = (pair for layer in layers for pair in layer.named_parameters())
    return [param for name, param in named if name.rpartition(".")[2] == "weight" and param.ndim < 3]


def switch(model: nn.Module, optimizer: Optimizer, target: Target) -> None:
    """Put a model and its optimizer into a phase, one tensor after the other, so that little is in memory twice."""
    conversion = target.conversion(model)
    conversion.refuse_ddp()
    if any(weight is not on_this_rank(weight) for weight in conversion.storage):
        gather_anew(model)
    conversion.apply(model, optimizer)
    set_recipe(model, target.phase.recipe)
