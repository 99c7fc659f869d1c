import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from octavo.autograd.casts import Norm
from octavo.kernels.reference.norm import normalise
from octavo.nn import LayerNorm, RMSNorm
from tests.support.helpers import assert_equal, gradients

KINDS = {"layer_norm": (LayerNorm, nn.LayerNorm), "rms_norm": (RMSNorm, nn.RMSNorm)}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_they_are_torchs(kind, dtype):
    ours, plain = (cls(24, 1e-3, dtype=dtype) for cls in KINDS[kind])
    assert isinstance(ours, type(plain))
    assert_equal(ours.state_dict(), plain.state_dict())
    assert repr(ours) == repr(plain)
    with torch.no_grad():
        ours.weight.normal_()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 24, dtype=dtype)
    assert torch.equal(ours(x), plain(x))
    for module in (ours, plain):
        module(x).square().sum().backward()
    assert_equal(gradients(ours), gradients(plain))


@each_kind
def test_a_zero_centered_gamma_starts_as_the_identity_and_adds_one(kind):
    ours, plain = KINDS[kind][0](24, zero_centered_gamma=True), KINDS[kind][1](24, eps=1e-5)
    x = torch.randn(5, 24)
    for _ in range(2):
        assert not ours.weight.any()
        assert torch.equal(ours(x), plain(x))
        with torch.no_grad():
            ours.weight.normal_()
        plain.load_state_dict({**ours.state_dict(), "weight": 1 + ours.weight})
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.factor(), plain.weight)
        ours.reset_parameters()
        plain.reset_parameters()
    assert copy.deepcopy(ours).zero_centered_gamma


@each_kind
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_the_kernels_compute_the_same_in_its_place(kind, zero, eps):
    ours = KINDS[kind][0](24, eps, zero)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    x = torch.randn(5, 24)
    assert ours.norm() == Norm(kind, eps, zero)
    torch.testing.assert_close(normalise(x, ours.weight, ours.bias, *ours.norm())[0], ours(x), rtol=1e-5, atol=1e-6)


def test_without_a_bias_and_with_torchs_own_eps():
    assert LayerNorm(8, bias=False).bias is None
    assert RMSNorm(8).bias is None
    ours = RMSNorm(8, eps=None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (1e-4 * torch.randn(5, 8)).to(dtype)
        found = normalise(x, ours.weight, None, *ours.norm())[0].to(dtype)
        torch.testing.assert_close(found, F.rms_norm(x, (8,)), rtol=torch.finfo(dtype).eps, atol=1e-6)


@each_kind
def test_a_norm_without_a_weight(kind):
    for zero_centered in (False, True):
        ours = KINDS[kind][0](24, zero_centered_gamma=zero_centered, elementwise_affine=False)
        x = torch.randn(5, 24)
        assert torch.equal(ours(x), KINDS[kind][1](24, eps=1e-5, elementwise_affine=False)(x))
