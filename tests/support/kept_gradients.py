"""What the tests of gradients in FP8 train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import E4M3, PerBlock, quantize
from octavo.optim import SGD, Adam, AdamW
from tests.support.helpers import every_layer

KINDS = ["fp32", "bf16", "fp8", "fp8 in blocks", "tied"]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": lambda params, **options: AdamW(params, lr=1e-2, **options),
    "AdamW fp32": lambda params, **options: AdamW(params, lr=1e-2, moments="fp32", **options),
    "Adam bf16": lambda params, **options: Adam(params, lr=1e-2, weight_decay=0.1, moments="bf16", **options),
    "SGD": lambda params, **options: SGD(params, lr=1e-2, momentum=0.9, **options),
    "SGD alone": lambda params, **options: SGD(params, lr=1e-2, weight_decay=0.1, **options),
}

each_kind = pytest.mark.parametrize("kind", KINDS)


class Shaped(nn.Module):
    """A weight of four dimensions and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 4, 3, 3) / 10)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        image = nn.functional.conv2d(x.view(-1, 4, 6, 6), self.kernel, padding=1)
        return image.reshape(len(x), -1) * self.gain


def model_of(kind: str = "fp32") -> nn.Sequential:
    """Widths that are no multiple of 128."""
    torch.manual_seed(0)
    linear = [nn.Linear(144, 144) for _ in range(3)]
    model = nn.Sequential(*linear, Shaped()).to(torch.float32 if kind == "fp32" else torch.bfloat16)
    if kind.startswith("fp8"):
        recipe = octavo.recipes.blockwise() if "blocks" in kind else octavo.recipes.dynamic()
        octavo.convert(model, recipe, select=every_layer, weight_storage="fp8")
    if kind == "tied":
        model[2].weight = model[0].weight
    return model


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(8, 144).to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def by_hand(param: nn.Parameter) -> None:
    """Round a gradient to what the pair reads, in float32."""
    grad = param.grad
    assert grad is not None
    matrix = grad.view(grad.shape[0], -1) if grad.ndim > 1 else grad.view(1, -1)
    pair = quantize(matrix.float(), E4M3, PerBlock(1, 128))
    param.grad = None
    param.grad_dtype = torch.float32
    param.grad = pair.dequantize().view(grad.shape)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]
