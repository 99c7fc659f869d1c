"""What FP8 does to each layer of a model, ranked, and the cheapest recipes by layer that stay within a budget.

A layer's predicted loss is how much higher, relatively, the trained model's loss will be with this layer in FP8:

    curvature + DESCENT × (1 - cosine)

Curvature is the loss that rounding adds in a forward in FP8. The cosine between the exact gradient and the one in FP8
is the share of a step's length that follows the exact gradient; noise that averages out makes up the step's other
component. So a training loses the share 1 - cosine of its steps (with an optimizer such as AdamW, whose steps do not
grow with the gradient's norm). The loss falls with the steps t as t^-DESCENT, so the lost steps would have lowered it
by the share DESCENT × (1 - cosine). Late in a language model's training the exponent is 0.05 to 0.1 (Kaplan et al.,
arXiv 2001.08361); early on the loss falls faster, so that more is lost.

Layers' losses add up: their noises are independent, so that the squares add, and 1 - cosine is half the square.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.cost.command import columns
from octavo.cost.estimate import LinearWork
from octavo.cost.rates import Rates
from octavo.errors import OctavoError
from octavo.recipes import high_precision
from octavo.scaling.recipe import PRODUCTS, Recipe
from octavo.scaling.recipe_map import RecipeMap, recipe_of

DESCENT = 0.1
WITHOUT = high_precision().name
LEAST = 0.8  # another recipe is taken for a layer if it leaves less than this share of its loss: else it may be chance
SHOWN = 10  # layers of each recipe, in a table

LEGEND = """\
output, grad_input, grad_weight: the layer's products, SQNR in dB
loss, 1 - cosine, norm: of the model's loss and gradient with this layer alone in FP8, against high precision
predicted loss: how much higher the trained model's will be; ~: estimated"""


class WhatIfError(OctavoError, ValueError):
    """A model, loss or budget that can't be compared; the message says why, and what to do."""


@dataclass(frozen=True)
class Effect:
    """What one layer in FP8 under a recipe changes, compared with high precision; averaged over batches.

    Attributes:
        layer, recipe: names; the layer "" where all of them are in FP8.
        output, grad_input, grad_weight: the norms of the products' errors over the products'; nan for one not computed.
        loss: relative change of the loss.
        curvature: the same without the term of first order in the output's errors, which is chance.
        cosine, norm_ratio: between the gradients of all the model's parameters, in FP8 and in high precision.
        measured: whether the model was run so; else curvature and cosine are estimates, loss and norm_ratio unknown.
    """

    layer: str
    recipe: str
    output: float
    grad_input: float
    grad_weight: float
    loss: float
    curvature: float
    cosine: float
    norm_ratio: float
    measured: bool

    @property
    def predicted(self) -> float:
        """The predicted loss, see the top of the file: infinite where the loss or the gradient is not finite."""
        found = max(self.curvature, 0.0) + DESCENT * (1 - self.cosine)
        return found if math.isfinite(found) else math.inf


