"""Rows of a tensor that FSDP2 shards: how many each rank has, and what is sent of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rows_on_each_rank(rows: int, ranks: int) -> int:
    """How many rows FSDP2 pads every rank's shard of a matrix to."""
    return -(-rows // ranks)


def padded_rows(shard: Tensor, whole: torch.Size, ranks: int) -> Tensor:
    """A shard, contiguous, with rows of zeros behind it to as many as each rank's; FSDP2 pads no other dimension."""
    rows = rows_on_each_rank(whole[0], ranks)
    if shard.shape[0] == rows or shard.shape[1:] != whole[1:]:
        return shard.contiguous()
    padded = shard.new_zeros(rows, *shard.shape[1:])
    padded[: shard.shape[0]] = shard
    return padded


def gathered_whole(received: Tensor, shape: torch.Size) -> Tensor:
    """What all ranks' shards are together, without their padding, whichever dimension is sharded."""
    return received.view(-1)[: math.prod(shape)].view(shape)
