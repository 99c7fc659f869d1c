"""Tokens that lie on the ranks of a tensor-parallel group, gathered in FP8 where products read them, and summed there.

    gather_input      the input of a layer forward; backward the sums of its gradient, each rank's tokens to their rank
    cast_norm         the same of a norm, which reads this rank's tokens; backward is its caller's
    scatter_output    the mirror image: sums of an output forward, the gathered gradient of it backward

Each rank casts its tokens, and codes and scales are what is sent:

    per tensor     one collective of 4 bytes finds the largest amax first, under Delayed too, where a first step has no
                   scale. The codes serve both products that read them
    rows, blocks   each token's scales are sent beside its codes. grad_weight reads along the tokens, in another
                   scaling, which is cast from the values of the gathered codes
    exact          a role that the recipe scales in two ways is not gathered here but by torch, in its dtype (can_gather
                   is False)

Sums are in the tensor's dtype, or as ``wire.reduce`` makes them.

Legend: x [..., s, K] this rank's tokens, of S. T all tokens, R rows of this rank; a suffix gives the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import CastRequest, as_rows, cast_role, cast_to_send, operands_of_codes
from octavo.autograd.observer import Observer
from octavo.autograd.rows import Wire
from octavo.autograd.shared_scales import scale_of_whole
from octavo.errors import UnsupportedOpError
from octavo.kernels.arguments import NormSource
from octavo.private import untraced
from octavo.scaling.delayed import State
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, Recipe
from octavo.tensor.collectives import gathered_parts, pack_message, summed, summed_part, unpack_message
from octavo.tensor.pair import NormResults, Operands, OperandsFacade

_REMEDY = (
    "of an input that was gathered in FP8: octavo's layers under octavo.distributed.ColwiseParallel read it. Where "
    "others do too, gather it by torch's own PrepareModuleInput"
)


class GatheredInput:
    """A stand-in for a gathered input [..., K] that exists as pairs only.

    It is no tensor, so that torch.compile traces the pairs and gradients that it holds as tensors.

    Attributes:
        carrier: [..., K] without memory; the gradient of the whole input flows to it.
        operands: the pairs, of [T, K]; the amax of the whole input, for a Delayed rule.
        casts, wire: its casts (``input_cast_arguments``), and how it was gathered.
    """

    def __init__(self, carrier: Tensor, operands: Operands, casts: tuple[Any, ...], wire: Wire) -> None:
        self.carrier, self.operands, self.casts, self.wire = carrier, operands, casts, wire

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedOpError(f"{getattr(func, '__name__', func)} {_REMEDY}")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that modules read; raise UnsupportedOpError for tensors' others, else AttributeError."""
        if name in ("shape", "dtype", "device", "ndim", "size", "is_meta", "requires_grad", "dim"):
            return getattr(self.carrier, name)
        return self.__torch_function__(getattr(torch.Tensor, name), ())


class GatheredGradient(OperandsFacade):
    """A whole gradient [..., N], on its way to the products, with sums of its columns."""

    REMEDY = _REMEDY


class GatherReader(NamedTuple):
    """The recipe whose products read a gathered tensor, its delayed state, and whether grad_weight is among them.

    ``observers``: (recipe, observer) pairs that see the cast of each rank's own tokens.
    """

    recipe: Recipe
    state: State | None
    needs_dw: bool
    observers: Sequence[tuple[Recipe, Observer]] = ()


def can_gather(reader: GatherReader, role: int, exact: bool) -> bool:
    """Whether a role can be sent as pairs."""
    return cast_to_send(reader.recipe.casts[role], True, reader.needs_dw, exact) is not None


def input_cast_arguments(recipe: Recipe) -> tuple[Any, ...]:
    """Return a recipe's casts of an input, as values that a compiled graph can hold and compare."""
    return tuple(None if cast is None else (cast.is_delayed, *cast.arguments) for cast in recipe.input_casts[:2])


