"""The casts: each picks its kernel by granularity and launches it. The contracts are in signatures.py.

    per tensor        Delayed one launch; Dynamic two, the first for the amax
    per row           one launch, where x and the codes lie in order and no columns are summed
    per row, column   else, and for a scaling of each: two launches, the first for the amaxes
    per block         of powers of two: one launch, for two such scalings too; others: the reference
    rows in groups    grouped_cast.py

Two other scalings take their launches one after the other. A norm alone is one launch, of a sum with a residual too. A
norm and its cast are one, of norm_kernels.py, where a program that owns rows knows the scales of what it normalises:

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
from octavo.kernels.arguments import (
    CastSource,
    Commit,
    NormSource,
    Output,
    Scaling,
    new_cast,
    new_norm,
    new_scales,
    sums_dtype,
)
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.cast import amax as reference_amax
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.reference.norm import norm as reference_norm
from octavo.kernels.triton.cast_input import CastInput, cast_input, codes_to, norm_input, outputs_to, rounding_of
from octavo.kernels.triton.cast_kernels import (
    LINES,
    cast_by_block,
    cast_by_line,
    cast_by_row,
    cast_by_tensor,
    find_amax,
)
from octavo.kernels.triton.delayed_update import StateTensors, backward_pass, committed, scale_exists, update_of
from octavo.kernels.triton.grouped_cast import grouped_cast
from octavo.kernels.triton.launch import Config, config, launch, workspace
from octavo.kernels.triton.norm_kernels import norm_blocks_kernel, norm_rows_kernel, norm_tensor_kernel
from octavo.kernels.triton.tiles import Codes, Outputs

_MOST_ROWS = 32  # of a block, for one launch: of 4096 rows the programs of 128 would be 32


def cast(
    source: CastSource | NormSource, first: Scaling, second: Scaling | None, output: Output, offsets: Tensor | None
) -> tuple[Tensor, ...]:
    """``octavo::cast``."""
    if offsets is not None:
        assert isinstance(source, CastSource)
        return grouped_cast(source, first, output, offsets)
    if isinstance(source, NormSource) and source.x.numel() == 0:
        return reference_cast(source, first, second, output)
    results = codes, other, scale_inv, found, *besides = new_cast(source, first, second, output)
    casts: tuple[Callable[..., Any], ...] = cast_by_tile, cast_by_block, cast_by_line
    sums = besides[0] if output.column_sum else None
    if isinstance(source, CastSource):
        given = cast_input(source)
    else:
        given = norm_input(source, *besides[:2])
        of_norm = _NormToFind(given, float(source.eps), besides[2] if output.keep else None)
        casts = of_norm.by_tile, of_norm.by_block, of_norm.by_line
    if not (given.fits(first.tile) if second is None else given.fits(first.tile, second.tile)):
        return _by_torch(source, first, second, output)
    given.clear_padding(codes)
    if second is None:
        casts[0](given, first, outputs_to(codes_to(codes, other), scale_inv, found), sums)
    else:
        if not output.transpose:
            given.clear_padding(other)
        both = codes_to(codes), codes_to(None, other) if output.transpose else codes_to(other)
        _two_scalings(given, (first, second), both, (scale_inv, found.t() if output.transpose else found), sums, *casts)
    return results


def _by_torch(
    source: CastSource | NormSource, first: Scaling, second: Scaling | None, output: Output
) -> tuple[Tensor, ...]:
    """A cast that no kernel makes: of an activation torch computes that first, all else is the reference's."""
    if isinstance(source, NormSource) or not source.activation:
        return reference_cast(source, first, second, output)
    *results, sums = cast(CastSource(produced(*source)), first, second, output, None)
    return *results, sums.to(sums_dtype(source.x.dtype))


def norm(source: NormSource, residual: Tensor | None) -> tuple[Tensor, ...]:
    """``octavo::norm``."""
    if source.x.numel() == 0:
        return reference_norm(source, residual)
    results = y, mean, rstd, total = new_norm(source, residual)
    _NormToFind(norm_input(source, mean, rstd, residual, total), float(source.eps), y).find_statistics(None)
    return results


