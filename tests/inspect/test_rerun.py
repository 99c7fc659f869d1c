"""A step's forwards and backwards that run once more."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("numpy")

import octavo
from octavo import recipes
from octavo.distributed.ranks import Ranks
from octavo.inspect.notes import StepNotes
from octavo.inspect.rerun import StepRunner


@pytest.mark.parametrize("is_twin", [True, False])
def test_a_rerun_has_the_gradients_and_the_loss_of_all_calls_in_its_precision(is_twin: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2))
    octavo.convert(model, recipes.dynamic(), lambda *_: True)
    weight, batches = model[0].weight, torch.randn(2, 8, 32)
    notes = StepNotes(model, lambda: None, contextlib.nullcontext)
    notes.begin()
    random_states = []
    for x in batches:
        random_states.append(torch.get_rng_state())
        model(x).backward(torch.ones(8, 32))
    calls, step_gradient = notes.calls, weight.grad.clone()  # type: ignore[operator]
    notes.end()

    recipe = recipes.high_precision() if is_twin else recipes.dynamic()
    rerun = StepRunner(model, Ranks(), tmp_path, False).run(calls, [weight, None], recipe, is_twin)
    (of_step, of_rerun), of_computed_weight = rerun.pairs
    assert of_step is weight.grad and torch.equal(weight.grad, step_gradient) and of_computed_weight == (None, None)
    assert rerun.loss.isnan()  # what the model returns is no loss

    exact = copy.deepcopy(model)
    octavo.set_recipe(exact, recipe)
    exact.zero_grad()
    losses = []
    for x, state in zip(batches, random_states, strict=True):
        torch.set_rng_state(state)
        (y := exact(x)).backward(torch.ones(8, 32))
        losses.append(y.detach().double().sum())
    step_loss = sum(call.outputs[0].product for call in calls)
    torch.testing.assert_close(of_rerun, exact[0].weight.grad)
    torch.testing.assert_close(rerun.loss_change, sum(losses) - step_loss)
    assert (rerun.outputs is not None) == is_twin
    change, predicted = rerun.slope
    assert float(change / predicted) == pytest.approx(1, abs=0.01) if is_twin else rerun.slope.tolist() == [0, 0]
