"""Activations and their gradients by torch's operations; those in float32 define what a cast rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.granularity import ALL
from octavo.kernels.activations import activation_of, cast_shape
from octavo.kernels.reference.codes import decode

_TANH_LINEAR, _TANH_CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715  # 2u's terms in h
_SQRT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)


def gated(h: Tensor, dy: Tensor | None, function: str) -> Tensor:
    """Return f(gate) . up of h = (gate | up), or, given the gradient dy of that, h's, float32 [R, C]."""
    gate, up = h.to(torch.float32).contiguous().chunk(2, dim=1)
    if dy is None:
        return FUNCTIONS[function].in_float32(gate).mul_(up)
    dy = dy.to(torch.float32)
    activated, slopes = FUNCTIONS[function].with_slope(gate)
    return torch.cat((slopes.mul_(up * dy), activated.mul_(dy)), 1)


def produced(
    x: Tensor,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = (ALL, ALL),
    decode: Callable[..., Tensor] = decode,
    gated: Callable[[Tensor, Tensor | None, str], Tensor] = gated,
) -> Tensor:
    """Return the values that a cast rounds: x, or an activation or its gradient, float32 [R, C]; see signatures.py."""
    cast_shape(x.shape, activation, None if preactivation is None else preactivation.shape, h_scale_inv is not None)
    if not activation:
        return x
    h, dy = (x, None) if preactivation is None else (preactivation, x)
    if h_scale_inv is not None:
        h = decode(h, torch.float32, h_scale_inv, h_tile)
    function, is_gated = activation_of(activation)
    if is_gated:
        return gated(h, dy, function)
    h, formulas = h.to(torch.float32).contiguous(), FUNCTIONS[function]
    return formulas.in_float32(h) if dy is None else formulas.with_slope(h)[1].mul_(dy)


class Formulas(NamedTuple):
    """A function f by torch's operations: in float32, as casts round it, and as autograd differentiates it.

    Attributes:
        in_float32: h -> f(h), without changing h.
        with_slope: h -> (f(h), f'(h)) in float32, whose common terms are computed once; without changing h;
            relu's slope is 0 at 0.
        value: h -> f(h) in h's dtype, which autograd can differentiate and a compiler fuse.
        gradient: (dy, h) -> dy . f'(h), likewise.
    """

    in_float32: Callable[[Tensor], Tensor]
    with_slope: Callable[[Tensor], tuple[Tensor, Tensor]]
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _relu(h: Tensor) -> Tensor:
    """Return h where it is positive, else 0, never -0; not by torch.where, which takes a CPU 30 times as long."""
    return h.clamp_min(0.0).add_(0.0)


def _relu_and_slope(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (relu, its slope: 1 where h is positive, else 0)."""
    # any positive number, even a subnormal one, is at least 1 after times 2^200; NaN stays NaN
    return _relu(h), h.mul(2.0**100).mul_(2.0**100).clamp_(0.0, 1.0).add_(0.0)


def _normal_distribution(h: Tensor) -> Tensor:
    """Return the normal distribution's cumulative function at h."""
    return torch.erfc(h * -_SQRT_HALF).mul_(0.5)


def _gelu_and_slope(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (h Phi(h), Phi(h) + h phi(h))."""
    below = _normal_distribution(h)
    bell = h.square().mul_(-0.5).exp_().mul_(_DENSITY)
    return below * h, bell.mul_(h).add_(below)


def _gelu_tanh(h: Tensor) -> Tensor:
    """Return h s(2u), with u as activations.py has it."""
    return h.square().mul_(_TANH_CUBIC).add_(_TANH_LINEAR).mul_(h).sigmoid_().mul_(h)


def _gelu_tanh_and_slope(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (h s(2u), its slope)."""
    # from a square of 1e4 on the sigmoid is 0 or 1 and its slope 0, which must not be multiplied by inf
    inner = h.square().clamp_(max=1e4).mul_(_TANH_CUBIC).add_(_TANH_LINEAR)
    s = torch.mul(inner, h).sigmoid_()
    return s * h, torch.ops.aten.sigmoid_backward(h, s).mul_(inner.mul_(3.0).sub_(2 * _TANH_LINEAR)).add_(s)


def _silu_and_slope(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (h s(h), its slope)."""
    s = h.sigmoid()
    return s * h, torch.ops.aten.sigmoid_backward(h, s).add_(s)  # h (1 - s) s + s


def _quick_gelu_and_slope(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (h s(1.702 h), its slope)."""
    s = h.mul(1.702).sigmoid_()
    return s * h, torch.ops.aten.sigmoid_backward(h, s).mul_(1.702).add_(s)


def _quick_gelu_gradient(dy: Tensor, h: Tensor) -> Tensor:
    """Return dy times the slope of h s(1.702 h), by operations that autograd can differentiate."""
    s = (1.702 * h).sigmoid()
    return dy * (s + 1.702 * h * s * (1 - s))


# For a tensor's last few elements torch's sigmoid may differ in the last bit.
_aten = torch.ops.aten
FUNCTIONS = {
    "relu": Formulas(_relu, _relu_and_slope, F.relu, lambda dy, h: _aten.threshold_backward(dy, h, 0)),
    "squared_relu": Formulas(
        lambda h: _relu(h).square_(),
        lambda h: (_relu(h).square_(), _relu(h).mul_(2.0)),
        lambda h: F.relu(h).square(),
        lambda dy, h: dy * F.relu(h) * 2,
    ),
    "silu": Formulas(lambda h: h.sigmoid().mul_(h), _silu_and_slope, F.silu, _aten.silu_backward),
    "quick_gelu": Formulas(
        lambda h: h.mul(1.702).sigmoid_().mul_(h),
        _quick_gelu_and_slope,
        lambda h: h * (1.702 * h).sigmoid(),
        _quick_gelu_gradient,
    ),
    "gelu": Formulas(lambda h: _normal_distribution(h).mul_(h), _gelu_and_slope, F.gelu, _aten.gelu_backward),
    "gelu_tanh": Formulas(
        _gelu_tanh,
        _gelu_tanh_and_slope,
        lambda h: F.gelu(h, approximate="tanh"),
        lambda dy, h: _aten.gelu_backward(dy, h, approximate="tanh"),
    ),
}


def activate(h: Tensor | tuple[Tensor, ...], name: str) -> Tensor:
    """Return activation(h) of h [..., C], in its dtype; if it is gated h is (gate | up) [..., 2C], or the two apart."""
    function, gated = activation_of(name)
    if isinstance(h, Tensor):
        if not gated:
            return FUNCTIONS[function].value(h)
        h = h.chunk(2, dim=-1)
    gate, up = h
    return FUNCTIONS[function].value(gate) * up
