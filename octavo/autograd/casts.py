"""From tensors to the pairs that products read: one cast for each role, whatever makes the tensor on the way.

Legend: T tokens, K in features, N out features; a suffix gives the layout, contracted dimension last. An operand is a
pair (qdata, scale_inv). ``activation``, where it is an argument, stands for the last arguments of the cast ops
(kernels/signatures.py): empty, or (name, preactivation, h_scale_inv, h_tile), and then what is cast is that activation
of the tensor, or that activation's gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.grouped import cast_groups, cast_matrices, scales_of_rows, transposed_codes
from octavo.autograd.shared_scales import Parts, scale_for, shared_amax
from octavo.granularity import ALL
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes
from octavo.scaling.delayed import State
from octavo.scaling.recipe import Cast, Recipe, RoleCasts
from octavo.tensor.pair import ForProducts, Operands, operands_of

INPUT, WEIGHT, GRAD_OUTPUT = range(3)  # rows of the delayed state

Pair = tuple[Tensor, Tensor]  # (qdata, scale_inv)
Activation = tuple[Any, ...]  # see above
Extras = tuple[Any, ...]  # (pad, column_sum, *activation): the last arguments of the cast ops


def as_rows(x: Tensor) -> Tensor:
    """[..., K] as [T, K]."""
    # not by -1, which is ambiguous for K = 0, nor by Size.numel(), which makes a traced size a constant
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def cast_to_send(casts: RoleCasts, as_is: bool, transposed: bool, exact: bool = False) -> Cast | None:
    """The cast that serves the layouts of a role that products read; None: rows are sent in high precision."""
    cast, second = casts.as_is, casts.transposed if transposed else None
    if cast is None or not (as_is or transposed) or (transposed and second is None):
        return None
    if second is not None and not casts.once and (exact or cast.is_delayed or second.is_delayed):
        return None  # a history needs the amax of what was never rounded
    return cast if cast.tile == (ALL, ALL) or cast.tile[0] == 1 else None


def cast_role(
    x_RC: Tensor,
    recipe: Recipe,
    role: int,
    as_is: bool,
    transposed: bool,
    state: State | None,
    column_sum: bool = False,
    activation: Activation = (),
    offsets: Tensor | None = None,
    parts: Parts | None = None,
) -> Operands:
    """Cast a role for the products that need it, reading it once where one kernel can.

    Args:
        x_RC: bf16, fp16 or fp32; a weight of groups is [G, N, K].
        recipe: whose casts of this role (INPUT, WEIGHT or GRAD_OUTPUT) are made; products in high precision need none.
        as_is, transposed: which of the two layouts are needed now.
        state: read by Delayed casts.
        column_sum: find it in the same read, if a cast reads ``x_RC`` as it lies.
        activation: see above; C is of what is cast.
        offsets: of rows in groups, see grouped.py; column sums are not found then.
        parts: how the role lies on several ranks, all of which then call this.

    Returns:
        pairs laid as their products want them: as_is [R, C'], transposed [C, R'], the contraction padded as the device
        wants it (transposed on some devices a strided view).
    """
    casts = recipe.casts[role]
    if isinstance(x_RC, ForProducts):
        return x_RC.read()
    extras = _pad(x_RC, recipe), column_sum, *activation
    first = casts.as_is if as_is else None
    second = casts.transposed if transposed else None
    if first is None or second is None or casts.once:
        cast = first or second
        layouts = first is not None, second is not None
        if cast is None:
            return Operands()
        return _cast(x_RC, cast, scale_for(x_RC, cast, state, role, activation, parts), role, extras, *layouts, offsets)
    scales = [scale_for(x_RC, cast, state, role, activation, parts) for cast in (first, second)]
    given = first.is_delayed or second.is_delayed or any(scale is not None for scale in scales)
    if not given and offsets is None and x_RC.ndim == 2:
        return _cast_two_scalings(x_RC, first, second, extras)
    a = _cast(x_RC, first, scales[0], role, extras, True, False, offsets)
    b = _cast(x_RC, second, scales[1], role, (extras[0], False, *activation), False, True, offsets)
    return a._replace(transposed=b.transposed, amax=b.amax if a.amax is None else a.amax)


def operands_of_codes(
    q_RC: Tensor,
    scale_inv: Tensor,
    recipe: Recipe,
    role: int,
    transposed: bool,
    amax: Tensor | None,
    offsets: Tensor | None = None,
) -> Operands:
    """The operands of rows of which there are the codes alone, as the role's first cast has written them.

    Where one cast serves both layouts these are both; else the transposed one is cast from the values of the codes.
    """
    casts = recipe.casts[role]
    cast, second = casts.as_is, casts.transposed if transposed else None
    assert cast is not None
    found = operands_of(q_RC, scale_inv, recipe.pads, second is not None and casts.once and offsets is None)
    laid = found.transposed if second is not None else None
    if second is not None and not casts.once:
        scales = (scale_inv, cast.tile) if offsets is None else scales_of_rows(scale_inv, cast.tile, offsets, len(q_RC))
        values = kernels.dequantize(q_RC, *scales, torch.float32)
        laid = cast_role(values, recipe, role, False, True, None, offsets=offsets).transposed
    elif second is not None and offsets is not None and needs_transposed_codes(q_RC.device):
        laid = transposed_codes(q_RC, offsets, _pad(q_RC, recipe)), scale_inv.t()
    return Operands(found.as_is, laid, amax if cast.is_delayed else None)


def _pad(x: Tensor, recipe: Recipe) -> int:
    """The multiple that both operands of a product are padded to along the contraction."""
    return contraction_multiple(x.device) if recipe.pads else 1


def _cast(
    x_RC: Tensor,
    cast: Cast,
    scale: Tensor | None,
    role: int,
    extras: Extras,
    as_is: bool,
    transposed: bool,
    offsets: Tensor | None = None,
) -> Operands:
    """Cast by one scaling, in one layout or both; with the amax, if the cast is Delayed.

    ``cast`` is that of ``x_RC`` as it lies, unless only the transposed layout is needed.
    """
    pad, column_sum, *activation = extras
    if x_RC.ndim == 3:
        return cast_matrices(x_RC, scale, role, cast, (as_is, transposed), pad)
    if offsets is not None:
        return cast_groups(x_RC, offsets, scale, role, cast, (as_is, transposed), (pad, *activation))
    lays = transposed and needs_transposed_codes(x_RC.device)
    if lays and not as_is and not activation:  # the transposed codes alone, without column sums
        laid = _cast(x_RC.t(), cast, scale, role, (pad, False), True, False)
        return Operands(None, laid.as_is, laid.amax)
    how = cast.arguments if as_is else cast.arguments_transposed
    q_RC, q_CR, scale_inv, amax, sums = kernels.cast(x_RC, scale, role, *how, lays, *extras)
    whole = cast.tile == (ALL, ALL)  # one scale is its own transpose
    return Operands(
        (q_RC, scale_inv) if as_is else None,
        (q_CR if lays else q_RC.t(), scale_inv if whole else scale_inv.t()) if transposed else None,
        amax if cast.is_delayed else None,
        sums if column_sum else None,
    )


def _cast_two_scalings(x_RC: Tensor, first: Cast, second: Cast, extras: Extras) -> Operands:
    lays = needs_transposed_codes(x_RC.device)
    q_RC, scale_inv, q2, scale_inv2, sums = kernels.cast_two_scalings(
        x_RC, *first.arguments, *second.arguments_transposed, lays, *extras
    )
    pair = (q2, scale_inv2) if lays else (q2.t(), scale_inv2.t())
    return Operands((q_RC, scale_inv), pair, None, sums if extras[1] else None)


def cast_grad_output(
    grad_TN: Tensor,
    recipe: Recipe,
    as_is: bool,
    transposed: bool,
    state: State | None,
    forward_amax: tuple[Tensor | None, Tensor | None] | None,
    column_sum: bool,
    activation: Activation = (),
    offsets: Tensor | None = None,
    parts: Parts | None = None,
) -> Operands:
    """Cast grad_output and, given the amax of forward's (input, weight), commit the delayed state with all three."""
    casts = recipe.grad_output_casts
    how = as_is, transposed, state, column_sum, activation, offsets, parts
    if state is None or forward_amax is None:
        return cast_role(grad_TN, recipe, GRAD_OUTPUT, *how)
    amax_input, amax_weight = forward_amax
    update = recipe.delayed_update
    cast = casts.as_is or casts.transposed
    apart = offsets is not None or parts is not None
    if cast is not None and casts.once and cast.is_delayed and (as_is or transposed) and not apart:
        lays = transposed and needs_transposed_codes(grad_TN.device)
        # in a first layer only the transposed codes are needed
        alone = lays and not as_is and not column_sum and not activation
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
            *activation,
        )
        if alone:
            return Operands(None, (q, scale_inv))
        return Operands((q, scale_inv), (q_t if lays else q.t(), scale_inv), None, sums if column_sum else None)
    operands = cast_role(grad_TN, recipe, GRAD_OUTPUT, *how)
    kernels.delayed_update(*state, *shared_amax((amax_input, amax_weight, operands.amax), parts), *update)
    return operands


