"""The casts: each picks its kernel by granularity and launches it. The contracts are in signatures.py.

    per tensor        cast_tensor.py    Delayed one launch; Dynamic two, the first for the amax
    per row           cast_rows.py      one launch; per column the same on the transposed view
    per block         cast_blocks.py    one launch, for two block scalings too

Two scalings that are not both blocks of powers of two take a launch each: an amax over rows and one over columns are
not both local to a program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import E5M2, format_of
from octavo.granularity import ALL, scale_shape
from octavo.kernels.layouts import is_small_block, padded
from octavo.kernels.reference.cast import column_sum_of
from octavo.kernels.triton.cast_blocks import cast_any_block_kernel, cast_blocks_kernel
from octavo.kernels.triton.cast_rows import cast_rows_kernel
from octavo.kernels.triton.cast_tensor import amax_kernel, cast_tensor_kernel
from octavo.kernels.triton.delayed_update import update_of
from octavo.kernels.triton.history import committed, scale_exists
from octavo.kernels.triton.launch import (
    Config,
    config,
    key_of,
    launch,
    next_power_of_two,
    on_its_device,
    with_room_for,
    workspace,
)
from octavo.kernels.triton.tiles import Codes, Source

Rounding = tuple[bool, float, bool]  # E5M2, format.max / 2^margin, power_of_two: the kernels' ROUNDING


@functools.cache
def rounding_of(dtype: torch.dtype, power_of_two: bool, margin: int) -> Rounding:
    """The kernels' ROUNDING from an op's arguments."""
    fmt = format_of(dtype)
    return fmt is E5M2, fmt.max * 2.0**-margin, power_of_two


@on_its_device
def cast(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    pad: int = 1,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast``."""
    rounding = rounding_of(dtype, power_of_two, margin)
    q = _codes(x, x.shape[0], x.shape[1], dtype, pad)
    return q, *_cast(x, delayed_scale, role, rounding, tile, q, None, column_sum)


