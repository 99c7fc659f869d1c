"""Rows in groups, as a mixture of experts sorts its tokens: each group is a matrix of its own.

offsets [G] int32, on the device of the rows, are the groups' ends, cumulative (what torch's grouped products call
``offs``): group e has the rows from offsets[e - 1], or 0, up to offsets[e]. Rows from the last end on are in no group.
Only the device knows how large groups are, so the sizes of the results depend on R and G alone:

    along the rows              a row a row: R
    along a scale's rows        tile rows of -1: one a group, G. Of 1: one a row, R. Of r: each group's blocks begin at
                                its first row and behind those of the groups before, R // r + G at most
    along transposed columns    each group is padded to a multiple of ``pad`` and begins where the one before ends:
                                (R // pad + G) * pad at most, or R where pad is 1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.granularity import ALL, Tile, tiles_along
from octavo.kernels.layouts import padded_size


def scale_rows(rows: int, groups: int, tile_rows: int) -> int:
    """Return how many rows scale_inv and amax have for so many rows in groups.

    Example:
        >>> [scale_rows(1000, 8, tile_rows) for tile_rows in (-1, 1, 128)]
        [8, 1000, 15]
    """
    if tile_rows == ALL:
        return groups
    return rows if tile_rows == 1 else rows // tile_rows + groups


def grouped_scale_shape(shape: tuple[int, int], groups: int, tile: Tile) -> tuple[int, int]:
    """Return the shape of scale_inv and amax of [R, C] in groups."""
    return scale_rows(shape[0], groups, tile[0]), tiles_along(shape[1], tile[1])


def padded_columns(rows: int, groups: int, pad: int) -> int:
    """Return how many columns the transposed codes of so many rows in groups have.

    Example:
        >>> padded_columns(1000, 8, 16), padded_columns(1000, 8, 1)
        (1120, 1000)
    """
    padded_size(0, pad)  # raises for a pad that is no divisor
    return rows if pad == 1 else (rows // pad + groups) * pad


def check_offsets_kind(offsets: Tensor, device: torch.device) -> None:
    """Check the dtype, shape and device of offsets, without reading them.

    Raises:
        TypeError: unless they are int32.
        ValueError: unless they are [G], on the device of the rows that they divide.
    """
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets are int32, not {offsets.dtype}: counts.cumsum(0).to(torch.int32)")
    if offsets.ndim != 1:
        raise ValueError(f"offsets of shape {list(offsets.shape)}: they are [groups], each group's end")
    if offsets.device != device:
        raise ValueError(f"offsets on {offsets.device} divide rows on {device}: move them there")


def check_offsets(offsets: Tensor, rows: int) -> list[int]:
    """Return the groups' ends on the host, checked; waits for a GPU.

    Raises:
        ValueError: where they descend or go beyond the rows, with the first that does.

    Example:
        >>> check_offsets(torch.tensor([3, 3, 8], dtype=torch.int32), rows=10)
        [3, 3, 8]
    """
    ends: list[int] = offsets.tolist()
    for group, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        if end < start:
            raise ValueError(
                f"offsets[{group}] = {end} is below {start}, where the group begins: offsets are the cumulative sizes "
                "of groups, and ascend"
            )
        if end > rows:
            raise ValueError(f"offsets[{group}] = {end}: there are {rows} rows")
    return ends


class GroupPlace(NamedTuple):
    """The place of a group along the rows, a scale's rows, and transposed columns, without their padding."""

    rows: slice
    scale_rows: slice
    columns: slice


def places(ends: Sequence[int], tile_rows: int, pad: int = 1) -> list[GroupPlace]:
    """Return each group's place; ``ends``: of the groups along the rows."""
    group_places = []
    start = column = tiles = 0
    for group, end in enumerate(ends):
        size = end - start
        if tile_rows == ALL:
            tiles = group
        rows_of_tiles = slice(tiles, tiles + tiles_along(size, tile_rows))
        group_places.append(GroupPlace(slice(start, end), rows_of_tiles, slice(column, column + size)))
        start, tiles, column = end, rows_of_tiles.stop, column + padded_size(size, pad)
    return group_places


def of_equal_groups(
    codes: Tensor, scale_inv: Tensor, tile: Sequence[int], shape: Sequence[int], pad: int = 1, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return views by group of the results of a grouped cast of weights [E, N, K], as E groups of N rows [E * N, K].

    Args:
        codes: [E * N, K'], or, with ``transposed``, [K, Rp] whose groups were padded to multiples of ``pad``.
        scale_inv: as the cast returned it, not transposed.
        tile: (rows, columns) of the weight as it lies that share a scale.
        shape: (E, N, K).
        pad: of the cast.
        transposed: whether ``codes`` are the transposed ones.

    Returns:
        codes [E, N, K'] and their scale_inv [E, ., .], or, with ``transposed``, [E, K, N'] and scale_inv to match.
    """
    groups, rows, _ = shape
    by_group = scale_inv[: groups * tiles_along(rows, tile[0])].unflatten(0, (groups, -1))
    if not transposed:
        return codes.unflatten(0, (groups, rows)), by_group
    group_columns = padded_size(rows, pad)
    laid = codes[:, : groups * group_columns].unflatten(1, (groups, group_columns))
    return laid.permute(1, 0, 2), by_group.transpose(1, 2)
