"""The pairs of a sharded weight [N, K] that each rank casts of its own rows, so that together they are the whole one's.

For weights whose two layouts are scaled differently (rows, 1 x 32), and for blocks that reach over several ranks' rows.
There ranks first agree on the amax of each block. Each casts its rows with a row of such amaxes beside them, which
makes a block's scale that of the whole block; that row's codes are not sent. Other scales are sent beside the codes,
unless ranks have different numbers of rows: FSDP2 then takes tensors of the shard's shape alone, and ranks agree on
all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo import kernels
from octavo.autograd.casts import WEIGHT
from octavo.granularity import ALL, Tile, scale_shape
from octavo.kernels.arguments import lie_by_columns
from octavo.kernels.layouts import contraction_multiple, with_padding
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.scaling.recipe import Cast, RoleCasts
from octavo.tensor.collectives import bytes_of, scales_from
from octavo.tensor.fsdp2 import padded_rows, rows_of_rank, rows_on_each_rank
from octavo.tensor.pair import Operands, operands_of, transposed_pair


class _CastLayout(NamedTuple):
    """A cast, its tile of the weight as it lies, the shape of the scales that ranks agree on; None: they are sent."""

    cast: Cast
    tile: Tile
    grid: tuple[int, ...] | None


class ShardCast:
    """How one rank casts its rows of a weight [N, K], and reads all ranks'.

    Args:
        casts: of the weight, Dynamic; of its two layouts one at most has blocks of several rows.
        shape: of the whole weight.
        ranks: that have rows; ``rank``: this one's number.
    """

    def __init__(self, casts: RoleCasts, shape: torch.Size, ranks: int, rank: int) -> None:
        assert casts.as_is is not None and casts.transposed is not None
        self.shape, self.ranks, part = shape, ranks, rows_on_each_rank(shape[0], ranks)
        self.begin = rows_of_rank(shape[0], ranks, rank).start
        layouts = [(casts.as_is, casts.as_is.tile), (casts.transposed, casts.transposed.tile[::-1])]
        self.layouts = list[_CastLayout]()
        for cast, tile in layouts[: 1 if casts.once else 2]:
            apart = shape[0] == part * ranks and tile[0] != ALL and part % tile[0] == 0
            self.layouts.append(_CastLayout(cast, tile, None if apart else scale_shape(shape, tile)))

    def amax(self, shard: Tensor) -> Tensor:
        """What this rank knows of the amax of all blocks that ranks agree on, one after the other; float32."""
        found = [shard.new_zeros(0, dtype=torch.float32)]
        for _, tile, grid in self.layouts:
            if grid is not None:
                blocks = shard.new_zeros(grid, dtype=torch.float32)
                if len(shard):
                    first, before = (0, 0) if tile[0] == ALL else divmod(self.begin, tile[0])
                    own = kernels.amax(functional.pad(shard, (0, 0, before, 0)) if before else shard, tile)
                    blocks[first : first + len(own)] = own
                found.append(blocks.view(-1))
        return torch.cat(found)

    def cast(self, shard: Tensor, amax: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(What this rank sends, uint8 of as many rows as every rank's; the scale_inv that ranks have agreed on).

        Args:
            shard: this rank's rows, bf16, fp16 or fp32.
            amax: the largest that ranks know, of all that ``amax`` gives.
        """
        x, before, sent, known = shard, 0, list[Tensor](), list[Tensor]()
        for cast, tile, grid in self.layouts:
            if grid is not None:
                blocks, amax = amax[: math.prod(grid)].view(grid), amax[math.prod(grid) :]
                known.append(
                    scale_inv_from_scale(scale_from_amax(blocks, cast.format.max, cast.power_of_two, cast.margin))
                )
                if tile[0] != 1:
                    x, before = self._beside(shard, blocks, tile)
        (first, *_), *others = self.layouts
        second = others[0].cast.as_second if others else {}
        q, q2, scale_inv, scale_inv2, *_ = kernels.cast(x, None, WEIGHT, *first.arguments, **second)
        for (cast, _, grid), codes, scales in zip(self.layouts, (q, q2), (scale_inv, scale_inv2), strict=False):
            own = codes.view(torch.uint8)[before : before + len(shard)]
            sent.append(padded_rows(own, self.shape, self.ranks))
            if grid is None:  # of rows alone where others are beside them
                sent.append(bytes_of(scales[before : before + len(shard)], cast.power_of_two))
        return sent, known

    def _beside(self, shard: Tensor, blocks: Tensor, tile: Tile) -> tuple[Tensor, int]:
        """(The shard with rows of the amaxes of blocks that other ranks have rows of, how many are before it)."""
        columns, end = shard.shape[1], self.begin + len(shard)
        wide = blocks.to(shard.dtype).repeat_interleave(columns if tile[1] == ALL else tile[1], 1)[:, :columns]
        if tile[0] == ALL:
            return torch.cat([shard, wide]), 0
        if not len(shard):
            return shard, 0
        (first, before), (last, after) = divmod(self.begin, tile[0]), divmod(end if end < self.shape[0] else 0, tile[0])
        rows = wide[first : first + 1].expand(before, columns), shard, wide[last : last + 1][:after]
        return torch.cat(rows) if before or after else shard, before

    def read(self, received: Sequence[Tensor], known: Sequence[Tensor], pads: bool) -> Operands:
        """What products read, of all ranks' ``sent``, and what ``cast`` gave besides."""
        left, agreed, pairs = iter(received), iter(known), list[tuple[Tensor, Tensor]]()
        for cast, tile, grid in self.layouts:
            q = next(left)[: self.shape[0]].view(cast.format.dtype)
            scales = scales_from(next(left), cast.power_of_two) if grid is None else next(agreed)
            # with the strides that products want, see kernels/signatures.py
            pairs.append((q, scales.t().contiguous().t() if lie_by_columns(tile) else scales))
        if len(pairs) == 1:
            return operands_of(*pairs[0], pads)
        (q, scale_inv), (q2, scale_inv2) = pairs
        pad = contraction_multiple(q.device) if pads else 1
        return Operands((with_padding(q, pad), scale_inv), transposed_pair(q2, scale_inv2, pads))