def cast_and_commit(source: CastSource, scaling: Scaling, commit: Commit, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_and_commit``."""
    given = cast_input(source)
    if not given.fits(scaling.tile):
        *results, sums = cast_and_commit(CastSource(produced(*source)), scaling, commit, output)
        return *results, sums.to(sums_dtype(source.x.dtype))
    q, t, scale_inv, found, sums = new_cast(source, scaling, None, output)
    given.clear_padding(q)
    own, (amax_input, amax_weight, limits, powers_of_two, margins, reduce) = commit[:3], commit[3:]
    length = commit.delayed_amax_history.shape[1]
    update = update_of(tuple(limits), tuple(powers_of_two), tuple(margins), reduce, length)
    out = outputs_to(codes_to(q, t), scale_inv, found)
    state, rolled = StateTensors(*own, backward_pass(commit.delayed_scale.device)), (amax_input, amax_weight)
    cast_by_tensor(given, scaling, out, sums if output.column_sum else None, state, rolled, update)
    committed(*own, (amax_input is not None, amax_weight is not None, True))
    return q, t, scale_inv, sums


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``: of a tensor by a kernel of its own, of rows and blocks by those that cast."""
    given, scaling = CastInput(x, *x.shape), NO_CODES._replace(tile=(tile[0], tile[1]))
    if not given.fits(scaling.tile):
        return reference_amax(x, tile)
    scale_inv = new_scales(x, x.shape, scaling.tile)
    out = outputs_to(codes_to(None), scale_inv, torch.empty_like(scale_inv))
    if scaling.tile == (ALL, ALL):
        find_amax(given, out.amax)
    else:
        cast_by_tile(given, scaling, out, None)
    return out.amax


def cast_by_tile(
    given: CastInput, scaling: Scaling, out: Outputs, sums: Tensor | None, knows_amax: bool = False
) -> None:
    """One scaling. knows_amax: per tensor, out's."""
    if scaling.tile == (ALL, ALL):
        cast_by_tensor(given, scaling, out, sums, knows_amax=knows_amax)
    elif scaling.tile == (1, ALL) and sums is None and out.codes.t is None and given.x.stride(1) == 1:
        cast_by_row(given, scaling, out)
    elif scaling.tile in LINES:
        cast_by_line(given, sums, (scaling, out))
    else:
        cast_by_block(given, sums, (scaling, out))


NO_CODES = Scaling(torch.float8_e4m3fn, (ALL, ALL), False, 0)  # for launches that write none


def _two_scalings(
    given: CastInput,
    scalings: tuple[Scaling, Scaling],
    codes: tuple[Codes, Codes],
    scale_invs: tuple[Tensor, Tensor],
    sums: Tensor | None,
    by_tile: Callable[..., None],
    by_block: Callable[..., None],
    by_line: Callable[..., None],
) -> None:
    """Both of blocks, or of rows and of columns, by one call; of others the first by ``by_tile``, then the second."""
    first, second = scalings
    both_blocks = is_small_block(first.tile) and is_small_block(second.tile)
    amaxes = (None if both_blocks else torch.empty_like(one, dtype=torch.float32) for one in scale_invs)
    out, other = map(outputs_to, codes, scale_invs, amaxes)
    if both_blocks:
        by_block(given, sums, (first, out), (second, other))
    elif {first.tile, second.tile} == set(LINES):
        by_line(given, sums, (first, out), (second, other))
    else:
        # whichever scaling has columns of its own to itself can sum them
        in_second = second.tile == (ALL, 1)
        by_tile(given, first, out, None if in_second else sums)
        cast_by_tile(given, second, other, sums if in_second else None)


class _NormToFind(NamedTuple):
    """A norm whose statistics are yet to be found, by the same launch as its cast or by one before."""

    given: CastInput
    eps: float
    y: Tensor | None

    def by_tile(self, given: CastInput, scaling: Scaling, out: Outputs, sums: None) -> None:
        """``cast_by_tile`` of the norm, and its statistics and y."""
        tile, delayed_scale = scaling.tile, scaling.delayed_scale
        if is_small_block(tile):
            self.by_block(given, sums, (scaling, out))
        elif tile == (1, ALL):
            self.launch(norm_rows_kernel, "norm_cast", out.codes.t is not None, (out,), (rounding_of(scaling),))
        elif tile == (ALL, ALL) and delayed_scale is not None and scale_exists(delayed_scale, scaling.role):
            arguments = out, delayed_scale, workspace(given.x, 2)
            constants = scaling.role, rounding_of(scaling).e5m2
            self.launch(norm_tensor_kernel, "norm_cast", out.codes.t is not None, arguments, constants)
        else:
            self.find_statistics(out.amax if tile == (ALL, ALL) else None)
            cast_by_tile(given, scaling, out, sums, knows_amax=True)

    def by_block(
        self,
        given: CastInput,
        sums: None,
        first: tuple[Scaling, Outputs],
        second: tuple[Scaling, Outputs] | None = None,
    ) -> None:
        """``cast_by_block`` of the norm, and its statistics and y."""
        scaling, out = first
        second_scaling, second_out = second or (None, None)
        blocks = scaling.tile, (second_scaling or scaling).tile
        if max(rows for rows, _ in blocks) > _MOST_ROWS:
            self.find_statistics(None)
            cast_by_block(given, sums, first, second)
            return
        transposes = (out if second_out is None else second_out).codes.t is not None
        roundings = rounding_of(scaling), None if second_scaling is None else rounding_of(second_scaling)
        self.launch(norm_blocks_kernel, "norm_cast_blocks", transposes, (out, second_out), roundings, blocks)

    def by_line(self, given: CastInput, sums: None, *scalings: tuple[Scaling, Outputs]) -> None:
        """``cast_by_line`` of the norm, and its statistics and y."""
        self.find_statistics(None)
        cast_by_line(given, sums, *scalings)

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
        first = self.given.source, norm, self.y, self.eps
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
