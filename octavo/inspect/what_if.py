"""A what-if: errors of a layer's three products and of the model's gradient if it computes in FP8, by recipe.

For each batch the model computes loss and gradients once in high precision. Against these are measured:

    products   each layer's products by themselves, under each recipe, from that pass's input, weight and grad_output
    alone      the batch computed once more with one layer in FP8 and all others in high precision
    together   the batch computed once more with all layers in FP8

docs/inspect.md says what a layer's predicted loss is. Where there are too many layers to run each alone, those of least
effect are estimated. The relative errors e of a layer's products give the noise that FP8 adds to the gradient:
e(grad_weight) times the norm of the layer's own gradient, which is exact, and e(output) and e(grad_input) times the
norm of the whole gradient. The latter is too much, as paths lead around the layer. So the effects of the layers that
were run alone are divided by their noise so estimated, and the median of that, times its noise, is a layer's estimate.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import glob
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.cost.rates import PUBLISHED, PlanError, Rates, rates_of
from octavo.cost.text import columns
from octavo.cost.work import COMPARED, LinearWork
from octavo.errors import OctavoError, first_line
from octavo.inspect.forwards import Autocast
from octavo.inspect.module_state import ModuleState
from octavo.inspect.rows import require_whole
from octavo.nn.candidates import Select, sizes_of
from octavo.nn.convert import convert
from octavo.nn.recipe_module import RecipeModule
from octavo.recipes import as_recipe, high_precision
from octavo.scaling.recipe import OPERANDS, Recipe, RecipeMap
from octavo.weights.fsdp2 import whole as full_tensor
from octavo.weights.operands import weight_of

Loss = Callable[[nn.Module, Any], Tensor]
Recipes = Mapping[str, Recipe | RecipeMap]  # by name
Key = tuple[str, str]  # a layer's name and a recipe's
NO_PRODUCTS = math.nan, math.nan, math.nan
# A loss is taken to fall with the number of steps t as t^-DESCENT, so where updates lose a share s of their direction,
# it is higher by DESCENT s. Late in a language model's training 0.05 to 0.1 (Kaplan et al., arXiv 2001.08361), early on
# more.
DESCENT = 0.1
WITHOUT = high_precision().name
MOST_LEFT = 0.8  # another recipe is taken if it leaves less than this of a layer's predicted loss: more may be chance
RUNS = 500  # passes with one layer alone in FP8, by default
SHOWN = 10  # layers of each recipe, in a table

LEGEND = """\
output, grad_input, grad_weight: the layer's products, SQNR in dB
loss, 1 - cosine, norm: of the model's loss and gradient with this layer alone in FP8, against high precision
predicted loss: how much higher the trained model's will be; ~: estimated"""


class WhatIfError(OctavoError, ValueError):
    """A model, loss or budget that can't be compared; the message says why, and what to do."""


class LossAndGradients(NamedTuple):
    """A batch's loss, and its gradients in the order of the model's parameters."""

    loss: float
    gradients: Sequence[Tensor | None]


