"""Casts: from bf16, fp16 or fp32 to codes, their scale_inv and the amax. The contracts are in signatures.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.arguments import CastSource, Commit, Output, Scaling, no_codes
from octavo.kernels.layouts import padded, sums_dtype
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.in_runs import KnownScaling, Pair, cast_in_runs, cast_values
from octavo.kernels.reference.tiles import tile_rows


def cast(source: CastSource, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast`` and ``octavo::cast_transpose``: (qdata, transposed qdata or [0, 0], scale_inv, amax, sums)."""
    ((codes, scale_inv, amax),), sums = _cast(source, [known(scaling)], output.column_sum)
    return *both_layouts(codes, output), scale_inv, amax, sums


def cast_two_scalings(source: CastSource, first: Scaling, second: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_two_scalings``."""
    pairs, sums = _cast(source, [known(first), known(second)], output.column_sum)
    return *two_pairs(pairs, output), sums


def cast_and_commit(source: CastSource, scaling: Scaling, commit: Commit, output: Output) -> tuple[Tensor, ...]:
    """``octavo::cast_and_commit``."""
    q, t, scale_inv, amax, sums = cast(source, scaling, output)
    delayed_update(*commit[:4], amax, *commit[4:])
    return q, t, scale_inv, sums


def _cast(source: CastSource, scalings: Sequence[KnownScaling], column_sum: bool) -> tuple[list[Pair], Tensor]:
    """What is cast in each scaling; and the op's ``sums``."""
    x, activation, preactivation, h_scale_inv, h_tile = source
    if not activation and preactivation is None and h_scale_inv is None:
        return [cast_values(x, scaling) for scaling in scalings], column_sum_of(x, column_sum)

    def make(rows: slice) -> Tensor:
        scale_inv = None if h_scale_inv is None else tile_rows(h_scale_inv, h_tile, rows)
        h = None if preactivation is None else preactivation[rows]
        return produced(x[rows], activation, h, scale_inv, h_tile)

    pairs, sums = cast_in_runs(make, source.shape, max(h_tile[0], 1), scalings, column_sum)
    return pairs, sums.to(sums_dtype(x.dtype))


def both_layouts(codes: Tensor, output: Output) -> tuple[Tensor, Tensor]:
    """Codes as the ops return them: as they lie, and transposed or [0, 0]."""
    laid = with_padding(transposed(codes), output.pad) if output.transpose else no_codes(codes, codes.dtype)
    return with_padding(codes, output.pad), laid


def two_pairs(pairs: Sequence[Pair], output: Output) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two scalings' pairs as the ops return them."""
    (codes, scale_inv, _), (second, second_scale_inv, _) = pairs
    if output.transpose:
        second, second_scale_inv = transposed(second), second_scale_inv.t().contiguous()
    return with_padding(codes, output.pad), scale_inv, with_padding(second, output.pad), second_scale_inv


def known(scaling: Scaling) -> KnownScaling:
    """A scaling whose delayed scale, if any, is a number."""
    dtype, tile, power_of_two, margin, delayed_scale, role = scaling
    scale = 0.0 if delayed_scale is None else delayed_scale.tolist()[role]
    return KnownScaling(dtype, tile, power_of_two, margin, scale)


def with_padding(codes: Tensor, pad: int) -> Tensor:
    """``codes`` with zero codes after each row, up to a multiple of ``pad``."""
    if pad == 1:
        return codes
    missing = padded(codes.shape[1], pad) - codes.shape[1]
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes


def column_sum_of(x: Tensor, wanted: bool) -> Tensor:
    """The ops' ``sums`` of x itself. torch adds in float32 and rounds once."""
    return x.sum(0) if wanted else x.new_empty(0)


def transposed(x: Tensor) -> Tensor:
    """Codes [R, C] as a contiguous copy [C, R]."""
    # not contiguous(): of a single row or column that is x itself, and an op's results must not alias
    return x.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(x.dtype)
