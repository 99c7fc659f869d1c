"""The three products of a linear layer, written once for every module and recipe.

    output       y_TN  = input_TK . weight_NK^T        forward
    grad_input   dx_TK = grad_output_TN . weight_KN^T  backward
    grad_weight  dW_NK = grad_output_NT . input_KT^T   backward

Legend: T tokens, K in features, N out features; a suffix gives the layout, contracted dimension last. An operand is a
pair (qdata, scale_inv); what forward saves for backward is the pair itself, never a copy, never the recipe's scale:
however the recipe moves on, the pair reads back as it was written.

Delayed state is committed by backward's cast of grad_output, see scaling/delayed.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.errors import HigherOrderGradientError
from octavo.granularity import PerBlock, Tile
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes
from octavo.scaling.recipe import Cast, Delayed, Recipe

INPUT, WEIGHT, GRAD_OUTPUT = range(3)  # rows of the delayed state

Pair = tuple[Tensor, Tensor]  # (qdata, scale_inv)


class Operands(NamedTuple):
    """A role's pairs.

    ``amax`` [1, 1] fp32 is what a Delayed cast found; None where nothing was cast that way. ``column_sum`` [C] of x's
    dtype, where it was asked for and the cast could find it. ``fresh``: just cast, not cached, so that amax is still to
    be rolled into the history.
    """

    as_is: Pair | None = None
    transposed: Pair | None = None
    amax: Tensor | None = None
    column_sum: Tensor | None = None
    fresh: bool = True


class State(NamedTuple):
    """A module's delayed state: scale [3] and amax history [3, H], float32."""

    scale: Tensor
    amax_history: Tensor


def cast_role(
    x_RC: Tensor,
    recipe: Recipe,
    role: int,
    as_is: bool,
    transposed: bool,
    state: State | None,
    column_sum: bool = False,
) -> Operands:
    """Cast a role for the products that need it, reading it once where one kernel can.

    Args:
        x_RC: bf16, fp16 or fp32.
        recipe: whose casts of this role are made; a product in high precision needs none.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        as_is, transposed: which of the two layouts are needed now.
        state: read by Delayed casts.
        column_sum: find it in the same read, if ``as_is`` is cast.

    Returns:
        pairs laid as their products want them: as_is [R, C'], transposed [C, R'], the contraction padded as the device
        wants it (transposed on some devices a strided view).
    """
    casts = recipe.casts[role]
    extras = _pad(x_RC, recipe), column_sum
    first = casts.as_is if as_is else None
    second = casts.transposed if transposed else None
    if first is not None and second is not None:
        if casts.once:
            return _cast_once(x_RC, first, state, role, extras)
        if not _is_delayed(first) and not _is_delayed(second):
            return _cast_two_scalings(x_RC, first, second, extras)
        a, b = _cast(x_RC, first, state, role, extras), _cast_transposed(x_RC, second, state, role, extras[0])
        return a._replace(transposed=b.transposed, amax=b.amax if a.amax is None else a.amax)
    if first is not None:
        return _cast(x_RC, first, state, role, extras)
    if second is not None:
        return _cast_transposed(x_RC, second, state, role, extras[0])
    return Operands()


def _pad(x: Tensor, recipe: Recipe) -> int:
    """The multiple that both operands of a product are padded to along the contraction."""
    return contraction_multiple(x.device) if recipe.pads else 1


def _is_delayed(cast: Cast) -> bool:
    return isinstance(cast.rule, Delayed)


def _cast_arguments(x: Tensor, cast: Cast, state: State | None, role: int, tile: Tile) -> tuple[Any, ...]:
    """What ``octavo::cast`` and ``octavo::cast_transpose`` take first."""
    delayed_scale = state.scale if state is not None and _is_delayed(cast) else None
    return x, delayed_scale, role, cast.format.dtype, tile, cast.power_of_two, cast.margin


def _cast(
    x: Tensor, cast: Cast, state: State | None, role: int, extras: tuple[int, bool], tile: Tile | None = None
) -> Operands:
    """Cast ``x`` as it lies, by the cast's tile or another; with its amax, if the cast is Delayed."""
    q, scale_inv, amax, sums = kernels.cast(*_cast_arguments(x, cast, state, role, tile or cast.tile), *extras)
    return Operands((q, scale_inv), None, amax if _is_delayed(cast) else None, sums if extras[1] else None)


