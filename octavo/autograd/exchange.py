"""Rows that experts of other ranks compute: sent as the pairs that products read, their results brought back.

    forward    rows -> cast -> all-to-all of pairs -> products -> all-to-all in high precision
    backward   the mirror image: the gradient of the results is sent as pairs, that of the rows is brought back

A rank sorts its rows by expert, and casts them by the recipe of the product that will read them. Codes and scales are
one message. What a product reads as it lies is what it would read on one rank:

    a scale a row, or a block of a row   travels beside its codes; in a byte where it is a power of two
    a scale a tensor                     of experts one each, of all ranks' rows, whose amax are agreed on before
    in high precision                    is sent so: a product reads it, or scales are of several rows but not of all

grad_weight reads rows along the tokens. Where one cast serves both layouts (per tensor) it reads these codes too; else
what is read is cast from the values of the codes that were sent.

Legend: S rows of this rank by all E experts, R rows that it received for its own, C columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import operands_of_codes
from octavo.autograd.gather_input import GatherReader
from octavo.autograd.grouped import Routing, group_of_rows
from octavo.granularity import ALL
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.private import c10d_ops
from octavo.scaling.recipe import Cast
from octavo.tensor.collectives import largest, pack, unpack
from octavo.tensor.pair import ForProducts, Operands


class Exchange(NamedTuple):
    """The ranks of the process group of this name, which hold as many of a mixture's experts each; and this one's.

    ``exact``: whether rows are sent in high precision that a product would read cast from the values of codes.
    ``average``: whether gradients of parameters, sums over all ranks' rows, are divided by the number of ranks.
    """

    group: str
    size: int
    rank: int
    exact: bool = False
    average: bool = True

    def part(self, each: int) -> slice:
        """The numbers of this rank's experts, of so many a rank."""
        return slice(self.rank * each, (self.rank + 1) * each)


class RowsToSend(NamedTuple):
    """How rows are cast to be sent, by no cast in high precision, and whose products read them, as this role."""

    cast: Cast | None
    role: int
    reader: GatherReader


class ReceivedRows(ForProducts):
    """Rows of other ranks in groups, tokens on the way to experts or gradients on the way back."""

    REMEDY = (
        "of rows that another rank sent in FP8 for this one's experts: only products read them. Take hooks off the "
        "parts of the experts, or give these a recipe with products in high precision, and rows are sent so"
    )


