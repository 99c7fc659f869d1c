"""The accuracy that each recipe promises, of its three products against float64; torchao's are in tests/compat."""

import pytest
import torch
from torch import Tensor, nn

import octavo
from tests.support.helpers import FP8_RECIPES, CountOps, sqnr

T, K, N = 256, 512, 384

# dB for y, dx, dW. Gradients of dynamic and delayed are E5M2, of two bits instead of three.
PROMISED = {
    "dynamic": (28, 24, 24),
    "delayed": (28, 24, 24),
    "rowwise": (28, 28, 28),
    "blockwise": (28, 28, 28),
    "mx": (28, 28, 28),
}
HIGHEST_IN_FP8 = 31


def accuracies(layer: nn.Linear, x: Tensor, grad: Tensor) -> list[float]:
    """Of y, dx and dW, in dB."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(grad)
    w, x64, g = layer.weight.detach().double(), x.double(), grad.double()
    found, truth = [y.detach(), leaf.grad, layer.weight.grad], [x64 @ w.t(), g @ w, g.t() @ x64]
    return [sqnr(result, expected) for result, expected in zip(found, truth, strict=True)]


def normal_layer(name: str, dtype: torch.dtype = torch.float32) -> octavo.nn.Linear:
    layer = octavo.nn.Linear(K, N, bias=False, recipe=FP8_RECIPES[name](), dtype=dtype)
    nn.init.normal_(layer.weight)
    return layer


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FP8_RECIPES)
def test_promised_accuracy(name, dtype):
    layer = normal_layer(name, dtype)
    for _ in range(4):  # delayed: its own amax, then those of earlier steps
        with CountOps() as ops:
            found = accuracies(layer, torch.randn(T, K, dtype=dtype), torch.randn(T, N, dtype=dtype))
        for product, db, promised in zip(("y", "dx", "dW"), found, PROMISED[name], strict=True):
            assert promised <= db < HIGHEST_IN_FP8, product
        assert ops.calls["matmul"] == 3


def test_blocks_keep_what_one_scale_loses():
    x = torch.randn(T, K) * torch.logspace(0, -6, T)[:, None]  # rows of very different size
    for name in ("rowwise", "blockwise", "mx"):
        layer = normal_layer(name)
        y = layer(x)
        assert min(sqnr(y[t], x[t].double() @ layer.weight.double().t()) for t in (0, 100, 255)) > 26
    y = normal_layer("dynamic")(x)
    assert y[255].abs().max() < 1e-3
