"""The accuracy that each recipe promises: of its three products against float64, and beside torchao's."""

import dataclasses

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
TORCHAO_NAMES = {"dynamic": "tensorwise", "delayed": "tensorwise", "rowwise": "rowwise"}


def products(layer: nn.Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    """y, dx, dW."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, layer.weight.grad]


def accuracies(layer: nn.Linear, x: Tensor, grad: Tensor) -> list[float]:
    w, x64, g = layer.weight.detach().double(), x.double(), grad.double()
    truth = [x64 @ w.t(), g @ w, g.t() @ x64]
    return [sqnr(result, expected) for result, expected in zip(products(layer, x, grad), truth, strict=True)]


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


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", TORCHAO_NAMES)
def test_beside_torchao(name, seed):
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(seed)
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(TORCHAO_NAMES[name]), emulate=True)
    layer = normal_layer(name)
    plain = nn.Linear(K, N, bias=False)
    plain.load_state_dict(layer.state_dict())
    theirs = float8.convert_to_float8_training(nn.Sequential(plain), config=config)[0]
    assert type(theirs) is not nn.Linear
    for _ in range(3):
        x, grad = torch.randn(T, K), torch.randn(T, N)
        for product, a, b in zip(
            ("y", "dx", "dW"), accuracies(layer, x, grad), accuracies(theirs, x, grad), strict=True
        ):
            assert b < HIGHEST_IN_FP8
            assert a > b - 0.3, product


def test_blocks_keep_what_one_scale_loses():
    x = torch.randn(T, K) * torch.logspace(0, -6, T)[:, None]  # rows of very different size
    for name, floor in (("rowwise", 28), ("blockwise", 28), ("mx", 28)):
        layer = normal_layer(name)
        y = layer(x)
        rows = [sqnr(y[t], x[t].double() @ layer.weight.double().t()) for t in (0, 100, 255)]
        assert min(rows) > floor - 2
    y = normal_layer("dynamic")(x)
    assert y[255].abs().max() < 1e-3
