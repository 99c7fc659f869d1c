"""Casts of tensors to the pairs that products read, one for each role; activations and norms are computed on the way.

Legend: T tokens, K in features, N out features; a suffix gives the layout, contracted dimension last. An operand is a
pair (qdata, scale_inv). A source is what is cast: a tensor itself, an activation or its gradient (CastSource), a norm
(NormSource), or the gradients of heads that rotary positions turned (RotaryHeads).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.grouped import cast_matrices, scales_of_rows, transposed_codes
from octavo.autograd.rows import DENSE, Parts, Rows
from octavo.autograd.shared_scales import AnySource, scale_for, shared_amax
from octavo.granularity import ALL, MX
from octavo.kernels.arguments import CastSource, RotaryHeads, have_e8m0_blocks
from octavo.kernels.devices import reads_swizzled
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes
from octavo.numerics import E8M0
from octavo.scaling.delayed import State
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, WEIGHT, Cast, Recipe, RoleCasts
from octavo.tensor.pair import NormResults, Operands, OperandsFacade, operands_of

CodesAndScale = tuple[Tensor, Tensor]  # (qdata, scale_inv)
# (the tensor that the cast op reads, its arguments of an activation, by place, its other options, by name, which nobody
# changes); a plain tuple costs each cast a call less than a NamedTuple
_OpInput = tuple[Tensor, Sequence[Any], Mapping[str, Any]]
ForwardAmax = tuple[Tensor | None, Tensor | None]  # of the input and of the weight; None where a role was not cast


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., K] as [T, K]."""
    # not by -1, which is ambiguous for K = 0, nor by Size.numel(), which makes a traced size a constant
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def cast_to_send(casts: RoleCasts, as_is: bool, transposed: bool, exact: bool = False) -> Cast | None:
    """Return the cast that serves the layouts of a role that products read; None: rows are sent in high precision.

    ``exact``: None too where two scalings differ, as one product would else read a cast of the codes' values.
    """
    cast, second = casts.as_is, casts.transposed if transposed else None
    if cast is None or not (as_is or transposed) or (transposed and second is None):
        return None
    if second is not None and not casts.coincide and (exact or cast.is_delayed or second.is_delayed):
        return None  # a history needs the amax of values that were not rounded
    return cast if cast.has_one_scale or (cast.tile[0] == 1 and not cast.is_packed) else None


class Recast(NamedTuple):
    """A cast that forward has made of an activation, and that backward makes again instead of saving the codes.

    Forward returns the cast's scale [1] (``CastRequest.keep_scale``, ``Operands.recast_scale``) and saves it alone
    (``Saved.recast_scale``). Backward casts the activation's gradient, which reads the activation's input anyway: the
    same cast (``CastRequest.recast``) writes the activation's codes again, by that scale (``Operands.recast_codes``).
    """

    scale: Tensor
    dtype: torch.dtype  # of the codes


class CastRequest(NamedTuple):
    """The casts of a role that products need now, and what is to be returned beside the pairs.

    Attributes:
        recipe: it says how the role is cast; products in high precision need no cast.
        role: INPUT, WEIGHT or GRAD_OUTPUT.
        as_is, transposed: which of the two layouts are needed now; their contraction is padded as the device wants it.
        column_sum: add up columns in the same read, where the layout as it lies is cast; never of rows in groups.
        keep_norm: whether a norm's result y is returned too, in high precision.
        keep_scale: whether the scale of an activation's one cast is returned too, see Recast.
        only_products: only products read the result: scales may be in the device's swizzled order.
        recast: what the cast of an activation's gradient also casts, to transposed codes for the next layer's
            grad_weight.
    """

    recipe: Recipe
    role: int
    as_is: bool
    transposed: bool
    column_sum: bool = False
    keep_norm: bool = False
    keep_scale: bool = False
    only_products: bool = False
    recast: Recast | None = None