class Change(NamedTuple):
    """The change of a batch's loss and gradients; the fields are an Effect's."""

    loss: float
    curvature: float
    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class Effect:
    """The changes that one layer in FP8 under a recipe causes, compared with high precision; averaged over batches.

    Attributes:
        layer, recipe: names; the layer "" where all of them are in FP8.
        output, grad_input, grad_weight: the norms of the products' errors over the products'; nan if not computed.
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
        """The predicted loss: max(curvature, 0) + DESCENT × (1 - cosine), infinite where either is not finite."""
        predicted = max(self.curvature, 0.0) + DESCENT * (1 - self.cosine)
        return predicted if math.isfinite(predicted) else math.inf


@dataclass(frozen=True)
class Cost:
    """The cost of an exception from a map's default recipe, and the loss that it saves.

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
    """The effects of recipes on a model's layers, as octavo.inspect.compare measures them.

    Attributes:
        recipes: the recipes by name.
        effects: the effects of each layer alone under each recipe, in the model's order.
        whole: by recipe, the effect of all layers in FP8 at once.
        works: by layer, its computations in a batch.
        rates: of the device that costs are predicted for.
    """

    recipes: Recipes
    effects: tuple[Effect, ...]
    whole: Mapping[str, Effect]
    works: Mapping[str, LinearWork]
    rates: Rates

    def ranked(self, recipe: str) -> list[Effect]:
        """Return layers' effects under a recipe, the highest predicted loss first."""
        return sorted((x for x in self.effects if x.recipe == recipe), key=lambda x: x.predicted, reverse=True)

    def recipe_map(self, *, keep: int | None = None, loss: float | None = None) -> RecipeMap:
        """Choose recipes by layer, for octavo.convert.

        Args:
            keep: this many layers stay in high precision. The others follow one recipe: the one with the lowest
                predicted loss among those faster than high precision, or among all if none is faster.
            loss: the predicted loss stays within this (0.001 is 0.1 %), at the least predicted time: layers may follow
                different recipes, or none.

        Raises:
            ValueError: unless exactly one of the two is given, and is at least 0; ``keep`` a whole number.
        """
        budget = keep if loss is None else loss
        if budget is None or not budget >= 0 or (keep is not None and loss is not None):
            raise ValueError(f"keep={keep}, loss={loss}: give one of them, of at least 0")
        require_whole("keep", 0 if keep is None else keep, 0)
        plain_recipes = {name: recipe for name, recipe in self.recipes.items() if isinstance(recipe, Recipe)}
        if len(plain_recipes) < len(self.recipes):
            raise ValueError("recipes by layer were compared: compare recipes, to choose among them for each layer")
        if keep is None:
            choices = {name: self._within(budget, name) for name in self.recipes}
        else:
            choices = {name: self._without_worst(keep, name) for name in self._faster or self.recipes}
        objective = self._costs if keep is None else self._losses
        default = min(choices, key=lambda name: self._sum(objective, choices[name]))
        values = {**plain_recipes, WITHOUT: None}
        rules = {glob.escape(layer): values[name] for layer, name in choices[default].items() if name != default}
        return RecipeMap(plain_recipes[default], rules)

    def predicted(self, recipe: RecipeMap) -> float:
        """Return the predicted loss under a map from ``recipe_map``: the sum of its layers' losses."""
        return self._sum(self._losses, {layer: self._name_of(recipe.of(layer)) for layer in self.works})

    def seconds(self, recipe: Recipe | RecipeMap) -> float:
        """Return the predicted seconds that the compared layers take in a step: products and casts."""
        return sum(sum(work.seconds(recipe.of(layer), self.rates)) for layer, work in self.works.items())

    def costs(self, recipe: RecipeMap) -> list[Cost]:
        """Return the costs of the exceptions of a map from ``recipe_map``, in the model's order."""
        default, costs = self._name_of(recipe.default), []
        total_flop = sum(work.flop * sum(work.products) for work in self.works.values())
        for layer, work in self.works.items():
            chosen = recipe.of(layer)
            if (name := self._name_of(chosen)) != default:
                share = work.flop * sum(work.products) / total_flop if chosen.is_high_precision else 0.0
                seconds = sum(work.seconds(chosen, self.rates)) - sum(work.seconds(recipe.default, self.rates))
                saved = self._losses[layer, default] - self._losses[layer, name]
                costs.append(Cost(layer, name, share, seconds, saved))
        return costs

    def _name_of(self, recipe: Recipe) -> str:
        """Return the name that a recipe was compared by, which need not be its own."""
        names = [WITHOUT] if recipe.is_high_precision else [name for name, x in self.recipes.items() if x == recipe]
        if not names:
            raise WhatIfError(f"{recipe.name} was not compared so: give a map that recipe_map returned")
        return names[0]

    @cached_property
    def _faster(self) -> list[str]:
        """The recipes that are faster than high precision."""
        high_precision_seconds = self.seconds(high_precision())
        return [name for name, recipe in self.recipes.items() if self.seconds(recipe) < high_precision_seconds]

    @cached_property
    def _losses(self) -> dict[Key, float]:
        """The predicted loss by layer and recipe; 0 in high precision."""
        losses = {(effect.layer, effect.recipe): effect.predicted for effect in self.effects}
        return losses | {(layer, WITHOUT): 0.0 for layer in self.works}

    @cached_property
    def _costs(self) -> dict[Key, float]:
        """The predicted time by layer and recipe; where none is faster than high precision, that of products alone."""
        rates = self.rates if self._faster else dataclasses.replace(self.rates, launch=0.0, copy=math.inf, casts={})
        return {
            (layer, name): sum(work.seconds(recipe.of(layer), rates))
            for layer, work in self.works.items()
            for name, recipe in {**self.recipes, WITHOUT: high_precision()}.items()
        }

    @staticmethod
    def _sum(values: Mapping[Key, float], chosen: Mapping[str, str]) -> float:
        """Return the sum of values over the layers, each in its chosen recipe."""
        return sum(values[pair] for pair in chosen.items())

    def _without_worst(self, count: int, default: str) -> dict[str, str]:
        """Return a recipe's name for each layer: none's for the ``count`` layers with the highest predicted loss."""
        layers_kept = {effect.layer for effect in self.ranked(default)[:count]}
        return {layer: WITHOUT if layer in layers_kept else default for layer in self.works}

    def _within(self, budget: float, default: str) -> dict[str, str]:
        """Choose a recipe's name for each layer: again and again make the change that saves most loss for its cost.

        At the end take back the changes that later ones have made needless, the dearest first.
        """
        chosen = dict.fromkeys(self.works, default)
        while self._sum(self._losses, chosen) > budget:  # this ends, as a layer in high precision loses nothing
            changes = [(layer, name) for layer in self.works for name in (*self.recipes, WITHOUT)]
            layer, name = max(changes, key=lambda change: self._worth(change, chosen[change[0]]))
            chosen[layer] = name
        for layer in sorted(chosen, key=lambda layer: self._costs[layer, chosen[layer]], reverse=True):
            restored = {**chosen, layer: default}
            is_cheaper = self._sum(self._costs, restored) <= self._sum(self._costs, chosen)
            if is_cheaper and self._sum(self._losses, restored) <= budget:
                chosen = restored
        return chosen

    def _worth(self, change: Key, present: str) -> tuple[float, float]:
        """Return the loss that a layer's change saves, divided by its cost, and the loss itself."""
        unchanged = change[0], present
        if self._losses[change] >= MOST_LEFT * self._losses[unchanged]:
            return -math.inf, 0.0
        saved, cost = self._losses[unchanged] - self._losses[change], self._costs[change] - self._costs[unchanged]
        return (saved / cost if cost > 0 else math.inf), saved

    def rows(self) -> list[dict[str, Any]]:
        """Return effects with their predicted losses, for JSON: None in place of inf and NaN."""
        effects = (*self.whole.values(), *self.effects)
        rows = [{**dataclasses.asdict(effect), "predicted": effect.predicted} for effect in effects]
        return [{name: _finite(value) for name, value in row.items()} for row in rows]

    def __str__(self) -> str:
        lines = []
        for recipe, effect_of_all in self.whole.items():
            ranked = self.ranked(recipe)
            rows = [[recipe, *OPERANDS, "loss", "1 - cosine", "norm", "predicted loss"]]
            rows += [_row(effect) for effect in (effect_of_all, *ranked[:SHOWN])]
            more = [f"and {len(ranked) - SHOWN} more layers"] if len(ranked) > SHOWN else []
            lines += [columns(rows), *more, ""]
        return "\n".join([*lines, LEGEND])

    __repr__ = __str__


