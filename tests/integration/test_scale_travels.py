"""Nothing changes a pair: what went wrong elsewhere with a scale that lives in the recipe cannot happen."""

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from tests.support.helpers import FP8_RECIPES, assert_equal, gradients, to_fp8

ALL = {**FP8_RECIPES, "high_precision": recipes.high_precision}


def make(recipe) -> nn.Module:
    torch.manual_seed(7)
    return to_fp8(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), recipe)


def test_a_state_loaded_or_reset_between_forward_and_backward():
    results = []
    for change in ("none", "reset", "load"):
        net = make(recipes.delayed(2))
        torch.manual_seed(8)
        net(torch.randn(8, 32)).sum().backward()
        saved = octavo.nn.delayed_state_dict(net)
        net.zero_grad()
        x = torch.randn(8, 32, requires_grad=True)
        y = net(x)
        if change == "reset":
            for layer in (net[0], net[2]):
                layer.delayed_scale[:2].zero_()
        elif change == "load":
            octavo.nn.load_delayed_state_dict(net, {k: torch.cat([v[:2] * 16, v[2:]]) for k, v in saved.items()})
        y.sum().backward()
        results.append({**gradients(net), "dx": x.grad})
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


FAULTS = {"inf": torch.inf, "-inf": -torch.inf, "nan": torch.nan}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FP8_RECIPES)
def test_one_fault_in_an_input(name, fault):
    layers, results = [], []
    for bad in (0.0, FAULTS[fault]):
        torch.manual_seed(7)
        layer = octavo.nn.Linear(256, 48, recipe=FP8_RECIPES[name]())
        layer(torch.randn(16, 256)).sum().backward()
        layer.zero_grad()
        x = torch.randn(16, 256)
        x[3, 5] = bad
        x.requires_grad_()
        y = layer(x)
        y.backward(torch.randn(16, 48))
        layers.append(layer)
        results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    (y0, dx0, dw0, db0), (y1, dx1, dw1, db1) = results
    assert not y1[3].isfinite().any()  # visible
    assert not y1.mean().isfinite()
    others = torch.arange(16) != 3
    assert torch.equal(y1[others], y0[others])  # local
    assert torch.equal(dx1, dx0)
    assert torch.equal(db1, db0)
    assert not dw1[:, 5].isfinite().any()
    features = torch.arange(256) != 5
    assert torch.equal(dw1[:, features], dw0[:, features])
    if name == "delayed":  # and the next scales don't know of it
        assert torch.equal(layers[0].delayed_scale, layers[1].delayed_scale)
        assert torch.equal(layers[0].delayed_amax_history, layers[1].delayed_amax_history)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FP8_RECIPES)
def test_one_fault_in_a_gradient(name, fault):
    states, results = [], []
    for bad in (0.0, FAULTS[fault]):
        torch.manual_seed(7)
        layer = octavo.nn.Linear(64, 48, recipe=FP8_RECIPES[name]())
        x = torch.randn(16, 64, requires_grad=True)
        grad = torch.randn(16, 48)
        grad[3, 5] = bad
        layer(x).backward(grad)
        results.append((x.grad, layer.weight.grad))
        states.append(octavo.nn.delayed_state_dict(layer))
    (dx0, dw0), (dx1, dw1) = results
    assert not dx1[3].isfinite().any()
    assert not dw1[5].isfinite().any()
    tokens, features = torch.arange(16) != 3, torch.arange(48) != 5
    assert torch.equal(dx1[tokens], dx0[tokens])
    assert torch.equal(dw1[features], dw0[features])
    if name == "delayed":
        assert_equal(*states)
