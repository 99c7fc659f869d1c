"""The casts: each picks its kernel by granularity and launches it. The contracts are in signatures.py.

    per tensor        cast_tensor.py    Delayed one launch; Dynamic two, the first for the amax
    per row           cast_rows.py      one launch; per column the same on the transposed view
    per block         cast_blocks.py    of powers of two: one launch, for two such scalings too; others: the reference

Two scalings that are not both blocks of powers of two take a launch each: an amax over rows and one over columns are
not both local to a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import numerics
from octavo.granularity import ALL, scale_shape
from octavo.kernels.layouts import is_small_block, sums_dtype
from octavo.kernels.reference.amax import amax_and_finiteness
from octavo.kernels.reference.cast import column_sum_of
from octavo.kernels.reference.codes import encode
from octavo.kernels.reference.multi_tensor_cast import copy_codes
from octavo.kernels.triton.cast_blocks import Second, cast_by_block
from octavo.kernels.triton.cast_rows import cast_by_row
from octavo.kernels.triton.cast_tensor import amax_of, cast_by_tensor
from octavo.kernels.triton.delayed_update import update_of
from octavo.kernels.triton.given import Given, given_of, materialised, rounding_of
from octavo.kernels.triton.history import committed
from octavo.kernels.triton.launch import on_its_device
from octavo.kernels.triton.tiles import Rounding


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
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast``."""
    given = _fitting((tile,), x, *activation)
    q = given.codes(dtype, pad)
    rounding = rounding_of(dtype, power_of_two, margin)
    return q, *cast_by_tile(given, delayed_scale, role, rounding, tile, q, None, column_sum)


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
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_transpose``."""
    given = _fitting((tile,), x, *activation)
    q, t = given.codes(dtype, pad), given.codes(dtype, pad, transpose=True)
    rounding = rounding_of(dtype, power_of_two, margin)
    return q, t, *cast_by_tile(given, delayed_scale, role, rounding, tile, q, t, column_sum)


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
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_two_scalings``."""
    given = _fitting((tile, second_tile), x, *activation)
    q, other = given.codes(dtype, pad), given.codes(second_dtype, pad, transpose_second)
    first, second = (
        rounding_of(dtype, power_of_two, margin),
        rounding_of(second_dtype, second_power_of_two, second_margin),
    )
    second_q, second_t = (None, other) if transpose_second else (other, None)
    if is_small_block(tile) and is_small_block(second_tile) and q.numel() > 0:
        shape = scale_shape(given.shape, second_tile)
        second_scale_inv = given.float32(shape[::-1] if transpose_second else shape)
        outputs = Second(second, second_tile, second_q, second_t, second_scale_inv)
        scale_inv, _, sums = cast_by_block(given, first, tile, q, None, column_sum, outputs)
        return q, scale_inv, other, second_scale_inv, sums
    # whichever scaling has columns of its own to itself can sum them
    sum_in_second = tuple(second_tile) == (ALL, 1)
    scale_inv, _, sums = cast_by_tile(given, None, 0, first, tile, q, None, column_sum and not sum_in_second)
    second_scale_inv, _, second_sums = cast_by_tile(
        given, None, 0, second, second_tile, second_q, second_t, column_sum and sum_in_second
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
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_and_commit``."""
    given = given_of(x, *activation)
    q, t = given.codes(dtype, pad), given.codes(dtype, pad, transpose=True) if transpose else None
    update = update_of(tuple(limits), tuple(powers_of_two), tuple(margins), reduce, delayed_amax_history.shape[1])
    rounding = rounding_of(dtype, power_of_two, margin)
    commit = delayed_amax_history, amax_input, amax_weight
    scale_inv, _, sums = cast_by_tensor(given, delayed_scale, 2, rounding, q, t, column_sum, commit, update)
    committed(delayed_scale, delayed_amax_history, (amax_input is not None, amax_weight is not None, True))
    return q, x.new_empty((0, 0), dtype=dtype) if t is None else t, scale_inv, sums


_ANY = Rounding(False, 448.0, False)  # where no codes are written


def _fitting(tiles: Sequence[Sequence[int]], *arguments: Any) -> Given:
    """``given_of``; where a kernel can't compute it for these tiles, as a tensor of its own."""
    given = given_of(*arguments)
    return given if not given.function[0] or all(map(given.fits, tiles)) else materialised(*arguments)


def cast_by_tile(
    given: Given,
    delayed_scale: Tensor | None,
    role: int,
    rounding: Rounding,
    tile: Sequence[int],
    q: Tensor | None,
    t: Tensor | None,
    column_sum: bool,
    own_amax: Tensor | None = None,  # [1, 1], if known
) -> tuple[Tensor, Tensor, Tensor]:
    """One scaling into q, t or both: (scale_inv, amax, column sums)."""
    rows, cols = tile
    if rows == ALL and cols == ALL:
        return cast_by_tensor(given, delayed_scale, role, rounding, q, t, column_sum, own_amax=own_amax)
    if rows == 1 and cols == ALL:
        scale_inv, amax, _ = cast_by_row(given, rounding, q, t)
        return scale_inv, amax, _sums_apart(given, column_sum)
    if rows == ALL and cols == 1:
        scale_inv, amax, sums = cast_by_row(given.t(), rounding, t, q, column_sum)
        return scale_inv.view(1, -1), amax.view(1, -1), sums
    if given.fits(tile):
        return cast_by_block(given, rounding, tile, q, t, column_sum)
    return *_cast_by_reference(given, rounding, tile, q, t), _sums_apart(given, column_sum)


def _cast_by_reference(
    given: Given, rounding: Rounding, tile: Sequence[int], q: Tensor | None, t: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A scale for each block of x itself, of any size: (scale_inv, amax)."""
    amax, all_finite = amax_and_finiteness(given.x, tile)
    scale = numerics.scale_from_amax(amax, rounding.limit, rounding.power_of_two, 0)
    for out, laid in ((q, False), (t, True)):
        if out is not None:
            codes = encode(given.x, scale, tile, out.dtype, all_finite, False)
            copy_codes(out, codes.t() if laid else codes)
    return numerics.scale_inv_from_scale(scale), amax


def _sums_apart(given: Given, wanted: bool) -> Tensor:
    """Column sums that no program of a cast's could find."""
    if given.function[0] and wanted:
        return cast_by_row(given.t(), _ANY, None, None, row_sum=True)[2]
    return column_sum_of(given.x, wanted).to(sums_dtype(given.read_dtype or given.x.dtype))


def amax_by_tile(x: Tensor, tile: Sequence[int]) -> Tensor:
    """amax of each tile of x."""
    given = given_of(x)
    if tile[0] == ALL and tile[1] == ALL:
        return amax_of(given)
    return cast_by_tile(given, None, 0, _ANY, tile, None, None, False)[1]
