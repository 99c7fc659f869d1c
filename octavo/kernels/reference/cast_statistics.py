"""What a cast did to a tensor: how much of it was flushed to zero, clipped and rounded, beside what the tensor holds.

What is counted lies in two tensors, to which any number of casts are added. SUMS, float64: these, and the histogram of
binary exponents. EXTREMES, float32, each the largest so far, from 0 on: the amax, the scale_inv, and the scale. Of rows
in groups each group is counted in a row of its own.

    elements    all
    zeros       that are 0 as they are
    flushed     finite, not 0, whose code is 0
    clipped     finite, beyond all that rounds to the format's largest number
    nonfinite   inf or NaN
    power       the sum of squares of the finite ones
    error       that of their differences from what their codes read
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
    """Add those of x [R, C]. A histogram of exponents counts what else would be a pass each."""
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
        numbers, error = (torch.where(finite, part, 0) for part in (numbers, error))
    amax = torch.stack(torch.aminmax(numbers)).abs().max()
    magnitudes = codes.view(torch.uint8) & 0x7F
    zeros = exponents[0] and x.numel() - x.count_nonzero()  # whose codes are 0
    code, factor = LARGEST[codes.dtype]
    clipped = exponents.new_zeros(())
    if amax > smallest * format_of(codes.dtype).max * factor:
        clipped = (magnitudes == code).logical_and_(numbers.abs() > read.abs() * factor).count_nonzero()
    squares = []
    for part in (numbers, error):
        wide = part.flatten().to(torch.float64)
        squares.append(torch.dot(wide, wide))
    counts = x.numel(), zeros, x.numel() - magnitudes.count_nonzero() - zeros, clipped, nonfinite, *squares
    sums[: len(SUMS)] += torch.stack([torch.as_tensor(part, device=sums.device).to(sums) for part in counts])
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
    for place, *of_group in zip(every, sums, extremes, strict=True):
        count(x[place.rows], codes[place.rows], scale_inv[place.scale_rows], tile, *of_group)
