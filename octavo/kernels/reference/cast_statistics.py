"""What a cast did to a tensor: how many elements it flushed to zero or clipped, and how large its rounding errors are.

The counts are in two tensors, to which any number of casts are added. SUMS, float64, has the numbers below and then the
histogram of binary exponents. EXTREMES, float32, has the largest amax, scale_inv and scale so far, or 0. Rows in groups
have a row of counts for each group.

    elements    all
    zeros       elements that are 0
    flushed     finite elements that are not 0, but whose code is
    clipped     finite elements too large to round to the format's largest number
    nonfinite   inf or NaN
    power       the sum of the finite elements' squares
    error       the sum of squares of the differences between finite elements and what their codes read
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.kernels.arguments import EXPONENTS, LARGEST, LOWEST, SUMS
from octavo.kernels.groups import check_offsets, places
from octavo.kernels.reference.codes import decode


def count(
    x: Tensor,
    codes: Tensor,
    scale_inv: Tensor,
    tile: Sequence[int],
    sums: Tensor,
    extremes: Tensor,
    decode: Callable[..., Tensor] = decode,
) -> None:
    """Add the counts of x [R, C]. The histogram of exponents finds faults and zeros without further passes."""
    if x.numel() == 0:
        return
    largest, smallest = scale_inv.max(), scale_inv.min()
    extremes[1:].copy_(torch.maximum(extremes[1:], torch.stack((largest, 1 / smallest))))
    x = x.to(torch.float32).contiguous()
    read = decode(codes, torch.float32, scale_inv, tile)
    exponents = torch.bincount(x.view(torch.int32).bitwise_right_shift(23).to(torch.uint8).flatten(), minlength=256)
    nonfinite = exponents[255]
    numbers, error = x, x - read
    if nonfinite:
        finite = x.isfinite()
        numbers, error = (torch.where(finite, values, 0) for values in (numbers, error))
    amax = torch.stack(torch.aminmax(numbers)).abs().max()
    magnitudes = codes.view(torch.uint8) & 0x7F
    zeros = exponents[0] and x.numel() - x.count_nonzero()
    code, factor = LARGEST[codes.dtype]
    clipped = exponents.new_zeros(())
    if amax > smallest * format_of(codes.dtype).max * factor:
        clipped = (magnitudes == code).logical_and_(numbers.abs() > read.abs() * factor).count_nonzero()
    squares = []
    for values in (numbers, error):
        wide = values.flatten().to(torch.float64)
        squares.append(torch.dot(wide, wide))
    counts = x.numel(), zeros, x.numel() - magnitudes.count_nonzero() - zeros, clipped, nonfinite, *squares
    sums[: len(SUMS)] += torch.stack([torch.as_tensor(number, device=sums.device).to(sums) for number in counts])
    extremes[0] = torch.maximum(extremes[0], amax)
    exponents[0] -= zeros
    bins = (torch.arange(255, device=x.device) - 127 - LOWEST).clamp_(0, EXPONENTS - 1)
    sums[len(SUMS) :].index_add_(0, bins, exponents[:255].to(sums.dtype))


def cast_statistics(
    x: Tensor,
    qdata: Tensor,
    scale_inv: Tensor,
    tile: Sequence[int],
    sums: Tensor,
    extremes: Tensor,
    offsets: Tensor | None = None,
    count: Callable[..., None] = count,
) -> None:
    """``octavo::cast_statistics``."""
    codes = qdata[:, : x.shape[1]]
    if offsets is None:
        count(x, codes, scale_inv, tile, sums, extremes)
        return
    every = places(check_offsets(offsets, x.shape[0]), tile[0])
    for place, *counts in zip(every, sums, extremes, strict=True):
        count(x[place.rows], codes[place.rows], scale_inv[place.scale_rows], tile, *counts)
