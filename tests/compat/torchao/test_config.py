"""octavo.compat.torchao's names, arguments and configurations against torchao's."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import octavo
from octavo import recipes
from octavo.compat import torchao as ours

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MODULES = [path.stem for path in Path(ours.__file__).parent.glob("[a-z]*.py")]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_torchaos_name_and_its_public_names(theirs, module):
    """Each file's public classes and functions stand in torchao's file of that name, but for recipe_of."""
    mine, other = (importlib.import_module(f"{package}.{module}") for package in (ours.__name__, theirs.__name__))
    written_here = {
        name
        for name, value in vars(mine).items()
        if getattr(value, "__module__", None) == mine.__name__ and name[0] != "_" and name != "recipe_of"
    }
    assert written_here | set(getattr(mine, "__all__", ())) <= vars(other).keys()


def test_it_has_every_name(theirs):
    assert set(theirs.__all__) <= vars(ours).keys()
    for name in ("ScalingType", "ScalingGranularity", "Float8LinearRecipeName"):
        assert {v.name: v.value for v in getattr(ours, name)} == {v.name: v.value for v in getattr(theirs, name)}
    for name in ("ScalingType", "ScalingGranularity"):
        assert [v.short_str() for v in getattr(ours, name)] == [v.short_str() for v in getattr(theirs, name)]
    for kind in RECIPES:
        for role in ("input", "weight", "grad_output"):
            configs = (library.Float8LinearConfig.from_recipe_name(kind) for library in (ours, theirs))
            assert len({getattr(config, f"cast_config_{role}").short_str() for config in configs}) == 1


CALLED = """CastConfig Float8GemmConfig Float8LinearConfig Float8LinearConfig.from_recipe_name
convert_to_float8_training precompute_float8_dynamic_scale_for_fsdp _auto_filter_for_recipe""".split()


@pytest.mark.parametrize("name", CALLED)
def test_arguments_are_the_same_in_order_kind_and_default(theirs, name):
    def arguments(library):
        function = library
        for part in name.split("."):
            function = getattr(function, part)
        parameters = inspect.signature(function).parameters.values()
        # torchao writes each role's dtype into its default values when a configuration is first made
        written = [(p, str(getattr(p.default, "value", p.default))) for p in parameters]
        return [(p.name, p.kind, re.sub("target_dtype=[^)]*", "", default)) for p, default in written]

    assert arguments(ours) == arguments(theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_the_named_configurations_are_the_same(theirs, name):
    def values(config):
        return {
            key: value.value if hasattr(value, "value") else values(value) if isinstance(value, dict) else value
            for key, value in (dataclasses.asdict(config) if not isinstance(config, dict) else config).items()
        }

    assert values(ours.Float8LinearConfig.from_recipe_name(name)) == values(
        theirs.Float8LinearConfig.from_recipe_name(theirs.Float8LinearRecipeName(name))
    )


def test_recipes_are_octavos():
    of_names = [ours.recipe_of(ours.Float8LinearConfig.from_recipe_name(name)) for name in RECIPES]
    assert of_names == [recipes.dynamic(), recipes.rowwise(power_of_two=True), recipes.rowwise_with_gw_hp()]


def test_options_that_cant_be_honoured_say_what_to_write():
    row = ours.CastConfig(scaling_granularity=ours.ScalingGranularity.AXISWISE)
    with pytest.raises(octavo.UnsupportedOptionError, match=r"can't be gathered in FP8.*different scales.*blockwise"):
        ours.Float8LinearConfig(cast_config_weight=row, enable_fsdp_float8_all_gather=True)
    with pytest.raises(octavo.UnsupportedOptionError, match=r"float8_e4m3fnuz: use torch\.float8_e4m3fn or"):
        ours.CastConfig(target_dtype=torch.float8_e4m3fnuz)
    off = ours.CastConfig(ours.ScalingType.DISABLED)
    with pytest.raises(ValueError, match="output multiplies input by weight: DISABLED is for both or none"):
        ours.Float8LinearConfig(cast_config_input=off)
    with pytest.raises(ValueError, match="must have one target_dtype"):
        ours.Float8LinearConfig(cast_config_weight_for_grad_input=ours.CastConfig(target_dtype=torch.float8_e5m2))
    with pytest.raises(ValueError, match="'mx' is not a valid"):
        ours.Float8LinearConfig.from_recipe_name("mx")
    with pytest.warns(DeprecationWarning, match="leave it out"):
        ours.Float8LinearConfig(force_recompute_fp8_weight_in_bwd=True)