class Journey(NamedTuple):
    """Where the rows of one forward go.

    Attributes:
        exchange: the ranks.
        offsets: int32 [E], where this rank's rows of each expert end.
        sizes: how many those are, E of them.
        sent: how many rows this rank sends to each.
        received: how many it gets from each.
        routing: sorts what was received by this rank's experts; rows of one are in the order of ranks.
    """

    exchange: Exchange
    offsets: Tensor
    sizes: list[int]
    sent: list[int]
    received: list[int]
    routing: Routing

    @property
    def own(self) -> slice:
        """The numbers of this rank's experts."""
        return self.exchange.part(len(self.sizes) // self.exchange.size)


def dispatch(rows: Tensor, offsets: Tensor, exchange: Exchange, sending: RowsToSend) -> tuple[Tensor, Journey]:
    """Rows [S, C] sorted by expert to the ranks that have these: rows [R, C] by this rank's experts, and their journey.

    Gradients flow back. One collective tells all ranks the sizes of groups (and what they found of amax), which are
    read on the host: an all-to-all needs them there.

    Raises:
        ValueError: on all ranks, where one has rows of no expert.
    """
    experts = offsets.shape[0]
    known = [torch.diff(offsets, prepend=offsets.new_zeros(1)), offsets.new_tensor([rows.shape[0]])]
    if _shares_scales(sending):
        known.append(_amax_of_groups(rows.detach(), offsets).view(torch.int32))
    every = _all_gather(torch.cat(known), exchange)  # [ranks, E + 1, or 2 E + 1]
    sizes: list[list[int]] = every[:, : experts + 1].tolist()
    for rank, (*of_experts, total) in enumerate(sizes):
        if sum(of_experts) != total:
            raise ValueError(f"rank {rank} has {total} rows, of which {sum(of_experts)} are of the {experts} experts")
    by_rank = [[sum(row) for row in _split(of_experts, exchange.size)] for *of_experts, _ in sizes]
    each = experts // exchange.size
    here = every[:, exchange.rank * each : (exchange.rank + 1) * each].flatten()
    received = [row[exchange.rank] for row in by_rank]
    expert = torch.arange(each, device=offsets.device).repeat(exchange.size)
    routing = Routing.of(expert.repeat_interleave(here, output_size=sum(received)), each)
    journey = Journey(exchange, offsets, sizes[exchange.rank][:-1], by_rank[exchange.rank], received, routing)
    amax = every[:, experts + 1 :].view(torch.float32).amax(0) if _shares_scales(sending) else None
    return _There.apply(rows, journey, sending, amax), journey


def combine(y: Tensor, journey: Journey, sending: RowsToSend) -> Tensor:
    """The results [R, C] of dispatched rows back to where these came from: [S, C]; their gradient is sent as pairs."""
    return _Back.apply(y, journey, sending)


class _There(torch.autograd.Function):
    """Rows to their experts; the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey, sending: RowsToSend, amax: Tensor | None) -> Tensor:
        ctx.journey = journey
        return _send(rows, journey, sending, amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _bring_back(grads[0], ctx.journey), None, None, None


class _Back(torch.autograd.Function):
    """Results back; the gradient goes to the experts."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, journey: Journey, sending: RowsToSend) -> Tensor:
        ctx.journey, ctx.sending = journey, sending
        return _bring_back(y, journey)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        amax, grad = None, grads[0].contiguous()
        if _shares_scales(ctx.sending):
            amax = largest(_amax_of_groups(grad, ctx.journey.offsets), ctx.journey.exchange.group)
        return _send(grad, ctx.journey, ctx.sending, amax), None, None


def _send(rows: Tensor, journey: Journey, sending: RowsToSend, amax: Tensor | None) -> Tensor:
    """What this rank's experts get. ``amax`` [E]: of all ranks' rows, where these share scales."""
    cast, order, columns = sending.cast, journey.routing.order, rows.shape[1]
    if cast is None:
        return _all_to_all(rows, journey.sent, journey.received, journey.exchange)[order]
    largest_amax = None
    if amax is None:
        q, _, scale_inv, _ = kernels.cast(rows, None, sending.role, *cast.arguments, offsets=journey.offsets)
        message = pack(q, scale_inv, cast.power_of_two)
    else:
        q, scale_inv = _cast_by_group(rows, journey, sending, amax)
        message, largest_amax = q.view(torch.uint8), amax.amax().view(1, 1)
    for recipe, observer in sending.reader.observers:
        observer.cast(recipe, sending.role, lambda: rows, Operands((q, scale_inv)), journey.offsets)
    received = _all_to_all(message, journey.sent, journey.received, journey.exchange)[order]
    if amax is None:
        codes, scales = unpack(received, columns, cast.format.dtype, cast.power_of_two)
    else:
        codes, scales = received.view(cast.format.dtype), scale_inv[journey.own]
    recipe, _, needs_dw, _ = sending.reader
    how = recipe, sending.role, needs_dw, largest_amax, journey.routing.offsets
    return ReceivedRows(operands_of_codes(codes, scales, *how), codes.shape, rows.dtype)


def _bring_back(y: Tensor, journey: Journey) -> Tensor:
    return _all_to_all(y[journey.routing.inverse], journey.received, journey.sent, journey.exchange)


def _shares_scales(sending: RowsToSend) -> bool:
    return sending.cast is not None and sending.cast.tile == (ALL, ALL)


def _amax_of_groups(rows: Tensor, offsets: Tensor) -> Tensor:
    """The amax [E] of each group; 0 of those without rows."""
    found = rows.new_zeros(offsets.shape[0] + 1, dtype=torch.float32)  # the last of rows in no group
    if len(rows):
        of_rows = kernels.amax(rows, (1, ALL)).flatten()
        found.scatter_reduce_(0, group_of_rows(offsets, len(rows)), of_rows, "amax")
    return found[:-1]


def _cast_by_group(rows: Tensor, journey: Journey, sending: RowsToSend, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [S, C], scale_inv [E, 1]) of scales that follow from ``amax`` [E] of all ranks, or are delayed."""
    cast = sending.cast
    assert cast is not None
    delayed = None
    if cast.is_delayed and sending.reader.state is not None:
        delayed = sending.reader.state.in_force(sending.role)[sending.role]
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin, delayed)
    q = torch.empty(rows.shape, dtype=cast.format.dtype, device=rows.device)
    groups = zip(rows.split(journey.sizes), q.split(journey.sizes), scale.split(1), strict=True)
    if parts := [group for group in groups if len(group[0])]:
        xs, codes, scales = map(list, zip(*parts, strict=True))
        found = [[scale.new_empty(1, 1) for _ in xs] for _ in range(2)]  # scale_inv and amax, which are known
        how = cast.tile, cast.power_of_two, cast.margin
        kernels.multi_tensor_cast(xs, codes, [], *found, scales, 0, *how, None)
    return q, scale_inv_from_scale(scale).unsqueeze(1)


def _split(values: list[int], parts: int) -> list[list[int]]:
    each = len(values) // parts
    return [values[begin : begin + each] for begin in range(0, len(values), each)]


def _all_gather(values: Tensor, exchange: Exchange) -> Tensor:
    return c10d_ops.wait_tensor(c10d_ops.all_gather_into_tensor(values.unsqueeze(0), exchange.size, exchange.group))


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], exchange: Exchange) -> Tensor:
    return c10d_ops.wait_tensor(c10d_ops.all_to_all_single(rows.contiguous(), received, sent, exchange.group))
