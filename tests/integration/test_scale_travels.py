"""A fault in a tensor that is cast is visible, stays where it is, and leaves no trace in the scales after it."""

import pytest
import torch

import octavo
from tests.support.helpers import FP8_RECIPES, assert_equal

FAULTS = {"inf": torch.inf, "-inf": -torch.inf, "nan": torch.nan}


def step(name, x_fault, grad_fault):
    """y, dx, dW and db of a second step, with these values in an element of its input and its gradient; the state."""
    torch.manual_seed(7)
    layer = octavo.nn.Linear(256, 48, recipe=FP8_RECIPES[name]())
    layer(torch.randn(16, 256)).sum().backward()
    layer.zero_grad()
    x, grad = torch.randn(16, 256), torch.randn(16, 48)
    x[3, 5], grad[3, 5] = x_fault, grad_fault
    y = layer(x.requires_grad_())
    y.backward(grad)
    return (y.detach(), x.grad, layer.weight.grad, layer.bias.grad), octavo.nn.delayed_state_dict(layer)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FP8_RECIPES)
def test_one_fault_in_an_input_or_a_gradient(name, fault):
    (y, dx, dw, db), state = step(name, 0.0, 0.0)
    (y_bad, dx_same, dw_bad, db_same), state_of_input = step(name, FAULTS[fault], 0.0)
    (y_same, dx_bad, dw_also, _), state_of_gradient = step(name, 0.0, FAULTS[fault])
    rows, inputs, outputs = torch.arange(16) != 3, torch.arange(256) != 5, torch.arange(48) != 5
    assert not y_bad[3].isfinite().any() and not dw_bad[:, 5].isfinite().any()  # visible
    assert not dx_bad[3].isfinite().any() and not dw_also[5].isfinite().any()
    assert torch.equal(y_bad[rows], y[rows]) and torch.equal(dw_bad[:, inputs], dw[:, inputs])  # local
    assert torch.equal(dx_bad[rows], dx[rows]) and torch.equal(dw_also[outputs], dw[outputs])
    assert torch.equal(dx_same, dx) and torch.equal(db_same, db) and torch.equal(y_same, y)
    if name == "delayed":  # and the next scales don't know of it
        assert_equal(state, state_of_input)
        assert_equal(state, state_of_gradient)
