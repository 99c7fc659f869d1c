import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import octavo
from octavo import recipes
from octavo.kernels import capability
from tests.support.helpers import assert_equal, to_fp8
from tests.support.passes import end_step

DELAYED = recipes.delayed(2)


def trained(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = to_fp8(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), DELAYED).to(dtype)
    net(torch.randn(4, 16, dtype=dtype)).sum().backward()
    net.zero_grad()
    return net


def test_the_state_goes_where_the_module_goes():
    net = trained().to("meta")
    assert net[0].delayed_scale.is_meta
    net.to_empty(device="cpu")
    assert not any(b.any() for b in octavo.nn.delayed_state_dict(net).values())  # not the garbage of fresh memory
    assert net[0].delayed_scale.dtype == torch.float32


def test_state_that_leaves_the_meta_device_is_empty():
    for by_hand in (True, False):
        layer = octavo.nn.Linear(16, 8, recipe=DELAYED, device="meta")
        if by_hand:
            for name, parameter in nn.Linear(16, 8).named_parameters():
                setattr(layer, name, parameter)
            layer.half()
        else:
            layer.load_state_dict(nn.Linear(16, 8).state_dict(), assign=True)
        for state in octavo.nn.delayed_state_dict(layer).values():
            assert not state.is_meta and not state.any() and state.dtype == torch.float32


def test_to_empty_keeps_the_state():
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    try:
        net = trained()
        before = octavo.nn.delayed_state_dict(net)
        assert_equal(octavo.nn.delayed_state_dict(net.to_empty(device="cpu")), before)
    finally:
        torch.use_deterministic_algorithms(False)


def test_global_registration_hooks_see_parameters_that_are_set():
    layer, seen = octavo.nn.Linear(16, 8), []
    with register_module_parameter_registration_hook(lambda module, name, value: seen.append((module, name, value))):
        layer.weight = weight = nn.Parameter(torch.randn(8, 16))
    assert seen == [(layer, "weight", weight)]


def test_reset_parameters_forgets_the_history():
    net = trained()
    weight = net[0].weight.clone()
    net[0].reset_parameters()
    assert not net[0].delayed_scale.any()
    assert not net[0].delayed_amax_history.any()
    assert not torch.equal(net[0].weight, weight)


def test_a_frozen_layer_keeps_its_state_unless_a_backward_passes_through_it():
    for frozen, other, reached in (("0", "2", False), ("2", "0", True)):
        net = trained()
        end_step()
        net.get_submodule(frozen).requires_grad_(False)
        before = octavo.nn.delayed_state_dict(net)
        y = net(torch.randn(4, 16))
        assert_equal(octavo.nn.delayed_state_dict(net), before)
        y.sum().backward()
        after = octavo.nn.delayed_state_dict(net)
        for name, changes in ((frozen, reached), (other, True)):
            name = f"{name}.delayed_amax_history"
            assert torch.equal(after[name], before[name]) != changes


def test_a_layer_frozen_from_the_start_takes_its_own_amax():
    delayed = octavo.nn.Linear(16, 8, recipe=DELAYED).requires_grad_(False)
    dynamic = copy.deepcopy(delayed)
    octavo.set_recipe(dynamic, recipes.dynamic())
    for size in (1.0, 100.0, 1e-3):
        x = size * torch.randn(4, 16)
        assert torch.equal(delayed(x), dynamic(x))


def test_the_emulation_warning_comes_once(caplog, monkeypatch):
    monkeypatch.setattr(capability, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="octavo"):
        octavo.nn.Linear(8, 8, recipe=recipes.high_precision(), device="cpu")
        assert not caplog.records
        octavo.nn.Linear(8, 8, device="meta")
        assert not caplog.records
        for _ in range(3):
            octavo.nn.Linear(8, 8, device="cpu")
    assert [record.name for record in caplog.records] == ["octavo"]
    assert "cpu" in caplog.text


def test_a_layer_has_one_attribute_more_than_torchs_and_loses_it_with_its_recipe():
    layer, plain = octavo.nn.Linear(8, 8, recipe=DELAYED), nn.Linear(8, 8)
    octavo.nn.KeptWeights(layer).cast()
    layer(torch.randn(4, 8)).sum().backward()
    with octavo.inspect.trace_faults(layer), octavo.using(layer, recipes.dynamic()):
        assert layer.__dict__.keys() - plain.__dict__.keys() == {"fp8"}
    del layer.fp8
    assert layer.__dict__.keys() == plain.__dict__.keys()


def test_the_scale_of_a_weight_that_lives_in_fp8():
    layer = octavo.convert(nn.Linear(64, 32), recipes.dynamic(), lambda module, name: True, "fp8")
    assert layer.weight_scale_inv is layer.weight.scale_inv
    with pytest.raises(AttributeError, match="weight_scale_inv"):
        _ = octavo.restore(layer).weight_scale_inv
    assert not hasattr(octavo.nn.Linear(64, 32), "weight_scale_inv")


def test_a_recipe_that_is_set_is_checked_and_brings_its_state():
    layer = octavo.nn.Linear(16, 8)
    layer.recipe = DELAYED
    assert layer.recipe is DELAYED and layer.delayed_amax_history.shape == (3, 2)
    for wrong in (octavo.RecipeMap(DELAYED), None, recipes.mx):
        with pytest.raises(TypeError, match=r"is no octavo\.Recipe"):
            layer.recipe = wrong
    assert layer.recipe is DELAYED
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.recipe == DELAYED and torch.equal(twin.delayed_scale, layer.delayed_scale)
    layer.recipe = "mx"
    assert not hasattr(layer, "delayed_scale")
    stored = octavo.convert(layer, recipes.dynamic(), lambda *_: True, weight_storage="fp8")
    with pytest.raises(ValueError, match="can't read weights that are stored in FP8"):
        stored.recipe = recipes.mx()