def cast_role(source: AnySource, request: CastRequest, state: State | None, rows: Rows = DENSE) -> Operands:
    """Cast a role for the products that need it, reading it once where one kernel can.

        products in FP8 that need it             casts
        none                                     none
        one; or two, by one scaling              one: ``_cast``
        two, by two Dynamic scalings             two from one read: ``_cast_by_two_scalings``
        two, by two scalings that are Delayed    one after the other: ``_cast_twice``
             or shared by ranks, or in groups

    Args:
        source: bf16, fp16 or fp32 [R, C], or what is computed from such; a weight of groups is [G, N, K]. A facade of
            pairs is not cast: it is returned as the operands that it has.
        request: which casts are needed, and by which recipe.
        state: read by Delayed casts.
        rows: how the role lies; ranks that have shards of it all call this.
    """
    if isinstance(source, OperandsFacade):
        return source.read()
    role, casts, parts = request.role, request.recipe.casts[request.role], rows.parts
    cast = casts.as_is if request.as_is else None
    cast_t = casts.transposed if request.transposed else None
    if (one_cast := cast or cast_t) is None:
        return Operands()
    op_input = _op_input(source, request, rows, one_cast, cast_t or one_cast)
    if cast is None or cast_t is None or casts.coincide:
        has_scale = one_cast.is_delayed or parts is not None
        scale = scale_for(source, one_cast, state, role, parts) if has_scale else None
        return _cast(op_input, one_cast, scale, request, (cast is not None, cast_t is not None))
    scale = scale_t = None
    is_dynamic = not (cast.is_delayed or cast_t.is_delayed)
    if parts is not None or not is_dynamic:
        scale = scale_for(source, cast, state, role, parts)
        shares_amax = cast.is_packed and cast_t.is_packed and (cast.rule, cast.margin) == (cast_t.rule, cast_t.margin)
        scale_t = scale if shares_amax else scale_for(source, cast_t, state, role, parts)  # ranks share an amax once
    if is_dynamic and scale is None and scale_t is None and rows.offsets is None and op_input[0].ndim != 3:
        return _cast_by_two_scalings(op_input, cast, cast_t, request)
    return _cast_twice(op_input, (cast, cast_t), (scale, scale_t), request)


def _op_input(source: AnySource, request: CastRequest, rows: Rows, *casts: Cast) -> _OpInput:
    """Return the op's arguments that say what of x is cast and how it lies, and what is returned beside the pairs."""
    options: dict[str, Any] = {}
    activation: Sequence[Any] = ()
    if isinstance(source, Tensor):
        x = source
    elif isinstance(source, CastSource):
        x, *activation = source
        if request.keep_scale:
            options["keep"] = True
        if request.recast is not None:
            options["recast_scale"], options["recast_dtype"] = request.recast
            options["recast_transposed"] = needs_transposed_codes(x.device)
    elif isinstance(source, RotaryHeads):
        x, options["k"], options["v"], options["cos"], options["sin"], _ = source
    else:
        options = source._asdict() | {"keep": request.keep_norm}
        x = options.pop("x")
    if rows.offsets is not None:
        options["offsets"] = rows.offsets
    elif rows.parts is not None:
        if request.recipe.has_e2m1:
            options["place"] = _place(source.shape, request.role, rows.parts)
    elif request.only_products and casts[0].scale_inv_dtype is E8M0 and _swizzles(source.shape, x, casts):
        options["swizzle"] = True
    return x, activation, options


def _place(shape: Sequence[int], role: int, parts: Parts) -> tuple[int, int]:
    """Return the row and column at which this rank's part [R, C] of a role begins in the whole matrix."""
    if not parts.roles[role]:
        return 0, 0
    # ranks that have columns of grad_output have rows of the weight; else they have tokens
    by_columns = role == INPUT or (role == GRAD_OUTPUT and parts.roles[WEIGHT])
    return (0, parts.rank * shape[1]) if by_columns else (parts.rank * shape[0], 0)


def _swizzles(shape: Sequence[int], x: Tensor, casts: Sequence[Cast]) -> bool:
    """Whether casts of this shape, of whole blocks, may write scales in the device's swizzled order, for bfloat16."""
    if x.dtype is not torch.bfloat16 or not have_e8m0_blocks(*casts):
        return False
    return len(shape) == 2 and shape[0] % MX[1] == shape[1] % MX[1] == 0 and reads_swizzled(x.device)