def _cast_transposed(x_RC: Tensor, cast: Cast, state: State | None, role: int, pad: int) -> Operands:
    if needs_transposed_codes(x_RC.device):
        laid = _cast(x_RC.t(), cast, state, role, (pad, False))
        return Operands(None, laid.as_is, laid.amax)
    laid = _cast(x_RC, cast, state, role, (pad, False), cast.granularity.transposed().tile)
    q, scale_inv = laid.as_is  # type: ignore[misc]
    return Operands(None, (q.t(), scale_inv.t()), laid.amax)


def _cast_once(x_RC: Tensor, cast: Cast, state: State | None, role: int, extras: tuple[int, bool]) -> Operands:
    if not needs_transposed_codes(x_RC.device):
        laid = _cast(x_RC, cast, state, role, extras)
        q_RC, scale_inv = laid.as_is  # type: ignore[misc]
        return laid._replace(transposed=(q_RC.t(), scale_inv.t()))
    q_RC, q_CR, scale_inv, amax, sums = kernels.cast_transpose(
        *_cast_arguments(x_RC, cast, state, role, cast.tile), *extras
    )
    return Operands(
        (q_RC, scale_inv),
        (q_CR, scale_inv.t()),
        amax if _is_delayed(cast) else None,
        sums if extras[1] else None,
    )


def _cast_two_scalings(x_RC: Tensor, first: Cast, second: Cast, extras: tuple[int, bool]) -> Operands:
    transpose = needs_transposed_codes(x_RC.device)
    q_RC, scale_inv, q2, scale_inv2, sums = kernels.cast_two_scalings(
        x_RC,
        first.format.dtype,
        first.tile,
        first.power_of_two,
        first.margin,
        second.format.dtype,
        second.granularity.transposed().tile,
        second.power_of_two,
        second.margin,
        transpose,
        *extras,
    )
    second_pair = (q2, scale_inv2) if transpose else (q2.t(), scale_inv2.t())
    return Operands((q_RC, scale_inv), second_pair, None, sums if extras[1] else None)


def _cast_grad_output(
    grad_TN: Tensor,
    recipe: Recipe,
    as_is: bool,
    transposed: bool,
    state: State | None,
    forward_amax: tuple[Tensor | None, Tensor | None] | None,
    column_sum: bool,
) -> Operands:
    """Cast grad_output and, given the amax of forward's (input, weight), commit the delayed state with all three."""
    casts = recipe.grad_output_casts
    if state is None or forward_amax is None:
        return cast_role(grad_TN, recipe, GRAD_OUTPUT, as_is, transposed, state, column_sum)
    amax_input, amax_weight = forward_amax
    update = recipe.delayed_update
    cast = casts.as_is or casts.transposed
    if cast is not None and casts.once and _is_delayed(cast) and (as_is or transposed):
        lays = transposed and needs_transposed_codes(grad_TN.device)
        alone = lays and not as_is and not column_sum  # in a first layer only the transposed codes are needed
        q, q_t, scale_inv, sums = kernels.cast_and_commit(
            grad_TN.t() if alone else grad_TN,
            *state,
            amax_input,
            amax_weight,
            cast.format.dtype,
            cast.power_of_two,
            cast.margin,
            *update,
            lays and not alone,
            _pad(grad_TN, recipe),
            column_sum,
        )
        if alone:
            return Operands(None, (q, scale_inv))
        return Operands((q, scale_inv), (q_t if lays else q.t(), scale_inv), None, sums if column_sum else None)
    operands = cast_role(grad_TN, recipe, GRAD_OUTPUT, as_is, transposed, state, column_sum)
    kernels.delayed_update(*state, amax_input, amax_weight, operands.amax, *update)
    return operands


