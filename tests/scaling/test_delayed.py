import copy
import math
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.scaling.delayed import empty_state, entering_input, facts_of, may_be_empty, note_empty
from tests.support.helpers import assert_equal, saved_and_loaded, sqnr, to_fp8
from tests.support.passes import end_step


def model(recipe=None) -> nn.Module:
    return to_fp8(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), recipe or recipes.delayed(3))


def step(net: nn.Module, size: float = 1.0) -> torch.Tensor:
    loss = net(size * torch.randn(4, 16)).square().sum()
    loss.backward()
    return loss.detach()


def test_the_state_is_of_plain_tensors_that_are_no_buffers():
    net = model()
    assert [tuple(one.shape) for one in net[0].fp8.state] == [(3,), (3, 3), (3, 3)]
    assert [one.dtype for one in net[0].fp8.state] == [torch.float32, torch.float32, torch.int32]
    assert not dict(net.named_buffers())
    assert not any("delayed" in name for name in net.state_dict())


def test_save_and_load_continue_bit_for_bit():
    torch.manual_seed(1)
    net = model()
    step(net)
    end_step()
    saved = octavo.nn.delayed_state_dict(net)
    assert sorted(saved) == [f"{n}.{b}" for n in "02" for b in ("delayed_amax_history", "delayed_scale")]
    other = model()
    other.load_state_dict(net.state_dict())
    octavo.nn.load_delayed_state_dict(other, saved)
    torch.manual_seed(2)
    expected = [step(net, size) for size in (0.5, 2.0)]
    assert saved["0.delayed_scale"].ne(net[0].delayed_scale).any()  # the saved state is a copy
    torch.manual_seed(2)
    assert [step(other, size) for size in (0.5, 2.0)] == expected
    assert_equal(octavo.nn.delayed_state_dict(other), octavo.nn.delayed_state_dict(net))


@pytest.mark.parametrize("weights_last", [False, True])
def test_a_model_that_has_trained_goes_back_to_what_was_saved(weights_last):
    """A state that is loaded in place brings its history, though weights were written since their last forward."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def trained(steps):
        losses = []
        for _ in range(steps):
            losses.append(step(net))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    trained(2)
    saved, delayed = copy.deepcopy(net.state_dict()), octavo.nn.delayed_state_dict(net)
    torch.manual_seed(2)
    expected = trained(3)
    for weights in (True, False) if not weights_last else (False, True):
        net.load_state_dict(saved) if weights else octavo.nn.load_delayed_state_dict(net, delayed)
    torch.manual_seed(2)
    assert trained(3) == expected


@pytest.mark.parametrize("order", ["weights, state", "state, weights", "state, weights by hand"])
def test_weights_loaded_after_those_of_the_state_are_not_cast_by_its_history(order):
    net, source = model(), model()
    step(source)
    end_step()
    saved, state = source.state_dict(), octavo.nn.delayed_state_dict(source)
    if order.startswith("weights"):
        net.load_state_dict(saved)
    octavo.nn.load_delayed_state_dict(net, state)
    if order.endswith("weights"):
        net.load_state_dict(saved)
    assert net[0].delayed_scale.all()
    larger = {name: 50 * value for name, value in saved.items()}
    if order.endswith("hand"):
        with torch.no_grad():
            net[0].weight.copy_(larger["0.weight"])
    else:
        net.load_state_dict(larger)
    x = torch.randn(4, 16)
    assert sqnr(net[0](x).detach(), x.double() @ larger["0.weight"].double().t() + net[0].bias.double()) > 20


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_a_peak_of_each_step_is_remembered_with_any_number_of_micro_batches(micro_batches):
    """A step's peak counts with any number of micro-batches, against float64, which has no history."""
    layer = octavo.nn.Linear(16, 16, bias=False, recipe=recipes.delayed(2))
    optimizer, noise = torch.optim.SGD(layer.parameters(), lr=1e-6), []
    for _ in range(3):
        weight = layer.weight.detach().double()
        for number in range(micro_batches):
            size = 100.0 if number == 0 else 1.0
            x, gradient = (size * torch.randn(8, 16)).requires_grad_(), size * torch.randn(8, 16)
            y = layer(x)
            y.backward(gradient)
            if number == 0:
                noise.append(sqnr(y.detach(), x.detach().double() @ weight.t()))
                noise.append(sqnr(x.grad, gradient.double() @ weight))
        optimizer.step()
        optimizer.zero_grad()
    assert min(noise[2:]) > 15
    assert (layer.delayed_amax_history > 0).all()


def test_no_delayed_recipe_no_state():
    assert octavo.nn.delayed_state_dict(model(recipes.dynamic())) == {}
    octavo.nn.load_delayed_state_dict(model(recipes.dynamic()), {})


DAMAGED = {"a NaN": math.nan, "a negative": -1.0, "an infinity": math.inf, "one that float32 has not": 1e300}


@pytest.mark.parametrize("tensor", ["scale", "amax_history"])
@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", *DAMAGED])
def test_loading_changes_all_or_nothing(fault, tensor):
    net, source = model(), model()
    step(source)
    state = {name: value.double() for name, value in octavo.nn.delayed_state_dict(source).items()}
    if fault == "missing":
        del state[f"2.delayed_{tensor}"]
    elif fault == "unexpected":
        state["3.delayed_scale"] = torch.zeros(3)
    elif fault in DAMAGED:
        state[f"2.delayed_{tensor}"][1] = DAMAGED[fault]
    else:
        state[f"2.delayed_{tensor}"] = torch.zeros(3, 5)
    with pytest.raises(ValueError, match=r"(2|3)\.delayed_"):
        octavo.nn.load_delayed_state_dict(net, state)
    assert not any(buffer.any() for buffer in octavo.nn.delayed_state_dict(net).values())


