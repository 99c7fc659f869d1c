"""Rows that experts of other ranks compute: sent as the pairs that products read, their results brought back.

    forward    rows -> cast -> all-to-all of pairs -> products -> all-to-all in high precision
    backward   the mirror image: the gradient of the results is sent as pairs, that of the rows is brought back

A rank sorts its rows by expert, and casts them by the recipe of the product that will read them. Codes and scales are
one message. What a product reads as it lies is what it would read on one rank:

    a scale a row, or a block of a row   travels beside its codes; in a byte where it is a power of two
    a scale a tensor                     one for each expert, from the amax of all ranks' rows, taken before
    in high precision                    is sent so: a product reads it, or a scale is shared by some rows, not all

grad_weight reads rows along the tokens. Where one cast serves both layouts (per tensor) it reads these codes too; else
what is read is cast from the values of the codes that were sent.

Legend: S rows of this rank by all E experts, R rows that it received for its own, C columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.cast_together import MatrixToCast, cast_together
from octavo.autograd.casts import operands_of_codes
from octavo.autograd.gather_input import GatherReader
from octavo.autograd.grouped import Routing, group_of_rows
from octavo.granularity import ALL
from octavo.numerics import scale_inv_from_scale
from octavo.scaling.recipe import Cast
from octavo.tensor.collectives import exchanged_rows, gathered_parts, maximum_over_ranks, pack_message, unpack_message
from octavo.tensor.pair import Operands, OperandsFacade


class Exchange(NamedTuple):
    """The name and size of the group whose ranks hold equally many of a mixture's experts, and this rank's number.

    ``exact``: whether rows are sent in high precision where a product would else read a cast of the codes' values.
    ``average``: whether gradients of parameters, sums over all ranks' rows, are divided by the number of ranks.
    """

    group: str
    size: int
    rank: int
    exact: bool = False
    average: bool = True

    def local_experts(self, each: int) -> slice:
        """Return the numbers of this rank's experts; ``each``: how many a rank has."""
        return slice(self.rank * each, (self.rank + 1) * each)


class RowsToSend(NamedTuple):
    """The cast of the rows to send (None: in high precision), their role, and the recipe whose products read them."""

    cast: Cast | None
    role: int
    reader: GatherReader


class ReceivedRows(OperandsFacade):
    """Rows of other ranks in groups, tokens on the way to experts or gradients on the way back."""

    REMEDY = (
        "of rows that another rank sent in FP8 for this one's experts: only products read them. Take hooks off the "
        "parts of the experts, or give these a recipe with products in high precision, and rows are sent so"
    )


class Journey(NamedTuple):
    """The ranks and experts that the rows of one forward are sent to, by which their results come back."""

    exchange: Exchange
    offsets: Tensor  # int32 [E], where this rank's rows of each expert end
    sizes: list[int]  # how many those are
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    routing: Routing  # sorts received rows by this rank's experts; rows of one expert are in the order of ranks


def dispatch(rows: Tensor, offsets: Tensor, exchange: Exchange, sending: RowsToSend) -> tuple[Tensor, Journey]:
    """Send rows [S, C], sorted by expert, to the experts' ranks; return rows [R, C] by local expert, and the Journey.

    Gradients flow back.
    """
    journey, amax = _plan_journey(rows.detach(), offsets, exchange, _shares_scales(sending))
    send = functools.partial(_send, journey=journey, sending=sending, amax=amax)
    return _Travel.apply(rows, send, functools.partial(_bring_back, journey=journey)), journey


def _plan_journey(
    rows: Tensor, offsets: Tensor, exchange: Exchange, shares_scales: bool
) -> tuple[Journey, Tensor | None]:
    """Return the Journey of rows and, if ranks share scales, the amax [E] of all ranks' rows of each expert.

    One collective tells all ranks the sizes of groups (and the amaxes of their rows), which are read on the host: an
    all-to-all needs them there.
    """
    experts = offsets.shape[0]
    if experts % exchange.size:
        raise ValueError(f"{experts} experts can't be shared by {exchange.size} ranks that have as many each")
    message_parts = [torch.diff(offsets, prepend=offsets.new_zeros(1)), offsets.new_tensor([rows.shape[0]])]
    if shares_scales:
        message_parts.append(_amax_of_groups(rows, offsets).view(torch.int32))
    message = torch.cat(message_parts).unsqueeze(0)
    # [ranks, E + 1, or 2 E + 1]: rows of each expert, all rows, and amaxes as int32
    messages = gathered_parts(message, exchange.size, exchange.group)
    sizes: list[list[int]] = messages[:, : experts + 1].tolist()
    for rank, (*expert_sizes, total) in enumerate(sizes):
        if sum(expert_sizes) != total:
            raise ValueError(f"rank {rank} has {total} rows, of which {sum(expert_sizes)} are of the {experts} experts")
    each = experts // exchange.size
    here, sizes_to_send = exchange.local_experts(each), sizes[exchange.rank][:-1]
    sent = [sum(sizes_to_send[begin : begin + each]) for begin in range(0, experts, each)]
    received = [sum(row[here]) for row in sizes]
    expert = torch.arange(each, device=offsets.device).repeat(exchange.size)
    expert_of_row = expert.repeat_interleave(messages[:, here].flatten(), output_size=sum(received))
    journey = Journey(exchange, offsets, sizes_to_send, sent, received, Routing.by_expert(expert_of_row, each))
    return journey, messages[:, experts + 1 :].view(torch.float32).amax(0) if shares_scales else None


