"""The product of two pairs that is itself a pair: float32 results, cast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.reference.cast import delayed_scale_of, transposed, with_padding
from octavo.kernels.reference.in_runs import Scaling, cast_values
from octavo.kernels.reference.matmul import matmul


def matmul_cast(
    a: Tensor,
    a_scale_inv: Tensor,
    a_tile: Sequence[int],
    b: Tensor,
    b_scale_inv: Tensor,
    b_tile: Sequence[int],
    bias: Tensor | None,
    fast_accum: bool,
    delayed_scale: Tensor | None,
    role: int,
    dtype: torch.dtype,
    tile: Sequence[int],
    power_of_two: bool,
    margin: int,
    transpose: bool,
    pad: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``octavo::matmul_cast``."""
    out = matmul(a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, bias, torch.float32, fast_accum)
    scaling = Scaling(dtype, tile, power_of_two, margin, delayed_scale_of(delayed_scale, role))
    codes, scale_inv, amax = cast_values(out, scaling)
    laid = with_padding(transposed(codes), pad) if transpose else codes.new_empty((0, 0))
    return with_padding(codes, pad), laid, scale_inv, amax
