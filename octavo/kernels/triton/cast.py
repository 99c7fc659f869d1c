"""Cast by the kernel of each granularity, which this file picks and launches. The contracts are in signatures.py.

    per tensor        Delayed one launch; Dynamic two, the first for the amax
    per row           one launch, where x and the codes lie in order and no columns are summed
    per row, column   otherwise, and for one scaling of each: two launches, the first for the amaxes
    per block         of powers of two: one launch, for two such scalings too; others: the reference
    rows in groups    grouped_cast.py

Two other scalings take their launches one after the other. A norm alone is one launch, also with a residual added. A
norm and its cast are one launch, of norm_kernels.py, if a program that owns whole rows can know their scales:

    Delayed                        if its scale is known to exist; the same launch computes the amax
    per row                        the program reads its rows again for their amaxes
    per block of up to 32 rows     a program's tile holds whole blocks; two such scalings too

All other casts of a norm are two launches: one for the statistics, with Dynamic the amax too, then the cast, which
normalises again. Blocks of more rows are among them: few programs would own so many, and no cache would hold them until
they are read again. Blocks that no kernel casts so, and tensors without elements, are cast after the reference has
normalised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.granularity import ALL, PADDING, Tile
from octavo.kernels.arguments import (
    Castable,
    CastSource,
    Commit,
    NormSource,
    Output,
    RotaryHeads,
    Scaling,
    new_cast,
    new_norm,
    new_scales,
    no_codes,
    sums_dtype,
)
from octavo.kernels.layouts import is_small_block
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.cast import amax as reference_amax
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.reference.norm import norm as reference_norm
from octavo.kernels.triton.cast_blocks import cast_by_block
from octavo.kernels.triton.cast_input import CastInput, cast_input, codes_to, norm_input, outputs_to, rounding_of
from octavo.kernels.triton.cast_kernels import (
    LINES,
    cast_by_line,
    cast_by_row,
    cast_by_tensor,
    find_amax,
)
from octavo.kernels.triton.delayed_update import committed, scale_exists
from octavo.kernels.triton.grouped_cast import grouped_cast
from octavo.kernels.triton.launch import Config, config, launch, workspace
from octavo.kernels.triton.norm_kernels import norm_blocks_kernel, norm_rows_kernel, norm_tensor_kernel
from octavo.kernels.triton.tiles import Codes, Outputs

_MOST_ROWS = 32  # rows of a block that one launch casts: with blocks of 128, 4096 rows would be only 32 programs' work


def cast(
    source: Castable, first: Scaling, second: Scaling | None, output: Output, offsets: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the op ``octavo::cast``; its contract is in signatures.py."""
    if offsets is not None:
        assert isinstance(source, CastSource)
        return grouped_cast(source, first, output, offsets)
    is_packed = first.is_packed or (second is not None and second.is_packed)  # no kernel casts to E2M1 yet
    if is_packed or (not isinstance(source, CastSource) and source.x.numel() == 0):
        return reference_cast(source, first, second, output)
    # by signatures.py's table of results: ``other`` and ``amax_or_scale`` are transposed codes and the amax, by two
    # scalings the second qdata and scale_inv; ``more`` is a norm's mean, rstd, y, else sums, scale, the recast's codes
    results = codes, other, scale_inv, amax_or_scale, *more = new_cast(source, first, second, output)
    sums, kept_scale, by_scaling = None, None, cast_by_scaling
    if isinstance(source, NormSource):
        mean, rstd, y = more
        inputs = norm_input(source, mean, rstd)
        by_scaling = _NormCasts(inputs, float(source.eps), y if output.keep else None).by_scaling
    else:
        inputs = cast_input(source)
        sums, kept_scale = more[0] if output.column_sum else None, more[1] if output.keep else None
    if not (inputs.fits(first.tile) if second is None else inputs.fits(first.tile, second.tile)):
        return _by_torch(source, first, second, output)
    inputs.clear_padding(codes, output.pad)
    if second is None:
        out = outputs_to(codes_to(codes, other), scale_inv, amax_or_scale)
        if output.recast is not None or kept_scale is not None:
            out = out._replace(scale=kept_scale)
            cast_by_tensor(inputs, first, out, sums, recast=_recast_to(output, more[-1]))
        else:
            by_scaling(inputs, sums, (first, out))
        return results
    _by_two_scalings(inputs, by_scaling, (first, second), output, results[:4], sums)
    return results


