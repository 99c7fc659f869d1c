import pytest
import torch

from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.reference.activation import produced
from octavo.nn.activation import activate

each_activation = pytest.mark.parametrize("name", ACTIVATIONS)


@each_activation
def test_it_is_what_the_casts_compute(name):
    h = 3 * torch.randn(40, 64)
    grad = torch.randn(40, 64 // (1 + ACTIVATIONS[name].gated))
    leaf = h.clone().requires_grad_()
    y = activate(leaf, name)
    y.backward(grad)
    torch.testing.assert_close(y, produced(h, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad, produced(grad, name, h), rtol=1e-5, atol=1e-5)


@each_activation
def test_gate_and_up_together_or_apart_in_any_shape(name):
    h = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    y = activate(h, name)
    assert y.dtype == torch.bfloat16
    assert y.shape == (2, 3, 16 // (1 + ACTIVATIONS[name].gated))
    if ACTIVATIONS[name].gated:
        assert torch.equal(activate(h.chunk(2, dim=-1), name), y)
        assert not torch.equal(activate(h.roll(8, dims=-1), name), y)  # the gate comes first


def test_another_name():
    with pytest.raises(ValueError, match=r"activation='selu': use one of relu, "):
        activate(torch.ones(2), "selu")