def _gathered(x: Tensor, wire: Wire) -> Tensor:
    """Return all ranks' x [R, .], in the order of the tokens of each sequence: [T, .]."""
    part = (x.view(torch.uint8) if x.itemsize == 1 else x).contiguous()
    whole = gathered_parts(part, wire.ranks, wire.group)
    if wire.runs > 1:
        whole = whole.view(wire.ranks, wire.runs, x.shape[0] // wire.runs, x.shape[1]).transpose(0, 1).flatten(0, 2)
    return whole.view(x.dtype) if x.itemsize == 1 else whole


def scattered(x_TC: Tensor, wire: Wire) -> Tensor:
    """Return this rank's rows [R, C] of the sum over ranks of x."""
    if wire.runs > 1:  # parts one after the other
        length = x_TC.shape[0] // (wire.runs * wire.ranks)
        x_TC = x_TC.view(wire.runs, wire.ranks, length, x_TC.shape[1]).transpose(0, 1).flatten(0, 2)
    if wire.reduce is not None:
        return wire.reduce(x_TC.contiguous(), wire.group)
    return summed_part(x_TC.contiguous(), wire.ranks, wire.group)


def _gather(source: Tensor | NormSource, reader: GatherReader, role: int, wire: Wire, keep: bool = False) -> Operands:
    """Return the pairs of all ranks' rows, or of their norm, and what the norm of this rank's rows returns beside."""
    recipe, state, needs_dw, observers = reader
    cast = recipe.casts[role].as_is
    assert cast is not None
    norm_arguments = source._asdict() if isinstance(source, NormSource) else {"x": source}
    rows = norm_arguments.pop("x")
    scale = amax = None
    if cast.has_one_scale:
        delayed = state.in_force(role) if cast.is_delayed and state is not None else None
        scale, amax = scale_of_whole(rows, role, cast.arguments, wire.group, (), delayed, **norm_arguments)
    q, _, scale_inv, _, *results = kernels.cast(rows, scale, role, *cast.arguments, **norm_arguments, keep=keep)
    for observed, observer in observers:
        observer.cast(observed, role, lambda: rows, Operands((q, scale_inv)))
    if cast.has_one_scale:
        q = _gathered(q, wire)
    else:
        message = _gathered(pack_message(q, scale_inv, cast.power_of_two), wire)
        q, scale_inv = unpack_message(message, q.shape[1], q.dtype, cast.power_of_two, cast.tile)
    norm = NormResults(*results) if norm_arguments else None
    return operands_of_codes((q, scale_inv), recipe, role, needs_dw, amax)._replace(norm=norm)


def cast_norm(
    source: NormSource, recipe: Recipe, state: State | None, *, needs_dw: bool, keep: bool, wire: Wire | None = None
) -> Operands:
    """Cast a norm's result [T, K] as the input of products, without writing it in between; gather it by ``wire``.

    The recipe's ``output`` must be in FP8; ``needs_dw``: grad_weight will read the input, too; ``keep``: the norm's
    result is returned too, in high precision. Pairs are of all ranks' rows, the norm's results of this rank's.
    """
    if wire is not None:
        return _gather(source, GatherReader(recipe, state, needs_dw), INPUT, wire, keep)
    request = CastRequest(recipe, INPUT, as_is=True, transposed=needs_dw, keep_norm=keep, only_products=True)
    return cast_role(source, request, state)


class _Carrier(torch.autograd.Function):
    """A tensor of the whole input's shape, without memory; backward the sums of its gradient are scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, wire: Wire) -> Tensor:
        ctx.wire, ctx.shape = wire, x.shape
        return x.new_zeros(()).expand(*x.shape[:dim], x.shape[dim] * wire.ranks, *x.shape[dim + 1 :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scattered(as_rows(grads[0]), ctx.wire).view(ctx.shape), None, None


class _ScatterOutput(torch.autograd.Function):
    """Sums forward; backward the gradient's codes and scales, without a reader the gradient in high precision."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dim: int, reader: GatherReader | None, wire: Wire, needs_db: bool) -> Tensor:
        ctx.options, ctx.shape = (reader, wire, needs_db), y.shape
        return scattered(as_rows(y), wire).view(*y.shape[:dim], y.shape[dim] // wire.ranks, *y.shape[dim + 1 :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (reader, wire, needs_db), rows = ctx.options, as_rows(grads[0])
        if reader is None:
            return _gathered(rows, wire).view(ctx.shape), None, None, None, None
        operands = _gather(rows, reader, GRAD_OUTPUT, wire)
        if needs_db:
            operands = operands._replace(column_sum=summed(rows.sum(0, dtype=torch.float32), wire.group).to(rows.dtype))
        return GatheredGradient(operands, ctx.shape, rows.dtype), None, None, None, None


def gather_input(x: Tensor, dim: int, reader: GatherReader, wire: Wire) -> GatheredInput:
    """Return the whole input, from this rank's tokens x [..., s, K], bf16, fp16 or fp32; all ranks of a group call it.

    ``dim`` is that of the tokens; ``can_gather`` must hold for ``reader``.
    """
    operands = _gather(as_rows(x.detach()), reader, INPUT, wire)
    return GatheredInput(_Carrier.apply(x, dim, wire), operands, input_cast_arguments(reader.recipe), wire)


@untraced  # compiled graphs leave out sums in FP8, and facades for gradients
def scatter_output(y: Tensor, dim: int, reader: GatherReader | None, wire: Wire, needs_db: bool) -> Tensor:
    """Return this rank's tokens [..., s, N] of the sum over ranks of y [..., S, N], bf16, fp16 or fp32.

    ``dim`` is that of the tokens. ``reader``: of the gradient, where ``can_gather`` holds; None: it is gathered in
    its dtype. ``needs_db``: whether it also gives a bias's gradient.
    """
    return _ScatterOutput.apply(y, dim, reader, wire, needs_db)
