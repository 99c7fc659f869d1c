"""Rotary positions between the one product of queries, keys and values and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.products import is_recorded, refuse_in_backward
from octavo.kernels.arguments import RotaryHeads

Attended = tuple[Tensor, Tensor, Tensor]  # queries, keys, values [B, heads, S, D]


def heads_apart(joined: Tensor, counts: tuple[int, int], width: int) -> Sequence[Tensor]:
    """Return queries, keys and values [B, S, heads, D], from one tensor that holds them [B, S, all heads x D]."""
    queries, keys = counts
    return joined.unflatten(2, (-1, width)).split([queries, keys, keys], 2)


class Positions(NamedTuple):
    """The rotary positions by which a chain turns the queries and keys of its product [B S, all heads x D].

    ``cos``, ``sin`` and ``counts`` are those of ``rotary``; ``sequences`` is B.
    """

    cos: Tensor
    sin: Tensor
    counts: tuple[int, int]
    sequences: int

    def turned(self, qkv: Tensor) -> Attended:
        """Return queries and keys, turned, and values, from the product."""
        return _turned(self.cos, self.sin, self.counts, qkv.view(self.sequences, self.cos.shape[1], qkv.shape[1]))


def gradient_of_heads(
    grads: Sequence[Tensor | None], counts: tuple[int, int], cos: Tensor, sin: Tensor
) -> RotaryHeads | None:
    """Return what the product's gradient is cast from, by the gradients of its three results; None without any."""
    if (like := next((grad for grad in grads if grad is not None), None)) is None:
        return None
    (batch, _, *dims), (queries, keys) = like.shape, counts
    with_counts = zip(grads, (queries, keys, keys), strict=True)
    whole = (like.new_zeros(batch, count, *dims) if grad is None else grad for grad, count in with_counts)
    q, k, v = (grad.transpose(1, 2) for grad in whole)
    return RotaryHeads(q, k, v, cos, sin, inverse=True)


class _TurnHeads(torch.autograd.Function):
    """rotary with its gradients, turned back into one tensor, which the product's cast reads as it lies."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, counts: tuple[int, int], *qkv: Tensor) -> Attended:
        ctx.save_for_backward(cos, sin)
        ctx.counts, ctx.is_joined = counts, len(qkv) == 1
        return _turned(cos, sin, counts, *qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_in_backward(*grads)
        joined = kernels.rotary(*(grad.transpose(1, 2) for grad in grads), *ctx.saved_tensors, True)
        grads_of_qkv = (joined,) if ctx.is_joined else heads_apart(joined, ctx.counts, grads[0].shape[-1])
        return None, None, None, *grads_of_qkv


def _turned(cos: Tensor, sin: Tensor, counts: tuple[int, int], *qkv: Tensor) -> Attended:
    width = qkv[0].shape[-1]
    if len(qkv) == 1:
        width //= counts[0] + 2 * counts[1]
        qkv = tuple(heads_apart(qkv[0], counts, width))
    turned = kernels.rotary(*qkv, cos, sin, False)
    query, key, value = (heads.transpose(1, 2) for heads in heads_apart(turned, counts, width))
    return query, key, value


def rotary(qkv: Sequence[Tensor], cos: Tensor, sin: Tensor, counts: tuple[int, int]) -> Attended:
    """Return queries and keys turned by the angles of their positions, and values, for attention.

    Args:
        qkv: one tensor [B, S, all heads x D], queries first, then keys, then values; or each [B, S, heads, D].
        cos, sin: of the angles, [1 or B, S, D or D / 2], see the op in signatures.py; no gradient flows to them.
        counts: the number of heads of queries, and that of keys and of values.
    """
    apply = _TurnHeads.apply if is_recorded(*qkv) else _turned
    return apply(cos, sin, counts, *qkv)
