"""The casts: each picks its kernel by granularity and launches it. The contracts are in signatures.py.

    per tensor        cast_tensor.py    Delayed one launch; Dynamic two, the first for the amax
    per row           cast_rows.py      one launch, where x and the codes lie in order and no columns are summed
    per row, column   cast_lines.py     else, and for a scaling of each: two launches, the first for the amaxes
    per block         cast_blocks.py    of powers of two: one launch, for two such scalings too; others: the reference
    rows in groups    grouped_cast.py

Two other scalings take their launches one after the other. A norm and its cast are one launch, of norm_kernels.py,
where a program that owns rows knows the scales of what it normalises:

    Delayed                        whose scale is known to exist; the amax is gathered on the way
    per row                        whose amax takes another look at them
    per block of up to 32 rows     which lie in a program's tile; two such scalings too

All else is a launch for the statistics, with Dynamic the amax too, and then the cast, which normalises for itself. So
are blocks of more rows: few programs would own so many, and no cache would hold them until they are read again. Tiles
that no kernel casts so, and tensors without elements, are cast after the reference has normalised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.granularity import ALL, Tile
from octavo.kernels.arguments import CastSource, Commit, NormSource, Output, Scaling, new_statistics, sums_dtype
from octavo.kernels.backward_pass import backward_pass
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.cast import amax as reference_amax
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.triton.cast_blocks import cast_by_block
from octavo.kernels.triton.cast_input import (
    CastInput,
    block_scaling_of,
    cast_input,
    codes_to,
    norm_input,
    rounding_of,
)
from octavo.kernels.triton.cast_lines import LINES, cast_by_line
from octavo.kernels.triton.cast_rows import cast_by_row
from octavo.kernels.triton.cast_tensor import cast_by_tensor, find_amax
from octavo.kernels.triton.delayed_update import StateTensors, update_of
from octavo.kernels.triton.grouped_cast import grouped_cast
from octavo.kernels.triton.known_scales import committed, scale_exists
from octavo.kernels.triton.launch import Config, config, launch, workspace
from octavo.kernels.triton.norm_kernels import norm_blocks_kernel, norm_rows_kernel, norm_tensor_kernel
from octavo.kernels.triton.tiles import Outputs

_MOST_ROWS = 32  # of a block, for one launch: of 4096 rows the programs of 128 would be 32


def cast(
    source: CastSource | NormSource, first: Scaling, second: Scaling | None, output: Output, offsets: Tensor | None
) -> tuple[Tensor, ...]:
    """``octavo::cast``."""
    norm: _NormToFind | None = None
    casts: tuple[Callable[..., Any], ...] = _CASTS
    if isinstance(source, CastSource):
        if offsets is not None:
            return grouped_cast(source, first, output, offsets)
        given = cast_input(source)
    elif source.x.numel() == 0:
        return reference_cast(source, first, second, output)
    else:
        norm = _norm(source, output)
        given, casts = norm.given, (norm.by_tile, norm.by_block, norm.by_line)
    if not (given.fits(first.tile) if second is None else given.fits(first.tile, second.tile)):
        return _by_torch(source, first, second, output)
    if second is not None:
        q, t, scale_inv, found, sums = _two_scalings(given, first, second, output, *casts)
    else:
        q, t = given.both_codes(first.dtype, output)
        out = given.outputs(first, q, t)
        scale_inv, found, sums = out.scale_inv, out.amax, casts[0](given, first, out, output.column_sum)
    if norm is None:
        return q, t, scale_inv, found, sums
    return q, t, scale_inv, found, *norm.statistics


def _by_torch(
    source: CastSource | NormSource, first: Scaling, second: Scaling | None, output: Output
) -> tuple[Tensor, ...]:
    """A cast that no kernel makes: of an activation torch computes that first, all else is the reference's."""
    if isinstance(source, NormSource) or not source.activation:
        return reference_cast(source, first, second, output)
    *results, sums = cast(CastSource(produced(*source)), first, second, output, None)
    return *results, sums.to(sums_dtype(source.x.dtype))


