"""One or two linear layers with what comes before them, in which only pairs travel from kernel to kernel.

    [norm] -> cast -> product                                   LayerNormLinear
    [norm] -> cast -> product -> activation + cast -> product   LayerNormMLP; Experts, whose rows are in groups
                                 activation + cast -> product   activated_linear: the last layer of other libraries'
                                                                feed-forwards, behind layers that are called as ever
           cast -> product -> rotary positions                  other libraries' attention: q, k and v as one product

A norm writes the pairs that the first product reads. The activation reads that product's output h and writes the pairs
that the second product reads; backward its gradient reads h again and writes the pairs of the first layer's
grad_output. Neither the norm's nor the activation's output, nor its gradient, is written in high precision; nor is the
gradient of what rotary positions turned: its cast reads the gradients of q, k and v, and turns them back. The products
and their saved pairs are those of products.py.

On a tensor-parallel group the first layer's weight is in parts by rows and the second's by columns: from the first
product to the second each rank has its part of the features, and the result is this rank's part of a sum. The norm
reads x, whole on every rank or this rank's tokens, whose pairs are then gathered.

Saved for backward, beside each layer's pairs: the norm's input and row statistics, and h, as it is or by the recipe's
``saved`` cast. Behind other layers h's gradient is computed by torch's own gradients of activations, in h's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import CastRequest, Recast, as_rows, cast_role, recast_alone
from octavo.autograd.gather_input import cast_norm, scattered
from octavo.autograd.norm import Norm
from octavo.autograd.products import (
    BackwardPlan,
    GradientSource,
    Layer,
    Saved,
    backward_plan,
    cast_gradient,
    gradients,
    gradients_needed_now,
    is_recorded,
    output,
    plan_for_next_pass,
    refuse_in_backward,
    to_save,
    unrounded,
)
from octavo.autograd.rotary import Positions, gradient_of_heads
from octavo.granularity import ALL
from octavo.kernels.activations import activation_of
from octavo.kernels.arguments import CastSource, NormSource
from octavo.kernels.reference.activation import FUNCTIONS
from octavo.scaling.recipe import INPUT, WEIGHT
from octavo.tensor.collectives import summed
from octavo.tensor.pair import Operands


class Chain(NamedTuple):
    """The steps of a chain; every layer's ``output`` product must be in FP8."""

    norm: Norm | None  # before the first layer
    layers: tuple[Layer, ...]  # one, or two with an activation between them
    activation: str  # a name of kernels/activations.py
    dtype: torch.dtype  # of all results; the input's own where there is no norm
    returns_norm: bool  # whether the norm's output is a second result
    positions: Positions | None = None  # one layer's: its product's heads are turned, and three results


class ChainTensors(NamedTuple):
    """The tensors that gradients flow to: x [..., K], the norm's parameters [K], weights [N, K] and biases [N]."""

    x: Tensor
    gamma: Any  # Tensor; without a norm None
    beta: Tensor | None
    weight: Tensor
    bias: Tensor | None
    second_weight: Any = None  # Tensor; of one layer None
    second_bias: Tensor | None = None


class ChainNeeds(NamedTuple):
    """Whether the gradient of each of ChainTensors is needed."""

    x: bool
    gamma: bool
    beta: bool
    weight: bool
    bias: bool
    second_weight: bool
    second_bias: bool

    def of_first_layer(self) -> tuple[bool, bool]:
        """Return whether the gradients of the first layer's input and of its output are needed."""
        of_input = self.x or self.gamma or self.beta
        return of_input, of_input or self.weight or self.bias


class SavedNorm(NamedTuple):
    """A norm's input, parameter and row statistics, which its gradient reads; all None if there is none to compute."""

    x: Tensor | None
    gamma: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


