"""Casts by chunks of rows (``written``): the float32 values to be rounded never exist all at once.

Where a scale needs the amax of all rows before the first code, the first chunks, up to KEPT elements, are kept from the
first pass to the second; the other chunks are computed twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.granularity import ALL, scale_shape
from octavo.kernels.arguments import CastSource, NormSource, Output, Scaling, new_statistics, sums_dtype
from octavo.kernels.cpu import codes
from octavo.kernels.cpu.codes import decode, encode, row_slices, tile_rows
from octavo.kernels.layouts import as_tiles
from octavo.kernels.reference.activation import produced as reference_produced
from octavo.kernels.reference.cast import CastResult, as_returned
from octavo.kernels.reference.norm import normalise
from octavo.numerics import scale_from_amax, scale_inv_from_scale, scale_inv_of, scale_of

# 4 MiB. Swiglu's gradient 1024x2816 takes 9.3 ms where all is computed twice, 6.0 ms where all is kept (1 core, AMD
# EPYC Zen 5). Not all is kept, because at the cast of that gradient a training step needs the most memory.
KEPT = 1 << 20

Seen = tuple[Tensor, bool]  # the amax of some chunks, and whether all their elements are finite

_FEW = 4096  # elements whose arithmetic costs less than a call of torch

_ROUNDING = 1 + 2.0**-20  # a scale of float32 may take its amax past the format's max by its own rounding


def written(
    source: CastSource | NormSource, scalings: Sequence[Scaling], output: Output
) -> tuple[list[CastResult], tuple[Tensor, ...]]:
    """``reference.cast.written``."""
    x = source.x
    if isinstance(source, NormSource):
        mean, rstd, kept = statistics = new_statistics(source, output.keep)

        def normalised(rows: slice) -> Tensor:
            y, mean_of_rows, rstd[rows] = normalise(*source._replace(x=x[rows]))
            if mean.numel():
                mean[rows] = mean_of_rows
            if output.keep:
                kept[rows] = y
            return y

        return cast_in_chunks(x, scalings, source.shape, normalised)[0], statistics
    if not source.activation and source.preactivation is None and source.h_scale_inv is None:
        sums = x.sum(0) if output.column_sum else x.new_empty(0)  # torch adds in float32 and rounds once
        if x.numel() <= codes.CHUNK:
            return [cast_values(x, scaling) for scaling in scalings], (sums,)
        return cast_in_chunks(x, scalings, source.shape)[0], (sums,)
    make, unit = functools.partial(_rows_of, source), max(source.h_tile[0], 1)
    pairs, sums = cast_in_chunks(x, scalings, source.shape, make, unit, output.column_sum)
    return pairs, (sums.to(sums_dtype(x.dtype)),)


def produced(*flat: Any) -> Tensor:
    """``reference.activation.produced``."""
    source = CastSource(*flat)
    slices = row_slices(source.shape, max(source.h_tile[0], 1), source.x.device)
    if not source.activation or len(slices) == 1:
        return reference_produced(*source, decode)
    values = source.x.new_empty(source.shape, dtype=torch.float32)
    for rows in slices:
        values[rows] = _rows_of(source, rows)
    return values


def _rows_of(source: CastSource, rows: slice) -> Tensor:
    """The values to be cast of some rows, which are whole tiles."""
    unit = source.h_tile[0]
    of_scale = slice(None) if unit == ALL else slice(rows.start // unit, -(-rows.stop // unit))
    return reference_produced(*source.part(rows, of_scale), decode)


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``."""
    if tile[0] == ALL and tile[1] == ALL:
        return amax_and_finiteness(x, tile)[0]
    amaxes = [amax_and_finiteness(x[rows], tile)[0] for rows in row_slices(x.shape, max(tile[0], 1), x.device)]
    found = torch.stack(amaxes).amax(0) if tile[0] == ALL else torch.cat(amaxes)
    return as_returned(found, (tile[0], tile[1]))


def amax_and_finiteness(x: Tensor, tile: Sequence[int]) -> tuple[Tensor, bool]:
    """The amax of each tile and whether ``x`` is finite throughout.

    x is read once without a mask; only if the result shows a fault is it read again, with the faults masked.
    """
    shape = scale_shape(x.shape, tile)
    if tile[0] == ALL and tile[1] == ALL:
        one, all_finite = one_amax_and_finiteness(x)
        return x.new_full(shape, one, dtype=torch.float32), all_finite
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32), True
    largest = _largest(x, tile)
    if math.isfinite(float(largest.max())):
        return largest, True
    return _largest(_without_faults(x), tile), False


def one_amax_and_finiteness(x: Tensor) -> tuple[float, bool]:
    """The amax of all of ``x`` as a number, and whether ``x`` is finite throughout."""
    if x.numel() == 0:
        return 0.0, True
    low, high = torch.aminmax(x)
    largest = max(abs(float(low)), abs(float(high)))  # both are NaN if any element is
    if math.isfinite(largest):
        return largest, True
    return one_amax_and_finiteness(_without_faults(x))[0], False


def _without_faults(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0)


