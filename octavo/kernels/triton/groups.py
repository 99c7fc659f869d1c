"""Find, on the device, the group of rows that a program works on.

Each group has programs for itself, each for so many of its rows. Programs without a group work on the rows that are in
no group, and on parts of the result that no group fills. For R rows in G groups R // HEIGHT + G + 1 programs are always
enough. A program finds its group by the sizes of all: a vector of numbers and some sums, for 128 groups as for one.

If offsets descend or go beyond the rows, all groups count as empty.

Kernels that serve matrices without groups too (``tiling.grouped`` is false) read and write rows by ``produce_of_group``
and ``places_of_codes``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import block_size
from octavo.kernels.triton.prologue import produce
from octavo.kernels.triton.tiles import narrow


class Groups(NamedTuple):
    """The groups' ends [count], and how many transposed columns and rows of scales there are for them."""

    offsets: Any
    count: Any
    columns: Any
    scale_rows: Any


class Grouping(NamedTuple):
    """Constants of the groups that a kernel is compiled for."""

    width: int  # a power of two, the number of groups or more
    ragged: bool  # whether kernels need to know where groups begin; else only where the last ends
    pad: int  # the multiple to which a group's transposed columns are padded
    block_r: int  # rows of a group that share a scale; launch.WHOLE for all
    h_block_r: int  # rows that share a scale_inv in an activation's input, if that is codes


class GroupOfProgram(NamedTuple):
    """A program's group and the program's part of it. Rows that are in no group are the group after the last."""

    part: Any  # the program's number among the group's
    first: Any  # the part's first row in the group
    size: Any  # rows to be read
    height: Any  # rows of codes to be written
    group: Any = 0  # its number
    start: Any = 0  # its first row in x
    column: Any = 0  # its first column of transposed codes
    columns: Any = 0  # to be written, with the padding
    scale_row: Any = 0  # its first row of scales
    scale_rows: Any = 0  # to be written
    h_row: Any = 0  # its first row of the scales of an activation's input


@triton.jit
def sizes_of(groups, R, grouping: tl.constexpr):
    """Return (the size of each group, 0 beyond their number; whether offsets are wrong)."""
    indices = tl.arange(0, grouping.width)
    inside = indices < groups.count
    ends = tl.load(groups.offsets + indices, mask=inside, other=0)
    starts = tl.load(groups.offsets + indices - 1, mask=inside & (indices > 0), other=0)
    is_wrong = tl.max((inside & ((ends < starts) | (ends > R))).to(tl.int32), 0) > 0
    return tl.where(is_wrong, 0, ends - starts), is_wrong


@triton.jit
def pieces_of(sizes, ROWS: tl.constexpr):
    """Return how many pieces of so many rows cover each group."""
    return (sizes + (ROWS - 1)) // ROWS


@triton.jit
def scales_before(group, sizes, groups_before, ROWS: tl.constexpr):
    """Return how many scales the groups before this one have, each for so many rows or columns of a group."""
    WHOLE: tl.constexpr = 1 << 30  # launch.py's
    return group if ROWS == WHOLE else tl.sum(tl.where(groups_before, pieces_of(sizes, ROWS), 0), 0)


