import inspect

import pytest

import octavo
from octavo import recipes
from octavo.nn.recipe_module import LayerFP8, RecipeModule
from octavo.weights.gathered import Gather
from octavo.weights.reader import LayerState, WeightGather, WeightReader

MIRRORS = [(WeightReader, RecipeModule), (LayerState, LayerFP8), (WeightGather, Gather)]


def members(protocol):
    return {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}


@pytest.mark.parametrize(("protocol", "mirrored"), MIRRORS)
def test_methods_of_a_protocol_have_the_arguments_of_the_class_that_it_describes(protocol, mirrored):
    methods = [name for name in members(protocol) if inspect.isfunction(getattr(protocol, name, None))]
    assert methods
    for name in methods:
        described, real = (inspect.signature(getattr(kind, name)).parameters for kind in (protocol, mirrored))
        assert [*described] == [*real], name


def test_a_linear_has_all_that_the_protocols_describe():
    linear = octavo.nn.Linear(16, 16, recipe=recipes.dynamic())
    for protocol, instance in ((WeightReader, linear), (LayerState, linear.fp8), (WeightGather, linear.fp8.gather)):
        assert members(protocol) <= {*dir(instance)}, protocol
