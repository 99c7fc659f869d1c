import pytest
import torch
from torch.nn import functional as F

import octavo
from octavo.autograd.chain import rms_norm

EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_a_fused_module_bit_for_bit(dtype):
    module = octavo.nn.RMSNormLinear(96, 32, EPS, bias=False, return_norm_output=True, dtype=dtype)
    torch.nn.init.normal_(module.norm.weight)
    x = torch.randn(3, 17, 96, dtype=dtype, requires_grad=True)
    _, expected = module(x)
    found = rms_norm(x, module.norm.weight, EPS)
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, module.norm.weight, EPS), expected)
    grad = torch.randn_like(x)
    inputs = x, module.norm.weight
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (found, expected)), strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_torchs():
    x, gamma = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    found = []
    for norm in (rms_norm, lambda x, gamma, eps: F.rms_norm(x, (8,), gamma, eps)):
        dx, dgamma = torch.autograd.grad(norm(x, gamma, EPS).square().sum(), (x, gamma), create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum() + dgamma.square().sum(), (x, gamma)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    x.requires_grad_(False)
    (dgamma,) = torch.autograd.grad(rms_norm(x, gamma, EPS).square().sum(), gamma, create_graph=True)
    assert dgamma.requires_grad


def test_it_saves_its_input_and_a_number_a_row():
    saved = []
    x, gamma = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True), torch.ones(32, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, gamma, EPS)
    assert sum(t.untyped_storage().nbytes() for t in saved if t is not gamma) == 64 * 32 * 2 + 64 * 4
