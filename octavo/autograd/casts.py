"""From tensors to the pairs that products read: one cast for each role, whatever makes the tensor on the way.

Legend: T tokens, K in features, N out features; a suffix gives the layout, contracted dimension last. An operand is a
pair (qdata, scale_inv). ``activation``, where it is an argument, stands for the last arguments of the cast ops
(kernels/signatures.py): empty, or (name, preactivation, h_scale_inv, h_tile), and then what is cast is that activation
of the tensor, or that activation's gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from octavo import kernels
from octavo.granularity import ALL, Tile
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes
from octavo.scaling.recipe import Cast, Delayed, Recipe
from octavo.tensor.pair import Operands

INPUT, WEIGHT, GRAD_OUTPUT = range(3)  # rows of the delayed state

Pair = tuple[Tensor, Tensor]  # (qdata, scale_inv)
Activation = tuple[Any, ...]  # see above
Extras = tuple[Any, ...]  # (pad, column_sum, *activation): the last arguments of the cast ops


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
    activation: Activation = (),
) -> Operands:
    """Cast a role for the products that need it, reading it once where one kernel can.

    Args:
        x_RC: bf16, fp16 or fp32.
        recipe: whose casts of this role are made; a product in high precision needs none.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        as_is, transposed: which of the two layouts are needed now.
        state: read by Delayed casts.
        column_sum: find it in the same read, if a cast reads ``x_RC`` as it lies.
        activation: see above; C is of what is cast.

    Returns:
        pairs laid as their products want them: as_is [R, C'], transposed [C, R'], the contraction padded as the device
        wants it (transposed on some devices a strided view).
    """
    casts = recipe.casts[role]
    extras = _pad(x_RC, recipe), column_sum, *activation
    first = casts.as_is if as_is else None
    second = casts.transposed if transposed else None
    if first is not None and second is not None:
        if casts.once:
            return _cast_once(x_RC, first, state, role, extras)
        if not _is_delayed(first) and not _is_delayed(second):
            return _cast_two_scalings(x_RC, first, second, extras)
        a = _cast(x_RC, first, state, role, extras)
        b = _cast_transposed(x_RC, second, state, role, (extras[0], False, *activation))
        return a._replace(transposed=b.transposed, amax=b.amax if a.amax is None else a.amax)
    if first is not None:
        return _cast(x_RC, first, state, role, extras)
    if second is not None:
        return _cast_transposed(x_RC, second, state, role, extras)
    return Operands()


def _pad(x: Tensor, recipe: Recipe) -> int:
    """The multiple that both operands of a product are padded to along the contraction."""
    return contraction_multiple(x.device) if recipe.pads else 1


def _is_delayed(cast: Cast) -> bool:
    return isinstance(cast.rule, Delayed)


def _cast_arguments(x: Tensor, cast: Cast, state: State | None, role: int, tile: Tile) -> tuple[Any, ...]:
    """What ``octavo::cast`` takes first."""
    delayed_scale = state.scale if state is not None and _is_delayed(cast) else None
    return x, delayed_scale, role, cast.format.dtype, tile, cast.power_of_two, cast.margin


def _cast(x: Tensor, cast: Cast, state: State | None, role: int, extras: Extras, tile: Tile | None = None) -> Operands:
    """Cast ``x`` as it lies, by the cast's tile or another; with its amax, if the cast is Delayed."""
    q, _, scale_inv, amax, sums = kernels.cast(
        *_cast_arguments(x, cast, state, role, tile or cast.tile), False, *extras
    )
    return Operands((q, scale_inv), None, amax if _is_delayed(cast) else None, sums if extras[1] else None)


def _cast_transposed(x_RC: Tensor, cast: Cast, state: State | None, role: int, extras: Extras) -> Operands:
    """Cast for the transposed layout alone; its column sums too, where the cast reads x as it lies."""
    pad, column_sum, *activation = extras
    lays = needs_transposed_codes(x_RC.device)
    if lays and not activation:
        laid = _cast(x_RC.t(), cast, state, role, (pad, False))
        return Operands(None, laid.as_is, laid.amax)
    tile = cast.granularity.transposed().tile
    if not lays:
        laid = _cast(x_RC, cast, state, role, extras, tile)
        q, scale_inv = laid.as_is  # type: ignore[misc]
        return Operands(None, (q.t(), scale_inv.t()), laid.amax, laid.column_sum)
    arguments = _cast_arguments(x_RC, cast, state, role, tile)
    _, q_CR, scale_inv, amax, sums = kernels.cast(*arguments, True, *extras)
    return Operands(None, (q_CR, scale_inv.t()), amax if _is_delayed(cast) else None, sums if column_sum else None)


