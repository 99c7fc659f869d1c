import copy
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo import RecipeMap, recipes
from octavo.nn import delayed_state_dict
from octavo.scaling.delayed import state_of
from tests.support.helpers import assert_equal, to_fp8

HIGH = recipes.high_precision()


def trained() -> nn.Module:
    """Two layers, each with a recipe of its own, after two steps."""
    net = to_fp8(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), RecipeMap(recipes.delayed(4), {"1": recipes.mx()}))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        step(net, optimizer)
    return net


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("recipe", [HIGH, recipes.dynamic(), recipes.delayed(4), recipes.delayed(7)], ids=str)
def test_layers_return_to_their_own_recipes_and_delayed_state(recipe):
    net = trained()
    own, before = [layer.recipe for layer in net], delayed_state_dict(net)
    states = [state_of(layer) for layer in net]
    names = [layer.__dict__.keys() for layer in net]
    with octavo.using(net, recipe) as same:
        assert same is net and [layer.recipe for layer in net] == [recipe, recipe]
        for _ in range(3):
            net(torch.randn(4, 16) * 1e3).sum().backward()
    assert all(layer.recipe is recipe for layer, recipe in zip(net, own, strict=True))
    assert_equal(delayed_state_dict(net), before)
    assert all(state_of(layer) is state for layer, state in zip(net, states, strict=True))
    assert [layer.__dict__.keys() for layer in net] == names and before.keys().isdisjoint(net.state_dict())


def test_they_return_after_an_exception_and_from_a_block_in_a_block():
    net = trained()
    own, before = [layer.recipe for layer in net], delayed_state_dict(net)
    with pytest.raises(RuntimeError, match="mine"), octavo.using(net, HIGH):
        with octavo.using(net[0], recipes.delayed(4)):
            net(torch.randn(4, 16)).sum().backward()
            assert net[0].delayed_scale.all() and net[1].recipe is HIGH
        assert net[0].recipe is HIGH and not delayed_state_dict(net)
        raise RuntimeError("mine")
    assert all(layer.recipe is recipe for layer, recipe in zip(net, own, strict=True))
    assert_equal(delayed_state_dict(net), before)


@pytest.mark.parametrize(("recipe", "error"), [("dinamic", ValueError), (None, TypeError)])
def test_a_wrong_recipe_changes_nothing(recipe, error):
    net = trained()
    before = delayed_state_dict(net)
    with pytest.raises(error, match=r"is no (octavo\.Recipe|recipe)"), octavo.using(net, recipe):
        pass
    assert_equal(delayed_state_dict(net), before)
    with pytest.raises(ValueError, match="holds no octavo module"), octavo.using(nn.Linear(2, 2), HIGH):
        pass
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"), octavo.using(None, HIGH):
        pass


def test_a_backward_of_a_forward_before_the_block_rolls_the_history():
    net, twin = trained(), None
    twin = copy.deepcopy(net)
    x = torch.randn(4, 16)
    loss, same = net(x).sum(), twin(x).sum()
    with octavo.using(net, HIGH):
        loss.backward()
    same.backward()
    assert_equal(delayed_state_dict(net), delayed_state_dict(twin))


@pytest.mark.parametrize("recipe", [HIGH, recipes.delayed(4)], ids=str)
def test_weights_loaded_in_the_block_begin_with_an_empty_history(recipe):
    net = trained()
    with octavo.using(net, recipe):
        net.load_state_dict(trained().state_dict())
    assert not any(state.any() for state in delayed_state_dict(net).values())


def test_weights_written_or_replaced_in_the_block_are_noticed():
    for replace in (False, True):
        layer = trained()[0]
        layer(torch.ones(1, 16))
        with octavo.using(layer, HIGH), torch.no_grad():
            if replace:
                layer.weight = nn.Parameter(layer.weight * 100)
            else:
                layer.weight.mul_(100)
        y = layer(torch.ones(1, 16))
        with octavo.using(layer, recipes.dynamic()):
            torch.testing.assert_close(y, layer(torch.ones(1, 16)), rtol=0.1, atol=1.0)


def test_what_the_block_makes_of_the_model():
    net = trained()
    with octavo.using(net, HIGH):
        octavo.restore(net)
    assert type(net[0]) is nn.Linear and not net[0]._buffers and "recipe" not in net[0].__dict__
    net = trained()
    with octavo.using(net, HIGH):
        twin = pickle.loads(pickle.dumps(net))
    assert twin[0].recipe == HIGH
    with octavo.using(net, HIGH):
        net.to("meta")
    assert all(buffer.is_meta for buffer in net.buffers())
