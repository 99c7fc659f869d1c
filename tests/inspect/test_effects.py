from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

import octavo
from octavo import recipes
from octavo.cost.rates import PUBLISHED
from octavo.cost.work import LinearWork
from octavo.inspect.what_if import DESCENT, SHOWN, Effect, WhatIf

NAMES = ("dynamic", "blockwise")
LAYERS = ("first", "blocks.0.up", "blocks.0.down", "head")
LOSSES = {"dynamic": (1e-3, 4e-4, 3e-4, 8e-3), "blockwise": (2e-4, 3.9e-4, 1e-4, 7e-3)}


def effect(layer, recipe, predicted, **changed):
    template = Effect(layer, recipe, 0.1, 0.1, 0.1, 0.0, predicted, 1.0, 1.0, True)
    return dataclasses.replace(template, **changed)


def what_if(losses=LOSSES, layers=LAYERS, features=4096, device="H100"):
    effects = [
        effect(layer, name, loss)
        for name, losses_of_recipe in losses.items()
        for layer, loss in zip(layers, losses_of_recipe, strict=True)
    ]
    works = {
        layer: LinearWork(layer, 16384, features, (i + 1) * features, True, True) for i, layer in enumerate(layers)
    }
    whole = {name: effect("", name, 1e-2) for name in losses}
    return WhatIf({name: getattr(recipes, name)() for name in losses}, tuple(effects), whole, works, PUBLISHED[device])


def recipes_of(comparison, chosen):
    return {layer: chosen.of(layer).name for layer in comparison.works}


def test_predicted_loss():
    assert effect("", "", 0.01, cosine=0.9).predicted == pytest.approx(0.01 + DESCENT * 0.1)
    assert effect("", "", -0.01, cosine=0.9).predicted == pytest.approx(DESCENT * 0.1)  # luck is no gain
    assert effect("", "", math.nan).predicted == effect("", "", 0.1, cosine=math.nan).predicted == math.inf


def test_keep_leaves_out_the_worst_layers_of_the_better_recipe():
    comparison = what_if()
    chosen = comparison.recipe_map(keep=1)
    assert chosen == octavo.RecipeMap(recipes.blockwise(), {"head": None})
    assert comparison.predicted(chosen) == pytest.approx(sum(LOSSES["blockwise"][:3]))
    assert comparison.recipe_map(keep=0).rules == {}
    assert set(recipes_of(comparison, comparison.recipe_map(keep=9)).values()) == {"high_precision"}


def test_keep_takes_no_recipe_that_is_slower_than_high_precision():
    losses = {"dynamic": LOSSES["dynamic"], "mx": (0.0, 0.0, 0.0, 0.0)}  # 380 TFLOP/s on an H100
    assert what_if(losses).recipe_map(keep=1).default.name == "dynamic"
    assert what_if(losses, device="B200").recipe_map(keep=1).default.name == "mx"


@pytest.mark.parametrize("features", [64, 4096])  # in the former no recipe is faster than high precision
@pytest.mark.parametrize("budget", [1.0, 5e-3, 1.7e-3, 1e-3, 5e-4, 1e-4, 0.0])
def test_loss_is_kept_and_no_exception_is_for_nothing(budget, features):
    comparison = what_if(features=features)
    chosen = comparison.recipe_map(loss=budget)
    assert comparison.predicted(chosen) <= budget
    for layer in chosen.rules:
        rules = {name: rule for name, rule in chosen.rules.items() if name != layer}
        assert comparison.predicted(octavo.RecipeMap(chosen.default, rules)) > budget


@pytest.mark.parametrize("budget", [5e-3, 1.7e-3, 1e-3, 5e-4])
def test_it_is_nearly_the_cheapest_of_all(budget):
    comparison = what_if()
    options = [*(getattr(recipes, name)() for name in NAMES), recipes.high_precision()]
    every = [
        octavo.RecipeMap(recipes.dynamic(), dict(zip(LAYERS, chosen, strict=True)))
        for chosen in itertools.product(options, repeat=len(LAYERS))
    ]
    least = min(comparison.seconds(m) for m in every if comparison.predicted(m) <= budget)
    assert comparison.seconds(comparison.recipe_map(loss=budget)) <= 1.05 * least


def test_another_recipe_must_save_a_part_of_the_loss():
    comparison = what_if({"dynamic": (1e-3,) * 4, "blockwise": (9e-4,) * 4})
    assert "blockwise" not in {rule and rule.name for rule in comparison.recipe_map(loss=3.5e-3).rules.values()}


def test_what_is_not_finite_is_left_out():
    comparison = what_if({"dynamic": (1e-4, math.inf, 1e-4, 1e-4)})
    assert comparison.recipe_map(loss=1e-3).rules == {"blocks.0.up": None}


def test_costs():
    comparison = what_if()
    chosen = octavo.RecipeMap(recipes.dynamic(), {"head": None, "first": recipes.blockwise()})
    first, head = comparison.costs(chosen)
    assert (first.layer, first.recipe, first.share) == ("first", "blockwise", 0.0)
    assert (head.layer, head.share) == ("head", 0.4)  # 4 of 1 + 2 + 3 + 4
    assert first.loss == pytest.approx(8e-4) and head.loss == pytest.approx(8e-3)
    all_dynamic = comparison.seconds(recipes.dynamic())
    assert first.seconds + head.seconds == pytest.approx(comparison.seconds(chosen) - all_dynamic) and head.seconds > 0


@pytest.mark.parametrize("budget", [{}, {"keep": 1, "loss": 0.1}, {"keep": -1}, {"loss": -0.1}])
def test_a_budget_is_one_number(budget):
    with pytest.raises(ValueError, match="give one of them"):
        what_if().recipe_map(**budget)


def test_table():
    text = str(what_if())
    assert text.index("head") < text.index("first") and "(all layers)" in text and "0.8000 %" in text
    many = [str(i) for i in range(SHOWN + 2)]
    assert "and 2 more layers" in str(what_if({"dynamic": [1e-3] * len(many)}, many))
    estimated = effect("0", "dynamic", 1e-3, measured=False, grad_input=math.nan)
    assert "~0.1000 %" in str(dataclasses.replace(what_if(), effects=(estimated,)))
