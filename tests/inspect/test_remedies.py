"""The shares that other casts would flush, by exponents, against casts that are done."""

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import E4M3, E5M2, Cast, Delayed, PerBlock, PerTensor, RecipeMap, recipes
from octavo.inspect.remedies import Exponents, as_text, outcome, remedies, with_cast, with_remedies
from octavo.inspect.rows import Row, Table
from octavo.kernels.arguments import Counted
from octavo.scaling.recipe import OPERANDS

pytest.importorskip("numpy")


def exponents_of(x: Tensor) -> Exponents:
    bins = (torch.frexp(x[x != 0].double()).exponent - 1 - Counted.lowest).clamp(0, Counted.exponents - 1)
    return Exponents(torch.bincount(bins.flatten(), minlength=Counted.exponents).tolist(), float(x.abs().max()))


def flushed(x: Tensor, cast: Cast) -> float:
    codes = octavo.quantize(x, cast.format, cast.granularity, power_of_two=cast.power_of_two).qdata
    return float((codes.view(torch.uint8) & 0x7F == 0).float().mean())


def normal() -> Tensor:
    """Made as tests are collected, before anything seeds torch."""
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(0))


def wide() -> Tensor:
    return normal() * torch.logspace(0, -24, 64, 2)[:, None]


def outlier() -> Tensor:
    x = normal()
    x[:, 7] *= 2.0**16
    return x


def test_the_share_below_a_magnitude() -> None:
    exponents = Exponents([0] * 48 + [8, 4, 4] + [0] * 13, 7.0)  # of 1 to 2, 2 to 4, 4 to 8
    assert [float(exponents.below(x)) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 1e30)] == [
        0, 0, 0, 0.25, 0.5, 0.75, 1, 1
    ]  # fmt: skip
    assert float(exponents.octaves_above_all_but(0.5)) == pytest.approx(math.log2(7 / 2))


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("x", [wide(), outlier()], ids=["wide", "outlier"])
def test_a_scale_for_the_tensor_is_foretold(format: octavo.formats.Format, x: Tensor) -> None:
    exponents = exponents_of(x)
    foretold = float(exponents.below(format.smallest_subnormal / 2 * exponents.amax / format.max))
    assert foretold == pytest.approx(flushed(x, Cast(format, PerTensor())), abs=5e-3)


@pytest.mark.parametrize("x", [wide(), outlier(), normal()], ids=["wide", "outlier", "normal"])
@pytest.mark.parametrize("tile", [32, 128])
def test_finer_scales_flush_no_more_than_their_bound(x: Tensor, tile: int) -> None:
    actual = flushed(x, Cast(E4M3, PerBlock(1, tile), power_of_two=True))
    bound = exponents_of(x).bound(tile, E4M3, E4M3.smallest_subnormal / 2)
    assert actual <= bound


def test_the_bound_says_something() -> None:
    x = outlier()
    assert flushed(x, Cast(E4M3, PerTensor())) > 0.25
    assert exponents_of(x).bound(32, E4M3, E4M3.smallest_subnormal / 2) < 0.08  # a block of sixteen has the outlier


@pytest.mark.parametrize("recipe", [recipes.delayed(margin=2), recipes.rowwise(True), recipes.blockwise()], ids=str)
def test_a_row_says_its_cast(recipe: octavo.Recipe) -> None:
    rows = Table(octavo.nn.Linear(16, 16, recipe=recipe)).rows
    for row in rows:
        cast = getattr(recipe, row.products[0])[octavo.scaling.recipe.OPERANDS[row.products[0]].index(row.role)]
        assert cast == row.cast == Row.of(json.loads(json.dumps(row.as_dict()))).cast


def test_a_rule_changes_one_cast() -> None:
    recipe = recipes.delayed()
    *_, gradient = rows = Table(octavo.nn.Linear(16, 16, recipe=recipe)).rows
    rules = with_cast(gradient, rows, Cast(E4M3, PerTensor()))
    changed = octavo.RecipeMap(recipe, {"*": rules[""]}).of("x")  # type: ignore[index]
    assert changed.grad_input == (Cast(E4M3, PerTensor()), recipe.grad_input[1])
    assert changed.grad_weight[0].format is E4M3 and changed.output == recipe.output


OWN = [
    recipes.dynamic(power_of_two=True),
    recipes.delayed(history_length=4, margin=2),
    recipes.rowwise(power_of_two=True),
    recipes.blockwise(power_of_two=False),
    dataclasses.replace(recipes.dynamic(), saved=Cast(E4M3, PerTensor()), fast_accum=(), grad_input=None),
]