# The tensors that a chain saves, in a row, None where no gradient reads one:
#     x, gamma, mean, rstd           SavedNorm, to _NORM_END
#     Saved of the first layer       to _LAYER_END
#     then of a second layer         h or its codes, the codes' scale_inv, Saved of that layer: see _behind_activation
#     or of rotary positions         cos, sin
_ToSave = tuple[Tensor | None, ...]
_Parameters = tuple[Tensor, Tensor | None]  # (weight, bias) of a layer
_NORM_END = len(SavedNorm._fields)
_LAYER_END = _NORM_END + len(Saved._fields)


def _cast_first_input(tensors: ChainTensors, chain: Chain, needs_dw: bool) -> tuple[Tensor | None, Operands]:
    """Return (the first layer's input in high precision, where that is read or returned; its pairs)."""
    x, gamma, beta, *_ = tensors
    layer, norm = chain.layers[0], chain.norm
    y: Tensor | None = x
    if norm is None:
        request = CastRequest(layer.recipe, INPUT, as_is=True, transposed=needs_dw, only_products=True)
        operands = cast_role(x, request, layer.state, layer.rows)
    else:
        keep = chain.returns_norm or (needs_dw and layer.recipe.grad_weight is None)
        source, wire = NormSource(x, gamma, beta, *norm), layer.rows.wire
        operands = cast_norm(source, layer.recipe, layer.state, needs_dw=needs_dw, keep=keep, wire=wire)
        assert operands.norm is not None
        mean, rstd, normed = operands.norm
        y = normed if keep else None
        if y is not None and y.dtype != chain.dtype:  # to y's own dtype .to() would return y, see _ChainFunction
            y = y.to(chain.dtype)
    for observer in layer.observers if layer.rows.wire is None else ():
        values = lambda: x  # noqa: E731
        if norm is not None:
            values = functools.partial(kernels.normalised, x, mean, rstd, gamma, beta, norm.kind, norm.zero_centered)
        observer.cast(layer.recipe, INPUT, values, operands, layer.rows.offsets)
    return y, operands


def _forward(tensors: ChainTensors, chain: Chain, needs: ChainNeeds) -> tuple[Tensor, Tensor | None, _ToSave]:
    """Return (the output [T, N], the norm's output or None, the tensors to save for the gradients that are needed)."""
    needs_dx, needs_dh = needs.of_first_layer()
    first, *later_layers = chain.layers
    y, operands = _cast_first_input(tensors, chain, needs.weight)
    h = output(y, operands, tensors.weight, tensors.bias, first, chain.dtype)
    norm = operands.norm if needs_dx else None
    saved_norm = (None,) * _NORM_END if norm is None else SavedNorm(tensors.x, tensors.gamma, norm.mean, norm.rstd)
    saved = *saved_norm, *to_save(y, operands, tensors.weight, first, needs_dx, needs.weight)
    if not later_layers:
        return h, y, saved
    (second,) = later_layers
    needs_of_second = needs_dh, needs.second_weight
    parameters = tensors.second_weight, tensors.second_bias
    recasts = needs_dh and needs.second_weight and _can_recast(first, second)
    result, saved_second = _behind_activation(h, chain.activation, second, parameters, needs_of_second, recasts)
    return result, y, (*saved, *saved_second)


def _can_recast(first: Layer, second: Layer) -> bool:
    """Whether a Recast can stand for the codes of the second layer's input.

    Its cast and that of the activation's gradient have one scale each, and h is saved as it is; what an observer reads
    is saved.
    """
    if second.recipe.saved is not None or second.observers or first.rows.offsets is not None:
        return False
    have_one_scale = second.recipe.input_casts.shared_tile == first.recipe.grad_output_casts.shared_tile == (ALL, ALL)
    return have_one_scale and first.recipe.may_pad == second.recipe.may_pad


