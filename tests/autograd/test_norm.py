"""An RMS norm by itself, beside that of a fused module and torch's."""

import pytest
import torch

import octavo
from octavo.autograd.norm import norm_and_branch

EPS = 1e-5


def rms_norm(x, gamma, eps):
    return norm_and_branch(x, gamma, eps)[0]


def torchs_norm(x, gamma, eps):
    return torch.nn.functional.rms_norm(x, gamma.shape, gamma, eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_a_fused_module_bit_for_bit(dtype):
    module = octavo.nn.RMSNormLinear(96, 32, EPS, bias=False, return_norm_output=True, dtype=dtype)
    torch.nn.init.normal_(module.norm.weight)
    x = torch.randn(3, 17, 96, dtype=dtype, requires_grad=True)
    _, expected = module(x)
    normed = rms_norm(x, module.norm.weight, EPS)
    assert torch.equal(normed, expected)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, module.norm.weight, EPS), expected)
    grad = torch.randn_like(x)
    inputs = x, module.norm.weight
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (normed, expected)), strict=True):
        assert torch.equal(a, b)


def test_a_branch_alone_has_a_gradient():
    x, residual, gamma = (torch.randn(size, requires_grad=True) for size in ((5, 8), (5, 8), (8,)))
    normed, total = norm_and_branch(x, gamma, EPS, residual)
    assert normed.requires_grad and torch.equal(total, x + residual)
    grad = torch.randn(5, 8)
    total.backward(grad)
    assert torch.equal(x.grad, grad) and torch.equal(residual.grad, grad) and gamma.grad is None


def test_second_derivatives_are_torchs():
    x, gamma = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    second_derivatives = []
    for norm in (rms_norm, torchs_norm):
        dx, dgamma = torch.autograd.grad(norm(x, gamma, EPS).square().sum(), (x, gamma), create_graph=True)
        second_derivatives.append(torch.autograd.grad(dx.square().sum() + dgamma.square().sum(), (x, gamma)))
    for a, b in zip(*second_derivatives, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    x.requires_grad_(False)
    (dgamma,) = torch.autograd.grad(rms_norm(x, gamma, EPS).square().sum(), gamma, create_graph=True)
    assert dgamma.requires_grad


def test_gradients_in_batches_are_torchs():
    x, gamma = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    directions = torch.randn(3, 5, 8)
    normed = rms_norm(x, gamma, EPS), torchs_norm(x, gamma, EPS)
    batched = (torch.autograd.grad(y, (x, gamma), directions, is_grads_batched=True) for y in normed)
    torch.testing.assert_close(*batched)


def test_it_saves_its_input_and_a_number_a_row():
    saved = []
    x, gamma = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True), torch.ones(32, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, gamma, EPS)
    assert sum(t.untyped_storage().nbytes() for t in saved if t is not gamma) == 64 * 32 * 2 + 64 * 4