@triton.jit
def locate(groups, index, R, HEIGHT: tl.constexpr, grouping: tl.constexpr):
    """Return the group of the program with this number, where programs have HEIGHT rows each, as a GroupOfProgram.

    Without a grouping all rows are one group.
    """
    WHOLE: tl.constexpr = 1 << 30  # launch.py's
    if grouping is None:
        place = GroupOfProgram(part=index, first=index * HEIGHT, size=R, height=R)
    elif grouping.ragged:
        ROWS: tl.constexpr = grouping.block_r
        H_ROWS: tl.constexpr = grouping.h_block_r
        PAD: tl.constexpr = grouping.pad
        sizes, _ = sizes_of(groups, R, grouping)
        programs = pieces_of(sizes, HEIGHT)
        groups_before = tl.cumsum(programs, 0) <= index  # groups whose programs come before this one
        group = tl.sum(groups_before.to(tl.int32), 0)
        part = index - tl.sum(tl.where(groups_before, programs, 0), 0)
        first = part * HEIGHT
        start = tl.sum(tl.where(groups_before, sizes, 0), 0)
        size = tl.sum(tl.where(tl.arange(0, grouping.width) == group, sizes, 0), 0)
        is_none = group == grouping.width
        height = tl.where(is_none, R - start, size)
        column = tl.multiple_of(tl.sum(tl.where(groups_before, pieces_of(sizes, PAD), 0), 0) * PAD, PAD)
        columns = tl.where(is_none, groups.columns - column, (size + (PAD - 1)) // PAD * PAD)
        scale_row = tl.minimum(group, groups.count)
        scale_rows = tl.where(is_none, 0, 1)
        if ROWS != WHOLE:
            scale_row = tl.sum(tl.where(groups_before, pieces_of(sizes, ROWS), 0), 0)
            scale_rows = tl.where(is_none, groups.scale_rows - scale_row, (size + (ROWS - 1)) // ROWS)
        place = GroupOfProgram(
            part=part,
            first=first,
            size=size,
            height=height,
            group=group,
            start=start,
            column=column,
            columns=columns,
            scale_row=scale_row,
            scale_rows=scale_rows,
            h_row=scales_before(group, sizes, groups_before, H_ROWS),
        )
    else:
        last = tl.load(groups.offsets + groups.count - 1, mask=groups.count > 0, other=0)
        size = tl.minimum(tl.maximum(last, 0), R)
        place = GroupOfProgram(part=index, first=index * HEIGHT, size=size, height=R, scale_rows=R)
    return place


@triton.jit
def produce_of_group(
    x, extra, place, local, cols, function: tl.constexpr, grouping: tl.constexpr, tiling: tl.constexpr
):
    """Return ``produce`` of the rows ``local``."""
    if tiling.grouped:
        is_mine = local < place.size
        rows = tl.where(is_mine, place.start + local, x.R)
        scale_rows = tl.where(is_mine, place.h_row + local // grouping.h_block_r, 0)
        tile, other_half = produce(x, extra, rows, cols, function, tiling.even, scale_rows)
    else:
        tile, other_half = produce(x, extra, local, cols, function, tiling.even)
    return tile, other_half


@triton.jit
def places_of_codes(x, codes, place, local, tiling: tl.constexpr):
    """Return where codes of the rows ``local`` go: (rows, R where there are none; transposed columns; their end)."""
    if tiling.grouped:
        rows = tl.where(local < place.height, place.start + local, x.R)
        columns = place.column + local
        end = place.column + place.columns
    else:
        rows = local
        columns = local
        end = codes.t_stride
    return rows, columns, end


@triton.jit
def fill_part(out_ptr, value, rows_end, cols_end, first_m, first_n, M: tl.constexpr, N: tl.constexpr):
    """Write one value to a part [M, N] of a result, up to rows_end and cols_end, its width."""
    m = first_m + tl.arange(0, M)
    n = first_n + tl.arange(0, N)
    values = narrow(tl.zeros([M, N], tl.float32) + value, out_ptr.dtype.element_ty)
    offsets = m.to(tl.int64)[:, None] * cols_end + n[None, :]
    tl.store(out_ptr + offsets, values, mask=(m < rows_end)[:, None] & (n < cols_end)[None, :])


def on_device(
    offsets: Tensor,
    pad: int = 1,
    block_r: int = 1,
    h_block_r: int = 1,
    ragged: bool = True,
    columns: int = 0,
    scale_rows: int = 0,
) -> tuple[Groups, Grouping]:
    """Return what kernels read of groups that end at these offsets; unlike Grouping's, rows of blocks may be ALL."""
    count = offsets.shape[0]
    width = max(16, triton.next_power_of_2(count))
    grouping = Grouping(width, ragged, pad, block_size(block_r), block_size(h_block_r))
    return Groups(offsets.contiguous(), count, columns, scale_rows), grouping