def _by_two_scalings(
    inputs: CastInput,
    by_scaling: Callable[..., None],
    scalings: tuple[Scaling, Scaling],
    output: Output,
    pairs: Sequence[Tensor],
    sums: Tensor | None,
) -> None:
    """Cast by two scalings into ``pairs``: qdata, second qdata, scale_inv, second scale_inv."""
    codes, second_codes, scale_inv, second_scale_inv = pairs
    first, second = scalings
    if not output.transpose:
        inputs.clear_padding(second_codes, output.pad)
    both_codes = codes_to(codes), codes_to(None, second_codes) if output.transpose else codes_to(second_codes)
    both_scales = scale_inv, second_scale_inv.t() if output.transpose else second_scale_inv
    both_blocks = is_small_block(first.tile) and is_small_block(second.tile)
    amaxes = (None if both_blocks else torch.empty_like(scales, dtype=torch.float32) for scales in both_scales)
    out, second_out = map(outputs_to, both_codes, both_scales, amaxes)
    if both_blocks or {first.tile, second.tile} == set(LINES):
        by_scaling(inputs, sums, (first, out), (second, second_out))
    else:
        in_second = second.tile == (ALL, 1)  # only a scaling whose programs own whole columns can sum them
        by_scaling(inputs, None if in_second else sums, (first, out))
        cast_by_scaling(inputs, sums if in_second else None, (second, second_out))


def _by_torch(source: Castable, first: Scaling, second: Scaling | None, output: Output) -> tuple[Tensor, ...]:
    """Cast what no kernel casts: of an activation torch computes that first; all else is the reference's."""
    if not isinstance(source, CastSource) or not source.activation:
        return reference_cast(source, first, second, output)
    results = list(cast(CastSource(produced(*source)), first, second, output, None))
    results[4] = results[4].to(sums_dtype(source.x.dtype))
    return tuple(results)


def _recast_to(output: Output, codes: Tensor) -> tuple[Scaling, Codes] | None:
    """Return the scaling of an activation that is cast beside its gradient, and where its codes go; None for none."""
    if output.recast is None:
        return None
    return output.recast, codes_to(None, codes) if output.recast_transposed else codes_to(codes)


def norm(source: NormSource, residual: Tensor | None) -> tuple[Tensor, ...]:
    """Compute the op ``octavo::norm``; its contract is in signatures.py."""
    if source.x.numel() == 0:
        return reference_norm(source, residual)
    results = y, mean, rstd, total = new_norm(source, residual)
    _NormCasts(norm_input(source, mean, rstd, residual, total), float(source.eps), y).find_statistics(None)
    return results


