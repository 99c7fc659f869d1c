import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import octavo
from octavo import recipes
from octavo.nn.candidates import features
from octavo.nn.linear import TransposedLinear
from tests.support.helpers import FP8_RECIPES, sqnr, to_fp8


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_it_is_a_linear_layer_with_its_weight_transposed(name):
    conv = Conv1D(48, 64)  # N, K
    nn.init.normal_(conv.bias)
    ours = to_fp8(conv, FP8_RECIPES[name]())
    linear = octavo.nn.Linear(64, 48, recipe=FP8_RECIPES[name]())
    linear.load_state_dict({"weight": conv.weight.t(), "bias": conv.bias})
    x, grad = torch.randn(2, 5, 64), torch.randn(2, 5, 48)
    results = []
    for module in (ours, linear):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(grad)
        results.append([y, leaf.grad, module.bias.grad])
    assert all(map(torch.equal, *results))
    assert torch.equal(ours.weight.grad, linear.weight.grad.t())


def test_conversion_and_back():
    conv = Conv1D(8, 16)
    weight, x = conv.weight, torch.randn(2, 16)
    assert features(conv) == (16, 8)
    expected = conv(x)
    to_fp8(conv, recipes.delayed())
    assert isinstance(conv, TransposedLinear) and isinstance(conv, Conv1D)
    assert 20 < sqnr(conv(x), expected) < 40
    octavo.restore(conv)
    assert type(conv) is Conv1D
    assert conv.weight is weight
    assert torch.equal(conv(x), expected)
