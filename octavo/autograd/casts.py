"""Casts of tensors to the pairs that products read, one for each role; activations and norms are computed on the way.

Legend: T tokens, K in features, N out features; a suffix gives the layout, contracted dimension last. An operand is a
pair (qdata, scale_inv). A source is what is cast: a tensor itself, an activation or its gradient (CastSource), a norm
(NormSource), or the gradients of heads that rotary positions turned (RotaryHeads).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.grouped import cast_matrices, scales_of_rows, transposed_codes
from octavo.autograd.shared_scales import Parts, scale_for, shared_amax
from octavo.granularity import ALL, MX
from octavo.kernels.arguments import Castable, CastSource, NormSource, RotaryHeads, have_e8m0_blocks
from octavo.kernels.devices import reads_swizzled
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes
from octavo.scaling.delayed import State
from octavo.scaling.recipe import Cast, Recipe, RoleCasts
from octavo.tensor.pair import ForProducts, Operands, operands_of

INPUT, WEIGHT, GRAD_OUTPUT = range(3)  # rows of the delayed state

CodesAndScale = tuple[Tensor, Tensor]  # (qdata, scale_inv)
AnySource = Tensor | Castable  # see above


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., K] as [T, K]."""
    # not by -1, which is ambiguous for K = 0, nor by Size.numel(), which makes a traced size a constant
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def cast_to_send(casts: RoleCasts, as_is: bool, transposed: bool, exact: bool = False) -> Cast | None:
    """Return the cast that serves the layouts of a role that products read; None: rows are sent in high precision."""
    cast, second = casts.as_is, casts.transposed if transposed else None
    if cast is None or not (as_is or transposed) or (transposed and second is None):
        return None
    if second is not None and not casts.once and (exact or cast.is_delayed or second.is_delayed):
        return None  # a history needs the amax of values that were not rounded
    return cast if cast.tile == (ALL, ALL) or cast.tile[0] == 1 else None


def cast_role(
    source: AnySource,
    recipe: Recipe,
    role: int,
    as_is: bool,
    transposed: bool,
    state: State | None,
    column_sum: bool = False,
    offsets: Tensor | None = None,
    parts: Parts | None = None,
    keep: bool = False,
    only_products: bool = False,
) -> Operands:
    """Cast a role for the products that need it, reading it once where one kernel can.

    Args:
        source: bf16, fp16 or fp32 [R, C], or what is computed from such; a weight of groups is [G, N, K].
        recipe: it says how this role (INPUT, WEIGHT or GRAD_OUTPUT) is cast; products in high precision need no cast.
        as_is, transposed: which of the two layouts are needed now; their contraction is padded as the device wants it.
        state: read by Delayed casts.
        column_sum: add up columns in the same read, if a cast reads the source as it lies.
        offsets: of rows in groups, see grouped.py; columns are not added up then.
        parts: how the role lies on several ranks, all of which then call this.
        keep: whether a norm's result y is returned too, in high precision.
        only_products: only products read the result: scales may be in the device's swizzled order.
    """
    if isinstance(source, ForProducts):
        return source.read()
    casts = recipe.casts[role]
    first = casts.as_is if as_is else None
    second = casts.transposed if transposed else None
    x, source_arguments = (source, _PLAIN) if isinstance(source, Tensor) else _source_arguments(source, keep)
    if only_products and offsets is None and parts is None and _swizzles(source.shape, x, first, second):
        source_arguments = source_arguments[0], source_arguments[1] | {"swizzle": True}
    pad = contraction_multiple(x.device) if recipe.pads else 1
    if first is None or second is None or casts.once:
        cast = first or second
        if cast is None:
            return Operands()
        call = scale_for(source, cast, state, role, parts), role, pad, column_sum, offsets
        return _cast(x, source_arguments, cast, call, first is not None, second is not None)
    scale, scale2 = scale_for(source, first, state, role, parts), scale_for(source, second, state, role, parts)
    has_scales = first.is_delayed or second.is_delayed or scale is not None or scale2 is not None
    if not has_scales and offsets is None and x.ndim != 3:
        writes_transposed, (activation, named) = needs_transposed_codes(x.device), source_arguments
        options = *first.arguments, writes_transposed, pad, column_sum, *activation
        q_RC, q2, scale_inv, scale_inv2, *sums_or_norm = kernels.cast(
            x, None, role, *options, **named, **second.as_second
        )
        pair = (q2, scale_inv2) if writes_transposed else (q2.t(), scale_inv2.t())
        of_norm = sums_or_norm if isinstance(source, NormSource) else ()
        return Operands((q_RC, scale_inv), pair, None, sums_or_norm[0] if column_sum else None, of_norm=of_norm)
    if is_norm := isinstance(source, NormSource):
        _, source_arguments = _source_arguments(source, keep=True)
    a = _cast(x, source_arguments, first, (scale, role, pad, column_sum, offsets), True, False)
    if is_norm:
        x, source_arguments = a.of_norm[2], _PLAIN
    b = _cast(x, source_arguments, second, (scale2, role, pad, False, offsets), False, True)
    return a._replace(transposed=b.transposed, amax=b.amax if a.amax is None else a.amax)


