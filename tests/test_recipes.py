import copy
import dataclasses
import pickle

import pytest
import torch

import octavo
from octavo import E4M3, E5M2, Delayed, Dynamic, PerBlock, PerRow, PerTensor, Recipe, recipes
from octavo.scaling.recipe import PRODUCTS

NAMES = ("dynamic", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "mx", "high_precision")
ALL = {name: getattr(recipes, name) for name in NAMES}


@pytest.mark.parametrize("name", ALL)
def test_every_recipe_is_a_frozen_printable_value(name):
    recipe = ALL[name]()
    assert recipe.name == name
    assert recipe == ALL[name]()
    assert hash(recipe) == hash(ALL[name]())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.output = None
    lines = str(recipe).splitlines()
    assert lines[0] == f"{name}:"
    assert [line.split()[0] for line in lines[1:]] == list(PRODUCTS)


@pytest.mark.parametrize("name", ALL)
def test_copies_are_equal_and_still_know_their_formats(name):
    recipe = ALL[name]()
    for other in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe
        assert str(other) == str(recipe)
        assert other.input_casts == recipe.input_casts
        if recipe.output is not None:
            assert other.output[0].format is E4M3


def test_recipes_differ():
    assert len({make() for make in ALL.values()}) == len(ALL)


@pytest.mark.parametrize(
    ("name", "input", "weight", "grad_output", "gradient_format"),
    [
        ("dynamic", PerTensor(), PerTensor(), PerTensor(), E5M2),
        ("delayed", PerTensor(), PerTensor(), PerTensor(), E5M2),
        ("rowwise", PerRow(), PerRow(), PerRow(), E4M3),
        ("blockwise", PerBlock(1, 128), PerBlock(128, 128), PerBlock(1, 128), E4M3),
        ("mx", PerBlock(1, 32), PerBlock(1, 32), PerBlock(1, 32), E4M3),
    ],
)
def test_granularities_and_formats(name, input, weight, grad_output, gradient_format):
    recipe = ALL[name]()
    for casts, granularity in (
        (recipe.input_casts, input),
        (recipe.weight_casts, weight),
        (recipe.grad_output_casts, grad_output),
    ):
        assert casts.as_is.granularity == casts.transposed.granularity == granularity
    assert {c.format for c in recipe.input_casts[:2] + recipe.weight_casts[:2]} == {E4M3}
    assert {c.format for c in recipe.grad_output_casts[:2]} == {gradient_format}


def test_scales_are_powers_of_two_where_the_format_or_the_source_says_so():
    assert all(cast.power_of_two for make in (recipes.blockwise, recipes.mx) for cast in make().output)
    assert not any(cast.power_of_two for make in (recipes.dynamic, recipes.rowwise) for cast in make().output)
    assert not recipes.blockwise(power_of_two=False).output[0].power_of_two
    assert recipes.dynamic(power_of_two=True).grad_weight[0].power_of_two
    assert recipes.rowwise(power_of_two=True).grad_weight[0].power_of_two


def test_what_is_cast_once():
    once = {name: tuple(c.once for c in roles(make())) for name, make in ALL.items()}
    assert once["dynamic"] == once["delayed"] == (True, True, True)
    assert once["rowwise"] == once["rowwise_with_gw_hp"] == once["mx"] == (False, False, False)
    assert once["blockwise"] == (False, True, False)


def test_rowwise_with_the_gradient_of_the_weight_in_high_precision_is_torchaos():
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    layer = octavo.nn.Linear(512, 384, bias=False, recipe=recipes.rowwise_with_gw_hp())
    plain = torch.nn.Linear(512, 384, bias=False)
    plain.load_state_dict(layer.state_dict())
    config = dataclasses.replace(config, emulate=True)
    theirs = float8.convert_to_float8_training(torch.nn.Sequential(plain), config=config)[0]
    x, grad = torch.randn(256, 512), torch.randn(256, 384)
    found = []
    for module in (layer, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(grad)
        found.append((y.detach(), leaf.grad, module.weight.grad))
    assert type(theirs) is not torch.nn.Linear
    for ours, other in zip(*found, strict=True):
        assert torch.equal(ours, other)


def test_delayed_arguments():
    recipe = recipes.delayed(history_length=3, reduce="most_recent", margin=2)
    assert recipe.delayed == Delayed(3, "most_recent")
    assert {cast.margin for pair in roles(recipe) for cast in pair[:2]} == {2}
    assert recipe.delayed_update == ((448.0, 448.0, 57344.0), (False,) * 3, (2,) * 3, "most_recent")
    assert recipes.dynamic().delayed is None
    assert {cast.rule for pair in roles(recipes.mx()) for cast in pair[:2]} == {Dynamic()}


def test_only_high_precision_is_high_precision():
    assert [name for name, make in ALL.items() if make().is_high_precision] == ["high_precision"]


def roles(recipe: Recipe):
    return recipe.input_casts, recipe.weight_casts, recipe.grad_output_casts