def _behind_activation(
    h: Tensor, activation: str, layer: Layer, parameters: _Parameters, needs: tuple[bool, bool], recasts: bool = False
) -> tuple[Tensor, _ToSave]:
    """Return (a layer's product with an activation of h, the tensors to save for gradients of (h, weight)).

    These are h or its codes, the codes' scale_inv, and the layer's ``Saved``, None where one is not needed.
    ``recasts``: the scale of a Recast is saved instead of the activation's codes.
    """
    (weight, bias), (needs_dh, needs_dw) = parameters, needs
    request = CastRequest(layer.recipe, INPUT, True, needs_dw and not recasts, keep_scale=recasts, only_products=True)
    a = cast_role(CastSource(h, activation), request, layer.state, layer.rows)
    for observer in layer.observers:
        produced = functools.partial(kernels.produced, h, activation, None)
        observer.cast(layer.recipe, INPUT, produced, a, layer.rows.offsets)
    result = output(None, a, weight, bias, layer, h.dtype)
    saved = to_save(None, a, weight, layer, needs_dh, needs_dw)
    if recasts:
        assert a.as_is is not None
        saved = saved._replace(x_scale_inv=a.as_is[1], recast_scale=a.recast_scale)
    cast = layer.recipe.saved
    if not (needs_dh or (needs_dw and layer.recipe.grad_weight is None)):
        return result, (None, None, *saved)
    if cast is None:
        return result, (h, None, *saved)
    q, _, scale_inv, *_ = kernels.cast(h, None, INPUT, *cast.arguments, offsets=layer.rows.offsets)
    return result, (q, scale_inv, *saved)


def _results(chain: Chain, result: Tensor, y: Tensor | None) -> Any:
    """Return what ``run_chain`` returns, in rows: heads that are turned, the output and the norm's, or the output."""
    if chain.positions is not None:
        return chain.positions.turned(result)
    return (result, y) if chain.returns_norm else result


