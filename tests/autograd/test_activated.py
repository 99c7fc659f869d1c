import dataclasses

import pytest
import torch
from torch import Tensor

from octavo import recipes
from octavo.autograd.activated import FUNCTIONS, activated_linear
from octavo.autograd.chain import Chain, run_chain
from octavo.autograd.products import linear
from octavo.kernels.activations import ACTIVATIONS, activation_of
from tests.autograd.test_chain import gradients, layer, weights
from tests.support.fused_cases import SAVED
from tests.support.helpers import FP8_RECIPES, CountOps, sqnr

T, K, F, N = 48, 64, 96, 40
each_recipe = pytest.mark.parametrize("name", FP8_RECIPES)


def both(recipe, activation: str) -> tuple[list[Tensor], list[Tensor]]:
    """The result and the gradients of x, both weights and both biases: of one chain, and of its two halves apart."""
    gated = activation_of(activation).gated
    x, grad = torch.randn(2, T // 2, K, requires_grad=True), torch.randn(2, T // 2, N)
    first, second = weights((2 * F if gated else F, K), (N, F))
    layers = [(layer(first[0], recipe), layer(second[0], recipe)) for _ in range(2)]  # each with a state of its own
    chain = Chain(None, layers[0], activation, torch.float32, False)
    expected = gradients(run_chain(x, (None, None), [first, second], chain), grad, [x, *first, *second])
    h = linear(x, *first, layers[1][0])
    gate, up = h.chunk(2, dim=-1) if gated else (h, None)
    y = activated_linear(gate, up, *second, layers[1][1], activation)
    return expected, gradients(y, grad, [x, *first, *second])


@each_recipe
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu", "geglu_tanh"])
def test_it_is_the_second_half_of_a_chain(name, activation):
    expected, found = both(FP8_RECIPES[name](), activation)
    for i in (0, 4, 5):  # bit for bit: the result, and the gradients of the second layer
        assert torch.equal(found[i], expected[i])
    for a, b in zip(found[1:4], expected[1:4], strict=True):  # but for the last bit of the gradient of h
        assert sqnr(a, b) > 30


def test_what_is_activated_may_be_saved_in_fp8_and_read_in_high_precision():
    for changed in ({"saved": SAVED}, {"grad_weight": None}, {"saved": SAVED, "grad_weight": None}):
        expected, found = both(dataclasses.replace(recipes.blockwise(), **changed), "swiglu")
        assert torch.equal(found[0], expected[0]) and torch.equal(found[4], expected[4])
        assert all(sqnr(a, b) > 30 for a, b in zip(found[1:4], expected[1:4], strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_functions_are_torchs(activation):
    function = FUNCTIONS[activation_of(activation).function]
    h, dy = torch.randn(2, 100, dtype=torch.float64)
    h.requires_grad_()
    (expected,) = torch.autograd.grad(function.value(h), h, dy)
    torch.testing.assert_close(function.gradient(dy, h.detach()), expected, rtol=1e-12, atol=1e-12)


def test_nothing_is_cast_that_no_gradient_reads():
    (own,) = weights((N, F))
    made = layer(own[0], recipes.dynamic())
    for needs, products in (((True, False), 2), ((False, True), 2), ((False, False), 1)):
        gate, weight = (
            one.detach().requires_grad_(need) for one, need in zip((torch.ones(T, F), own[0]), needs, strict=True)
        )
        with CountOps() as ops:
            y = activated_linear(gate, torch.ones(T, F), weight, None, made, "swiglu")
            if any(needs):
                y.sum().backward()
        assert ops.calls["matmul"] == products
        assert [one.grad is not None for one in (gate, weight)] == list(needs)
    up = torch.ones(T, F, requires_grad=True)
    activated_linear(torch.ones(T, F), up, own[0].detach(), None, made, "reglu").sum().backward()
    assert up.grad is not None