def _matmul(
    a: Pair, a_cast: Cast, b: Pair, b_cast: Cast, bias: Tensor | None, dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    return kernels.matmul(*a, a_cast.tile, *b, b_cast.tile, bias, dtype, fast_accum)


def _output(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None, recipe: Recipe, x: Operands, w: Operands) -> Tensor:
    if recipe.output is None:
        return F.linear(x_TK, weight_NK.to(x_TK.dtype), None if bias is None else bias.to(x_TK.dtype))
    assert x.as_is is not None and w.as_is is not None
    input_cast, weight_cast = recipe.output
    return _matmul(x.as_is, input_cast, w.as_is, weight_cast, bias, x_TK.dtype, fast_accum=True)


def _packed(pair: Pair | None, cast: Cast | None) -> tuple[Tensor | None, Tensor | None]:
    """A pair to save for backward: block scales that are powers of two as E8M0, exact in a quarter of the bytes."""
    if pair is None or cast is None:
        return None, None
    q, scale_inv = pair
    blocks = isinstance(cast.granularity, PerBlock)
    return q, scale_inv.to(torch.float8_e8m0fnu) if blocks and cast.power_of_two else scale_inv


class _Linear(torch.autograd.Function):
    """y = x . W^T + b with a recipe's products."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias: Tensor | None,
        weight: Operands,
        recipe: Recipe,
        state: State | None,
        training: bool,
    ) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad[:3]
        x = cast_role(x_TK, recipe, INPUT, True, needs_dw, state)
        ctx.recipe, ctx.state, ctx.commits, ctx.rolls_weight = recipe, state, training, weight.fresh
        ctx.dtypes = x_TK.dtype, weight_NK.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(
            x_TK if needs_dw and recipe.grad_weight is None else None,
            *_packed(x.transposed if needs_dw else None, recipe.input_casts.transposed),
            weight_NK if needs_dx and recipe.grad_input is None else None,
            *_packed(weight.transposed if needs_dx else None, recipe.weight_casts.transposed),
            x.amax,
            weight.amax,  # not rolled but saved all the same: a checkpoint counts what its second forward saves
        )
        return _output(x_TK, weight_NK, bias, recipe, x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise HigherOrderGradientError(
                "create_graph=True asks for second derivatives, which FP8 products don't have; use "
                "octavo.set_recipe(model, octavo.recipes.high_precision()) for that pass"
            )
        (grad_TN,) = grads
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        x_TK, x_q, x_scale_inv, weight_NK, w_q, w_scale_inv, x_amax, w_amax = ctx.saved_tensors
        recipe, (x_dtype, weight_dtype, bias_dtype) = ctx.recipe, ctx.dtypes
        amax = (x_amax, w_amax if ctx.rolls_weight else None) if ctx.commits else None
        g = _cast_grad_output(grad_TN, recipe, needs_dx, needs_dw, ctx.state, amax, needs_db)
        dx_TK = dw_NK = db_N = None
        if needs_dx:
            if recipe.grad_input is None:
                dx_TK = torch.mm(grad_TN, weight_NK.to(grad_TN.dtype))
            else:
                assert g.as_is is not None
                g_cast, w_cast = recipe.grad_input
                weight = w_q, w_scale_inv.to(torch.float32)
                dx_TK = _matmul(g.as_is, g_cast, weight, w_cast, None, x_dtype)
        if needs_dw:
            if recipe.grad_weight is None:
                dw_NK = torch.mm(grad_TN.t(), x_TK).to(weight_dtype)
            else:
                assert g.transposed is not None
                g_cast, x_cast = recipe.grad_weight
                x = x_q, x_scale_inv.to(torch.float32)
                dw_NK = _matmul(g.transposed, g_cast, x, x_cast, None, x_dtype).to(weight_dtype)
        if needs_db:
            db_N = (grad_TN.sum(0) if g.column_sum is None else g.column_sum).to(bias_dtype)
        return dx_TK, dw_NK, db_N, None, None, None, None


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    weight: Operands,
    recipe: Recipe,
    state: State | None,
    training: bool,
) -> Tensor:
    """y = x . weight^T + bias by a recipe's products.

    Args:
        x: [..., K] bf16, fp16 or fp32: also the dtype of the result.
        weight_NK: the weight that gradients flow to, any of those dtypes.
        bias: [N] or None.
        weight: the weight's operands, made by ``cast_role``.
        recipe: at least one product in FP8.
        state: delayed state where the recipe is delayed.
        training: whether backward commits the delayed state.

    Returns:
        [..., N], dtype of x.
    """
    x_TK = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])  # -1 is ambiguous for K = 0
    if torch.is_grad_enabled() and (x.requires_grad or weight_NK.requires_grad or _requires_grad(bias)):
        y_TN = _Linear.apply(x_TK, weight_NK, bias, weight, recipe, state, training)
    else:
        operands = cast_role(x_TK, recipe, INPUT, True, False, state)
        y_TN = _output(x_TK, weight_NK, bias, recipe, operands, weight)
    return y_TN if x.ndim == 2 else y_TN.view(*x.shape[:-1], weight_NK.shape[0])


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad
