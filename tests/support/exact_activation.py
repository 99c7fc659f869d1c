"""Activations and their gradients in float64."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "squared_relu": lambda h: F.relu(h) ** 2,
    "silu": F.silu,
    "quick_gelu": lambda h: h * F.sigmoid(1.702 * h),
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
}
# no rounding but a product's: every implementation has the same bits
EXACT = {"", "relu", "squared_relu", "reglu"}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def exact(h: Tensor, activation: str) -> Tensor:
    """Return the activation in the dtype of h."""
    if activation in PLAIN:
        return PLAIN[activation](h)
    gate, up = h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]
    return PLAIN[GATED[activation]](gate) * up


def exact_gradient(dy: Tensor, h: Tensor, activation: str) -> Tensor:
    h = h.double().requires_grad_()
    return torch.autograd.grad(exact(h, activation), h, dy.double())[0]