@on_its_device
def cast_transpose(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    pad: int = 1,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_transpose``."""
    rounding = rounding_of(dtype, power_of_two, margin)
    rows, cols = x.shape
    q, t = _codes(x, rows, cols, dtype, pad), _codes(x, cols, rows, dtype, pad)
    return q, t, *_cast(x, delayed_scale, role, rounding, tile, q, t, column_sum)


@on_its_device
def cast_two_scalings(
    x: Tensor,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    second_dtype: torch.dtype,
    second_tile: Sequence[int],
    second_power_of_two: bool,
    second_margin: int,
    transpose_second: bool,
    pad: int = 1,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_two_scalings``."""
    rows, cols = x.shape
    first = rounding_of(dtype, power_of_two, margin)
    second = rounding_of(second_dtype, second_power_of_two, second_margin)
    q = _codes(x, rows, cols, dtype, pad)
    second_q = second_t = None
    if transpose_second:
        other = second_t = _codes(x, cols, rows, second_dtype, pad)
    else:
        other = second_q = _codes(x, rows, cols, second_dtype, pad)
    if is_small_block(tile) and is_small_block(second_tile) and x.numel() > 0:
        shape = scale_shape(x.shape, second_tile)
        second_scale_inv = _float32(x, shape[::-1] if transpose_second else shape)
        outputs = _Second(second, second_tile, second_q, second_t, second_scale_inv)
        scale_inv, _, sums = _cast_blocks(x, first, tile, q, None, column_sum, outputs)
        return q, scale_inv, other, second_scale_inv, sums
    # whichever scaling has columns of its own to itself can sum them
    sum_in_second = tuple(second_tile) == (ALL, 1)
    scale_inv, _, sums = _cast(x, None, 0, first, tile, q, None, column_sum and not sum_in_second)
    second_scale_inv, _, second_sums = _cast(
        x, None, 0, second, second_tile, second_q, second_t, column_sum and sum_in_second
    )
    if transpose_second:
        second_scale_inv = second_scale_inv.t().contiguous()  # nothing to move for a row or a column
    return q, scale_inv, other, second_scale_inv, second_sums if sum_in_second else sums


@on_its_device
def cast_and_commit(
    x: Tensor,
    delayed_scale: Tensor,
    delayed_amax_history: Tensor,
    amax_input: Tensor | None,
    amax_weight: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
    limits: Sequence[float],
    powers_of_two: Sequence[bool],
    margins: Sequence[int],
    reduce: str,
    transpose: bool,
    pad: int = 1,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_and_commit``."""
    rows, cols = x.shape
    q = _codes(x, rows, cols, dtype, pad)
    t = _codes(x, cols, rows, dtype, pad) if transpose else None
    update = update_of(tuple(limits), tuple(powers_of_two), tuple(margins), reduce, delayed_amax_history.shape[1])
    rounding = rounding_of(dtype, power_of_two, margin)
    commit = delayed_amax_history, amax_input, amax_weight
    scale_inv, _, sums = _cast_tensor(x, delayed_scale, 2, rounding, q, t, column_sum, commit, update)
    committed(delayed_scale, delayed_amax_history, (amax_input is not None, amax_weight is not None, True))
    return q, x.new_empty((0, 0), dtype=dtype) if t is None else t, scale_inv, sums


def _codes(x: Tensor, rows: int, cols: int, dtype: torch.dtype, pad: int) -> Tensor:
    return x.new_empty((rows, padded(cols, pad)), dtype=dtype)


def _float32(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _cast(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    rounding: Rounding,
    tile: Sequence[int],
    q: Tensor | None,
    t: Tensor | None,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One scaling into q, t or both: (scale_inv, amax, column sum)."""
    rows, cols = tile
    if rows == ALL and cols == ALL:
        return _cast_tensor(x, delayed_scale, role, rounding, q, t, column_sum, (None, None, None), None)
    if rows == 1 and cols == ALL:
        scale_inv, amax, _ = _cast_rows(x, rounding, q, t, False)
        return scale_inv, amax, column_sum_of(x, column_sum)
    if rows == ALL and cols == 1:
        scale_inv, amax, sums = _cast_rows(x.t(), rounding, t, q, column_sum)
        return scale_inv.view(1, -1), amax.view(1, -1), sums
    if x.numel() > 0 and is_small_block(tile):
        return _cast_blocks(x, rounding, tile, q, t, column_sum)
    return *_cast_any_block(x, rounding, tile, q, t), column_sum_of(x, column_sum)


def _source(x: Tensor) -> Source:
    return Source(x, *x.shape, *x.stride())


def _out(q: Tensor | None, t: Tensor | None) -> Codes:
    return Codes(q, 0 if q is None else q.shape[1], t, 0 if t is None else t.shape[1])


def _shape(x: Tensor, chosen: Config) -> tuple[int, int, tuple[bool, int, int, int]]:
    """How cast_tensor.py's programs share x: (strips of columns, groups in a strip, SHAPE)."""
    rows, cols = x.shape
    block_r, block_c, tiles, _ = chosen
    strips = -(-cols // block_c) or 1
    groups = -(-rows // (block_r * tiles)) or 1
    even = rows == groups * block_r * tiles and cols == strips * block_c
    return strips, groups, (even, tiles, block_r, block_c)


def amax_of_tensor(x: Tensor, delayed_scale: Tensor | None = None, role: int = 0) -> Tensor:
    """amax [1, 1] of all of x; given ``delayed_scale``, left unwritten where that has a scale for ``role``."""
    chosen = config("amax", x.numel().bit_length())
    strips, groups, shape = _shape(x, chosen)
    amax = _float32(x, (1, 1))
    key = key_of(x, (delayed_scale,), "amax", delayed_scale is None, role, chosen)
    arguments = _source(x), amax, delayed_scale, workspace(x, 2), groups, role, shape
    launch(amax_kernel, strips * groups, arguments, chosen.num_warps, key)
    return amax


def amax_of_tiles(x: Tensor, tile: Sequence[int]) -> Tensor:
    """amax of each row, column or block of x."""
    return _cast(x, None, 0, (False, 448.0, False), tile, None, None, False)[1]


def _cast_tensor(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    rounding: Rounding,
    q: Tensor | None,
    t: Tensor | None,
    column_sum: bool,
    commit: tuple[Tensor | None, Tensor | None, Tensor | None],  # history, amax of input and weight
    update: tuple[Any, ...] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = config("cast" if t is None else "cast_transpose", x.numel().bit_length())
    strips, groups, shape = _shape(x, chosen)
    own_amax = None
    if delayed_scale is None or not scale_exists(delayed_scale, role):
        own_amax = amax_of_tensor(x, delayed_scale, role)
    scale_inv = _float32(x, (1, 1))
    amax = own_amax if own_amax is not None and delayed_scale is None else _float32(x, (1, 1))
    sums = x.new_empty(x.shape[1] if column_sum else 0)
    out = _out(q, t)
    given = (delayed_scale, *commit)
    none = [tensor is None for tensor in (*given, own_amax, q, t)]
    options = role, rounding, update, chosen, out.q_stride, out.t_stride, column_sum, *none
    arguments = (
        _source(x),
        out,
        scale_inv,
        amax,
        own_amax,
        *given,
        (sums, _float32(x, (groups, x.shape[1]))) if column_sum else None,
        workspace(x, 2 + strips),
        groups,
        role,
        rounding,
        update,
        shape,
    )
    key = key_of(x, given, "cast_tensor", *options)
    launch(cast_tensor_kernel, strips * groups, arguments, chosen.num_warps, key)
    return scale_inv, amax, sums


def _cast_rows(
    x: Tensor, rounding: Rounding, q: Tensor | None, t: Tensor | None, row_sum: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    scale_inv, amax = _float32(x, (rows, 1)), _float32(x, (rows, 1))
    sums = x.new_empty(rows if row_sum else 0)
    if rows == 0:
        return scale_inv, amax, sums
    in_order = t is None and x.stride(1) == 1
    chosen = config("cast_rows" if in_order else "cast_rows_transpose", x.numel().bit_length())
    widest = max(16, next_power_of_two(cols))
    block_c = min(chosen.block_c, widest)
    # narrow rows: as many as fill half a tile
    block_r = chosen.block_r * max(1, chosen.block_c // (2 * block_c))
    out = _out(q, t)
    arguments = (
        _source(x),
        out,
        scale_inv,
        amax,
        sums if row_sum else None,
        rounding,
        rows % block_r == 0 and cols % block_c == 0,
        widest <= block_c,
        block_r,
        block_c,
    )
    key = key_of(x, (), "cast_rows", rounding, chosen, out.q_stride, out.t_stride, q is None, t is None, row_sum)
    launch(cast_rows_kernel, -(-rows // block_r), arguments, chosen.num_warps, key)
    return scale_inv, amax, sums


class _Second(NamedTuple):
    """A second block scaling from the same read."""

    rounding: Rounding
    tile: Sequence[int]
    q: Tensor | None
    t: Tensor | None
    scale_inv: Tensor


def _cast_blocks(
    x: Tensor,
    rounding: Rounding,
    tile: Sequence[int],
    q: Tensor | None,
    t: Tensor | None,
    column_sum: bool,
    second: _Second | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    kind = "cast_blocks" if t is None and second is None else "cast_blocks_transpose"
    chosen = with_room_for(config(kind, x.numel().bit_length()), tile, tile if second is None else second.tile)
    block_r, block_c = chosen.block_r, chosen.block_c
    strips, groups = -(-cols // block_c), -(-rows // block_r)
    shape = scale_shape(x.shape, tile)
    scale_inv, amax = _float32(x, shape), _float32(x, shape)
    sums = x.new_empty(cols if column_sum else 0)
    second_strides = None
    if second is not None:  # as the second scale_inv lies, seen from x
        second_strides = second.scale_inv.stride() if second.t is None else second.scale_inv.stride()[::-1]
    out = _out(q, t)
    second_out = None if second is None else _out(second.q, second.t)
    second_rounding = None if second is None else second.rounding
    second_tile = None if second is None else tuple(second.tile)
    arguments = (
        _source(x),
        out,
        scale_inv,
        amax if second is None else None,
        second_out,
        None if second is None else second.scale_inv,
        second_strides,
        (sums, _float32(x, (groups, cols))) if column_sum else None,
        workspace(x, 2 + strips) if column_sum else None,
        rounding,
        tuple(tile),
        second_rounding,
        second_tile,
        rows % block_r == 0 and cols % block_c == 0,
        block_r,
        block_c,
    )
    widths = out.q_stride, out.t_stride, q is None, t is None
    second_widths = None if second_out is None else (second_out.q is None, second_out.q_stride, second_out.t_stride)
    options = rounding, tuple(tile), chosen, widths, second_rounding, second_tile, second_widths, column_sum
    launch(cast_blocks_kernel, strips * groups, arguments, chosen.num_warps, key_of(x, (), "cast_blocks", *options))
    return scale_inv, amax, sums


def _cast_any_block(
    x: Tensor, rounding: Rounding, tile: Sequence[int], q: Tensor | None, t: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    shape = scale_shape(x.shape, tile)
    scale_inv, amax = _float32(x, shape), _float32(x, shape)
    block_rows, block_cols = rows if tile[0] == ALL else tile[0], cols if tile[1] == ALL else tile[1]
    for codes, width in ((q, cols), (t, rows)):
        if codes is not None and codes.shape[1] > width:
            codes.view(torch.uint8)[:, width:].zero_()
    if amax.numel() > 0:
        arguments = (
            _source(x),
            _out(q, t),
            scale_inv,
            amax,
            block_rows,
            block_cols,
            rounding,
            min(32, next_power_of_two(block_rows)),
            min(128, next_power_of_two(block_cols)),
        )
        launch(cast_any_block_kernel, amax.numel(), arguments, 4, None)
    return scale_inv, amax