def cast_and_commit(source: CastSource, scaling: Scaling, commit: Commit, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_and_commit``."""
    given = cast_input(source)
    if not given.fits(scaling.tile):
        *results, sums = cast_and_commit(CastSource(produced(*source)), scaling, commit, output)
        return *results, sums.to(sums_dtype(source.x.dtype))
    q, t = given.both_codes(scaling.dtype, output)
    own, (amax_input, amax_weight, limits, powers_of_two, margins, reduce) = commit[:3], commit[3:]
    update = update_of(
        tuple(limits), tuple(powers_of_two), tuple(margins), reduce, commit.delayed_amax_history.shape[1]
    )
    out, state = given.outputs(scaling, q, t), StateTensors(*own, backward_pass(commit.delayed_scale.device))
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
_CASTS = cast_by_tile, cast_by_block, cast_by_line


def _two_scalings(
    given: CastInput,
    first: Scaling,
    second: Scaling,
    output: Output,
    by_tile: Callable[..., Tensor | None],
    by_block: Callable[..., Tensor | None],
    by_line: Callable[..., Tensor | None],
) -> tuple[Any, ...]:
    """Both pairs, as ``octavo::cast`` returns them, and the column sums: of blocks, or rows and columns, by one call.

    Of other scalings the first is cast by ``by_tile``, and then the second.
    """
    q = given.codes(first.dtype, output.pad)
    other = given.codes(second.dtype, output.pad, output.transpose)
    both_blocks = is_small_block(first.tile) and is_small_block(second.tile)
    out = given.outputs(first, q, with_amax=not both_blocks)
    codes: tuple[Tensor | None, Tensor | None] = (None, other) if output.transpose else (other, None)
    other_out = given.outputs(second, *codes, transpose=output.transpose, with_amax=not both_blocks)
    if both_blocks:
        sums = by_block(given, output.column_sum, (first, out), (second, other_out))
    elif {first.tile, second.tile} == set(LINES):
        sums = by_line(given, output.column_sum, (first, out), (second, other_out))
    else:
        # whichever scaling has columns of its own to itself can sum them
        in_second = output.column_sum and second.tile == (ALL, 1)
        sums = by_tile(given, first, out, output.column_sum and not in_second)
        other_sums = cast_by_tile(given, second, other_out, in_second)
        sums = other_sums if in_second else sums
    return q, other, out.scale_inv, other_out.scale_inv, sums


def _norm(source: NormSource, output: Output) -> _NormToFind:
    mean, rstd, y = new_statistics(source, output.keep)
    return _NormToFind(norm_input(source, mean, rstd), float(source.eps), (mean, rstd, y), output.keep)


class _NormToFind(NamedTuple):
    """A norm whose statistics are yet to be found, by the same launch as its cast or by one before."""

    given: CastInput
    eps: float
    statistics: tuple[Tensor, Tensor, Tensor]  # (mean, rstd, y), as the ops return them
    keep: bool

    def by_tile(self, given: CastInput, scaling: Scaling, out: Outputs, column_sum: bool = False) -> None:
        """``cast_by_tile`` of the norm, and its statistics and y; column sums are not asked for."""
        tile, delayed_scale = scaling.tile, scaling.delayed_scale
        if is_small_block(tile):
            self.by_block(given, column_sum, (scaling, out))
        elif tile == (1, ALL):
            self.launch(norm_rows_kernel, "norm_cast", out.codes.t is not None, (out,), (rounding_of(scaling),))
        elif tile == (ALL, ALL) and delayed_scale is not None and scale_exists(delayed_scale, scaling.role):
            arguments = out, delayed_scale, workspace(given.x, 2)
            constants = scaling.role, rounding_of(scaling).e5m2
            self.launch(norm_tensor_kernel, "norm_cast", out.codes.t is not None, arguments, constants)
        else:
            self.find_statistics(out.amax if tile == (ALL, ALL) else None)
            cast_by_tile(given, scaling, out, column_sum, knows_amax=True)

    def by_block(
        self,
        given: CastInput,
        column_sum: bool,
        first: tuple[Scaling, Outputs],
        second: tuple[Scaling, Outputs] | None = None,
    ) -> None:
        """``cast_by_block`` of the norm, and its statistics and y."""
        scaling, out = first
        second_scaling, second_out = second or (None, None)
        blocks = scaling.tile, (second_scaling or scaling).tile
        if max(rows for rows, _ in blocks) > _MOST_ROWS:
            self.find_statistics(None)
            cast_by_block(given, column_sum, first, second)
            return
        transposes = (out if second_out is None else second_out).codes.t is not None
        scalings = block_scaling_of(scaling), None if second_scaling is None else block_scaling_of(second_scaling)
        self.launch(norm_blocks_kernel, "norm_cast_blocks", transposes, (out, second_out), scalings, blocks)

    def by_line(self, given: CastInput, column_sum: bool, *scalings: tuple[Scaling, Outputs]) -> None:
        """``cast_by_line`` of the norm, and its statistics and y."""
        self.find_statistics(None)
        cast_by_line(given, column_sum, *scalings)

    def find_statistics(self, amax: Tensor | None) -> None:
        """Statistics, y, and unless it is None the amax of what is to be cast [1, 1]."""
        work = None if amax is None else workspace(self.given.x, 2)
        arguments = Outputs(codes_to(None), None, amax, 0, 0), None, work
        self.launch(norm_tensor_kernel, "norm_cast", False, arguments, (0, False))

    def launch(
        self,
        kernel: Any,
        name: str,
        transposes: bool,
        arguments: Sequence[Any],
        constants: Sequence[Any],
        blocks: tuple[Tile, ...] = (),
    ) -> None:
        """Launch a kernel of norm_kernels.py, by a configuration of this name, with its own arguments and constants.

        A tile is to hold whole blocks: (rows, columns) that share a scale, of one or two scalings.
        """
        x, rows, cols, norm, function, *_ = self.given
        name = name if not transposes and x.stride(1) == 1 else f"{name}_transpose"
        chosen = config(name, (rows * cols).bit_length())
        block_r, block_c, tiles, num_warps = _tile(chosen, cols, blocks)
        tiles = tiles if kernel is norm_tensor_kernel else 1  # fewer programs then meet at the shared amax
        fold = 16 // x.element_size()
        _, programs, tiling = self.given.tiling(block_r, block_c, tiles, block_c >= cols, fold)
        first = self.given.source, norm, self.statistics[2] if self.keep else None, self.eps
        launch(kernel, programs, (*first, *arguments, function.zero_centered, *constants, tiling), num_warps)


@functools.lru_cache(maxsize=4096)
def _tile(chosen: Config, cols: int, blocks: tuple[Tile, ...]) -> Config:
    """A configuration whose tile has whole blocks, and whole rows where up to 16 warps can hold one."""
    elements = chosen.block_r * chosen.block_c
    block_r = max(chosen.block_r, *(rows for rows, _ in blocks), 1)
    least = max(16, *(size for _, size in blocks), 1)
    widest = max(triton.next_power_of_2(cols), least)
    block_c = max(elements // block_r, least)
    larger = widest // block_c
    if block_r == 1 and 1 < larger and larger * chosen.num_warps <= 16:
        return Config(1, widest, chosen.tiles, larger * chosen.num_warps)
    block_c = min(block_c, widest)
    return chosen._replace(block_r=max(block_r, elements // block_c), block_c=block_c)
