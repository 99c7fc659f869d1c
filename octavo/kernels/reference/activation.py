"""Activations and their gradients in float32: the definition of what casts compute before they round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.activations import activation_of, cast_shape
from octavo.kernels.reference.codes import decode

_TANH = 2 * math.sqrt(2 / math.pi), 0.044715
_SQRT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)


def produced(
    x: Tensor,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = (ALL, ALL),
    decode: Callable[..., Tensor] = decode,
) -> Tensor:
    """The values that a cast rounds: x itself, or an activation or its gradient, float32 [R, C]; see signatures.py."""
    cast_shape(x.shape, activation, None if preactivation is None else preactivation.shape, h_scale_inv is not None)
    if not activation:
        return x
    h = x if preactivation is None else preactivation
    if h_scale_inv is None:
        h = h.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    else:
        h = decode(h, torch.float32, h_scale_inv, h_tile).contiguous()
    return _activated(h, activation) if preactivation is None else _gradient(h, x.to(torch.float32), activation)


def _activated(h: Tensor, activation: str) -> Tensor:
    function, gated = activation_of(activation)
    if not gated:
        return value(h, function)
    gate, up = h.chunk(2, dim=1)
    return value(gate, function).mul_(up)


def _gradient(h: Tensor, dy: Tensor, activation: str) -> Tensor:
    """The gradient of h, which overwrites h."""
    function, gated = activation_of(activation)
    if not gated:
        return slope(h, function).mul_(dy)
    gate, up = h.chunk(2, dim=1)
    of_gate, slopes = value_and_slope(gate, function)
    # not by out=, which torch's compiler refuses for some columns, and which takes a CPU 1.4 times as long
    gate.copy_(slopes.mul_(up.mul_(dy)))
    up.copy_(of_gate.mul_(dy))
    return h


def value(h: Tensor, function: str) -> Tensor:
    """f(h), float32."""
    if function == "relu":
        return _relu(h)
    if function == "squared_relu":
        return _relu(h).square_()
    if function == "gelu":
        return _normal_distribution(h).mul_(h)
    return _sigmoid(h, function).mul_(h)


def slope(h: Tensor, function: str) -> Tensor:
    """f'(h), float32; of relu it is 0 at 0."""
    return value_and_slope(h, function)[1]


def value_and_slope(h: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """(f(h), f'(h)), float32; what both need is computed once."""
    if function == "relu":
        # any positive number, even a subnormal one, is at least 1 after times 2^200; NaN stays NaN
        return _relu(h), h.mul(2.0**100).mul_(2.0**100).clamp_(0.0, 1.0).add_(0.0)
    if function == "squared_relu":
        return _relu(h).square_(), _relu(h).mul_(2.0)
    if function == "gelu":
        below = _normal_distribution(h)
        bell = h.square().mul_(-0.5).exp_().mul_(_DENSITY)
        return below * h, bell.mul_(h).add_(below)
    if function == "gelu_tanh":
        factor, cubic = _TANH
        # from a square of 1e4 on the sigmoid is 0 or 1 and its slope 0, which must not be multiplied by inf
        inner = h.square().clamp_(max=1e4).mul_(factor * cubic).add_(factor)
        s = torch.mul(inner, h).sigmoid_()
        return s * h, torch.ops.aten.sigmoid_backward(h, s).mul_(inner.mul_(3.0).sub_(2 * factor)).add_(s)
    s = _sigmoid(h, function)
    bend = torch.ops.aten.sigmoid_backward(h, s)  # h (1 - s) s
    return s * h, (bend.mul_(1.702) if function == "quick_gelu" else bend).add_(s)


def _relu(h: Tensor) -> Tensor:
    """h where it is positive, else 0, never -0; not by torch.where, which takes a CPU 30 times as long."""
    return h.clamp_min(0.0).add_(0.0)


def _normal_distribution(h: Tensor) -> Tensor:
    """The normal distribution's cumulative function at h."""
    return torch.erfc(h * -_SQRT_HALF).mul_(0.5)


def _sigmoid(h: Tensor, function: str) -> Tensor:
    """The sigmoid that multiplies h in f. For a tensor's last few elements torch's may differ in the last bit."""
    if function == "silu":
        return h.sigmoid()
    if function == "quick_gelu":
        return h.mul(1.702).sigmoid_()
    factor, cubic = _TANH
    return h.square().mul_(factor * cubic).add_(factor).mul_(h).sigmoid_()
