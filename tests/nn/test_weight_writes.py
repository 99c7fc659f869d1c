import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.step_count import OPTIMIZER_STEPS
from tests.support.helpers import FP8_RECIPES, CountOps

K, N, T = 48, 32, 16

WRITES = {  # none of which a version, an optimizer's step or a storage need tell
    "data": lambda weight: weight.data.mul_(3),
    "another tensor over its storage": lambda weight: torch.from_numpy(weight.detach().numpy()).mul_(3),
    "fewer rows": lambda weight: setattr(weight, "data", weight.data[:8]),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_forward_computes_with_the_weight_as_it_is(write, recipe, frozen):
    layer = octavo.nn.Linear(K, N, bias=False, recipe=FP8_RECIPES[recipe]())
    layer.requires_grad_(not frozen)
    layer(torch.randn(T, K, requires_grad=True)).sum().backward()  # gradients are there, as while they accumulate
    if layer.weight.grad is not None:
        layer.weight.grad.zero_()
    layer(torch.randn(T, K))
    with torch.no_grad():
        WRITES[write](layer.weight)
    if layer.recipe.delayed is not None:
        octavo.nn.invalidate(layer)  # the history, whose scale three times as much would saturate
    twin = octavo.nn.Linear(K, len(layer.weight), bias=False, recipe=layer.recipe)
    twin.weight = nn.Parameter(layer.weight.detach().clone())
    if layer.recipe.delayed is not None:
        twin.__dict__["delayed_state"] = layer.delayed_state.clone()
    x = torch.randn(T, K)
    assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_every_micro_batch_casts_its_weight(recipe):
    layer = octavo.nn.Linear(K, N, recipe=FP8_RECIPES[recipe]())
    for _ in range(3):
        with CountOps() as ops:
            loss = layer(torch.randn(T, K, requires_grad=True)).sum()
        assert ops.casts == 2
        loss.backward()


def test_steps_are_counted_once_each():
    OPTIMIZER_STEPS.watch()
    OPTIMIZER_STEPS.watch()
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = torch.optim.SGD([p], lr=0.1)
    before = OPTIMIZER_STEPS.count
    optimizer.step()
    assert OPTIMIZER_STEPS.count == before + 1


def test_invalidate_forgets_the_history_of_weights_and_what_was_kept():
    net = nn.Sequential(octavo.nn.Linear(K, N, recipe=recipes.delayed()), nn.ModuleList([octavo.nn.Linear(N, N)]))
    kept = octavo.nn.KeptWeights(net)
    kept.cast()
    net[0](torch.randn(2, K, requires_grad=True)).sum().backward()
    octavo.nn.invalidate(net)
    assert net[0].delayed_scale.ne(0).tolist() == [True, False, True]
    for layer in (net[0], net[1][0]):
        with CountOps() as ops:
            layer(torch.randn(2, layer.in_features))
        assert ops.casts == 2


def test_a_copy_keeps_nothing():
    layer = octavo.nn.Linear(K, N)
    octavo.nn.KeptWeights(layer).cast()
    other = copy.deepcopy(layer)
    assert layer.kept_operands is not None and other.kept_operands is None
    assert other.weight_writes is not layer.weight_writes