class _ChainFunction(torch.autograd.Function):
    """A chain with its gradients, see the module.

    No result may be a tensor that had another name in forward: torch.compile of torch 2.11 returns that one too, and
    loses the gradient of both (pytorch issue 180642).
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *values, chain = arguments
        tensors, needs = ChainTensors(*values), ChainNeeds(*ctx.needs_input_grad[:-1])
        result, y, saved = _forward(tensors, chain, needs)
        parameters = (tensors.weight, tensors.bias), (tensors.second_weight, tensors.second_bias)
        layers = zip(chain.layers, parameters, strict=False)
        ctx.plans = [backward_plan(layer, chain.dtype, weight, bias) for layer, (weight, bias) in layers]
        ctx.norm, ctx.activation, ctx.are_tensors = chain.norm, chain.activation, [x is not None for x in tensors]
        ctx.set_materialize_grads(False)
        positions = chain.positions
        ctx.counts = None if positions is None else positions.counts
        ctx.save_for_backward(*saved, *(() if positions is None else (positions.cos, positions.sin)))
        return _results(chain, result, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_in_backward(*grads)
        needs, plan = ChainNeeds(*gradients_needed_now(ctx)), ctx.plans[0]
        tensors = ctx.saved_tensors  # which a checkpoint lets be read once
        saved, tensors_behind = Saved(*tensors[_NORM_END:_LAYER_END]), tensors[_LAYER_END:]
        needs_dx, needs_dh = needs.of_first_layer()
        source: GradientSource | None
        source, *grads_of_norm = grads  # None: nothing was computed from that result
        if ctx.counts is not None:
            source, grads_of_norm = gradient_of_heads(grads, ctx.counts, *tensors_behind), []
        dx = dw = db = dw2 = db2 = dgamma = dbeta = None
        if isinstance(source, Tensor) and len(ctx.plans) == 2:
            dx, dw, db, dw2, db2 = _gradients_of_two_layers(ctx, source, saved, tensors_behind, needs)
        elif source is not None and needs_dh:
            needs_of_layer = needs_dx, needs.weight, needs.bias
            dx, dw, db = gradients(cast_gradient(source, saved, plan, needs_of_layer), saved, plan, needs_of_layer)
        if source is not None:
            ctx.plans = [plan_for_next_pass(plan) if needs_dh else plan, *map(plan_for_next_pass, ctx.plans[1:])]
        dx = dx if plan.layer.rows.parts is None else _whole(dx, plan)
        dys = [dy for dy in (dx, *grads_of_norm) if dy is not None]
        if ctx.norm is not None and needs_dx and dys:
            has_beta = ctx.are_tensors[2]
            dy = dys[0] if len(dys) == 1 else dys[0] + dys[1]
            options = ctx.norm.kind, ctx.norm.zero_centered, has_beta
            dx, dgamma, dbeta = kernels.norm_backward(dy, *SavedNorm(*tensors[:_NORM_END]), *options)
            dbeta = dbeta if has_beta else None
        return dx, dgamma, dbeta, dw, db, dw2, db2, None


def _gradients_of_two_layers(
    ctx: Any, grad: Tensor, saved: Saved, saved_second: Sequence[Tensor | None], needs: ChainNeeds
) -> tuple[Tensor | None, ...]:
    """Return the gradients of (input, weight, bias) of the first layer and (weight, bias) of the second.

    ``saved_second``: the tensors that ``_behind_activation`` returned to be saved.
    """
    first_plan, plan = ctx.plans
    h, h_scale_inv, *tensors = saved_second
    second, recipe = Saved(*tensors), plan.layer.recipe
    needs_dx, needs_dh = needs.of_first_layer()
    needs_dw, needs_of_first = needs.second_weight, (needs_dx, needs.weight, needs.bias)
    scale_and_tile = h_scale_inv, (ALL, ALL) if recipe.saved is None else recipe.saved.tile
    if needs_dw and recipe.grad_weight is None:
        assert h is not None
        x = unrounded(CastSource(h, ctx.activation, None, *scale_and_tile), second.offsets)
        second = second._replace(x_TK=x.to(plan.dtype))
    recast = None
    if needs_dw and second.recast_scale is not None:
        recast = Recast(second.recast_scale, recipe.casts[INPUT].as_is.format.dtype)
    g = cast_gradient(grad, second, plan, (needs_dh, needs_dw, needs.second_bias))
    # with a Recast the first layer's cast makes the codes that dw2 reads: dw2 is computed after that
    dh, dw2, db2 = gradients(g, second, plan, (needs_dh, needs_dw and recast is None, needs.second_bias))
    g_first = None
    if dh is not None:
        source = CastSource(dh, ctx.activation, h, *scale_and_tile)
        g_first = cast_gradient(source, saved, first_plan, needs_of_first, recast)
        del source, dh  # codes alone are read from here on: the peak holds no dh beside dw2 and dx
    if recast is not None:
        codes = None
        if g_first is not None:
            codes, g_first.recast_codes = g_first.recast_codes, None  # so that ``del codes`` below frees them
        if codes is None:  # no cast of the first layer was needed
            assert h is not None
            codes = recast_alone(CastSource(h, ctx.activation), recast, recipe.may_pad)
        _, dw2, _ = gradients(g, second._replace(x_q=codes), plan, (False, True, False))
        del codes  # before the first layer's products
    of_first = (None, None, None) if g_first is None else gradients(g_first, saved, first_plan, needs_of_first)
    return *of_first, dw2, db2


def _whole(dx_TK: Tensor | None, plan: BackwardPlan) -> Tensor | None:
    """Return dx, summed over ranks where each has some rows of the weight; of this rank's tokens if x was gathered."""
    _, parts, wire = plan.layer.rows
    if dx_TK is None or parts is None or not parts.roles[WEIGHT]:  # experts on other ranks are whole there
        return dx_TK
    return summed(dx_TK, parts.group) if wire is None else scattered(dx_TK, wire)


