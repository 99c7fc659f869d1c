"""The casts: each picks its kernel by granularity and launches it. The contracts are in signatures.py.

    per tensor        cast_tensor.py    Delayed one launch; Dynamic two, the first for the amax
    per row           cast_rows.py      one launch; per column the same on the transposed view
    per block         cast_blocks.py    of powers of two: one launch, for two such scalings too; others: the reference

Two scalings that are not both blocks of powers of two take a launch each: an amax over rows and one over columns are
not both local to a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import numerics
from octavo.granularity import ALL
from octavo.kernels.arguments import CastSource, Commit, Output, Scaling, new_scales, unpacking
from octavo.kernels.layouts import is_small_block, sums_dtype
from octavo.kernels.reference.amax import amax_and_finiteness
from octavo.kernels.reference.cast import column_sum_of
from octavo.kernels.reference.codes import encode
from octavo.kernels.reference.multi_tensor_cast import copy_codes
from octavo.kernels.triton.cast_blocks import Second, cast_by_block
from octavo.kernels.triton.cast_rows import cast_by_row
from octavo.kernels.triton.cast_tensor import amax_of, cast_by_tensor
from octavo.kernels.triton.delayed_update import update_of
from octavo.kernels.triton.given import Given, given_of, kernel_rounding, materialised
from octavo.kernels.triton.history import committed
from octavo.kernels.triton.tiles import Rounding


def cast(source: CastSource, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast`` and ``octavo::cast_transpose``: (qdata, transposed qdata or [0, 0], scale_inv, amax, sums)."""
    given = _fitting(source, scaling.tile)
    q, t = given.both_codes(scaling.dtype, output)
    found = cast_by_tile(given, scaling, q, t if output.transpose else None, output.column_sum)
    return q, t, *found


cast_transpose = unpacking("cast_transpose", cast)  # with the op's own flat arguments


def cast_two_scalings(source: CastSource, first: Scaling, second: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_two_scalings``."""
    given = _fitting(source, first.tile, second.tile)
    q, other = second_codes(given, first, second, output)
    second_q, second_t = (None, other) if output.transpose else (other, None)
    if is_small_block(first.tile) and is_small_block(second.tile) and q.numel() > 0:
        outputs = second_of(given, second, other, output)
        scale_inv, _, sums = cast_by_block(
            given, kernel_rounding(first), first.tile, q, None, output.column_sum, outputs
        )
        return q, scale_inv, other, outputs.scale_inv, sums
    # whichever scaling has columns of its own to itself can sum them
    in_second = output.column_sum and tuple(second.tile) == (ALL, 1)
    scale_inv, _, sums = cast_by_tile(given, first, q, None, output.column_sum and not in_second)
    second_scale_inv, _, second_sums = cast_by_tile(given, second, second_q, second_t, in_second)
    if output.transpose:
        second_scale_inv = second_scale_inv.t().contiguous()  # nothing to move for a row or a column
    return q, scale_inv, other, second_scale_inv, second_sums if in_second else sums


def cast_and_commit(source: CastSource, scaling: Scaling, commit: Commit, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_and_commit``."""
    given = given_of(*source)
    q, t = given.both_codes(scaling.dtype, output)
    delayed_scale, history, amax_input, amax_weight, limits, powers_of_two, margins, reduce = commit
    update = update_of(tuple(limits), tuple(powers_of_two), tuple(margins), reduce, history.shape[1])
    written = q, t if output.transpose else None, output.column_sum
    scale_inv, _, sums = cast_by_tensor(given, scaling, *written, (history, amax_input, amax_weight), update)
    committed(delayed_scale, history, (amax_input is not None, amax_weight is not None, True))
    return q, t, scale_inv, sums


def second_codes(given: Given, first: Scaling, second: Scaling, output: Output) -> tuple[Tensor, Tensor]:
    """Where the codes of two scalings go."""
    q = given.codes(first.dtype, output.pad)
    return q, given.codes(second.dtype, output.pad, output.transpose)


def second_of(given: Given, scaling: Scaling, codes: Tensor, output: Output) -> Second:
    """The second of two block scalings, into ``codes``."""
    scale_inv = new_scales(given.x, given.shape, scaling.tile, output.transpose)
    q, t = (None, codes) if output.transpose else (codes, None)
    return Second(kernel_rounding(scaling), scaling.tile, q, t, scale_inv)


_ANY = Scaling(torch.float8_e4m3fn, (ALL, ALL), False, 0)  # where no codes are written


def _fitting(source: CastSource, *tiles: Sequence[int]) -> Given:
    """``given_of``; where a kernel can't compute it for these tiles, as a tensor of its own."""
    given = given_of(*source)
    return given if not given.function.name or all(map(given.fits, tiles)) else materialised(*source)


def cast_by_tile(
    given: Given,
    scaling: Scaling,
    q: Tensor | None,
    t: Tensor | None,
    column_sum: bool,
    own_amax: Tensor | None = None,  # [1, 1], if known
) -> tuple[Tensor, Tensor, Tensor]:
    """One scaling into q, t or both: (scale_inv, amax, column sums)."""
    rows, cols = tile = scaling.tile
    rounding = kernel_rounding(scaling)
    if rows == ALL and cols == ALL:
        return cast_by_tensor(given, scaling, q, t, column_sum, own_amax=own_amax)
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
        return cast_by_row(given.t(), kernel_rounding(_ANY), None, None, row_sum=True)[2]
    return column_sum_of(given.x, wanted).to(sums_dtype(given.read_dtype or given.x.dtype))


def amax_by_tile(x: Tensor, tile: Sequence[int]) -> Tensor:
    """amax of each tile of x."""
    given = given_of(x)
    if tile[0] == ALL and tile[1] == ALL:
        return amax_of(given)
    return cast_by_tile(given, _ANY._replace(tile=tile), None, None, False)[1]
