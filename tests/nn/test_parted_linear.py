"""Layers with named splits under tensor parallelism: each split is sharded, and equals one rank's."""

import copy

import pytest
import torch

import octavo
from octavo.nn.linear import divide
from tests.support import parallel_tasks as tasks


@pytest.mark.covering(1)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [
        "high_precision",
        "delayed",
        "mx",
        *(pytest.param(it, marks=pytest.mark.full) for it in ("power of two", "rowwise")),
    ],
)
def test_a_transformer_block(pool, recipe, norm, sequence):
    """A block's largest errors are those of another order of additions, in float32, which changes a few codes."""
    for differing in pool.run(tasks.block, (2,), recipe, norm, sequence):
        assert max(differing.values()) < (1e-5 if recipe == "high_precision" else 5e-3)


def test_splits_that_do_not_divide(pool):
    assert pool.run(tasks.uneven_splits, (2,))[0].startswith("splits {'b': 5} do not divide into 2 ranks")


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_stays_frozen(frozen):
    layer = octavo.nn.Linear(16, {"a": 8, "b": 8})
    layer.get_parameter(frozen).requires_grad_(False)
    divide(layer, 2)
    assert "bias=True, splits={'a': 8, 'b': 8}" in repr(layer)  # before it is sharded, too
    frozen_names = [name for name, param in layer.named_parameters() if not param.requires_grad]
    assert frozen_names == [f"a.{frozen}", f"b.{frozen}"]


def test_blocks_in_fp8_are_not_cut():
    layer = octavo.nn.Linear(256, {"a": 128, "b": 128})
    octavo.convert(layer, octavo.recipes.blockwise(), lambda module, name: True, weight_storage="fp8")
    with pytest.raises(ValueError, match="each split needs a multiple of 128 rows a rank"):
        divide(layer, 2)
    assert layer.weight.shape == (256, 256)


def test_splits_are_stored_in_blocks_afterwards_too():
    before = octavo.nn.Linear(256, {"a": 256, "b": 128})
    after = copy.deepcopy(before)
    divide(after, 1)
    for layer in (before, after):
        octavo.convert(layer, octavo.recipes.blockwise(), lambda module, name: True, weight_storage="fp8")
    divide(before, 1)
    expected, actual = before.state_dict(), after.state_dict()
    assert actual["b.weight_scale_inv"].shape == (1, 2) and actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    octavo.restore(after)
    for recipe in (octavo.recipes.dynamic(), octavo.recipes.delayed()):
        with pytest.raises(ValueError, match="can be stored in blocks of 128 x 128 alone"):
            octavo.convert(after, recipe, lambda module, name: True, weight_storage="fp8")


def test_splits_in_fp8_have_one_scale_and_one_optimizer():
    layer = octavo.nn.Linear(256, {"a": 128, "b": 128})
    octavo.convert(layer, octavo.recipes.dynamic(), lambda module, name: True, weight_storage="fp8")
    divide(layer, 2)
    assert torch.equal(layer.a.weight.scale_inv, layer.b.weight.scale_inv)
    assert layer.a.weight.scale_inv.data_ptr() != layer.b.weight.scale_inv.data_ptr()
    for params in ([layer.a.weight], [{"params": [layer.a.weight]}, {"params": [layer.b.weight]}]):
        optimizer = octavo.optim.AdamW(params)
        layer.a.weight.grad = torch.ones(128, 256)
        with pytest.raises(ValueError, match="the named splits of a weight that lives in FP8 have one scale"):
            optimizer.step()
    values = {name: torch.ones(128, 256) for name in ("a.weight", "b.weight")}
    saved = {name: value.clone() for name, value in layer.state_dict().items()}
    twice = saved | {"b.weight_scale_inv": saved["b.weight_scale_inv"] * 2}  # as layers of their own would have
    b_alone = {name: twice[name] for name in ("b.weight", "b.weight_scale_inv")}
    for other, factor in ((twice, 2), (saved, 1), (b_alone, 2), (saved, 1), (values, None)):
        layer.load_state_dict(other, strict=False)
        assert torch.equal(layer.weight.dequantize()[128:], layer.b.weight.dequantize())  # by the scale of a
        state = layer.state_dict()
        assert torch.equal(state["a.weight_scale_inv"], state["b.weight_scale_inv"])
        expected = [torch.ones(128, 256)] * 2 if factor is None else [pair(saved, "a"), pair(saved, "b") * factor]
        for weight, value in zip(layer.weights, expected, strict=True):
            torch.testing.assert_close(weight.dequantize(), value, rtol=2**-4, atol=2**-9 * value.abs().max())
    layer.b.load_state_dict({"weight": values["b.weight"] * 1000}, strict=False)  # of one split alone
    assert torch.equal(layer.state_dict()["a.weight_scale_inv"], layer.b.weight.scale_inv)
    layer.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in layer.state_dict().items())
    others = saved["b.weight"].flip(0)
    layer.b.load_state_dict(
        {name[2:]: value for name, value in (saved | {"b.weight": others}).items() if name[0] == "b"}
    )
    assert torch.equal(layer.b.state_dict()["weight"], others)


def pair(state, split):
    codes, scale_inv = state[f"{split}.weight"], state[f"{split}.weight_scale_inv"]
    return codes.squeeze(1).view(torch.float8_e4m3fn).float() * scale_inv


def test_a_split_that_is_loaded_alone_ends_the_delayed_state():
    layer = octavo.nn.Linear(32, {"a": 16, "b": 16}, recipe=octavo.recipes.delayed())
    layer(torch.randn(4, 32))[0].sum().backward()
    divide(layer, 1)
    assert layer.delayed_scale.any()
    layer.b.load_state_dict({"weight": torch.ones(16, 32), "bias": torch.ones(16)})
    assert not layer.delayed_scale.any()


def test_a_layer_that_has_got_an_attribute_of_a_splits_name_keeps_its_weight():
    layer = octavo.nn.Linear(8, {"gate": 4, "up": 4})
    layer.up = "an attribute"
    with pytest.raises(ValueError, match=r"a Linear has \['up'\] already"):
        divide(layer, 2)
    assert type(layer) is octavo.nn.Linear and layer(torch.ones(2, 8))[1].shape == (2, 4)
