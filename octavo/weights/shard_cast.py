"""Casts of one rank's shard of a weight that FSDP2 sends in FP8, and the operands that all ranks' codes make.

A weight whose layouts one cast serves, per tensor or in blocks that each lie on one rank, is cast in one launch with
others (``prepare``). Any other is cast alone (``cast``): its layouts are scaled differently (rows, 1 x 32), or its
blocks reach over several ranks' rows.

Ranks take the maximum of the amax of each block that they share (``amax``). Of such blocks of several rows each rank
appends to its rows one row of these amaxes, so that its cast finds the scale of the whole block; the codes of the
appended row are not sent. Other scales are sent beside the codes, unless ranks have different numbers of rows: FSDP2
then takes tensors of the shard's shape alone, and ranks take the maximum for all scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo import kernels
from octavo.autograd.cast_together import MatrixToCast
from octavo.granularity import ALL, Tile, scale_shape
from octavo.kernels.arguments import lie_by_columns
from octavo.kernels.layouts import contraction_multiple, is_small_block, with_padding
from octavo.numerics import scale_inv_from_scale
from octavo.private import pytree
from octavo.scaling.recipe import WEIGHT, Cast, RoleCasts
from octavo.tensor.collectives import scale_bytes, scales_from
from octavo.tensor.pair import Operands, operands_of, transposed_pair
from octavo.weights.fsdp2 import padded_rows, rows_of_rank, rows_on_each_rank


class WeightScales(NamedTuple):
    """The scales of a weight that is cast per tensor, [1], of experts [E]; the same on all ranks.

    ``amax``: [1, 1], the weight's own, under Delayed.
    """

    scale: Tensor
    scale_inv: Tensor
    amax: Tensor | None


class ShardCodes(NamedTuple):
    """The tensors that a cast of a shard wrote.

    Attributes:
        sent: of each layout the codes, uint8, of as many rows on each rank, and their scales, unless ranks share these.
        shared_scales: the scale_inv of each layout whose scales ranks share.
        amax: [1, 1], of the whole weight, under Delayed.
    """

    sent: tuple[Tensor, ...]
    shared_scales: tuple[Tensor, ...]
    amax: Tensor | None = None

    def on(self, device: torch.device) -> ShardCodes:
        """Return these tensors on a device, without a wait for their copies."""
        if self.sent[0].device == device:
            return self
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), self)


class LayoutCast(NamedTuple):
    """The cast of one layout.

    Attributes:
        tile: that of the cast, in the weight as it lies.
        grid: the shape of the whole weight's scales, where ranks share them; None where each block lies on one rank,
            which sends its scales.
    """

    cast: Cast
    tile: Tile
    grid: tuple[int, ...] | None


class ShardCast:
    """The casts of one rank's rows of a weight [N, K], or its experts of [E, N, K].

    At most one of the two layouts has blocks of several rows.

    Attributes:
        shape: the whole weight's.
        cast_as_is: that of the weight as it lies; where it is cast with other weights it serves both layouts.
        first_row: number of this rank's first row, or expert.
        in_one_launch: whether it is cast with other weights.
        needs_maximum: whether ranks share scales.
    """

    def __init__(self, casts: RoleCasts, shape: torch.Size, ranks: int, rank: int) -> None:
        assert casts.as_is is not None and casts.transposed is not None
        self.shape, self.ranks = shape, ranks
        self.in_one_launch = is_cast_in_one_launch(casts.shared_tile, shape, ranks)
        self.first_row = rows_of_rank(shape[0], ranks, rank).start
        self.cast_as_is = casts.as_is
        tiles = [(casts.as_is, casts.as_is.tile), (casts.transposed, casts.transposed.tile[::-1])]
        self.layouts = [LayoutCast(cast, tile, self._grid(tile)) for cast, tile in tiles[: 1 if casts.coincide else 2]]
        self.needs_maximum = any(layout.grid is not None for layout in self.layouts)

    def _grid(self, tile: Tile) -> tuple[int, ...] | None:
        """Return the shape of scales that ranks share, None where each block lies on one rank."""
        if has_whole_blocks(tile, self.shape, self.ranks):
            return None
        return *self.shape[:-2], *scale_shape(self.shape[-2:], tile)

    def amax(self, shard: Tensor) -> Tensor:
        """Return this rank's amax of each block that several ranks share, one after the other; float32."""
        amaxes = [self._amax_of(shard, tile, grid).view(-1) for _, tile, grid in self.layouts if grid is not None]
        return amaxes[0] if len(amaxes) == 1 else torch.cat([shard.new_zeros(0, dtype=torch.float32), *amaxes])

    def _amax_of(self, shard: Tensor, tile: Tile, grid: tuple[int, ...]) -> Tensor:
        """Return the amax of each block of the whole weight in this rank's rows, 0 where it has none of a block."""
        if not len(shard):
            return shard.new_zeros(grid, dtype=torch.float32)
        if shard.ndim == 3:  # per tensor
            first_block, row_amaxes = self.first_row, kernels.amax(shard.flatten(0, 1), (1, ALL))
            block_amaxes = row_amaxes.view(shard.shape[:2]).amax(1).view(-1, 1, 1)
        else:
            first_block, rows_above = (0, 0) if tile[0] == ALL else divmod(self.first_row, tile[0])
            block_amaxes = kernels.amax(functional.pad(shard, (0, 0, rows_above, 0)) if rows_above else shard, tile)
        if block_amaxes.shape == grid:
            return block_amaxes
        whole = shard.new_zeros(grid, dtype=torch.float32)
        whole[first_block : first_block + len(block_amaxes)] = block_amaxes
        return whole

    def prepare(
        self, shard: Tensor, before: ShardCodes | None, scales: WeightScales | None
    ) -> tuple[ShardCodes, list[MatrixToCast]]:
        """Return (the codes that a launch with other weights writes, this shard's matrices for it).

        ``before``: the last codes, whose memory is written again; ``scales``: per tensor; None for blocks.
        """
        sent = self._memory(shard, scales is None) if before is None else before.sent
        xs = _matrices(shard) if shard.numel() else []
        codes = _matrices(sent[0].view(self.cast_as_is.format.dtype)[: len(shard)])
        # lengths differ: an empty shard has no xs; of experts ``sent`` has padding, and ``scales`` those of later ranks
        if scales is None:  # the launch finds them, and writes them into ``sent``
            of_blocks = zip(xs, codes, _matrices(sent[1]), strict=False)
            return ShardCodes(sent, ()), [MatrixToCast(x, q, scale_inv=scale_inv) for x, q, scale_inv in of_blocks]
        first_matrix = self.first_row if shard.ndim == 3 else 0
        with_scale = zip(xs, codes, scales.scale[first_matrix:].split(1), strict=False)
        matrices = [MatrixToCast(x, q, scale=scale) for x, q, scale in with_scale]
        return ShardCodes(sent, (scales.scale_inv.view(-1, *[1] * (shard.ndim - 1)),), scales.amax), matrices

    def _memory(self, shard: Tensor, has_blocks: bool) -> tuple[Tensor, ...]:
        """Return memory for the codes, of as many rows on every rank, and for the scales of blocks."""
        shape, cast = (rows_on_each_rank(self.shape[0], self.ranks), *self.shape[1:]), self.cast_as_is
        codes = torch.zeros(shape, dtype=torch.uint8, device=shard.device)
        if not has_blocks:
            return (codes,)
        grid = *shape[:-2], *scale_shape(shape[-2:], cast.tile)
        return codes, shard.new_ones(grid, dtype=cast.scale_inv_dtype)

    def cast(self, shard: Tensor, amax: Tensor) -> ShardCodes:
        """Cast the shard alone; ``amax``: the maximum over ranks of what the method ``amax`` returns."""
        x, rows_above = shard, 0
        sent, shared_scales = list[Tensor](), list[Tensor]()
        for cast, tile, grid in self.layouts:
            if grid is not None:
                block_amaxes, amax = amax[: math.prod(grid)].view(grid), amax[math.prod(grid) :]
                scale = cast.scale_of(block_amaxes)
                shared_scales.append(scale_inv_from_scale(scale).to(cast.scale_inv_dtype))
                if tile[0] != 1:
                    x, rows_above = self._with_amax_rows(shard, block_amaxes, tile)
        (first, *_), *others = self.layouts
        second = others[0].cast.as_second if others else {}
        q, q2, scale_inv, scale_inv2, *_ = kernels.cast(x, None, WEIGHT, *first.arguments, **second)
        rows = slice(rows_above, rows_above + len(shard))  # without those of amaxes
        for (cast, _, grid), codes, scales in zip(self.layouts, (q, q2), (scale_inv, scale_inv2), strict=False):
            sent.append(padded_rows(codes.view(torch.uint8)[rows], self.shape, self.ranks))
            if grid is None:
                sent.append(scale_bytes(scales[rows], cast.power_of_two))
        return ShardCodes(tuple(sent), tuple(shared_scales))

    def _with_amax_rows(self, shard: Tensor, block_amaxes: Tensor, tile: Tile) -> tuple[Tensor, int]:
        """Return (the shard with rows of its blocks' amaxes, how many are above it), so that a cast finds their scales.

        Of a weight of 300 rows in blocks of 128, the second of three ranks has rows 100 to 199: the last 28 of block 0,
        and 72 of block 1. It casts 100 rows of block 0's amaxes, so that its own lie as in the weight, its 100 rows,
        and one row of block 1's amaxes, for the 56 rows that the third rank has. Where a block is all rows, one row of
        its amaxes follows the shard.

        ``block_amaxes``: of each block of the whole weight, over all ranks; ``tile``: a block's size.
        """
        columns, end = shard.shape[1], self.first_row + len(shard)
        width = columns if tile[1] == ALL else tile[1]
        wide = block_amaxes.to(shard.dtype).repeat_interleave(width, 1)[:, :columns]
        if tile[0] == ALL:
            return torch.cat([shard, wide]), 0
        if not len(shard):
            return shard, 0
        first, rows_above = divmod(self.first_row, tile[0])
        last, rows_below = divmod(end if end < self.shape[0] else 0, tile[0])
        rows = wide[first : first + 1].expand(rows_above, columns), shard, wide[last : last + 1][:rows_below]
        return torch.cat(rows) if rows_above or rows_below else shard, rows_above

    def read(self, received: Sequence[Tensor], codes: ShardCodes, may_pad: bool) -> Operands:
        """Return the operands of all ranks' ``sent`` tensors; ``codes``: this rank's, which has scales and amax."""
        tensors, shared_scales = iter(received), iter(codes.shared_scales)
        pairs: list[tuple[Tensor, Tensor]] = []
        for cast, tile, grid in self.layouts:
            q = next(tensors)[: self.shape[0]].view(cast.format.dtype)
            scales = next(tensors if grid is None else shared_scales)
            if scales.dtype == torch.uint8:
                scales = scales_from(scales, cast.power_of_two, tile)
            # with the strides that products want, see kernels/signatures.py
            pairs.append((q, scales.t().contiguous().t() if lie_by_columns(tile) else scales))
        if len(pairs) == 1:
            return operands_of(*pairs[0], may_pad)._replace(amax=codes.amax)
        (q, scale_inv), (q2, scale_inv2) = pairs
        pad = contraction_multiple(q.device, may_pad)
        return Operands((with_padding(q, pad), scale_inv), transposed_pair(q2, scale_inv2, may_pad))


def _matrices(tensor: Tensor) -> Sequence[Tensor]:
    """Return the matrices of experts [E, N, K], or a single one."""
    return tensor.unbind() if tensor.ndim == 3 else [tensor]


def is_square(block: Tile | None) -> bool:
    """Whether a cast that serves both layouts of a weight has small blocks of as many rows as columns."""
    return block is not None and block[0] == block[1] and is_small_block(block)


def is_cast_in_one_launch(block: Tile | None, shape: torch.Size, ranks: int) -> bool:
    """Whether shards are cast with other weights: by one cast, per tensor or in blocks that lie on one rank each."""
    return block == (ALL, ALL) or (block is not None and is_square(block) and has_whole_blocks(block, shape, ranks))


def has_whole_blocks(tile: Tile, shape: torch.Size, ranks: int) -> bool:
    """Whether each of these ranks has as many rows, or experts, and they are whole blocks of this size."""
    return tile[0] != ALL and shape[0] % ranks == 0 and (len(shape) == 3 or shape[0] // ranks % tile[0] == 0)