class Norm(NamedTuple):
    """Which norm, without its parameters: kind is "layer_norm" or "rms_norm"."""

    kind: str
    eps: float
    zero_centered: bool


def cast_norm(
    x_TK: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    norm: Norm,
    recipe: Recipe,
    transposed: bool,
    state: State | None,
    keep: bool,
) -> tuple[Operands, Tensor | None, Tensor, Tensor]:
    """Normalise x [T, K] and cast the result as the input of products, without writing it in between.

    Gamma and beta are [K]. The recipe's ``output`` must be in FP8; ``transposed``: grad_weight will need the input.

    Returns:
        the pairs, the norm's output y in high precision if it is to be kept, and its rows' mean and rstd.
    """
    casts, pad = recipe.input_casts, _pad(x_TK, recipe)
    first, second = casts.as_is, casts.transposed if transposed else None
    assert first is not None
    lays = needs_transposed_codes(x_TK.device)
    apart = second is not None and not casts.once
    if second is not None and apart and not first.is_delayed and not second.is_delayed:
        q, scale_inv, q2, scale_inv2, mean, rstd, y = kernels.norm_cast_two_scalings(
            x_TK, gamma, beta, *norm, *first.arguments, *second.arguments_transposed, lays, pad, keep
        )
        pair = (q2, scale_inv2) if lays else (q2.t(), scale_inv2.t())
        return Operands((q, scale_inv), pair), y if keep else None, mean, rstd
    delayed_scale = scale_for(x_TK, first, state, INPUT, (), None)
    lays = lays and second is not None and not apart
    q, q_t, scale_inv, amax, mean, rstd, y = kernels.norm_cast(
        x_TK, gamma, beta, *norm, delayed_scale, INPUT, *first.arguments, lays, pad, keep or apart
    )
    found, laid = amax if first.is_delayed else None, None
    if second is not None and apart:  # one is Delayed, the other not
        other_scale = scale_for(y, second, state, INPUT, (), None)
        _, laid, other_amax, *_ = _cast(y, second, other_scale, INPUT, (pad, False), False, True)
        found = other_amax if found is None else found
    elif second is not None:
        laid = q_t if lays else q.t(), scale_inv.t()
    return Operands((q, scale_inv), laid, found), y if keep else None, mean, rstd
