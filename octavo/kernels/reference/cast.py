"""amax, and casts from bf16, fp16 or fp32 to codes, their scale_inv and the amax. Contracts are in signatures.py.

The ops differ in what they return of ``written``, in whose place another device may have a tuned function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.granularity import Tile, scale_shape
from octavo.kernels.arguments import (
    CastSource,
    Commit,
    NormSource,
    Output,
    Scaling,
    laid_scales,
    new_grouped,
    new_statistics,
    new_sums,
    no_codes,
)
from octavo.kernels.backward_pass import scales_of_pass
from octavo.kernels.groups import check_offsets, places
from octavo.kernels.layouts import as_tiles, transposed, with_padding
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.codes import encode
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.norm import normalise
from octavo.numerics import scale_from_amax, scale_inv_from_scale

Written = tuple[Tensor, Tensor, Tensor]  # (codes, scale_inv, amax)
Write = Callable[[CastSource | NormSource, Sequence[Scaling], Output], tuple[list[Written], tuple[Tensor, ...]]]


def amax_of(x: Tensor, tile: Sequence[int]) -> Tensor:
    """An element a tile, float32."""
    shape = scale_shape(x.shape, tile)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    x_RC = torch.where(x.isfinite(), x, 0).to(torch.float32).abs_().view(-1, x.shape[-1])
    return as_tiles(x_RC, tile).amax(dim=(1, 3)).view(shape)


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``; see signatures.py."""
    return laid(amax_of(x, tile), (tile[0], tile[1]))


def laid(found: Tensor, tile: Tile, transpose: bool = False) -> Tensor:
    """An element a tile as the ops return it."""
    given = found.t() if transpose else found
    out = laid_scales(given, found.shape, tile, transpose)
    return given if not transpose and given.stride() == out.stride() else out.copy_(given)


def cast_values(x: Tensor, scaling: Scaling) -> Written:
    """Cast x [R, C], any float dtype, as it lies."""
    dtype, tile, power_of_two, margin, delayed_scale, role = scaling
    amax = amax_of(x, tile)
    scale = scale_from_amax(amax, format_of(dtype).max, power_of_two, margin)
    if delayed_scale is not None:  # 0 where there is no history yet
        scale = torch.where(delayed_scale[role] == 0.0, scale, delayed_scale[role])
    return encode(x, scale, tile, dtype), scale_inv_from_scale(scale), amax


def written(
    source: CastSource | NormSource, scalings: Sequence[Scaling], output: Output
) -> tuple[list[Written], tuple[Tensor, ...]]:
    """(what is cast in each scaling, what the ops return beside it: column sums, or a norm's mean, rstd and y)."""
    if isinstance(source, NormSource):
        values, mean, rstd = normalise(*source)
        kept = values.to(source.x.dtype) if output.keep else new_statistics(source, False)[2]
        return [cast_values(values, scaling) for scaling in scalings], (mean, rstd, kept)
    values, sums = produced(*source), new_sums(source.x, source.shape[1], output.column_sum)
    if output.column_sum:  # torch adds in float32 and rounds once
        sums.copy_(values.sum(0))
    return [cast_values(values, scaling) for scaling in scalings], (sums,)


_ONE = Output()


def cast(
    source: CastSource | NormSource,
    first: Scaling,
    second: Scaling | None = None,
    output: Output = _ONE,
    offsets: Tensor | None = None,
    write: Write = written,
) -> tuple[Tensor, ...]:
    """``octavo::cast``."""
    if offsets is not None:
        assert isinstance(source, CastSource)
        return _cast_groups(source, first, output, offsets, write)
    scalings = [first] if second is None else [first, second]
    ((codes, scale_inv, found), *more), rest = write(source, scalings, output)
    if second is None:
        other = with_padding(transposed(codes), output.pad) if output.transpose else no_codes(codes, codes.dtype)
        found = laid(found, first.tile)
    else:
        ((other, found, _),) = more
        other = with_padding(transposed(other) if output.transpose else other, output.pad)
        found = laid(found, second.tile, output.transpose)
    return with_padding(codes, output.pad), other, laid(scale_inv, first.tile), found, *rest


def _cast_groups(
    source: CastSource, scaling: Scaling, output: Output, offsets: Tensor, write: Write
) -> tuple[Tensor, ...]:
    """Each group's own cast."""
    q, t, scale_inv, amax = new_grouped(source, scaling, output, offsets)
    rows, cols = source.shape
    ends = check_offsets(offsets, rows)
    for codes in (q, t):
        codes.view(torch.uint8).zero_()
    scale_inv.fill_(1.0)
    amax.zero_()
    inputs = places(ends, source.h_tile[0])
    for place, of_input in zip(places(ends, scaling.tile[0], output.pad), inputs, strict=True):
        if place.rows.start == place.rows.stop and scaling.delayed_scale is None:
            continue  # a scale of 1 and an amax of 0, which are there
        mine = source.part(of_input.rows, of_input.scale_rows)
        codes, _, found_inv, found, _ = cast(mine, scaling, write=write)
        scale_inv[place.scale_rows], amax[place.scale_rows] = found_inv, found
        raw = codes.view(torch.uint8)
        if output.as_is:
            q.view(torch.uint8)[place.rows, :cols] = raw
        if output.transpose:
            t.view(torch.uint8)[:, place.columns] = raw.t()
    return q, t, scale_inv, amax


def cast_and_commit(
    source: CastSource, scaling: Scaling, commit: Commit, output: Output, write: Write = written
) -> tuple[Tensor, ...]:
    """``octavo::cast_and_commit``."""
    in_force = scales_of_pass(commit.delayed_scale, commit.delayed_before)
    in_pass = scaling._replace(delayed_scale=in_force)
    q, t, scale_inv, amax, sums = cast(source, in_pass, None, output, write=write)
    delayed_update(*commit[:5], amax, *commit[5:])
    return q, t, scale_inv, sums