@dataclass(frozen=True)
class Cost:
    """What an exception from a map's default recipe costs, and what it saves.

    Attributes:
        layer, recipe: names; "high_precision" stands for no recipe.
        share: of all compared layers' operations, the share that is no longer in FP8.
        seconds: predicted additional seconds a step.
        loss: how much lower the predicted loss is with the exception.
    """

    layer: str
    recipe: str
    share: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class WhatIf:
    """What octavo.inspect.compare found.

    Attributes:
        recipes: by name.
        effects: of each layer alone under each recipe, in the model's order.
        whole: by recipe, the effect of all layers together.
        works: what each layer computes in a batch.
        rates: of the device that costs are predicted for.
    """

    recipes: Mapping[str, Recipe]
    effects: tuple[Effect, ...]
    whole: Mapping[str, Effect]
    works: Mapping[str, LinearWork]
    rates: Rates

    def ranked(self, recipe: str) -> list[Effect]:
        """Layers under a recipe, the highest predicted loss first."""
        under_it = [effect for effect in self.effects if effect.recipe == recipe]
        return sorted(under_it, key=lambda effect: effect.predicted, reverse=True)

    def recipe_map(self, *, keep: int | None = None, loss: float | None = None) -> RecipeMap:
        """Recipes by layer, for octavo.convert.

        Args:
            keep: this many layers stay in high precision. The others follow one recipe: the one with the lowest
                predicted loss among those faster than high precision, or among all if none is faster.
            loss: the predicted loss stays within this (0.001 is 0.1 %), at the least predicted time: layers may follow
                different recipes, or none.

        Raises:
            ValueError: unless exactly one of the two is given, and is at least 0.
        """
        budget = keep if loss is None else loss
        if budget is None or budget < 0 or (keep is not None and loss is not None):
            raise ValueError(f"keep={keep}, loss={loss}: give one of them, of at least 0")
        if keep is not None:
            kept = {
                name: {effect.layer for effect in self.ranked(name)[:keep]} for name in self._faster or self.recipes
            }
            found = [(name, {layer: WITHOUT if layer in kept[name] else name for layer in self.works}) for name in kept]
            default, chosen = min(found, key=lambda pair: self._sum(self._losses, pair[1]))
        else:
            found = [(name, self._within(budget, name)) for name in self.recipes]
            default, chosen = min(found, key=lambda pair: self._sum(self._costs, pair[1]))
        values = {**self.recipes, WITHOUT: None}
        rules = {glob.escape(layer): values[name] for layer, name in chosen.items() if name != default}
        return RecipeMap(self.recipes[default], rules)

    def predicted(self, recipe: RecipeMap) -> float:
        """The predicted loss under a map from ``recipe_map``: the sum of its layers'."""
        return self._sum(self._losses, {layer: recipe.of(layer).name for layer in self.works})

    def seconds(self, recipe: Recipe | RecipeMap) -> float:
        """The predicted seconds that the compared layers take in a step: products and casts."""
        return sum(sum(work.seconds(recipe_of(recipe, layer), self.rates)) for layer, work in self.works.items())

    def costs(self, recipe: RecipeMap) -> list[Cost]:
        """What the exceptions of a map from ``recipe_map`` cost and bring, in the model's order."""
        default, found = recipe.default.name, []
        whole = sum(work.flop * sum(work.products) for work in self.works.values())
        for layer, work in self.works.items():
            chosen = recipe.of(layer)
            if chosen.name != default:
                share = work.flop * sum(work.products) / whole if chosen.is_high_precision else 0.0
                seconds = sum(work.seconds(chosen, self.rates)) - sum(work.seconds(recipe.default, self.rates))
                saved = self._losses[layer, default] - self._losses[layer, chosen.name]
                found.append(Cost(layer, chosen.name, share, seconds, saved))
        return found

    @cached_property
    def _options(self) -> dict[str, Recipe]:
        return {**self.recipes, WITHOUT: high_precision()}

    @cached_property
    def _faster(self) -> list[str]:
        """The recipes that are faster than high precision."""
        whole = self.seconds(high_precision())
        return [name for name, recipe in self.recipes.items() if self.seconds(recipe) < whole]

    @cached_property
    def _losses(self) -> dict[tuple[str, str], float]:
        """The predicted loss by layer and recipe."""
        found = {(effect.layer, effect.recipe): effect.predicted for effect in self.effects}
        return found | {(layer, WITHOUT): 0.0 for layer in self.works}

    @cached_property
    def _costs(self) -> dict[tuple[str, str], float]:
        """The predicted time by layer and recipe.

        Where the layers are too small for any recipe to be faster than high precision, it is that of the products
        alone, so that recipes still differ.
        """
        ideal = dataclasses.replace(self.rates, launch=0.0, copy=math.inf, casts={})
        rates = self.rates if self._faster else ideal
        pairs = itertools.product(self.works.items(), self._options.items())
        return {(layer, name): sum(work.seconds(recipe, rates)) for (layer, work), (name, recipe) in pairs}

    @staticmethod
    def _sum(values: Mapping[tuple[str, str], float], chosen: Mapping[str, str]) -> float:
        return sum(values[pair] for pair in chosen.items())

    def _within(self, budget: float, default: str) -> dict[str, str]:
        """A recipe's name for each layer so that the predicted loss is within the budget, begun with one for all.

        Again and again it makes the change that saves most loss for its cost. At the end it takes back the changes that
        later ones have made needless, the dearest first.
        """
        chosen = dict.fromkeys(self.works, default)
        while self._sum(self._losses, chosen) > budget:  # this ends, as a layer in high precision loses nothing
            changes = [(layer, name) for layer in self.works for name in self._options]
            layer, name = max(changes, key=lambda change: self._worth(change, chosen[change[0]]))
            chosen[layer] = name
        for layer in sorted(chosen, key=lambda layer: self._costs[layer, chosen[layer]], reverse=True):
            back = {**chosen, layer: default}
            is_cheaper = self._sum(self._costs, back) <= self._sum(self._costs, chosen)
            if is_cheaper and self._sum(self._losses, back) <= budget:
                chosen = back
        return chosen

    def _worth(self, change: tuple[str, str], before: str) -> tuple[float, float]:
        """The loss that a layer's change saves: divided by its cost, and as it is."""
        now = change[0], before
        if self._losses[change] >= LEAST * self._losses[now]:
            return -math.inf, 0.0
        saved, cost = self._losses[now] - self._losses[change], self._costs[change] - self._costs[now]
        return (saved / cost if cost > 0 else math.inf), saved

    def rows(self) -> list[dict[str, Any]]:
        """Effects with their predicted losses, for JSON: None in place of inf and NaN."""
        found = (*self.whole.values(), *self.effects)
        rows = [{**dataclasses.asdict(effect), "predicted": effect.predicted} for effect in found]
        return [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows
        ]

    def __str__(self) -> str:
        lines = []
        for recipe, whole in self.whole.items():
            ranked = self.ranked(recipe)
            rows = [[recipe, *PRODUCTS, "loss", "1 - cosine", "norm", "predicted loss"]]
            rows += [_row(effect) for effect in (whole, *ranked[:SHOWN])]
            more = len(ranked) - SHOWN
            lines += [columns(rows), *[f"and {more} more layers"] * (more > 0), ""]
        return "\n".join([*lines, LEGEND])

    __repr__ = __str__


def _row(effect: Effect) -> list[str]:
    errors = effect.output, effect.grad_input, effect.grad_weight
    sqnr = ["" if math.isnan(e) else f"{-20 * math.log10(e):.1f}" if e > 0 else "exact" for e in errors]
    about = "" if effect.measured else "~"
    measured = [f"{100 * effect.loss:+.4f} %", f"{about}{1 - effect.cosine:.2e}", f"{effect.norm_ratio:.4f}"]
    measured = measured if effect.measured else ["", measured[1], ""]
    return [effect.layer or "(all layers)", *sqnr, *measured, f"{about}{100 * effect.predicted:.4f} %"]
