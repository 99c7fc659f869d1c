"""A linear layer behind an activation: the activation is computed in float32 as its result is cast.

    h -> activation + cast -> product          h [T, K], or of a gated activation gate and up [T, K] each

It is the second half of chain.py, of layers that are modules of their own: h is what other layers returned. Saved for
backward are the layer's pairs and h, as it is or by the recipe's ``saved`` cast; the activation's output is never
written in high precision. Backward computes h's gradient by torch's own gradients of activations, in h's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.autograd.casts import INPUT, as_rows, cast_role
from octavo.autograd.chain import saved_input
from octavo.autograd.products import (
    Layer,
    Saved,
    asked,
    cast_gradient,
    gradients,
    is_recorded,
    later,
    output,
    plan_of,
    refuse_second_derivatives,
    to_save,
)
from octavo.granularity import ALL
from octavo.kernels.activations import activation_of
from octavo.kernels.arguments import CastSource


class Differentiable(NamedTuple):
    """A function of kernels/activations.py by torch's operations: f(h), and (dy, h) -> dy . f'(h)."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _quick_gelu_gradient(dy: Tensor, h: Tensor) -> Tensor:
    s = (1.702 * h).sigmoid()
    return dy * (s + 1.702 * h * s * (1 - s))


_aten = torch.ops.aten
FUNCTIONS = {
    "relu": Differentiable(F.relu, lambda dy, h: _aten.threshold_backward(dy, h, 0)),
    "squared_relu": Differentiable(lambda h: F.relu(h).square(), lambda dy, h: dy * F.relu(h) * 2),
    "silu": Differentiable(F.silu, lambda dy, h: _aten.silu_backward(dy, h)),
    "quick_gelu": Differentiable(lambda h: h * (1.702 * h).sigmoid(), _quick_gelu_gradient),
    "gelu": Differentiable(F.gelu, lambda dy, h: _aten.gelu_backward(dy, h)),
    "gelu_tanh": Differentiable(
        lambda h: F.gelu(h, approximate="tanh"), lambda dy, h: _aten.gelu_backward(dy, h, approximate="tanh")
    ),
}


class Activated(NamedTuple):
    """What is computed: the layer, whose ``output`` product must be in FP8, and a name of kernels/activations.py."""

    layer: Layer
    activation: str


def _forward(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    what: Activated,
    needs: tuple[bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """(the output [T, N], what to save for the gradients of (h, weight) that are needed)."""
    (layer, activation), (needs_dh, needs_dw) = what, needs
    h = gate if up is None else torch.cat((gate, up), 1)
    a = cast_role(CastSource(h, activation), layer.recipe, INPUT, True, needs_dw, layer.state)
    if layer.observer is not None:
        produced = functools.partial(kernels.produced, h, activation, None)
        layer.observer.cast(layer.recipe, INPUT, produced, a, None)
    y = output(None, a, weight, bias, layer, h.dtype)
    reads_h = needs_dh or (needs_dw and layer.recipe.grad_weight is None)
    of_h = saved_input(h, layer) if reads_h else (None, None)
    return y, (*of_h, *to_save(None, a, weight, layer, needs_dh, needs_dw))


class _ActivatedLinear(torch.autograd.Function):
    """See the file."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, what: Activated
    ) -> Tensor:
        needs = ctx.needs_input_grad
        y, saved = _forward(gate, up, weight, bias, what, (needs[0] or needs[1], needs[2]))
        ctx.plan, ctx.activation = plan_of(what.layer, gate.dtype, weight, bias), what.activation
        ctx.given = True, up is not None, True, bias is not None
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        plan, (h, h_scale_inv, *rest) = ctx.plan, ctx.saved_tensors
        of_gate, of_up, needs_dw, needs_db = asked(ctx, ctx.needs_input_grad[:4], ctx.given)
        ctx.plan = later(plan)
        saved, needs, dtype = Saved(*rest), (of_gate or of_up, needs_dw, needs_db), plan.dtypes[0]
        if h_scale_inv is not None:
            tile = (ALL, ALL) if plan.recipe.saved is None else plan.recipe.saved.tile
            h = kernels.dequantize(h, h_scale_inv.to(torch.float32), tile, dtype)
        if needs_dw and plan.recipe.grad_weight is None:
            saved = saved._replace(x_TK=kernels.produced(h, ctx.activation, None).to(dtype))
        da, dw, db = gradients(cast_gradient(grads[0], saved, plan, needs), saved, plan, needs)
        dgate, dup = (None, None) if da is None else _gradients_of_h(da, h, ctx.activation)
        return dgate if of_gate else None, dup if of_up else None, dw, db, None


def _gradients_of_h(da: Tensor, h: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """The gradients of (gate, up), or of (h, None)."""
    name, gated = activation_of(activation)
    function = FUNCTIONS[name]
    if not gated:
        return function.gradient(da, h), None
    gate, up = h.chunk(2, dim=1)
    return function.gradient(da * up, gate), da * function.value(gate)


def activated_linear(
    gate: Tensor, up: Tensor | None, weight_NK: Tensor, bias: Tensor | None, layer: Layer, activation: str
) -> Tensor:
    """y [..., N] = activation(h) . weight^T + bias, of one dtype, bf16, fp16 or fp32.

    ``gate`` and ``up`` [..., K] are what a gated activation reads; without a gate ``gate`` is h, and ``up`` None.
    """
    rows, rows_of_up = as_rows(gate), None if up is None else as_rows(up)
    arguments = rows, rows_of_up, weight_NK, bias, Activated(layer, activation)
    if is_recorded(gate, up, weight_NK, bias):
        y_TN = _ActivatedLinear.apply(*arguments)
    else:
        y_TN, _ = _forward(*arguments, (False, False))
    return y_TN if gate.ndim == 2 else y_TN.view(*gate.shape[:-1], y_TN.shape[1])