def _cast_by_two_scalings(op_input: _OpInput, cast: Cast, cast_t: Cast, request: CastRequest) -> Operands:
    """Cast by one scaling as x lies and by another transposed, reading x once."""
    x, activation, options = op_input
    writes_transposed = cast_t.is_packed or needs_transposed_codes(x.device)
    pad = contraction_multiple(x.device, request.recipe.may_pad, request.recipe.has_e2m1)
    arguments = *cast.arguments, writes_transposed, pad, request.column_sum, *activation
    q, q_t, scale_inv, scale_inv_t, *results = kernels.cast(
        x, None, request.role, *arguments, **options, **cast.named, **cast_t.as_second
    )
    pair_t = (q_t, scale_inv_t) if writes_transposed else (q_t.t(), scale_inv_t.t())
    norm = NormResults(*results) if "gamma" in options else None
    return Operands((q, scale_inv), pair_t, None, results[0] if request.column_sum else None, norm)


def _cast_twice(
    op_input: _OpInput, casts: tuple[Cast, Cast], scales: tuple[Tensor | None, Tensor | None], request: CastRequest
) -> Operands:
    """Cast as x lies, then transposed; a norm is computed by the first cast, and the second reads its result."""
    (cast, cast_t), (scale, scale_t) = casts, scales
    x, activation, options = op_input
    if "gamma" in options:
        op_input = x, activation, {**options, "keep": True}
    operands = _cast(op_input, cast, scale, request, (True, False))
    if (norm := operands.norm) is not None:
        assert norm.y is not None
        op_input = norm.y, (), {}
        norm = norm if request.keep_norm else norm._replace(y=None)
    second = _cast(op_input, cast_t, scale_t, request._replace(column_sum=False), (False, True))
    amax = second.amax if operands.amax is None else operands.amax
    return operands._replace(transposed=second.transposed, amax=amax, norm=norm)


def _cast(
    op_input: _OpInput,
    cast: Cast,
    scale: Tensor | None,
    request: CastRequest,
    layouts: tuple[bool, bool],
    commit_arguments: Sequence[Any] | None = None,
) -> Operands:
    """Cast by one scaling, in one layout or both; with the amax, if the cast is Delayed.

    The op returns codes, transposed codes, scale_inv, the amax unless it is committed, and then

        of a norm               mean, rstd, y
        of rows in groups       nothing
        of any other source     sums of columns; and of an activation what ``keep_scale`` or ``recast`` asks for

    Args:
        cast: that of x as it lies, unless only the transposed one of ``layouts`` is needed.
        commit_arguments: with them the op is ``cast_and_commit``, which also enters amaxes into the delayed state: its
            arguments between x and the output, which are the state, forward's amaxes, scaling, how to make scales.
    """
    x, activation, options = op_input
    (as_is, transposed), role = layouts, request.role
    pad = contraction_multiple(x.device, request.recipe.may_pad, request.recipe.has_e2m1)
    if x.ndim == 3:
        return cast_matrices(x, scale, role, cast, layouts, pad)
    is_norm, is_grouped = "gamma" in options, "offsets" in options
    sums_columns = request.column_sum and not is_grouped
    writes_transposed = transposed and (cast.is_packed or needs_transposed_codes(x.device))
    # by its length: when torch 2.11 compiles, it can't negate a tuple
    is_plain = x.ndim == 2 and len(activation) == 0 and not is_norm and not is_grouped
    if writes_transposed and not as_is and is_plain and (commit_arguments is None or not sums_columns):
        return _cast_lying_transposed(op_input, cast, scale, request, commit_arguments)
    if is_grouped:
        options = {**options, "as_is": as_is or not writes_transposed}
    arguments = cast.arguments if as_is else cast.arguments_transposed
    output = writes_transposed, pad, sums_columns, *activation
    if commit_arguments is None:
        q, q_t, scale_inv, amax, *results = kernels.cast(x, scale, role, *arguments, *output, **options, **cast.named)
        if not cast.is_delayed:
            amax = None
        elif is_grouped:
            amax = amax.amax(0, keepdim=True)  # groups share one history
    else:
        q, q_t, scale_inv, *results = kernels.cast_and_commit(x, *commit_arguments, *output, **options)
        amax = None
    pair = (q, scale_inv) if as_is else None
    pair_t = None
    if transposed:
        has_one_scale = not is_grouped and cast.has_one_scale  # which is its own transpose
        pair_t = q_t if writes_transposed else q.t(), scale_inv if has_one_scale else scale_inv.t()
    if is_norm or is_grouped:
        return Operands(pair, pair_t, amax, None, NormResults(*results) if is_norm else None)
    column_sum = results[0] if sums_columns else None
    recast_scale = results[1] if request.keep_scale else None
    recast_codes = None
    if request.recast is not None:
        recast_codes = results[1] if options["recast_transposed"] else results[1].t()
    return Operands(pair, pair_t, amax, column_sum, None, recast_scale, recast_codes)


