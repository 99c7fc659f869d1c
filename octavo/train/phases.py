"""What ``--schedule`` says: phases of a run, by their names and shares of its steps.

    fp8-then-bf16@0.7    the run's recipe, weights and state for 70 % of the steps, then all in high precision
    bf16-then-fp8@0.3    the other way round
    dynamic-then-blockwise@0.5-then-bf16@0.9
    auto                 the run's recipe until updates fall below the weights' resolution, then high precision

In bf16 (float32 and baseline are the same here) layers compute in high precision, in the run's dtype; weights are
plain, and masters and moments float32.
"""

from __future__ import annotations

from typing import Any

import octavo
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap
from octavo.schedule import Phase
from octavo.train.config import AUTO, BASELINE, UNCONVERTED, StateConfig, check_schedule, or_none
from octavo.train.errors import TrainError

BELOW = 0.06  # auto's threshold, which the default run crosses after three quarters; benchmarks/training/adaptive.py


def phases_of(text: str, recipe: Recipe | RecipeMap, steps: int, state: StateConfig) -> list[Phase]:
    """The phases of a run by what --schedule says, or one; ``state`` is how FP8 phases keep weights and state.

    Raises:
        TrainError: for a schedule whose phases begin in no step of the run.
    """
    if not text:
        return [_phase("fp8", recipe, state)]
    if check_schedule(text) == AUTO:
        return [_phase("fp8", recipe, state), _phase(BASELINE, recipe, state, when_update_below_resolution=BELOW)]
    first, *rest = text.split("-then-")
    phases, before = [_phase(first, recipe, state)], 0
    for part in rest:
        name, share = part.split("@")
        begins = round(float(share) * steps)
        if not before < begins < steps:
            raise TrainError(
                f"schedule {text}: {name} would begin at step {begins} of {steps}, after one at step {before}: "
                "choose a share of the steps between those around it"
            )
        phases.append(_phase(name, recipe, state, from_step=begins))
        before = begins
    return phases


def _phase(name: str, recipe: Recipe | RecipeMap, state: StateConfig, **trigger: Any) -> Phase:
    if name in UNCONVERTED:
        return Phase(octavo.recipes.high_precision(), "fp32", "fp32", None, **trigger)
    own = recipe if name == "fp8" else getattr(octavo.recipes, name)()
    return Phase(own, state.moments, or_none(state.master), or_none(state.weight_storage), **trigger)  # type: ignore[arg-type]
