"""octavo.compat.torchao against torchao itself: its names and arguments, and what its own layers compute on a CPU."""

import copy
import dataclasses
import inspect
import re

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.compat import torchao as ours

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("torchao.float8")


def emulated(library, name):
    """Torchao's own CPU products are checked by its emulation, whose products are torch's in the codes' float32."""
    return dataclasses.replace(library.Float8LinearConfig.from_recipe_name(name), emulate=True)


def from_name(*libraries):
    return [library.Float8LinearConfig.from_recipe_name for library in libraries]


def results(model, x):
    """Return the output and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().mean().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def signal_to_noise(actual, expected):
    """Decibels, of the noisiest of several tensors."""
    pairs = [(f.double(), e.double()) for f, e in zip(actual, expected, strict=True)]
    return min(20 * torch.log10(e.norm() / (f - e).norm()).item() for f, e in pairs)


# --- names and arguments ----------------------------------------------------------------------------------------------


def test_it_has_every_name(theirs):
    assert set(theirs.__all__) <= vars(ours).keys()
    for name in ("ScalingType", "ScalingGranularity", "Float8LinearRecipeName"):
        assert {v.name: v.value for v in getattr(ours, name)} == {v.name: v.value for v in getattr(theirs, name)}
    for name in ("ScalingType", "ScalingGranularity"):
        assert [v.short_str() for v in getattr(ours, name)] == [v.short_str() for v in getattr(theirs, name)]
    for kind in RECIPES:
        for role in ("input", "weight", "grad_output"):
            casts = (getattr(of(kind), f"cast_config_{role}").short_str() for of in from_name(ours, theirs))
            assert len(set(casts)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "CastConfig",
        "Float8GemmConfig",
        "Float8LinearConfig",
        "Float8LinearConfig.from_recipe_name",
        "convert_to_float8_training",
        "precompute_float8_dynamic_scale_for_fsdp",
        "_auto_filter_for_recipe",
    ],
)
def test_arguments_are_the_same_in_order_kind_and_default(theirs, name):
    def arguments(library):
        function = library
        for part in name.split("."):
            function = getattr(function, part)
        parameters = inspect.signature(function).parameters.values()
        # torchao writes each role's dtype into its default values when a configuration is first made
        defaults = {
            p: re.sub("target_dtype=[^)]*", "", str(getattr(p.default, "value", p.default))) for p in parameters
        }
        return [(p.name, p.kind, default) for p, default in defaults.items()]

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


def test_the_filter_is_the_same(theirs):
    sizes = [15, 16, 1024, 1040, 2048, 2064, 4096, 4112]
    for name in ("tensorwise", "rowwise"):
        filters = [library._auto_filter_for_recipe(name, ["head"]) for library in (ours, theirs)]
        for rows in sizes:
            for cols in sizes:
                layer = nn.Linear(cols, rows, device="meta")
                assert len({keep(layer, fqn) for keep in filters for fqn in ["up"]}) == 1, (name, rows, cols)
                assert not filters[0](layer, "lm_head")
        assert not filters[0](nn.Conv1d(2048, 4112, 1, device="meta"), "conv")
    for library in (ours, theirs):
        with pytest.raises(NotImplementedError):
            library._auto_filter_for_recipe("rowwise_with_gw_hp", [])


# --- results ----------------------------------------------------------------------------------------------------------


def test_recipes_are_octavos():
    recipe_of_name = {name: ours.recipe_of(ours.Float8LinearConfig.from_recipe_name(name)) for name in RECIPES}
    assert recipe_of_name == {
        "tensorwise": recipes.dynamic(),
        "rowwise": recipes.rowwise(power_of_two=True),
        "rowwise_with_gw_hp": recipes.rowwise_with_gw_hp(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_computes_what_torchaos_computes(theirs, name, dtype):
    """A layer computes what torchao's computes; in bfloat16 without a bias, which octavo adds before it rounds."""
    layer = nn.Linear(64, 48, bias=dtype is torch.float32, dtype=dtype)
    x = torch.randn(2, 16, 64, dtype=dtype)
    models = [
        library.convert_to_float8_training(copy.deepcopy(layer), config=emulated(library, name))
        for library in (ours, theirs)
    ]
    actual, expected = (results(model, x) for model in models)
    if name == "tensorwise" and dtype is torch.float32:
        # torchao multiplies the codes by their scales before it adds up, octavo the sum
        assert signal_to_noise(actual, expected) > 120
    elif (
        name == "tensorwise"
    ):  # so a sum that is nearly between two values may be rounded to the other, by the CPU's order
        for f, e in zip(actual, expected, strict=True):
            assert (f != e).float().mean() < 2e-3
            torch.testing.assert_close(f, e, rtol=2**-7, atol=0)
    else:
        for f, e in zip(actual, expected, strict=True):
            assert torch.equal(f, e)


# --- refused options --------------------------------------------------------------------------------------------------


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


def test_torchaos_own_configuration_is_not_taken_for_ours(theirs):
    with pytest.raises(TypeError, match=r"import Float8LinearConfig from octavo\.compat\.torchao too"):
        ours.convert_to_float8_training(nn.Linear(16, 16), config=theirs.Float8LinearConfig())


def test_emulation_is_refused_where_fp8_is_native(monkeypatch):
    monkeypatch.setattr(ours, "runs_natively", lambda device: True)
    with pytest.raises(octavo.UnsupportedOptionError, match="train on a CPU"):
        ours.convert_to_float8_training(nn.Linear(16, 16), config=ours.Float8LinearConfig(emulate=True))


def test_chosen_layers_that_stay_as_they_are_are_named():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "up": nn.Linear(32, 32)})
    with pytest.warns(UserWarning, match=r"1 chosen layers stay.*attention.out_proj: a MultiheadAttention reads"):
        ours.convert_to_float8_training(model)
    assert isinstance(model["up"], octavo.nn.Linear)
    assert ours.precompute_float8_dynamic_scale_for_fsdp(model) is None  # gathers need no scales in advance
