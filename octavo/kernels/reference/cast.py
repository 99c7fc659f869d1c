"""Casts: from bf16, fp16 or fp32 to codes, their scale_inv and the amax. The contracts are in signatures.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.arguments import CastSource, Commit, NormSource, Output, Scaling, no_codes, sums_dtype
from octavo.kernels.backward_pass import scales_of_pass
from octavo.kernels.layouts import padded
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.amax import laid
from octavo.kernels.reference.chunked_cast import KnownScaling, Written, cast_in_chunks, cast_values
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.norm import cast_norm
from octavo.kernels.reference.tiles import tile_rows


def cast(source: CastSource | NormSource, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast`` and ``octavo::norm_cast``."""
    ((codes, scale_inv, amax),), rest = _cast(source, [known(scaling)], output)
    scales = (laid(found, scaling.tile) for found in (scale_inv, amax))
    return *both_layouts(codes, output), *scales, *rest


def cast_two_scalings(
    source: CastSource | NormSource, first: Scaling, second: Scaling, output: Output
) -> tuple[Tensor, ...]:
    """``octavo::cast_two_scalings`` and ``octavo::norm_cast_two_scalings``."""
    ((codes, scale_inv, _), (other, other_scale_inv, _)), rest = _cast(source, [known(first), known(second)], output)
    if output.transpose:
        other = transposed(other)
    scale_inv, other_scale_inv = laid(scale_inv, first.tile), laid(other_scale_inv, second.tile, output.transpose)
    return with_padding(codes, output.pad), scale_inv, with_padding(other, output.pad), other_scale_inv, *rest


def cast_and_commit(source: CastSource, scaling: Scaling, commit: Commit, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_and_commit``."""
    in_force = scales_of_pass(commit.delayed_scale, commit.delayed_before)
    q, t, scale_inv, amax, sums = cast(source, scaling._replace(delayed_scale=in_force), output)
    delayed_update(*commit[:5], amax, *commit[5:])
    return q, t, scale_inv, sums


def _cast(
    source: CastSource | NormSource, scalings: Sequence[KnownScaling], output: Output
) -> tuple[list[Written], tuple[Tensor, ...]]:
    """(what is cast in each scaling, what the ops return beside it: column sums, or a norm's mean, rstd and y)."""
    if isinstance(source, NormSource):
        return cast_norm(source, scalings, output.keep)
    x, activation, preactivation, h_scale_inv, h_tile = source
    if not activation and preactivation is None and h_scale_inv is None:
        # torch adds in float32 and rounds once
        sums = x.sum(0) if output.column_sum else x.new_empty(0)
        return [cast_values(x, scaling) for scaling in scalings], (sums,)

    def make(rows: slice) -> Tensor:
        scale_inv = None if h_scale_inv is None else tile_rows(h_scale_inv, h_tile, rows)
        h = None if preactivation is None else preactivation[rows]
        return produced(x[rows], activation, h, scale_inv, h_tile)

    pairs, sums = cast_in_chunks(make, source.shape, max(h_tile[0], 1), scalings, output.column_sum, x.device)
    return pairs, (sums.to(sums_dtype(x.dtype)),)


def both_layouts(codes: Tensor, output: Output) -> tuple[Tensor, Tensor]:
    """Codes as the ops return them: as they lie, and transposed or [0, 0]."""
    laid = with_padding(transposed(codes), output.pad) if output.transpose else no_codes(codes, codes.dtype)
    return with_padding(codes, output.pad), laid


def known(scaling: Scaling) -> KnownScaling:
    """A scaling whose delayed scale, if any, is a number."""
    dtype, tile, power_of_two, margin, delayed_scale, role = scaling
    scale = 0.0 if delayed_scale is None else delayed_scale.tolist()[role]
    return KnownScaling(dtype, tile, power_of_two, margin, scale)


def with_padding(codes: Tensor, pad: int) -> Tensor:
    """``codes`` with zero codes after each row, up to a multiple of ``pad``."""
    if pad == 1:
        return codes
    missing = padded(codes.shape[-1], pad) - codes.shape[-1]
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes


def transposed(x: Tensor) -> Tensor:
    """Codes [..., R, C] as a contiguous copy [..., C, R]."""
    # not contiguous(): of a single row or column that is x itself, and an op's results must not alias
    return x.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format).view(x.dtype)