def _largest(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Largest absolute value of each tile, NaN where the tile has one; float32."""
    # converted first: reducing 32 neighbours of 2048x256 bf16 takes 1044 us, converting and reducing 120 us (1 core,
    # AMD EPYC Zen 5)
    wide = x.abs() if x.dtype == torch.float32 else x.to(torch.float32).abs_()
    return as_tiles(wide, tile).amax(dim=(1, 3))


def cast_values(
    x: Tensor, scaling: Scaling, into: Tensor | None = None, overwrites: bool = False, seen: Seen | None = None
) -> CastResult:
    """Cast one chunk, x [R, C] of any float dtype, as it lies; ``into`` and ``overwrites`` as in encode.

    ``seen``: the amax of all chunks, and whether all are finite; by default there is no other chunk.
    """
    dtype, tile, power_of_two, margin, *_ = scaling
    limit = format_of(dtype).max
    if tile[0] != ALL or tile[1] != ALL:
        amax, all_finite = seen or amax_and_finiteness(x, tile)
        scales = scale_from_amax(amax, limit, power_of_two, margin)
        codes = encode(x, scales, tile, dtype, all_finite, False, into, overwrites)
        return codes, scale_inv_from_scale(scales), amax
    delayed = scaling.known_scale
    if into is None and 0 < x.numel() <= _FEW:
        found = _cast_few(x, scaling, delayed, limit)
        if found is not None:
            return found
    largest, all_finite = (float(seen[0]), seen[1]) if seen else one_amax_and_finiteness(x)
    scale = delayed or scale_of(largest, limit, power_of_two, margin)
    clips = largest * scale > limit * _ROUNDING
    codes = encode(x, scale, tile, dtype, all_finite, clips, into, overwrites)
    scale_inv, amax = (x.new_full((1, 1), number, dtype=torch.float32) for number in (scale_inv_of(scale), largest))
    return codes, scale_inv, amax


def _cast_few(x: Tensor, scaling: Scaling, delayed: float, limit: float) -> CastResult | None:
    """``cast_values`` with one scale and few calls of torch; None if x holds a fault. ``delayed``: its scale, or 0."""
    amax = torch.linalg.vector_norm(x, math.inf, keepdim=True, dtype=torch.float32)
    largest = amax.item()
    if not math.isfinite(largest):
        return None
    value = delayed or scale_of(largest, limit, scaling.power_of_two, scaling.margin)
    scale = torch.full_like(amax, value)
    wide = torch.mul(x, scale)  # float32, as ``scale`` is
    if largest * value > limit * _ROUNDING:
        wide.clamp_(-limit, limit)
    codes = wide.to(scaling.dtype, memory_format=torch.contiguous_format)
    return codes, scale_inv_from_scale(scale), amax


def cast_in_chunks(
    x: Tensor,
    scalings: Sequence[Scaling],
    shape: tuple[int, int],
    make: Callable[[slice], Tensor] | None = None,
    unit: int = 1,
    column_sum: bool = False,
) -> tuple[list[CastResult], Tensor]:
    """Cast x, or the y [R, C] that ``make`` makes, in one or two scalings: (each one's result, y's column sums or [0]).

    ``make(rows)``: these rows of y, float32, in a tensor that is overwritten. Chunks begin at multiples of ``unit``.
    """
    slices = row_slices(shape, math.lcm(unit, *(s.tile[0] for s in scalings if s.tile[0] != ALL)), x.device)
    sums = x.new_zeros(shape[1] if column_sum else 0, dtype=torch.float32)
    if len(slices) == 1:
        y = make(slices[0]) if make else x
        if column_sum:
            sums = y.sum(0)
        return [
            cast_values(y, scaling, None, make is not None and scaling is scalings[-1]) for scaling in scalings
        ], sums
    kept, casts = _KeptChunks(make or x.__getitem__), [_ScalingChunks(scaling, shape, x.device) for scaling in scalings]
    if looking := [cast for cast in casts if cast.looks_first]:
        for y in map(kept.first, slices):
            for cast in looking:
                cast.look(y)
    for rows in slices:
        y = kept.again(rows)
        if column_sum:
            sums.add_(y.sum(0))
        for cast in casts:
            cast.add(y, rows, make is not None and cast is casts[-1])
        del y  # before the next is made
    return [(cast.codes, cast.scale_inv, cast.amax) for cast in casts], sums


class _KeptChunks:
    """Makes chunks, and keeps the first of them for a second pass."""

    def __init__(self, make: Callable[[slice], Tensor]) -> None:
        self.make, self.left, self.chunks = make, KEPT, dict[int, Tensor]()

    def first(self, rows: slice) -> Tensor:
        """Make a chunk in the first pass."""
        y = self.make(rows)
        self.left -= y.numel()
        if self.left >= 0:
            self.chunks[rows.start] = y
        return y

    def again(self, rows: slice) -> Tensor:
        """The same chunk in the second pass, kept or made again; it is not kept any longer."""
        y = self.chunks.pop(rows.start, None)
        return self.make(rows) if y is None else y


class _ScalingChunks:
    """One scaling's result, written chunk by chunk."""

    seen: Seen | None

    def __init__(self, scaling: Scaling, shape: tuple[int, int], device: torch.device) -> None:
        grid = scale_shape(shape, scaling.tile)
        self.scaling, self.spans, self.seen = scaling, scaling.tile[0] == ALL, None
        self.looks_first = self.spans and not scaling.known_scale  # for the amax of all rows
        self.codes = torch.empty(shape, dtype=scaling.dtype, device=device)
        self.scale_inv, self.amax = torch.empty(grid, device=device), torch.zeros(grid, device=device)

    def look(self, y: Tensor) -> None:
        """Raise the amax of all chunks seen to this chunk's."""
        amax, is_finite = amax_and_finiteness(y, self.scaling.tile)
        self.seen = (torch.maximum(self.seen[0], amax), self.seen[1] and is_finite) if self.seen else (amax, is_finite)

    def add(self, y: Tensor, rows: slice, overwrites: bool) -> None:
        """Cast a chunk."""
        tile = self.scaling.tile
        _, scale_inv, amax = cast_values(y, self.scaling, self.codes[rows], overwrites, self.seen)
        if self.spans:
            self.scale_inv, self.amax = scale_inv, torch.maximum(self.amax, amax)
        else:
            tile_rows(self.scale_inv, tile, rows).copy_(scale_inv)
            tile_rows(self.amax, tile, rows).copy_(amax)
