"""Casts: from bf16, fp16 or fp32 to codes, their scale_inv and the amax. The contracts are in signatures.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.granularity import ALL
from octavo.kernels.activations import cast_shape
from octavo.kernels.layouts import padded, sums_dtype
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.kernels.reference.in_runs import Pair, Scaling, cast_in_runs, cast_values
from octavo.kernels.reference.tiles import tile_rows


def cast(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    pad: int = 1,
    column_sum: bool = False,
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast``."""
    scaling = Scaling(dtype, tile, power_of_two, margin, delayed_scale_of(delayed_scale, role))
    ((codes, scale_inv, amax),), sums = _cast(x, [scaling], column_sum, *activation)
    return with_padding(codes, pad), scale_inv, amax, sums


def cast_transpose(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    pad: int = 1,
    column_sum: bool = False,
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_transpose``."""
    scaling = Scaling(dtype, tile, power_of_two, margin, delayed_scale_of(delayed_scale, role))
    ((codes, scale_inv, amax),), sums = _cast(x, [scaling], column_sum, *activation)
    return with_padding(codes, pad), with_padding(transposed(codes), pad), scale_inv, amax, sums


def cast_two_scalings(
    x: Tensor,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    second_dtype: torch.dtype,
    second_tile: Sequence[int],
    second_power_of_two: bool,
    second_margin: int,
    transpose_second: bool,
    pad: int = 1,
    column_sum: bool = False,
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_two_scalings``."""
    first = Scaling(dtype, tile, power_of_two, margin)
    other = Scaling(second_dtype, second_tile, second_power_of_two, second_margin)
    ((codes, scale_inv, _), (second, second_scale_inv, _)), sums = _cast(x, [first, other], column_sum, *activation)
    if transpose_second:
        second, second_scale_inv = transposed(second), second_scale_inv.t().contiguous()
    return with_padding(codes, pad), scale_inv, with_padding(second, pad), second_scale_inv, sums


def cast_and_commit(
    x: Tensor,
    delayed_scale: Tensor,
    delayed_amax_history: Tensor,
    amax_input: Tensor | None,
    amax_weight: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
    limits: Sequence[float],
    powers_of_two: Sequence[bool],
    margins: Sequence[int],
    reduce: str,
    transpose: bool,
    pad: int = 1,
    column_sum: bool = False,
    *activation: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_and_commit``."""
    scaling = Scaling(dtype, (ALL, ALL), power_of_two, margin, delayed_scale_of(delayed_scale, 2))
    ((codes, scale_inv, amax),), sums = _cast(x, [scaling], column_sum, *activation)
    delayed_update(
        delayed_scale, delayed_amax_history, amax_input, amax_weight, amax, limits, powers_of_two, margins, reduce
    )
    laid = with_padding(transposed(codes), pad) if transpose else codes.new_empty((0, 0))
    return with_padding(codes, pad), laid, scale_inv, sums


def _cast(
    x: Tensor,
    scalings: Sequence[Scaling],
    column_sum: bool,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = (ALL, ALL),
) -> tuple[list[Pair], Tensor]:
    """x, or what is computed of it, in each scaling; and the op's ``sums``."""
    if not activation and preactivation is None and h_scale_inv is None:
        return [cast_values(x, scaling) for scaling in scalings], column_sum_of(x, column_sum)
    shape = cast_shape(
        x.shape, activation, None if preactivation is None else preactivation.shape, h_scale_inv is not None
    )

    def make(rows: slice) -> Tensor:
        scale_inv = None if h_scale_inv is None else tile_rows(h_scale_inv, h_tile, rows)
        h = None if preactivation is None else preactivation[rows]
        return produced(x[rows], activation, h, scale_inv, h_tile)

    pairs, sums = cast_in_runs(make, shape, max(h_tile[0], 1), scalings, column_sum)
    return pairs, sums.to(sums_dtype(x.dtype))


def delayed_scale_of(delayed_scale: Tensor | None, role: int) -> float:
    """The scale of a role, 0 where there is none."""
    return 0.0 if delayed_scale is None else delayed_scale.tolist()[role]


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