def _cast_lying_transposed(
    op_input: _OpInput, cast: Cast, scale: Tensor | None, request: CastRequest, commit_arguments: Sequence[Any] | None
) -> Operands:
    """Cast a matrix for the transposed layout alone, for ``_cast``: x.t() is cast as it lies, as codes lie like it."""
    x, activation, options = op_input
    if "place" in options:
        options = {**options, "place": options["place"][::-1]}
    request = request._replace(column_sum=False)
    return _cast((x.t(), activation, options), cast, scale, request, (True, False), commit_arguments).swapped()


def recast_alone(source: CastSource, recast: Recast, may_pad: bool) -> Tensor:
    """Return an activation's codes again, without its gradient's; the contraction last, as grad_weight reads it."""
    transposes, pad = needs_transposed_codes(source.x.device), contraction_multiple(source.x.device, may_pad)
    output = transposes, pad, False, source.activation
    codes, transposed, *_ = kernels.cast(source.x, recast.scale, 0, recast.dtype, (ALL, ALL), False, 0, *output)
    return transposed if transposes else codes.t()


def operands_of_codes(
    pair: CodesAndScale, recipe: Recipe, role: int, transposed: bool, amax: Tensor | None, offsets: Tensor | None = None
) -> Operands:
    """Return the operands of rows, or of a weight [G, N, K], from the codes alone, as the first cast wrote them.

    Where one cast serves both layouts, both read these codes; else the transposed one is cast from the codes' values.
    """
    (q_RC, scale_inv), casts = pair, recipe.casts[role]
    cast, cast_t = casts.as_is, casts.transposed if transposed else None
    assert cast is not None
    lays_codes = cast_t is not None and casts.coincide and offsets is None
    as_is, pair_t, *_ = operands_of(q_RC, scale_inv, recipe.may_pad, lays_codes)
    if cast_t is None:
        pair_t = None
    elif not casts.coincide:
        scales = (scale_inv, cast.tile) if offsets is None else scales_of_rows(scale_inv, cast.tile, offsets, len(q_RC))
        flat = q_RC.flatten(0, -2), scales[0].flatten(0, -2)  # a weight of groups has tiles within one row
        values = kernels.dequantize(*flat, scales[1], torch.float32).view(q_RC.shape)
        request = CastRequest(recipe, role, as_is=False, transposed=True)
        pair_t = cast_role(values, request, None, Rows(offsets)).transposed
    elif offsets is not None and needs_transposed_codes(q_RC.device):
        pair_t = transposed_codes(q_RC, offsets, contraction_multiple(q_RC.device, recipe.may_pad)), scale_inv.t()
    return Operands(as_is, pair_t, amax if cast.is_delayed else None)


def cast_and_commit(
    source: AnySource, request: CastRequest, state: State, forward_amax: ForwardAmax, rows: Rows = DENSE
) -> Operands:
    """Cast grad_output, and commit the delayed state with the amaxes of all three roles: in one op where it can be."""
    casts, layouts = request.recipe.grad_output_casts, (request.as_is, request.transposed)
    cast = casts.as_is if casts.coincide and rows.offsets is None and rows.parts is None else None
    if cast is not None and cast.is_delayed and not cast.is_packed and any(layouts):  # per tensor
        scaling = cast.format.dtype, cast.power_of_two, cast.margin
        commit_arguments = *state, *forward_amax, *scaling, *request.recipe.delayed_update
        return _cast(_op_input(source, request, rows, cast), cast, None, request, layouts, commit_arguments)
    operands = cast_role(source, request, state, rows)
    commit(state, request.recipe, (*forward_amax, operands.amax), rows.parts)
    return operands


def commit(state: State, recipe: Recipe, amaxes: Sequence[Tensor | None], parts: Parts | None) -> None:
    """Enter the amaxes of (input, weight, grad_output) into a delayed state, None where a role was not cast."""
    kernels.delayed_update(*state, *shared_amax(amaxes, parts), *recipe.delayed_update)
