"""The activations of kernels/activations.py in plain torch, for parts that run one after the other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.activations import activation_of

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "squared_relu": lambda h: F.relu(h).square(),
    "silu": F.silu,
    "quick_gelu": lambda h: h * (1.702 * h).sigmoid(),
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
}


def activate(h: Tensor | tuple[Tensor, ...], name: str) -> Tensor:
    """activation(h) of h [..., C], in its dtype; for a gated one h is (gate | up) [..., 2C], or the two apart.

    Raises:
        ValueError: for a name that is not in octavo.kernels.activations.ACTIVATIONS.

    Example:
        >>> import torch
        >>> activate(torch.tensor([1.0, -1.0, 2.0, 3.0]), "reglu").tolist()
        [2.0, 0.0]
    """
    function, gated = activation_of(name)
    if isinstance(h, Tensor):
        if not gated:
            return _FUNCTIONS[function](h)
        h = h.chunk(2, dim=-1)
    gate, up = h
    return _FUNCTIONS[function](gate) * up
