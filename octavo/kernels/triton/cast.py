"""The casts: each picks its kernel by granularity and launches it. The contracts are in signatures.py.

    per tensor        cast_tensor.py    Delayed one launch; Dynamic two, the first for the amax
    per row           cast_rows.py      one launch, where x and the codes lie in order and no columns are summed
    per row, column   cast_lines.py     else, and for a scaling of each: two launches, the first for the amaxes
    per block         cast_blocks.py    of powers of two: one launch, for two such scalings too; others: the reference

Two other scalings take their launches one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import CastSource, Commit, Output, Scaling, sums_dtype
from octavo.kernels.backward_pass import backward_pass
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.cast import amax as reference_amax
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.reference.cast import cast_two_scalings as reference_cast_two_scalings
from octavo.kernels.triton.cast_blocks import cast_by_block
from octavo.kernels.triton.cast_input import CastInput, cast_input
from octavo.kernels.triton.cast_lines import LINES, cast_by_line
from octavo.kernels.triton.cast_rows import cast_by_row
from octavo.kernels.triton.cast_tensor import cast_by_tensor, find_amax
from octavo.kernels.triton.delayed_update import State, update_of
from octavo.kernels.triton.known_scales import committed
from octavo.kernels.triton.tiles import Outputs


def cast(source: CastSource, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast``."""
    given = cast_input(source)
    if not given.fits(scaling.tile):
        return _by_torch(cast, reference_cast, source, scaling, output)
    q, t = given.both_codes(scaling.dtype, output)
    out = given.outputs(scaling, q, t)
    sums = cast_by_tile(given, scaling, out, output.column_sum)
    return q, t, out.scale_inv, out.amax, sums


def cast_two_scalings(source: CastSource, first: Scaling, second: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_two_scalings``."""
    given = cast_input(source)
    if not given.fits(first.tile, second.tile):
        return _by_torch(cast_two_scalings, reference_cast_two_scalings, source, first, second, output)
    return two_scalings(given, first, second, output)


def cast_and_commit(source: CastSource, scaling: Scaling, commit: Commit, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_and_commit``."""
    given = cast_input(source)
    if not given.fits(scaling.tile):
        return _by_torch(cast_and_commit, None, source, scaling, commit, output)
    q, t = given.both_codes(scaling.dtype, output)
    own, (amax_input, amax_weight, limits, powers_of_two, margins, reduce) = commit[:3], commit[3:]
    update = update_of(
        tuple(limits), tuple(powers_of_two), tuple(margins), reduce, commit.delayed_amax_history.shape[1]
    )
    out, state = given.outputs(scaling, q, t), State(*own, backward_pass(commit.delayed_scale.device))
    sums = cast_by_tensor(given, scaling, out, output.column_sum, state, (amax_input, amax_weight), update)
    committed(*own, (amax_input is not None, amax_weight is not None, True))
    return q, t, out.scale_inv, sums


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``: of a tensor by a kernel of its own, of rows and blocks by those that cast."""
    given, scaling = CastInput(x, *x.shape), NO_CODES._replace(tile=(tile[0], tile[1]))
    if not given.fits(scaling.tile):
        return reference_amax(x, tile)
    out = given.outputs(scaling)
    if scaling.tile == (ALL, ALL):
        find_amax(given, out.amax)
    else:
        cast_by_tile(given, scaling, out, False)
    return out.amax


def _by_torch(
    op: Callable[..., Any], reference: Callable[..., Any] | None, source: CastSource, *how: Any
) -> tuple[Tensor, ...]:
    """An op of what no kernel casts so: of an activation that torch computes first, of x itself by the reference."""
    if reference is not None and not source.activation:
        return tuple(reference(source, *how))
    *results, sums = op(CastSource(produced(*source)), *how)
    return *results, sums.to(sums_dtype(source.x.dtype))


def cast_by_tile(
    given: CastInput, scaling: Scaling, out: Outputs, column_sum: bool, knows_amax: bool = False
) -> Tensor:
    """One scaling: the column sums. knows_amax: per tensor, out's."""
    if scaling.tile == (ALL, ALL):
        return cast_by_tensor(given, scaling, out, column_sum, knows_amax=knows_amax)
    if scaling.tile == (1, ALL) and not column_sum and out.codes.t is None and given.x.stride(1) == 1:
        cast_by_row(given, scaling, out)
        return given.sums(column_sum)
    if scaling.tile in LINES:
        return cast_by_line(given, column_sum, (scaling, out))
    return cast_by_block(given, column_sum, (scaling, out))


NO_CODES = Scaling(torch.float8_e4m3fn, (ALL, ALL), False, 0)  # for launches that write none


def two_scalings(
    given: CastInput,
    first: Scaling,
    second: Scaling,
    output: Output,
    cast_blocks: Callable[..., Tensor | None] = cast_by_block,
    cast_lines: Callable[..., Tensor | None] = cast_by_line,
    cast_first: Callable[..., Tensor | None] = cast_by_tile,
) -> tuple[Any, ...]:
    """What ``octavo::cast_two_scalings`` returns: of blocks by ``cast_blocks``, of rows and columns by ``cast_lines``.

    Of other scalings the first is cast by ``cast_first``, and then the second.
    """
    q = given.codes(first.dtype, output.pad)
    other = given.codes(second.dtype, output.pad, output.transpose)
    both_blocks = is_small_block(first.tile) and is_small_block(second.tile)
    out = given.outputs(first, q, with_amax=not both_blocks)
    codes: tuple[Tensor | None, Tensor | None] = (None, other) if output.transpose else (other, None)
    other_out = given.outputs(second, *codes, transpose=output.transpose, with_amax=not both_blocks)
    if both_blocks:
        sums = cast_blocks(given, output.column_sum, (first, out), (second, other_out))
    elif {first.tile, second.tile} == set(LINES):
        sums = cast_lines(given, output.column_sum, (first, out), (second, other_out))
    else:
        # whichever scaling has columns of its own to itself can sum them
        in_second = output.column_sum and second.tile == (ALL, 1)
        sums = cast_first(given, first, out, output.column_sum and not in_second)
        other_sums = cast_by_tile(given, second, other_out, in_second)
        sums = other_sums if in_second else sums
    return q, out.scale_inv, other, other_out.scale_inv, sums