@pytest.mark.parametrize("start", OWN, ids=lambda recipe: recipe.name)
def test_rules_change_nothing_else(start: octavo.Recipe) -> None:
    rows = Table(nn.Sequential(octavo.nn.Linear(16, 16, recipe=start))).rows
    seen = 0
    for row in rows:
        for remedy in remedies(row, rows, exponents_of(wide()), 1e-6, "smallest_subnormal"):
            assert eval(as_text(remedy.rules), vars(octavo)) == remedy.rules
            if isinstance(remedy.rules["0"], octavo.Recipe):  # another for all of the layer
                continue
            changed = octavo.RecipeMap(start, remedy.rules).of("0")
            assert (changed.saved, changed.fast_accum) == (start.saved, start.fast_accum)
            seen += _differences(start, changed, row)
    assert seen >= 5


def _differences(start: octavo.Recipe, changed: octavo.Recipe, row: Row) -> int:
    """Return how many casts differ, which may be a row's, in one field, or in that and in a margin left out."""
    seen = 0
    for product, roles in OPERANDS.items():
        if getattr(changed, product) is None:
            seen += getattr(start, product) is not None
            assert getattr(start, product) is None or product in row.products
            continue
        for role, before, after in zip(roles, getattr(start, product), getattr(changed, product), strict=True):
            if before == after:
                continue
            assert role == row.role and product in row.products
            names = "format", "granularity", "rule", "power_of_two", "margin"
            fields = {name for name in names if getattr(before, name) != getattr(after, name)}
            assert fields in ({"format"}, {"rule"}, {"margin"}, {"format", "margin"}, {"rule", "margin"})
            assert "margin" not in fields or after.margin == 0
            seen += 1
    return seen


def test_what_no_gpu_multiplies_is_not_proposed() -> None:
    x, *_ = rows = Table(octavo.nn.Linear(16, 16, recipe=recipes.dynamic())).rows
    assert with_cast(x, rows, Cast(E5M2, PerTensor())) is None


@pytest.mark.parametrize("recipe", [recipes.nvfp4(), recipes.nvfp4(4)], ids=["dynamic", "delayed"])
def test_four_bits_are_mended_by_eight_or_more(recipe: octavo.Recipe) -> None:
    """E2M1's blocks, rotation and rounding are those of no other format, so that no single cast is changed."""
    rows = Table(octavo.nn.Linear(16, 16, recipe=recipe)).rows
    for row in rows:
        offered = list(remedies(row, rows, exponents_of(wide()), 1e-6, "smallest_subnormal"))
        assert [remedy.rules[""] for remedy in offered if remedy.is_bound][-2:] == [recipes.blockwise(), recipes.mx()]


def test_the_last_remedy_is_certain() -> None:
    rule = Delayed(4)
    *_, gradient = rows = Table(octavo.nn.Linear(16, 16, recipe=recipes.delayed(4))).rows
    offered = list(remedies(gradient, rows, exponents_of(wide()), 1e-6, "smallest_subnormal"))
    assert gradient.cast.rule == rule
    assert [remedy.is_bound for remedy in offered] == [False, True, True, False]
    assert offered[-1].rules == {"": {"grad_input": None, "grad_weight": None}} and offered[-1].share == 0


def test_where_no_finer_scale_may_do_none_is_named() -> None:
    *_, gradient = rows = Table(octavo.nn.Linear(16, 16, recipe=recipes.delayed(4))).rows
    *finer, last = offered = list(remedies(gradient, rows, exponents_of(wide()), 1e-6, "smallest_subnormal"))
    nothing = "nothing is flushed: these products are in high precision"
    assert outcome(last, [last], "smallest_subnormal") == nothing
    said = outcome(last, offered, "smallest_subnormal")
    best = min((remedy for remedy in finer if remedy.is_bound), key=lambda remedy: remedy.share)
    assert said.startswith(f"{nothing}; {as_text(best.rules)} may do too: ")


@pytest.mark.parametrize("name", ['a"b', "x[0]", "*", 'q": print("RUN"), "z', "Delayed(), Dynamic())", "z\\n"])
def test_a_layers_name_is_matched_as_it_is(name: str) -> None:
    net = nn.Sequential()
    net.add_module(name, octavo.nn.Linear(16, 16, recipe=recipes.delayed()))
    rows = Table(net).rows
    for remedy in remedies(rows[0], rows, exponents_of(wide()), 1e-6, "smallest_subnormal"):
        assert eval(as_text(remedy.rules), vars(octavo)) == remedy.rules
        recipe = octavo.RecipeMap(recipes.delayed(), remedy.rules)
        assert recipe.unmatched([name]) == [] and recipe.unmatched([f"{name}2", "a", "x0"]) == list(recipe.rules)


def test_remedies_of_one_layer_together() -> None:
    off, pair = None, recipes.dynamic().output
    offered = [{"0": {"output": off}}, {"1": recipes.mx()}, {"0": {"output": pair, "grad_weight": pair}}, {"1": None}]
    own = RecipeMap(recipes.dynamic())
    assert with_remedies(own, [*offered, {"0": {"grad_input": off}}]).rules == {  # type: ignore[list-item]
        "0": {"output": off, "grad_input": off},
        "1": recipes.mx(),
    }
