"""Named splits that are Linears of their own, as tensor parallelism makes them: each computes what it does alone."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.nn.linear import separate
from tests.support import parallel_tasks as tasks
from tests.support.combinations import in_full
from tests.support.helpers import CountOps, every_layer


@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("recipe", ["high_precision", "delayed", "mx", *in_full(("power of two",), ("rowwise",))])
def test_a_transformer_block(pool, recipe, norm, sequence):
    """Another order of additions in float32, which differs from CPU to CPU, makes other codes of a few elements."""
    for distances in pool.run(tasks.block, (2,), recipe, norm, sequence):
        assert max(distances.values()) < (1e-5 if recipe == "high_precision" else 5e-3)


def test_splits_that_do_not_divide(pool):
    assert pool.run(tasks.uneven_splits, (2,))[0].startswith("splits {'b': 5} do not divide into 2 ranks")


def joined_step(layer, x):
    """Return the outputs of all splits side by side, and the gradients of the input and of all parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = torch.cat(layer(x), -1)
    y.square().sum().backward()
    return tasks.gradients(layer) | {"y": y.detach(), "x": x.grad}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed", "blockwise"])
def test_outputs_and_gradients_are_those_of_one_product(recipe):
    """The input is cast once for all splits; the delayed history goes on, of which the next scales are."""
    joined = octavo.nn.Linear(128, {"a": 128, "b": 256}, recipe=tasks.RECIPES[recipe])
    joined_step(joined, torch.randn(16, 128))
    layer, x = octavo.nn.separate_splits(copy.deepcopy(joined)), torch.randn(16, 128)
    wanted = joined_step(joined, x)
    with CountOps() as ops:
        actual = joined_step(layer, x)
    assert ops.casts == 1 + 2 + 2  # the input; each split's weight and gradient
    for name in ("weight", "bias"):
        actual[name] = torch.cat([actual.pop(f"{split}.{name}") for split in "ab"])
    assert max(tasks.differences(wanted, actual).values()) < 1e-6


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_stays_frozen(frozen):
    layer = octavo.nn.Linear(16, {"a": 8, "b": 8})
    layer.get_parameter(frozen).requires_grad_(False)
    octavo.nn.separate_splits(layer)
    names = [name for name, param in layer.named_parameters() if not param.requires_grad]
    assert names == [f"a.{frozen}", f"b.{frozen}"]


def test_what_is_sharded_already_can_not_be_separated(lone_mesh):
    layer = fully_shard(octavo.nn.Linear(16, {"a": 8, "b": 8}), mesh=lone_mesh)
    with pytest.raises(ValueError, match=r"whose weight is a DTensor can't be separated .* before it is sharded"):
        octavo.nn.separate_splits(layer)


def test_reset_parameters_draws_each_split_as_a_layer_of_its_own():
    layer, plain = octavo.nn.separate_splits(octavo.nn.Linear(16, {"a": 8, "b": 24})), torch.nn.ModuleList()
    plain.extend(torch.nn.Linear(16, size) for size in (8, 24))
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    for split, same in zip(layer.children(), plain, strict=True):
        same.reset_parameters()
        assert torch.equal(split.weight, same.weight) and torch.equal(split.bias, same.bias)


def test_blocks_in_fp8_are_not_cut():
    layer = octavo.nn.Linear(256, {"a": 128, "b": 128})
    octavo.convert(layer, octavo.recipes.blockwise(), every_layer, weight_storage="fp8")
    with pytest.raises(ValueError, match="each split needs a multiple of 128 rows a rank"):
        separate(layer, 2)
    assert layer.weight.shape == (256, 256)


@pytest.mark.parametrize("recipe", ["blockwise", "dynamic"])
def test_weights_in_fp8_keep_their_codes(recipe):
    """A split has its rows' codes and scales; blocks are those that it would have if it were stored afterwards."""
    joined = octavo.nn.Linear(256, {"a": 256, "b": 128}, bias=False)
    later = octavo.nn.separate_splits(copy.deepcopy(joined))
    octavo.convert(joined, tasks.RECIPES[recipe], every_layer, weight_storage="fp8")
    layer = octavo.nn.separate_splits(copy.deepcopy(joined))
    values = torch.cat([layer.a.weight.before_cast(), layer.b.weight.before_cast()])
    assert torch.equal(values, joined.weight.before_cast())
    octavo.convert(later, tasks.RECIPES[recipe], every_layer, weight_storage="fp8")
    if recipe == "blockwise":
        assert all(torch.equal(value, layer.state_dict()[name]) for name, value in later.state_dict().items())
    later.load_state_dict(joined.state_dict())
    assert torch.equal(later.b.weight.dequantize(), joined.weight.dequantize()[256:])
    with pytest.raises(RuntimeError, match=r"splits in FP8 have scales of their own: octavo.nn.separate_splits\(mod"):
        joined.load_state_dict(layer.state_dict())


def test_state_dicts_of_one_are_loaded_by_the_other():
    joined, other = (octavo.nn.Linear(16, {"a": 8, "b": 24}) for _ in range(2))
    layer = octavo.nn.separate_splits(copy.deepcopy(other))
    layer.load_state_dict(joined.state_dict())
    assert torch.equal(layer.b.weight, joined.weight[8:]) and torch.equal(layer.a.bias, joined.bias[:8])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, joined.weight)
    with pytest.raises(RuntimeError, match="does not divide into the splits"):
        layer.load_state_dict({"weight": torch.ones(31, 16), "bias": torch.ones(31)})


def test_a_map_gives_splits_the_recipe_of_the_layer_that_they_were():
    model = octavo.nn.TransformerBlock(64, 64, 4, recipe=octavo.recipes.dynamic())
    rules = {"*.qkv.linear": octavo.recipes.mx(), "*.query": octavo.recipes.rowwise()}
    octavo.set_recipe(octavo.nn.separate_splits(model), octavo.RecipeMap(octavo.recipes.dynamic(), rules))
    names = [split.recipe.name for split in model.attention.qkv.linear.children()]
    assert names == ["rowwise", "mx", "mx"] and model.mlp.fc1.gate.recipe.name == "dynamic"


def test_splits_find_scales_together_with_the_weights_that_were_converted_with_their_layer():
    """Under FSDP2 they are gathered in FP8."""
    model = torch.nn.Sequential(octavo.nn.Linear(64, {"a": 32, "b": 32}), torch.nn.Linear(64, 64))
    octavo.nn.separate_splits(octavo.convert(model, octavo.recipes.dynamic(), every_layer))
    groups = [layer.fp8.gather.group for layer in (model[0].a, model[0].b, model[1])]
    assert groups[0] is not None and groups[0] is groups[1] is groups[2]


def test_a_layer_that_has_got_an_attribute_of_a_splits_name_keeps_its_weight():
    layer = octavo.nn.Linear(8, {"gate": 4, "up": 4})
    layer.up = "an attribute"
    with pytest.raises(ValueError, match=r"a Linear has \['up'\] already"):
        octavo.nn.separate_splits(layer)
    assert type(layer) is octavo.nn.Linear and layer(torch.ones(2, 8))[1].shape == (2, 4)