def _cast_once(x_RC: Tensor, cast: Cast, state: State | None, role: int, extras: Extras) -> Operands:
    if not needs_transposed_codes(x_RC.device):
        laid = _cast(x_RC, cast, state, role, extras)
        q_RC, scale_inv = laid.as_is  # type: ignore[misc]
        whole = cast.tile == (ALL, ALL)  # one scale is its own transpose
        return Operands(laid.as_is, (q_RC.t(), scale_inv if whole else scale_inv.t()), laid.amax, laid.column_sum)
    arguments = _cast_arguments(x_RC, cast, state, role, cast.tile)
    q_RC, q_CR, scale_inv, amax, sums = kernels.cast(*arguments, True, *extras)
    return Operands(
        (q_RC, scale_inv),
        (q_CR, scale_inv.t()),
        amax if _is_delayed(cast) else None,
        sums if extras[1] else None,
    )


def _cast_two_scalings(x_RC: Tensor, first: Cast, second: Cast, extras: Extras) -> Operands:
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


def cast_grad_output(
    grad_TN: Tensor,
    recipe: Recipe,
    as_is: bool,
    transposed: bool,
    state: State | None,
    forward_amax: tuple[Tensor | None, Tensor | None] | None,
    column_sum: bool,
    activation: Activation = (),
) -> Operands:
    """Cast grad_output and, given the amax of forward's (input, weight), commit the delayed state with all three."""
    casts = recipe.grad_output_casts
    if state is None or forward_amax is None:
        return cast_role(grad_TN, recipe, GRAD_OUTPUT, as_is, transposed, state, column_sum, activation)
    amax_input, amax_weight = forward_amax
    update = recipe.delayed_update
    cast = casts.as_is or casts.transposed
    if cast is not None and casts.once and _is_delayed(cast) and (as_is or transposed):
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
    operands = cast_role(grad_TN, recipe, GRAD_OUTPUT, as_is, transposed, state, column_sum, activation)
    kernels.delayed_update(*state, amax_input, amax_weight, operands.amax, *update)
    return operands


class Norm(NamedTuple):
    """Which norm, without its parameters: kind is "layer_norm" or "rms_norm"."""

    kind: str
    eps: float
    zero_centered: bool


class Normalised(NamedTuple):
    """A norm's output y: its pairs, in high precision where it was asked for, and the statistics of its input."""

    operands: Operands
    y: Tensor | None
    mean: Tensor
    rstd: Tensor


def cast_norm(
    x_TK: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    norm: Norm,
    recipe: Recipe,
    transposed: bool,
    state: State | None,
    keep: bool,
) -> Normalised:
    """Normalise x [T, K] and cast the result as the input of products, without writing it in between.

    Args:
        x_TK: bf16, fp16 or fp32.
        gamma, beta: [K]; beta may be None.
        norm: which.
        recipe: whose casts of the input are made; ``output`` must be in FP8.
        transposed: whether grad_weight will need it.
        state: read by Delayed casts.
        keep: return y too.
    """
    casts, pad = recipe.input_casts, _pad(x_TK, recipe)
    first, second = casts.as_is, casts.transposed if transposed else None
    assert first is not None
    arguments = x_TK, gamma, beta, *norm
    cast = first.format.dtype, first.tile, first.power_of_two, first.margin
    lays = needs_transposed_codes(x_TK.device)
    if second is not None and not casts.once and not _is_delayed(first) and not _is_delayed(second):
        tile = second.granularity.transposed().tile
        other = second.format.dtype, tile, second.power_of_two, second.margin
        q, scale_inv, q2, scale_inv2, mean, rstd, y = kernels.norm_cast_two_scalings(
            *arguments, *cast, *other, lays, pad, keep
        )
        pair = (q2, scale_inv2) if lays else (q2.t(), scale_inv2.t())
        return Normalised(Operands((q, scale_inv), pair), y if keep else None, mean, rstd)
    apart = second is not None and not casts.once  # one is Delayed, the other not
    delayed_scale = state.scale if state is not None and _is_delayed(first) else None
    q, q_t, scale_inv, amax, mean, rstd, y = kernels.norm_cast(
        *arguments, delayed_scale, INPUT, *cast, lays and second is not None and not apart, pad, keep or apart
    )
    operands = Operands((q, scale_inv), None, amax if _is_delayed(first) else None)
    if second is not None and apart:
        laid = _cast_transposed(y, second, state, INPUT, (pad, False))
        operands = operands._replace(
            transposed=laid.transposed, amax=laid.amax if operands.amax is None else operands.amax
        )
    elif second is not None:
        operands = operands._replace(transposed=(q_t if lays else q.t(), scale_inv.t()))
    return Normalised(operands, y if keep else None, mean, rstd)