def _finite(value: Any) -> Any:
    """Return a value for JSON: None in place of inf and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(effect: Effect) -> list[str]:
    """Return an effect as cells of a table."""
    errors = effect.output, effect.grad_input, effect.grad_weight
    sqnr = ["" if math.isnan(e) else f"{-20 * math.log10(e):.1f}" if e > 0 else "exact" for e in errors]
    loss, norm = (f"{100 * effect.loss:+.4f} %", f"{effect.norm_ratio:.4f}") if effect.measured else ("", "")
    about = "" if effect.measured else "~"
    predicted = f"{about}{100 * effect.predicted:.4f} %"
    return [effect.layer or "(all layers)", *sqnr, loss, f"{about}{1 - effect.cosine:.2e}", norm, predicted]


def compare(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    recipes: Iterable[Recipe | str] | Mapping[str, Recipe | RecipeMap | str] | None = None,
    *,
    select: Select | None = None,
    runs: int = RUNS,
    rates: Rates | None = None,
) -> WhatIf:
    """Find the layers that can't stand FP8, by the errors in their products and in the model's gradient.

    It runs a copy of the model, with the same parameters, and leaves all as it was, torch's random numbers too, which
    are the same in each pass. No optimizer runs, and no hook on accumulated gradients. It works in one process.

    Args:
        model: plain or converted, on its device; it computes in training mode. Give one that has trained for a while.
        loss: ``loss(model, batch)`` gives the scalar that training calls backward of; with autocast, if training has.
        batches: a few of the training's. ``delayed`` scales a batch by those before it, and the first by itself.
        recipes: of different names, or names, as octavo.convert takes them; octavo's five by default. Or a dict of
            recipes, or recipes by layer, by name.
        select: which layers, as for octavo.convert.
        runs: the most passes with one layer alone in FP8, shared by all batches and recipes; of more layers, those of
            least effect are estimated, or all where there are fewer than one for each batch and recipe.
        rates: of the device that will train, for the costs; by default this one's, or an H100's if it has none.

    Returns:
        a WhatIf: print it, or ask for its ``recipe_map``.

    Raises:
        WhatIfError: without layers, batches or recipes; for a loss that is no scalar with a gradient.
        ValueError: for ``runs`` below 1.

    Example:
        >>> import torch, octavo
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        >>> found = octavo.inspect.compare(
        ...     model,
        ...     lambda model, x: model(x).square().mean(),
        ...     [torch.randn(16, 32)],
        ...     [octavo.recipes.dynamic()],
        ...     select=lambda module, name: True,
        ... )
        >>> found.recipe_map(keep=1).of("0").name != found.recipe_map(keep=1).of("2").name
        True
    """
    require_whole("runs", runs, 1)
    compared = COMPARED if recipes is None else recipes
    if isinstance(compared, str | Recipe | RecipeMap):
        raise WhatIfError(f"recipes is a {type(compared).__name__}: give a list of recipes, or a dict of them by name")
    by_name = compared.items() if isinstance(compared, Mapping) else [(getattr(x, "name", str(x)), x) for x in compared]
    named = [(name, as_recipe(value)) for name, value in by_name]
    batches, chosen = list(batches), dict(named)
    without_fp8 = [name for name, value in named if name == WITHOUT or getattr(value, "is_high_precision", False)]
    if not named or len(chosen) < len(named) or without_fp8:
        names = [name for name, _ in named]
        raise WhatIfError(f"recipes={names}: needs recipes with products in FP8, each of another name")
    if not batches:
        raise WhatIfError("batches is empty: give at least one of the training's")
    copied, layers = _copy_in_high_precision(model, select)
    for (name, recipe), (layer, module) in itertools.product(named, layers.items()):
        try:
            module.recipe = recipe.of(*module.names(layer))
        except ValueError as error:
            raise WhatIfError(f"{error}; leave {name} out") from error
        module.recipe = high_precision()
    passes = _Passes(copied, loss, layers, chosen)
    for batch in batches:
        passes.measure(batch, runs // (len(batches) * len(chosen)))
    try:
        rates = rates or rates_of(device=next(model.parameters()).device)
    except PlanError:  # no rates are published of it, such as a laptop's CPU
        rates = PUBLISHED["H100"]
    return passes.result(rates)


def check(
    model: nn.Module, loss: Loss, batches: Iterable[Any], recipe: Recipe | RecipeMap, *, select: Select | None = None
) -> Effect:
    """Measure recipes by layer together: return an Effect of the layer "", as ``compare`` does for one recipe."""
    return compare(model, loss, batches, {"map": recipe}, select=select, runs=1).whole["map"]


def _copy_in_high_precision(model: nn.Module, select: Select | None) -> tuple[nn.Module, dict[str, RecipeModule]]:
    """Return a copy in training mode that shares parameters, and the layers to compare by name, in high precision."""
    tensor_attributes = [x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor)]
    try:
        copied = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *tensor_attributes)})
    except (TypeError, RuntimeError) as error:
        why = "take away what its modules hold besides tensors and plain Python"
        raise WhatIfError(f"the model can't be copied ({first_line(error)}): {why}") from error
    if not copied.training:
        copied.train()
    modules = dict(model.named_modules())
    chosen = (lambda _, name: select(modules[name], name)) if callable(select) else select
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "octavo.convert converted nothing")
        convert(copied, high_precision(), chosen)

    def is_selected(name: str) -> bool:
        return select is None or not isinstance(modules.get(name), RecipeModule) or select(modules[name], name)

    layers = {name: module for name, module in RecipeModule.named_in(copied) if is_selected(name)}
    if not layers:
        least = "by default those that octavo.convert takes (--min-features N, or select=)"
        raise WhatIfError(f"no layer to compare: none of this model's is selected, {least}")
    return copied, layers


class _Passes:
    """Runs a model in high precision and with layers in FP8; has the results by layer and recipe.

    ``local``: the squared norms of the three products' errors and of the products.
    ``first_order``: the change of this batch's loss, of first order in the output's errors.
    """

    def __init__(self, model: nn.Module, loss: Loss, layers: Mapping[str, RecipeModule], recipes: Recipes) -> None:
        self.model, self.loss, self.layers, self.recipes = model, loss, layers, recipes
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.state = ModuleState(model, before_forward=True, most_bytes=math.inf)  # which each pass begins with
        self.works: dict[str, LinearWork] = {}
        self.local: dict[Key, Tensor] = {}
        self.gradient_share: dict[str, float] = {}  # {layer: its share of the gradient's square}
        self.first_order: dict[Key, float] = {}
        self.changes: dict[tuple[str | None, str], list[Change]] = {}  # of each batch; None: of all layers together
        self.states: dict[Key, Any] = {}  # of delayed recipes, which go on from one batch to the next
        self.last_states: dict[Key, Any] = {}  # those with which this batch begins
        self.run_alone: dict[str, list[str]] = {}  # {recipe: the layers that are run alone}

    def measure(self, batch: Any, most: int) -> None:
        """Run a batch in high precision, with all layers in FP8, and with ``most`` layers alone, under each recipe."""
        self.last_states, self.first_order = dict(self.states), {}
        with contextlib.ExitStack() as hooks:
            for layer_name, layer in self.layers.items():
                watch = functools.partial(self._watch, layer_name)
                hooks.enter_context(layer.register_forward_hook(watch, prepend=True, with_kwargs=True))
            exact = self.gradient(batch)
        if not math.isfinite(exact.loss) or exact.loss == 0:
            raise WhatIfError(f"loss(model, batch) is {exact.loss} in high precision: nothing is relative to it")
        if not self.run_alone:
            self._choose(exact.gradients, most)
        for recipe, chosen in self.run_alone.items():
            for name in (None, *chosen):
                names = list(self.layers) if name is None else [name]
                changed = self.gradient(batch, recipe, names)
                first_order = sum(self.first_order.get((layer_name, recipe), 0.0) for layer_name in names)
                self.changes.setdefault((name, recipe), []).append(_change_between(exact, changed, first_order))

    def _choose(self, gradients: Sequence[Tensor | None], most: int) -> None:
        """Choose which layers to run alone: those whose products' errors add most noise to the gradient."""
        sizes = [0.0 if gradient is None else float(gradient.double().square().sum()) for gradient in gradients]
        squares, gradient_square = dict(zip(map(id, self.parameters), sizes, strict=True)), sum(sizes)
        for name, layer in self.layers.items():
            self.gradient_share[name] = squares.get(id(weight_of(layer)), 0.0) / (gradient_square or 1.0)
        reached = [name for name in self.layers if name in self.works]
        for recipe in self.recipes:
            self.run_alone[recipe] = sorted(reached, key=lambda name: self._noise(name, recipe), reverse=True)[:most]

    def _noise(self, name: str, recipe: str) -> float:
        """Estimate the squared norm of the gradient's error over the gradient's; see the top of the file."""
        output, grad_input, grad_weight = (0.0 if math.isnan(e) else e**2 for e in self._errors(name, recipe))
        return grad_weight * self.gradient_share[name] + output + grad_input

    def _errors(self, name: str, recipe: str) -> tuple[float, float, float]:
        """Return the norms of a layer's products' errors over the products'; nan where one is not computed."""
        errors, exact = self.local[name, recipe]
        output, grad_input, grad_weight = (errors / exact).sqrt().tolist()  # 0 / 0: a product that is not computed
        return output, grad_input, grad_weight

    def gradient(self, batch: Any, recipe: str = WITHOUT, names: Iterable[str] = ()) -> LossAndGradients:
        """Return a batch's loss and gradient with layers of these names under a recipe, all others without one."""
        self.state.put_copies()
        for name in names:
            self._set_recipe(name, recipe, self.last_states)
        devices = {p.device.index or 0 for p in self.model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices), torch.enable_grad():
            value = self.loss(self.model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                shape = getattr(value, "shape", None)
                returned = f"a {type(value).__name__}" if shape is None else f"a tensor of shape {tuple(shape)}"
                raise WhatIfError(f"loss(model, batch) gave {returned}: it must be a scalar with a gradient")
            gradients = torch.autograd.grad(value.reshape(()), self.parameters, allow_unused=True)
        for name in names:
            self.layers[name].recipe = high_precision()
        return LossAndGradients(float(value.detach()), gradients)

    def _set_recipe(self, name: str, recipe: str, states: Mapping[Key, Any]) -> None:
        """Give a layer a recipe, and a copy of its delayed state to begin with, if it has one."""
        layer = self.layers[name]
        layer.recipe = self.recipes[recipe].of(*layer.names(name))
        if (state := states.get((name, recipe))) is not None:
            layer.fp8.state = state.clone()

    def _watch(self, name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Compute a layer's products under each recipe when its backward begins: input and grad_output exist then."""
        x, *offsets = (*args, *(kwargs[key] for key in ("input", "offsets") if key in kwargs))
        splits = output if isinstance(output, tuple) else (output,)
        if not splits[0].requires_grad:
            return
        autocast = torch.autocast(*Autocast.now(x.device.type))
        sizes = [split.shape for split in splits]

        def backward(gradients: Sequence[Tensor | None]) -> None:
            first = next(gradient for gradient in gradients if gradient is not None)
            of_splits = [first.new_zeros(s) if g is None else g for g, s in zip(gradients, sizes, strict=True)]
            with autocast:
                self._compare_products(name, x, torch.cat(of_splits, -1), offsets)

        torch.autograd.graph.register_multi_grad_hook(splits, backward)

    def _compare_products(self, name: str, x: Tensor, grad: Tensor, offsets: Sequence[Tensor]) -> None:
        """Add up the errors of a layer's products under each recipe, from a batch's input and grad_output."""
        layer = self.layers[name]
        exact = _products(layer, x, grad, offsets)
        experts, columns, rows = sizes_of(layer)
        needs = exact[1] is not None, exact[2] is not None
        self.works.setdefault(name, LinearWork(name, x.numel() // columns, columns, rows, *needs, experts or 1))
        for recipe in self.recipes:
            key = name, recipe
            self._set_recipe(name, recipe, self.states)
            products = _products(layer, x, grad, offsets)
            if (state := layer.fp8.state) is not None:
                self.states[key] = state.clone()
            layer.recipe = high_precision()
            squares = torch.zeros(2, len(OPERANDS), dtype=torch.float64, device=x.device)
            for i, (product, exact_product) in enumerate(zip(products, exact, strict=True)):
                if product is not None and exact_product is not None:
                    error = product.double() - exact_product.double()
                    squares[:, i] = torch.stack([error.square().sum(), exact_product.double().square().sum()])
            first_order = ((products[0].double() - exact[0].double()) * full_tensor(grad).double()).sum()
            self.first_order[key] = self.first_order.get(key, 0.0) + float(first_order)
            self.local[key] = self.local.get(key, 0) + squares

    def result(self, rates: Rates) -> WhatIf:
        """Return the effects of all batches, measured or estimated."""
        if not self.works:
            raise WhatIfError("no layer took part in the loss: loss(model, batch) must call the model that it is given")
        works = {name: self.works[name] for name in self.layers if name in self.works}
        effects = []
        for recipe in self.recipes:
            measured = {name: _mean(self.changes[name, recipe]) for name in self.run_alone[recipe]}
            curvature, deviation = _per_noise([(self._noise(name, recipe), each) for name, each in measured.items()])
            for name in works:
                noise, was_run = self._noise(name, recipe), name in measured
                change = measured[name] if was_run else Change(0.0, curvature * noise, 1 - deviation * noise, 1.0)
                effects.append(Effect(name, recipe, *self._errors(name, recipe), *change, was_run))
        whole = {name: Effect("", name, *NO_PRODUCTS, *_mean(self.changes[None, name]), True) for name in self.recipes}
        return WhatIf(dict(self.recipes), tuple(effects), whole, works, rates)


def _per_noise(changes: Sequence[tuple[float, Change]]) -> tuple[float, float]:
    """Return curvature and deviation (1 - cosine), divided by the estimated noise: the medians of the measured layers.

    Without any: no curvature, and the 1 - cosine of a small error at right angles to the gradient, half its noise.
    """
    ratios = [(x.curvature / noise, (1 - x.cosine) / noise) for noise, x in changes if noise > 0]
    ratios = [pair for pair in ratios if all(map(math.isfinite, pair))]
    return (statistics.median(a for a, _ in ratios), statistics.median(b for _, b in ratios)) if ratios else (0.0, 0.5)


def _products(
    layer: RecipeModule, x: Tensor, grad: Tensor, offsets: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (output, grad_input, grad_weight) of a layer under its recipe; None for a gradient that nothing needs."""
    weight = weight_of(layer)
    with torch.enable_grad():
        x = x.detach().requires_grad_(x.requires_grad)
        output = type(layer).forward(layer, x, *offsets)
        output = torch.cat(output, -1) if isinstance(output, tuple) else output
        leaves = [tensor for tensor in (x, weight) if tensor is not None and tensor.requires_grad]
        if not leaves:  # the output has a gradient by its bias alone
            return full_tensor(output.detach()), None, None
        gradients = dict(zip(map(id, leaves), torch.autograd.grad(output, leaves, grad), strict=True))
    grad_input, grad_weight = (full_tensor(gradients[id(one)]) if id(one) in gradients else None for one in (x, weight))
    return full_tensor(output.detach()), grad_input, grad_weight


def _change_between(exact: LossAndGradients, changed: LossAndGradients, first_order: float) -> Change:
    """Return the change of a batch's results; ``first_order``: that term of the loss's change."""
    (exact_loss, x), (loss, y) = exact, changed
    dot, exact_square, changed_square = (
        sum(float(p.double().flatten() @ q.double().flatten()) for p, q in pairs if p is not None and q is not None)
        for pairs in (zip(x, y, strict=True), zip(x, x, strict=True), zip(y, y, strict=True))
    )
    cosine = ratio = math.nan
    if exact_square and changed_square:
        cosine = dot / math.sqrt(exact_square * changed_square)
        ratio = math.sqrt(changed_square / exact_square)
    change = loss - exact_loss
    return Change(change / abs(exact_loss), (change - first_order) / abs(exact_loss), cosine, ratio)


def _mean(values: Sequence[Change]) -> Change:
    """Return the mean of changes over batches."""
    return Change(*map(statistics.fmean, zip(*values, strict=True)))
