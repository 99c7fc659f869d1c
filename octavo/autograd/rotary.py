"""Rotary positions between the one product of queries, keys and values and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.products import is_recorded, refuse_in_backward

Attended = tuple[Tensor, Tensor, Tensor]  # queries, keys, values [B, heads, S, D]


def _apart(joined: Tensor, counts: tuple[int, int], width: int) -> list[Tensor]:
    """Queries, keys and values [B, S, heads, D] of what lies beside each other [B, S, all heads x D]."""
    queries, keys = counts
    return list(joined.unflatten(2, (-1, width)).split([queries, keys, keys], 2))


class _TurnHeads(torch.autograd.Function):
    """See rotary. The gradients are turned back into one tensor, which the product's cast reads as it lies."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, counts: tuple[int, int]) -> Attended:
        ctx.save_for_backward(cos, sin)
        return _turned(qkv, cos, sin, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_in_backward(*grads)
        return kernels.rotary(*(grad.transpose(1, 2) for grad in grads), *ctx.saved_tensors, True), None, None, None


def _turned(qkv: Tensor, cos: Tensor, sin: Tensor, counts: tuple[int, int]) -> Attended:
    width = qkv.shape[-1] // (counts[0] + 2 * counts[1])
    turned = kernels.rotary(*_apart(qkv, counts, width), cos, sin, False)
    query, key, value = (heads.transpose(1, 2) for heads in _apart(turned, counts, width))
    return query, key, value


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, counts: tuple[int, int]) -> Attended:
    """Queries and keys turned by the angles of their positions, and values, for attention.

    Args:
        qkv: [B, S, all heads x D], queries first, then keys, then values.
        cos, sin: of the angles, [1 or B, S, D or D / 2], see the op in signatures.py; no gradient flows to them.
        counts: how many heads of queries there are, and of keys, which values have as many of.
    """
    apply = _TurnHeads.apply if is_recorded(qkv) else _turned
    result: Attended = apply(qkv, cos, sin, counts)
    return result