def run_chain(tensors: ChainTensors, chain: Chain, leading: Sequence[int] | None = None) -> Any:
    """Return a chain's output [..., N] in ``chain.dtype`` for x [..., K], and the norm's [..., K] if ``returns_norm``.

    With ``chain.positions`` its output is queries, keys and values [B, heads, S, D].

    ``leading``: the result's dimensions before N, where x is this rank's tokens only; else None.
    """
    x = tensors.x
    tensors = tensors._replace(x=as_rows(x))
    if is_recorded(*tensors):
        results = _ChainFunction.apply(*tensors, chain)
    else:
        result, y, _ = _forward(tensors, chain, ChainNeeds(*[False] * len(ChainNeeds._fields)))
        results = _results(chain, result, y)
    if chain.positions is not None or x.ndim == 2:
        return results
    leading = x.shape[:-1] if leading is None else leading
    if not chain.returns_norm:
        return results.view(*leading, results.shape[-1])
    result, y = results
    return result.view(*leading, result.shape[-1]), y.view(x.shape)


class _ActivatedLinear(torch.autograd.Function):
    """activated_linear with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, layer: Layer, activation: str
    ) -> Tensor:
        needs_dgate, needs_dup, needs_dw, *_ = ctx.needs_input_grad
        h, needs = _joined(gate, up), (needs_dgate or needs_dup, needs_dw)
        y, saved = _behind_activation(h, activation, layer, (weight, bias), needs)
        ctx.plan, ctx.activation = backward_plan(layer, gate.dtype, weight, bias), activation
        ctx.are_tensors = True, up is not None, True, bias is not None
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_in_backward(*grads)
        plan, dtype, recipe = ctx.plan, ctx.plan.dtype, ctx.plan.layer.recipe
        h, h_scale_inv, *tensors_of_layer = ctx.saved_tensors
        saved = Saved(*tensors_of_layer)
        needs_dgate, needs_dup, needs_dw, needs_db = gradients_needed_now(ctx)
        needs = needs_dgate or needs_dup, needs_dw, needs_db
        ctx.plan = plan_for_next_pass(plan)
        if h_scale_inv is not None:  # to the dtype of torch's gradients of it; ``unrounded`` reads float32
            h = kernels.dequantize(h, h_scale_inv, recipe.saved.tile, dtype)
        if needs_dw and recipe.grad_weight is None:
            saved = saved._replace(x_TK=kernels.produced(h, ctx.activation, None).to(dtype))
        da, dw, db = gradients(cast_gradient(grads[0], saved, plan, needs), saved, plan, needs)
        dgate, dup = (None, None) if da is None else _gradients_of_h(da, h, ctx.activation)
        return dgate if needs_dgate else None, dup if needs_dup else None, dw, db, None, None


def _joined(gate: Tensor, up: Tensor | None) -> Tensor:
    return gate if up is None else torch.cat((gate, up), 1)


def _gradients_of_h(da: Tensor, h: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of (gate, up); of (h, None) where the activation is not gated."""
    name, gated = activation_of(activation)
    function = FUNCTIONS[name]
    if not gated:
        return function.gradient(da, h), None
    gate, up = h.chunk(2, dim=1)
    return function.gradient(da * up, gate), da * function.value(gate)


def activated_linear(
    gate: Tensor, up: Tensor | None, weight_NK: Tensor, bias: Tensor | None, layer: Layer, activation: str
) -> Tensor:
    """Return y [..., N] = activation(h) . weight^T + bias, of one dtype, bf16, fp16 or fp32.

    ``gate`` and ``up`` [..., K] are what a gated activation reads; without a gate ``gate`` is h, and ``up`` None.
    """
    rows, rows_of_up = as_rows(gate), None if up is None else as_rows(up)
    if is_recorded(gate, up, weight_NK, bias):
        y_TN = _ActivatedLinear.apply(rows, rows_of_up, weight_NK, bias, layer, activation)
    else:
        h, parameters = _joined(rows, rows_of_up), (weight_NK, bias)
        y_TN, _ = _behind_activation(h, activation, layer, parameters, (False, False))
    return y_TN if gate.ndim == 2 else y_TN.view(*gate.shape[:-1], y_TN.shape[1])
