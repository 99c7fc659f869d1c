"""Calls that are timed compute what a layer's forward and backward do."""

import torch

import octavo
from octavo.autograd.timed import cast_call, product_call


def test_they_are_a_layers_product_and_cast() -> None:
    layer, recipe = torch.nn.Linear(32, 16, bias=False), octavo.recipes.dynamic()
    x = torch.randn(64, 32)
    plain, fp8 = (product_call(x, layer.weight.detach(), each, 1)() for each in (None, recipe))
    assert torch.equal(plain, layer(x)) and not torch.equal(plain, fp8)
    assert torch.equal(fp8, octavo.convert(layer, recipe, lambda module, name: True)(x))
    for each in (recipe, octavo.recipes.delayed()):
        operands = cast_call(x, each)()
        assert torch.equal(operands.as_is[0].view(torch.uint8).t(), operands.transposed[0].view(torch.uint8)[:, :64])
