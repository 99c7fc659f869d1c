"""Casts: from bf16, fp16 or fp32 to codes, their scale_inv and the amax. The contracts are in signatures.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.formats import format_of
from octavo.granularity import ALL
from octavo.kernels.layouts import padded
from octavo.kernels.reference.amax import amax_and_finiteness, one_amax_and_finiteness
from octavo.kernels.reference.codes import encode
from octavo.kernels.reference.delayed_update import delayed_update
from octavo.numerics import scale_from_amax, scale_inv_from_scale, scale_inv_of, scale_of

_ROUNDING = 1 + 2.0**-20  # a scale of float32 may take its amax past the format's max by its own rounding


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast``."""
    codes, scale_inv, amax = _cast(x, delayed_scale, role, dtype, tile, power_of_two, margin)
    return _padded(codes, pad), scale_inv, amax, column_sum_of(x, column_sum)


def _cast(
    x: Tensor,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One scaling of x as it lies: (codes, scale_inv, amax)."""
    limit = format_of(dtype).max
    if tile[0] != ALL or tile[1] != ALL:
        amax, all_finite = amax_and_finiteness(x, tile)
        scales = scale_from_amax(amax, limit, power_of_two, margin)
        return encode(x, scales, tile, dtype, all_finite, clips=False), scale_inv_from_scale(scales), amax
    largest, all_finite = one_amax_and_finiteness(x)
    scale = 0.0 if delayed_scale is None else float(delayed_scale[role])
    if scale == 0.0:  # Dynamic, or no history yet: this tensor's own amax
        scale = scale_of(largest, limit, power_of_two, margin)
    codes = encode(x, scale, tile, dtype, all_finite, clips=largest * scale > limit * _ROUNDING)
    shape = (1,) * x.ndim
    return codes, _float32(x, shape, scale_inv_of(scale)), _float32(x, shape, largest)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_transpose``."""
    codes, scale_inv, amax = _cast(x, delayed_scale, role, dtype, tile, power_of_two, margin)
    return _padded(codes, pad), _padded(_transposed(codes), pad), scale_inv, amax, column_sum_of(x, column_sum)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_two_scalings``."""
    codes, scale_inv, _ = _cast(x, None, 0, dtype, tile, power_of_two, margin)
    second, second_scale_inv, _ = _cast(x, None, 0, second_dtype, second_tile, second_power_of_two, second_margin)
    if transpose_second:
        second, second_scale_inv = _transposed(second), second_scale_inv.t().contiguous()
    return _padded(codes, pad), scale_inv, _padded(second, pad), second_scale_inv, column_sum_of(x, column_sum)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::cast_and_commit``."""
    codes, scale_inv, amax = _cast(x, delayed_scale, 2, dtype, (ALL, ALL), power_of_two, margin)
    delayed_update(
        delayed_scale, delayed_amax_history, amax_input, amax_weight, amax, limits, powers_of_two, margins, reduce
    )
    transposed = _padded(_transposed(codes), pad) if transpose else codes.new_empty((0, 0))
    return _padded(codes, pad), transposed, scale_inv, column_sum_of(x, column_sum)


def _float32(like: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    return like.new_full(shape, value, dtype=torch.float32)


def _padded(codes: Tensor, pad: int) -> Tensor:
    if pad == 1:
        return codes
    missing = padded(codes.shape[1], pad) - codes.shape[1]
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes


def column_sum_of(x: Tensor, wanted: bool) -> Tensor:
    """The ops' ``sums``. torch adds in float32 and rounds once."""
    return x.sum(0) if wanted else x.new_empty(0)


def _transposed(x: Tensor) -> Tensor:
    # not contiguous(): of a single row or column that is x itself, and an op's results must not alias
    return x.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(x.dtype)