def test_another_recipe_keeps_a_state_of_the_same_length_and_scales_and_last_amaxes_of_another():
    layer = octavo.nn.Linear(16, 8, recipe=recipes.delayed(2))
    layer(torch.randn(4, 16)).sum().backward()
    before, history = layer.delayed_scale.clone(), layer.delayed_amax_history.clone()
    layer.recipe = recipes.delayed(2, "most_recent")
    assert torch.equal(layer.delayed_scale, before)
    layer.recipe = recipes.delayed(3)
    assert layer.delayed_amax_history.shape == (3, 3)
    assert torch.equal(layer.delayed_scale, before) and before.all()
    assert torch.equal(layer.delayed_amax_history[:, 0], history[:, 0])
    assert not layer.delayed_amax_history[:, 1:].any()


def test_what_may_be_empty_is_known_without_asking_the_device():
    net = model()
    layer = net[0]
    assert may_be_empty(layer.delayed_scale)
    net.eval()(torch.randn(4, 16))
    assert may_be_empty(layer.delayed_scale)
    step(net.train())
    assert not may_be_empty(layer.delayed_scale)
    saved = octavo.nn.delayed_state_dict(net)
    layer.reset_delayed_state()
    assert may_be_empty(layer.delayed_scale) and not may_be_empty(net[2].delayed_scale)
    octavo.nn.load_delayed_state_dict(net, saved)
    assert not may_be_empty(layer.delayed_scale)
    octavo.nn.load_delayed_state_dict(net, {name: torch.zeros_like(value) for name, value in saved.items()})
    assert may_be_empty(layer.delayed_scale)
    step(net)
    empty_state(layer.fp8.state, 1)
    assert (layer.delayed_scale == 0).tolist() == [False, True, False] and may_be_empty(layer.delayed_scale)
    for longer in (copy.deepcopy(model()[0]), model()[0].to(torch.float64).float()):
        longer.recipe = recipes.delayed(5)
        assert may_be_empty(longer.delayed_scale)


def test_a_state_on_another_device_has_the_same_numbers_and_may_be_empty():
    net = model()
    step(net)
    state = net[0].fp8.state
    assert state.on(torch.device("cpu")) is state and not may_be_empty(state.scale)
    moved = state.on(torch.device("cpu", 0))  # by name another device than torch.device("cpu")
    assert moved is not state and all(map(torch.equal, moved, state)) and may_be_empty(moved.scale)
    assert state.on(torch.device("meta")).scale.is_meta


def test_nothing_of_this_process_is_noted_in_a_compiled_graph(monkeypatch):
    net = model()
    step(net)
    state = net[0].fp8.state
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        note_empty(state.scale)
        with entering_input(state, 7):
            facts_of(state.scale).history_id = 9
        assert may_be_empty(state.scale)
    assert not may_be_empty(state.scale) and facts_of(state.scale).history_id == 9
    with entering_input(state, 7):
        facts_of(state.scale).history_id = None  # as a commit leaves it
    assert facts_of(state.scale).history_id not in (None, 9)  # the ninth, and what the seventh cast put in


def test_a_copy_may_be_empty_until_its_own_backward():
    """A copy's buffers count versions anew: ranks of one tensor-parallel weight would take different scales."""
    net = model()
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.deepcopy(copy.deepcopy(net))):
        assert may_be_empty(copied[0].delayed_scale)
        step(copied)
        assert not may_be_empty(copied[0].delayed_scale)


def test_a_scale_is_saved_by_itself_without_a_class_of_octavo():
    net = model()
    step(net)
    loaded = saved_and_loaded(net[0].delayed_scale)
    assert torch.equal(loaded, net[0].delayed_scale) and may_be_empty(loaded)


@pytest.mark.parametrize("how", ["layer by layer", "at once"])
def test_a_state_that_is_loaded_first_stays_with_the_weights_of_one_load(how):
    """A second load, of weights that the state is not of, empties it."""
    net, source = model(), model()
    step(source)
    octavo.nn.load_delayed_state_dict(net, octavo.nn.delayed_state_dict(source))
    for expected in (True, False):
        for name, part in net.named_children() if how == "layer by layer" else [("", net)]:
            part.load_state_dict(source.get_submodule(name).state_dict())
        assert bool(net[0].delayed_scale.all()) == bool(net[2].delayed_scale.all()) == expected


def test_state_made_on_meta_is_loaded_once_the_weights_are():
    """Weights that are assigned, as transformers loads them, move no state; nothing runs before it is loaded."""
    trained = octavo.nn.Linear(64, 32, recipe=octavo.recipes.delayed())
    trained(torch.randn(8, 64)).sum().backward()
    loaded = octavo.nn.Linear(64, 32, recipe=octavo.recipes.delayed(), device="meta")
    loaded.load_state_dict(trained.state_dict(), assign=True)
    assert loaded.delayed_scale.tolist() == [0, 0, 0]
    octavo.nn.load_delayed_state_dict(loaded, octavo.nn.delayed_state_dict(trained))
    assert torch.equal(loaded.delayed_scale, trained.delayed_scale) and loaded.delayed_scale.all()
    assert torch.equal(loaded.delayed_amax_history, trained.delayed_amax_history)