def cast_and_commit(
    source: CastSource | RotaryHeads, scaling: Scaling, commit: Commit, output: Output
) -> tuple[Tensor, ...]:
    """Compute the op ``octavo::cast_and_commit``; its contract is in signatures.py."""
    if isinstance(source, RotaryHeads) and source.x.numel() == 0:
        source = CastSource(source.x.new_empty(source.shape))
    inputs = cast_input(source)
    if isinstance(source, CastSource) and not inputs.fits(scaling.tile):
        *results, sums, no_recast = cast_and_commit(CastSource(produced(*source)), scaling, commit, output)
        return *results, sums.to(sums_dtype(source.x.dtype)), no_recast
    q, t, scale_inv, amax, sums, *others = new_cast(source, scaling, None, output)
    recast_codes = others[0] if others else no_codes(q, q.dtype)
    inputs.clear_padding(q, output.pad)
    out = outputs_to(codes_to(q, t), scale_inv, amax)
    sums_or_none = sums if output.column_sum else None
    cast_by_tensor(inputs, scaling, out, sums_or_none, commit, recast=_recast_to(output, recast_codes))
    committed(*commit[:3], (*(amax is not None for amax in commit[3:5]), True))
    return q, t, scale_inv, sums, recast_codes


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Compute the op ``octavo::amax``, of rows and blocks by casts; its contract is in signatures.py."""
    inputs, scaling = CastInput(x, *x.shape), Scaling(torch.float8_e4m3fn, (tile[0], tile[1]), False, 0)
    if not inputs.fits(scaling.tile):
        return reference_amax(x, tile)
    scale_inv = new_scales(x, x.shape, scaling.tile)
    out = outputs_to(codes_to(None), scale_inv, torch.empty_like(scale_inv))
    if scaling.tile == (ALL, ALL):
        find_amax(inputs, out.amax)
    else:
        cast_by_scaling(inputs, None, (scaling, out))
    return out.amax


def cast_by_scaling(inputs: CastInput, sums: Tensor | None, *scalings: tuple[Scaling, Outputs]) -> None:
    """Cast with one scaling, or with two that one read serves: blocks, or rows and columns."""
    scaling, out = scalings[0]
    has_whole_rows = len(scalings) == 1 and scaling.tile == (1, ALL) and inputs.x.stride(1) == 1
    if scaling.tile == (ALL, ALL):
        cast_by_tensor(inputs, scaling, out, sums)
    elif scaling.tile not in LINES:
        cast_by_block(inputs, sums, *scalings)
    elif has_whole_rows and sums is None and out.codes.t is None:
        cast_by_row(inputs, scaling, out)
    else:
        cast_by_line(inputs, sums, *scalings)


class _NormCasts(NamedTuple):
    """The casts of a norm, whose statistics the cast's launch computes, or a launch before it; it has no sums."""

    inputs: CastInput
    eps: float
    y: Tensor | None

    def by_scaling(self, inputs: CastInput, sums: Tensor | None, *scalings: tuple[Scaling, Outputs]) -> None:
        """Do ``cast_by_scaling`` of the norm, and write its statistics and y."""
        (scaling, out), *others = scalings
        second_scaling, second_out = others[0] if others else (None, None)
        delayed_scale, blocks = scaling.delayed_scale, (scaling.tile, (second_scaling or scaling).tile)
        transposes = (second_out or out).codes.t is not None
        if is_small_block(scaling.tile) and max(rows for rows, _ in blocks) <= _MOST_ROWS:
            roundings = rounding_of(scaling), None if second_scaling is None else rounding_of(second_scaling)
            self.launch(norm_blocks_kernel, transposes, (out, second_out), roundings, blocks)
        elif scaling.tile == (1, ALL) and second_scaling is None:
            self.launch(norm_rows_kernel, transposes, (out,), (rounding_of(scaling),))
        elif scaling.tile != (ALL, ALL):
            self.find_statistics(None)
            cast_by_scaling(inputs, sums, *scalings)
        elif delayed_scale is not None and scale_exists(delayed_scale, scaling.role):
            arguments = out, delayed_scale, workspace(inputs.x, 2)
            self.launch(norm_tensor_kernel, transposes, arguments, (scaling.role, rounding_of(scaling).e5m2))
        else:
            self.find_statistics(out.amax)
            cast_by_tensor(inputs, scaling, out, sums, amax_is_written=True)

    def find_statistics(self, amax: Tensor | None) -> None:
        """Write the statistics, y, and into ``amax`` [1, 1], if there is one, the amax of the norm's result."""
        work = None if amax is None else workspace(self.inputs.x, 2)
        arguments = Outputs(codes_to(None), scale_inv=None, amax=amax, stride_r=0, stride_c=0), None, work
        role, e5m2 = 0, False  # of codes, of which there are none here
        self.launch(norm_tensor_kernel, False, arguments, (role, e5m2))

    def launch(
        self, kernel: Any, transposes: bool, out: Sequence[Any], constants: Sequence[Any], blocks: tuple[Tile, ...] = ()
    ) -> None:
        """Launch a kernel of norm_kernels.py with these arguments for what it writes, and constants.

        A tile is to hold whole blocks: (rows, columns) that share a scale, of one or two scalings.
        """
        x, rows, cols, norm, function, *_ = self.inputs
        name = "norm_cast_blocks" if blocks else "norm_cast"
        name = name if not transposes and x.stride(1) == 1 else f"{name}_transpose"
        tile_r, tile_c, tiles, num_warps = _tile(config(name, (rows * cols).bit_length()), cols, blocks)
        tiles = tiles if kernel is norm_tensor_kernel else 1  # with more tiles, fewer programs raise the shared amax
        _, programs, tiling = self.inputs.tiling(tile_r, tile_c, tiles, tile_c >= cols, fold=16 // x.element_size())
        first = self.inputs.source, norm, self.y, self.eps
        launch(kernel, programs, (*first, *out, function.zero_centered, *constants, tiling), num_warps)


@functools.lru_cache(maxsize=4096)
def _tile(chosen: Config, cols: int, blocks: tuple[Tile, ...]) -> Config:
    """Return a configuration whose tile has whole blocks, and whole rows where up to 16 warps can hold one."""
    elements = chosen.tile_r * chosen.tile_c
    tile_r = max(chosen.tile_r, *(rows for rows, _ in blocks), 1)
    least = max(PADDING, *(size for _, size in blocks), 1)  # a tile holds a row's padding
    widest = max(triton.next_power_of_2(cols), least)
    tile_c = max(elements // tile_r, least)
    larger = widest // tile_c
    if tile_r == 1 and 1 < larger and larger * chosen.num_warps <= 16:
        return Config(1, widest, chosen.depth, larger * chosen.num_warps)
    tile_c = min(tile_c, widest)
    return chosen._replace(tile_r=max(tile_r, elements // tile_c), tile_c=tile_c)
