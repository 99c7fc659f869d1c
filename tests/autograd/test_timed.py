"""Calls that are timed compute what a layer's forward and backward do."""

import torch

import octavo
from octavo.autograd.timed import TimedCalls


def test_they_are_a_layers_product_and_cast() -> None:
    layer, recipe = torch.nn.Linear(32, 16, bias=False), octavo.recipes.dynamic()
    x = torch.randn(64, 32)
    assert not torch.equal(fp8 := TimedCalls(recipe).product(x, layer.weight.detach(), "weight")(), layer(x))
    assert torch.equal(fp8, octavo.convert(layer, recipe, lambda module, name: True)(x))
    for each in (recipe, octavo.recipes.delayed()):
        operands = TimedCalls(each).cast(x)()
        assert torch.equal(operands.as_is[0].view(torch.uint8).t(), operands.transposed[0].view(torch.uint8)[:, :64])
