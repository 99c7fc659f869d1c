"""The input of products gathered in FP8: each rank casts its tokens, and codes and scales are what is sent.

    per tensor     one collective of 4 bytes finds the largest amax first, under Delayed too, where a first step has no
                   scale. The codes serve both products; nothing is sent in backward
    rows, blocks   each token's scales are sent beside its codes. grad_weight reads the input transposed, scaled along
                   the tokens: cast and gathered in backward, of what forward kept, this rank's tokens. Columns (PerRow
                   transposed) first agree on the largest amax of each, 4 bytes a feature

Backward adds and scatters the gradient of the whole input in its own dtype.

Legend: x [..., s, K] this rank's tokens, of S along dimension ``wire.dim``; T all tokens. R rows of this rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import INPUT, Pair, State
from octavo.autograd.shared_scales import largest
from octavo.granularity import ALL
from octavo.kernels.layouts import contraction_multiple, needs_transposed_codes
from octavo.kernels.reference.cast import transposed, with_padding
from octavo.numerics import scale_from_amax
from octavo.scaling.recipe import Cast, Recipe
from octavo.tensor.gathered_input import GatheredInput, Wire


def why_not_gathered(recipe: Recipe, tokens: int) -> str | None:
    """Why an input, of which each rank has so many consecutive tokens, can't be sent as pairs; or None."""
    casts = recipe.input_casts
    if casts.as_is is None or casts.transposed is None:
        return "a product reads it in high precision"
    if casts.once and casts.as_is.tile == (ALL, ALL):
        return None
    if casts.as_is.tile[0] != 1 or casts.transposed.tile[0] != 1:
        return "its two layouts are scaled neither per tensor nor by rows"
    block = casts.transposed.tile[1]
    if block != ALL and tokens % block:
        return f"blocks of {block} tokens reach over several ranks"
    return None


def arguments_of(recipe: Recipe) -> tuple[Any, ...]:
    """How a recipe casts an input, as values that a compiled graph can hold."""
    return tuple(None if cast is None else (cast.is_delayed, *cast.arguments) for cast in recipe.input_casts[:2])


def _rows(x: Tensor, wire: Wire) -> tuple[Tensor, int]:
    """This rank's x [..., s, K] as rows [R, K], and how many runs of consecutive tokens they are."""
    runs = math.prod(x.shape[: wire.dim])
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), runs


def _gathered(x: Tensor, runs: int, wire: Wire) -> Tensor:
    """All ranks' x [R, .], a rank's rows one after the other in each of the runs that R is made of: [T, .]."""
    functional = torch.ops._c10d_functional
    own = (x.view(torch.uint8) if x.itemsize == 1 else x).contiguous()
    whole: Tensor = functional.wait_tensor(functional.all_gather_into_tensor(own, wire.ranks, wire.group))
    if runs != 1:
        whole = whole.view(wire.ranks, runs, -1, x.shape[1]).transpose(0, 1).reshape(-1, x.shape[1])
    return whole.view(x.dtype) if x.itemsize == 1 else whole


def _gathered_scales(scale_inv: Tensor, cast: Cast, runs: int, wire: Wire) -> Tensor:
    """All ranks' scales of rows [R, .], powers of two as E8M0, which is exact."""
    if not cast.power_of_two:
        return _gathered(scale_inv, runs, wire)
    return _gathered(scale_inv.to(torch.float8_e8m0fnu), runs, wire).to(torch.float32)


def _gather(x: Tensor, recipe: Recipe, state: State | None, wire: Wire) -> GatheredInput:
    casts, (rows, runs), scale, amax = recipe.input_casts, _rows(x, wire), None, None
    cast = casts.as_is
    assert cast is not None
    if casts.once:
        amax = largest(kernels.amax(rows, cast.tile), wire.group)
        scale = scale_from_amax(amax.view(1), cast.format.max, cast.power_of_two, cast.margin).expand(3)
        if cast.is_delayed and state is not None:
            scale = torch.where(state.scale > 0, state.scale, scale)
        scale = scale.contiguous()
    q, _, scale_inv, *_ = kernels.cast(rows, scale, INPUT, *cast.arguments)
    q, pad = _gathered(q, runs, wire), contraction_multiple(x.device) if recipe.pads else 1
    tensors: dict[str, Tensor | None] = {"qdata": with_padding(q, pad), "scale_inv": scale_inv}
    if casts.once:
        laid = with_padding(transposed(q), pad) if needs_transposed_codes(x.device) else q.t()
        tensors |= {"transposed_qdata": laid, "transposed_scale_inv": scale_inv}
        tensors["found_amax"] = amax if cast.is_delayed else None
    else:
        found = _gathered_scales(scale_inv, cast, runs, wire)
        # with the strides that products want, see kernels/signatures.py
        tensors |= {"scale_inv": found.t().contiguous().t() if cast.tile == (1, 128) else found, "shard": x}
    shape = (*x.shape[: wire.dim], x.shape[wire.dim] * wire.ranks, *x.shape[wire.dim + 1 :])
    return GatheredInput(tensors, shape, x.dtype, arguments_of(recipe), wire)


def gathered_transposed(x: Tensor, recipe: Recipe, wire: Wire) -> Pair:
    """The pair of the whole input transposed [K, T], in backward, of this rank's x [..., s, K]."""
    if wire.memo:
        return wire.memo[0]
    cast, (rows, runs) = recipe.input_casts.transposed, _rows(x, wire)
    assert cast is not None
    own = len(rows)
    if by_column := cast.tile[1] == ALL:  # a row more, of all ranks' amax, makes the scales those of whole columns
        columns = largest(kernels.amax(rows, (ALL, 1)), wire.group)
        rows = torch.cat([rows, columns.view(1, -1).to(x.dtype)])
    q, _, scale_inv, *_ = kernels.cast(rows, None, INPUT, *cast.arguments_transposed)
    scale_inv = scale_inv if by_column else _gathered_scales(scale_inv, cast, runs, wire)  # [1, K] or [blocks, K]
    q = transposed(_gathered(q[:own], runs, wire))
    pair = with_padding(q, contraction_multiple(x.device) if recipe.pads else 1), scale_inv.t()
    if wire.memo is not None:
        wire.memo.append(pair)
    return pair


class _GatherInput(torch.autograd.Function):
    """Codes and scales forward, sums of gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: Recipe, state: State | None, wire: Wire) -> GatheredInput:
        ctx.wire = wire
        return _gather(x, recipe, state, wire)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wire, functional = ctx.wire, torch.ops._c10d_functional
        grad = grads[0]
        if wire.dim != 0:
            grad = torch.cat(grad.chunk(wire.ranks, wire.dim))
        scattered = functional.reduce_scatter_tensor(grad.contiguous(), "sum", wire.ranks, wire.group)
        return functional.wait_tensor(scattered), None, None, None


def gather_input(x: Tensor, recipe: Recipe, state: State | None, wire: Wire) -> GatheredInput:
    """The whole input, of this rank's tokens x [..., s, K], bf16, fp16 or fp32; every rank of the group calls it.

    ``recipe``: one for which ``why_not_gathered`` has no answer.
    """
    found: GatheredInput = _GatherInput.apply(x, recipe, state, wire)
    return found