def _swizzles(shape: Sequence[int], x: Tensor, *casts: Cast | None) -> bool:
    """Whether casts of this shape, of whole blocks, may write scales in the device's swizzled order, for bfloat16."""
    needed_casts = [cast for cast in casts if cast is not None]
    if x.dtype is not torch.bfloat16 or not needed_casts or not have_e8m0_blocks(*needed_casts):
        return False
    return len(shape) == 2 and shape[0] % MX[1] == shape[1] % MX[1] == 0 and reads_swizzled(x.device)


_SourceArguments = tuple[Sequence[Any], dict[str, Any]]  # of the op: positional and named, without x
_Call = tuple[Tensor | None, int, int, bool, Tensor | None]  # scale, role, pad, column_sum, offsets
_PLAIN: _SourceArguments = (), {}


def _source_arguments(
    source: CastSource | NormSource | RotaryHeads, keep: bool = False
) -> tuple[Tensor, _SourceArguments]:
    """Return (x, the op's arguments that say what of x is cast); ``keep``: a norm's y is returned too."""
    if isinstance(source, CastSource):
        x, *activation = source
        return x, (activation, {})
    if isinstance(source, RotaryHeads):
        q, k, v, cos, sin, _ = source
        return q, ((), {"k": k, "v": v, "cos": cos, "sin": sin})
    of_norm = source._asdict() | {"keep": keep}
    return of_norm.pop("x"), ((), of_norm)


def _cast(
    x: Tensor,
    source_arguments: _SourceArguments,
    cast: Cast,
    call: _Call,
    as_is: bool,
    transposed: bool,
    commit: tuple[Any, ...] = (),
) -> Operands:
    """Cast by one scaling, in one layout or both; with the amax, if the cast is Delayed.

    ``cast`` is that of x as it lies, unless only the transposed layout is needed. ``commit``: the
    delayed state, forward's amaxes and the update's options, where the cast commits the state too.
    """
    (activation, named), (scale, role, pad, column_sum, offsets) = source_arguments, call
    if x.ndim == 3:
        return cast_matrices(x, scale, role, cast, (as_is, transposed), pad)
    writes_transposed, is_norm = transposed and needs_transposed_codes(x.device), "gamma" in named
    # by its length: when torch 2.11 compiles, it can't negate a tuple
    is_plain = len(activation) == 0 and len(named) == 0 and offsets is None
    if writes_transposed and not as_is and is_plain and not (commit and column_sum):  # the transposed codes alone
        flipped = _cast(x.t(), source_arguments, cast, (scale, role, pad, False, None), True, False, commit)
        return Operands(None, flipped.as_is, flipped.amax)
    options = cast.arguments if as_is else cast.arguments_transposed
    sums_or_norm: Sequence[Tensor] = ()
    if commit:
        *state, update = commit
        scaling = options[0], options[2], options[3]
        options = *scaling, *update, writes_transposed, pad, column_sum, *activation
        written = kernels.cast_and_commit(x, *state, *options, **named)
        q_RC, q_CR, scale_inv, *sums_or_norm = written
        amax = None
    elif offsets is not None:
        options = *options, writes_transposed, pad, False, *activation
        q_RC, q_CR, scale_inv, amax = kernels.cast(
            x, scale, role, *options, offsets=offsets, as_is=as_is or not writes_transposed
        )
        amax = amax.amax(0, keepdim=True) if cast.is_delayed else None  # they share one history
        column_sum = False
    else:
        options = *options, writes_transposed, pad, column_sum, *activation
        q_RC, q_CR, scale_inv, amax, *sums_or_norm = kernels.cast(x, scale, role, *options, **named)
    whole = offsets is None and cast.tile == (ALL, ALL)  # one scale is its own transpose
    return Operands(
        (q_RC, scale_inv) if as_is else None,
        (q_CR if writes_transposed else q_RC.t(), scale_inv if whole else scale_inv.t()) if transposed else None,
        amax if cast.is_delayed else None,
        sums_or_norm[0] if column_sum else None,
        of_norm=sums_or_norm if is_norm else (),
    )


