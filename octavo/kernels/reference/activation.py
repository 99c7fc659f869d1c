"""Activations and their gradients in float32: the definition of what casts compute on their way (activations.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.activations import activation_of, cast_shape
from octavo.kernels.reference.codes import decode
from octavo.kernels.reference.tiles import row_runs

_TANH = 2 * math.sqrt(2 / math.pi), 0.044715
_SQRT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)


def produced(
    x: Tensor,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = (ALL, ALL),
) -> Tensor:
    """What a cast casts: x itself, or float32 [R, C]; see signatures.py."""
    shape = cast_shape(x.shape, activation, None if preactivation is None else preactivation.shape)
    if not activation:
        return x
    h_RC = x if preactivation is None else preactivation
    result = torch.empty(shape, dtype=torch.float32, device=x.device)
    for scale_inv, _, h, grad, out in row_runs(h_tile, h_scale_inv, h_RC, x, result):
        wide = h.to(torch.float32) if scale_inv is None else decode(h, torch.float32, scale_inv, h_tile)
        if preactivation is None:
            _forward(wide, activation, out)
        else:
            _backward(grad.to(torch.float32), wide, activation, out)
    return result


def _forward(h: Tensor, activation: str, out: Tensor) -> None:
    function, gated = activation_of(activation)
    if not gated:
        out.copy_(value(h, function))
        return
    gate, up = h.chunk(2, dim=1)
    torch.mul(value(gate, function), up, out=out)


def _backward(dy: Tensor, h: Tensor, activation: str, out: Tensor) -> None:
    function, gated = activation_of(activation)
    if not gated:
        torch.mul(dy, slope(h, function), out=out)
        return
    gate, up = h.chunk(2, dim=1)
    dgate, dup = out.chunk(2, dim=1)
    of_gate, slopes = value_and_slope(gate, function)
    # not by out=, which torch's compiler refuses for parts of rows, and which takes a CPU 1.4 times as long
    dgate.copy_((dy * up).mul_(slopes))
    dup.copy_(of_gate.mul_(dy))


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
    """(f(h), f'(h)), float32, of what both have in common computed once."""
    if function == "relu":
        # any positive number, subnormal or not, is 1 at most of 2^200 times it; NaN stays
        return _relu(h), h.mul(2.0**100).mul_(2.0**100).clamp_(0.0, 1.0).add_(0.0)
    if function == "squared_relu":
        return _relu(h).square_(), _relu(h).mul_(2.0)
    if function == "gelu":
        below = _normal_distribution(h)
        bell = h.square().mul_(-0.5).exp_().mul_(_DENSITY)
        return below * h, bell.mul_(h).add_(below)
    s = _sigmoid(h, function)
    rest, of_h = 1.0 - s, s * h
    if function == "quick_gelu":
        rest.mul_(1.702)
    elif function == "gelu_tanh":
        # where the square is larger, rest or h s is 0, and times inf it would be NaN
        factor, cubic = _TANH
        rest.mul_(h.square().clamp_(max=1e4).mul_(3 * factor * cubic).add_(factor))
    return of_h, rest.mul_(of_h).add_(s)


def _relu(h: Tensor) -> Tensor:
    """h where it is positive, else 0, never -0; not by torch.where, which takes a CPU 30 times as long."""
    return h.clamp_min(0.0).add_(0.0)


def _normal_distribution(h: Tensor) -> Tensor:
    """How much of the normal distribution lies below h."""
    return torch.erfc(h * -_SQRT_HALF).mul_(0.5)


def _sigmoid(h: Tensor, function: str) -> Tensor:
    """The sigmoid that multiplies h in f."""
    if function == "silu":
        u = -h
    elif function == "quick_gelu":
        u = h * -1.702
    else:
        factor, cubic = _TANH
        u = h.square().mul_(-factor * cubic).sub_(factor).mul_(h)
    # not torch.sigmoid: for a tensor's last few elements it takes another path, whose last bit differs in 4 % of them
    return u.exp_().add_(1.0).reciprocal_()
