"""amax, and casts from bf16, fp16 or fp32 to codes, their scale_inv and the amax. Contracts are in signatures.py.

All ops cast with ``written``, for which another device may pass a tuned function, and return some of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.formats import format_of
from octavo.granularity import ALL, Tile, scale_shape
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
from octavo.kernels.layouts import as_tiles, is_small_block, transposed, with_padding
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.codes import encode
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.norm import normalise
from octavo.numerics import scale_from_amax, scale_inv_from_scale

CastResult = tuple[Tensor, Tensor, Tensor]  # (codes, scale_inv, amax)
Write = Callable[[CastSource | NormSource, Sequence[Scaling], Output], tuple[list[CastResult], tuple[Tensor, ...]]]


def amax_of(x: Tensor, tile: Sequence[int]) -> Tensor:
    """The amax of each tile, float32."""
    shape = scale_shape(x.shape, tile)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    x_RC = torch.where(x.isfinite(), x, 0).to(torch.float32).abs_().view(-1, x.shape[-1])
    return as_tiles(x_RC, tile).amax(dim=(1, 3)).view(shape)


def amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """``octavo::amax``; see signatures.py."""
    return as_returned(amax_of(x, tile), (tile[0], tile[1]))


def as_returned(found: Tensor, tile: Tile, transpose: bool = False) -> Tensor:
    """One number a tile, in the memory layout in which the ops return it."""
    given = found.t() if transpose else found
    out = laid_scales(given, found.shape, tile, transpose)
    return given if not transpose and given.stride() == out.stride() else out.copy_(given)


def cast_values(x: Tensor, scaling: Scaling) -> CastResult:
    """Cast x [R, C], any float dtype, as it lies."""
    dtype, tile, power_of_two, margin, delayed_scale, role = scaling
    amax = amax_of(x, tile)
    scale = scale_from_amax(amax, format_of(dtype).max, power_of_two, margin)
    if delayed_scale is not None:  # 0 where there is no history yet
        scale = torch.where(delayed_scale[role] == 0.0, scale, delayed_scale[role])
    return encode(x, scale, tile, dtype), scale_inv_from_scale(scale), amax


def written(
    source: CastSource | NormSource, scalings: Sequence[Scaling], output: Output
) -> tuple[list[CastResult], tuple[Tensor, ...]]:
    """(each scaling's result, what the ops return besides: column sums, or a norm's mean, rstd and y)."""
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
        return _grouped_cast(source, first, output, offsets, write)
    scalings = [first] if second is None else [first, second]
    ((codes, scale_inv, found), *more), besides = write(source, scalings, output)
    if second is None:
        other = with_padding(transposed(codes), output.pad) if output.transpose else no_codes(codes, codes.dtype)
        found = as_returned(found, first.tile)
    else:
        ((other, found, _),) = more
        other = with_padding(transposed(other) if output.transpose else other, output.pad)
        found = as_returned(found, second.tile, output.transpose)
    return with_padding(codes, output.pad), other, as_returned(scale_inv, first.tile), found, *besides


def _grouped_cast(
    source: CastSource, scaling: Scaling, output: Output, offsets: Tensor, write: Write
) -> tuple[Tensor, ...]:
    """``octavo::cast`` of rows in groups: each group is cast by itself."""
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
            continue  # its scale is 1 and its amax 0, as they were filled
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


def check_multi_tensor_cast(lists: Sequence[Sequence[Tensor]], tile: Sequence[int]) -> None:
    """Raise ValueError for what one launch can't do; ``lists``: the op's, in their order."""
    xs, qdata, transposed, scale_inv, amax, delayed_scales = lists
    lengths = [len(some) for some in (qdata, scale_inv, amax)]
    lengths += [len(some) for some in (transposed, delayed_scales) if some]
    if any(length != len(xs) for length in lengths):
        raise ValueError(f"the lists are {[len(some) for some in lists]} long; give each tensor its outputs")
    if tuple(tile) != (ALL, ALL) and not is_small_block(tile):
        raise ValueError(f"tile={tuple(tile)}: many are cast per tensor or by blocks of powers of two up to 128")
    for name, tensors in (("xs", xs), ("qdata", qdata)):
        dtypes = sorted({str(tensor.dtype) for tensor in tensors})
        if len(dtypes) > 1:
            raise ValueError(f"{name} have the dtypes {dtypes}; make a call for each")
    for index, x in enumerate(xs):
        if x.ndim != 2 or x.stride(1) != 1:
            raise ValueError(f"xs[{index}] of shape {tuple(x.shape)}, strides {x.stride()}: needs contiguous rows")


def multi_tensor_cast(
    xs: Sequence[Tensor],
    qdata: Sequence[Tensor],
    transposed_qdata: Sequence[Tensor],
    scale_inv: Sequence[Tensor],
    amax: Sequence[Tensor],
    delayed_scales: Sequence[Tensor],
    role: int,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    skip: Tensor | None = None,
    write: Write = written,
) -> None:
    """``octavo::multi_tensor_cast``."""
    check_multi_tensor_cast((xs, qdata, transposed_qdata, scale_inv, amax, delayed_scales), tile)
    if skip is not None and bool(skip):
        return
    for index, x in enumerate(xs):
        delayed_scale = delayed_scales[index] if delayed_scales else None
        dtype = qdata[index].dtype
        scaling = Scaling(dtype, (tile[0], tile[1]), power_of_two, margin, delayed_scale, role)
        output = Output(bool(transposed_qdata))
        codes, other, scales, found, _ = cast(CastSource(x), scaling, None, output, write=write)
        _copy_codes(qdata[index], codes)
        if transposed_qdata:
            _copy_codes(transposed_qdata[index], other)
        scale_inv[index].copy_(scales)
        amax[index].copy_(found)


def _copy_codes(out: Tensor, codes: Tensor) -> None:
    """Write codes to ``out``; where its rows are longer, they end with zero codes."""
    padding = out.shape[1] - codes.shape[1]
    out.view(torch.uint8).copy_(F.pad(codes.view(torch.uint8), (0, padding)))