def operands_of_codes(
    pair: CodesAndScale, recipe: Recipe, role: int, transposed: bool, amax: Tensor | None, offsets: Tensor | None = None
) -> Operands:
    """Return the operands of rows, or of a weight [G, N, K], from the codes alone, as the first cast wrote them.

    Where one cast serves both layouts, both read these codes; else the transposed one is cast from the codes' values.
    """
    (q_RC, scale_inv), casts = pair, recipe.casts[role]
    cast, second = casts.as_is, casts.transposed if transposed else None
    assert cast is not None
    operands = operands_of(q_RC, scale_inv, recipe.pads, second is not None and casts.once and offsets is None)
    laid = operands.transposed if second is not None else None
    if second is not None and not casts.once:
        scales = (scale_inv, cast.tile) if offsets is None else scales_of_rows(scale_inv, cast.tile, offsets, len(q_RC))
        flat = q_RC.flatten(0, -2), scales[0].flatten(0, -2)  # a weight of groups has tiles within one row
        values = kernels.dequantize(*flat, scales[1], torch.float32).view(q_RC.shape)
        laid = cast_role(values, recipe, role, False, True, None, offsets=offsets).transposed
    elif second is not None and offsets is not None and needs_transposed_codes(q_RC.device):
        pad = contraction_multiple(q_RC.device) if recipe.pads else 1
        laid = transposed_codes(q_RC, offsets, pad), scale_inv.t()
    return Operands(operands.as_is, laid, amax if cast.is_delayed else None)


def cast_grad_output(
    source: AnySource,
    recipe: Recipe,
    as_is: bool,
    transposed: bool,
    state: State | None,
    forward_amax: tuple[Tensor | None, Tensor | None] | None,
    column_sum: bool,
    offsets: Tensor | None = None,
    parts: Parts | None = None,
) -> Operands:
    """Cast grad_output and, given the amax of forward's (input, weight), commit the delayed state with all three."""
    arguments = source, recipe, GRAD_OUTPUT, as_is, transposed, state, column_sum, offsets, parts
    if state is None or forward_amax is None:
        return cast_role(*arguments, only_products=True)
    (cast, _, once), update = recipe.grad_output_casts, recipe.delayed_update
    in_groups_or_parts = offsets is not None or parts is not None
    if cast is not None and once and cast.is_delayed and (as_is or transposed) and not in_groups_or_parts:
        x, source_arguments = (source, _PLAIN) if isinstance(source, Tensor) else _source_arguments(source)
        call = None, GRAD_OUTPUT, contraction_multiple(x.device) if recipe.pads else 1, column_sum, None
        return _cast(x, source_arguments, cast, call, as_is, transposed, (*state, *forward_amax, update))
    operands = cast_role(*arguments)
    commit(state, recipe, (*forward_amax, operands.amax), parts)
    return operands


def commit(state: State, recipe: Recipe, amaxes: Sequence[Tensor | None], parts: Parts | None) -> None:
    """Enter the amaxes of (input, weight, grad_output) into a delayed state, None where a role was not cast."""
    kernels.delayed_update(*state, *shared_amax(amaxes, parts), *recipe.delayed_update)


class Norm(NamedTuple):
    """A norm without its parameters: kind is "layer_norm" or "rms_norm"."""

    kind: str
    eps: float
    zero_centered: bool


def cast_norm(
    source: NormSource, recipe: Recipe, transposed: bool, state: State | None, keep: bool
) -> tuple[Operands, Tensor | None, Tensor, Tensor]:
    """Cast a norm's result [T, K] as the input of products, without writing it in between.

    The recipe's ``output`` must be in FP8; ``transposed``: grad_weight will need the input.

    Returns:
        the pairs, the norm's output y in high precision if ``keep``, else None, and its rows' mean and rstd.
    """
    operands = cast_role(source, recipe, INPUT, True, transposed, state, keep=keep, only_products=True)
    mean, rstd, y = operands.of_norm
    return operands._replace(of_norm=()), y if keep else None, mean, rstd