def combine(y: Tensor, journey: Journey, sending: RowsToSend) -> Tensor:
    """Send results [R, C] back to the ranks of the dispatched rows; return [S, C]. The gradient is sent as pairs."""

    def send(grad: Tensor) -> Tensor:
        grad, amax = grad.contiguous(), None
        if _shares_scales(sending):
            amax = maximum_over_ranks(_amax_of_groups(grad, journey.offsets), journey.exchange.group)
        return _send(grad, journey, sending, amax)

    return _Travel.apply(y, functools.partial(_bring_back, journey=journey), send)


class _Travel(torch.autograd.Function):
    """Rows sent by one function, their gradient by the other."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, way: Callable[[Tensor], Tensor], way_back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.way_back = way_back
        return way(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way_back(grads[0]), None, None


def _send(rows: Tensor, journey: Journey, sending: RowsToSend, amax: Tensor | None) -> Tensor:
    """Return the rows that this rank's experts receive. ``amax`` [E]: of all ranks' rows, where these share scales."""
    cast, order, columns = sending.cast, journey.routing.order, rows.shape[1]
    if cast is None:
        return exchanged_rows(rows, journey.sent, journey.received, journey.exchange.group)[order]
    largest_amax = None
    if amax is None:
        q, _, scale_inv, _ = kernels.cast(rows, None, sending.role, *cast.arguments, offsets=journey.offsets)
        message = pack_message(q, scale_inv, cast.power_of_two)
    else:
        q, scale_inv = _cast_by_group(rows, journey, sending, amax)
        message, largest_amax = q.view(torch.uint8), amax.amax().view(1, 1)
    for recipe, observer in sending.reader.observers:
        observer.cast(recipe, sending.role, lambda: rows, Operands((q, scale_inv)), journey.offsets)
    received = exchanged_rows(message, journey.sent, journey.received, journey.exchange.group)[order]
    if amax is None:
        codes, scales = unpack_message(received, columns, cast.format.dtype, cast.power_of_two, cast.tile)
    else:
        local_experts = journey.exchange.local_experts(len(scale_inv) // journey.exchange.size)
        codes, scales = received.view(cast.format.dtype), scale_inv[local_experts]
    recipe, _, needs_dw, _ = sending.reader
    operands = operands_of_codes((codes, scales), recipe, sending.role, needs_dw, largest_amax, journey.routing.offsets)
    return ReceivedRows(operands, codes.shape, rows.dtype)


def _bring_back(y: Tensor, journey: Journey) -> Tensor:
    return exchanged_rows(y[journey.routing.inverse], journey.received, journey.sent, journey.exchange.group)


def _shares_scales(sending: RowsToSend) -> bool:
    return sending.cast is not None and sending.cast.has_one_scale


def _amax_of_groups(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the amax [E] of each group; 0 for a group without rows."""
    amax = rows.new_zeros(offsets.shape[0] + 1, dtype=torch.float32)  # the last: of rows in no group
    if len(rows):
        row_amax = kernels.amax(rows, (1, ALL)).flatten()
        amax.scatter_reduce_(0, group_of_rows(offsets, len(rows)), row_amax, "amax")
    return amax[:-1]


def _cast_by_group(rows: Tensor, journey: Journey, sending: RowsToSend, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes [S, C], scale_inv [E, 1]) by scales from ``amax`` [E] of all ranks, or by delayed scales."""
    cast, role, state = sending.cast, sending.role, sending.reader.state
    assert cast is not None
    delayed = state.in_force(role)[role] if cast.is_delayed and state is not None else None
    scale = cast.scale_of(amax, delayed)
    q = torch.empty(rows.shape, dtype=cast.format.dtype, device=rows.device)
    groups = zip(rows.split(journey.sizes), q.split(journey.sizes), scale.split(1), strict=True)
    cast_together([MatrixToCast(x, codes, scale=one) for x, codes, one in groups if len(x)], cast)
    return q, scale_inv_from_scale(scale).unsqueeze(1)
