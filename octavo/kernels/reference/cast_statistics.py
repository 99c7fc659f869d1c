"""What a cast did to a tensor: how much of it was flushed to zero, clipped and rounded, beside what the tensor holds.

What is counted lies in two tensors, to which any number of casts are added. SUMS, float64: these, and the histogram of
binary exponents. EXTREMES, float32, each the largest so far, from 0 on: the amax, the scale_inv, and the scale.

    elements    all
    zeros       that are 0 as they are
    flushed     finite, not 0, whose code is 0
    clipped     finite, beyond all that rounds to the format's largest number
    nonfinite   inf or NaN
    power       the sum of squares of the finite ones
    error       that of their differences from what their codes read
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.reference.codes import decode
from octavo.kernels.reference.tiles import row_chunks

SUMS = ("elements", "zeros", "flushed", "clipped", "nonfinite", "power", "error")
EXTREMES = ("amax", "scale_inv", "scale")
EXPONENTS = 64  # bins of the exponents floor(log2 |x|), zeros and what is not finite left out
LOWEST = -48  # the first bin's, which holds all below too, as the last all above

# (the largest number's code, the factor by which a number must exceed it to be more than rounded to it)
LARGEST = {torch.float8_e4m3fn: (0x7E, 464 / 448), torch.float8_e5m2: (0x7B, 61440 / 57344)}


def cast_statistics(
    x: Tensor, qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], sums: Tensor, extremes: Tensor
) -> None:
    """``octavo::cast_statistics``."""
    if x.numel() == 0:
        return
    codes = qdata[:, : x.shape[1]]
    largest, smallest = scale_inv.max(), scale_inv.min()
    extremes[1:].copy_(torch.maximum(extremes[1:], torch.stack((largest, 1 / smallest))))
    for scales, part, part_codes in row_chunks(tile, scale_inv, x, codes):
        _add(part.to(torch.float32), part_codes, scales, tile, sums, extremes)


def _add(x: Tensor, codes: Tensor, scale_inv: Tensor, tile: Sequence[int], sums: Tensor, extremes: Tensor) -> None:
    read = decode(codes, torch.float32, scale_inv, tile)
    finite, magnitude = x.isfinite(), x.abs()
    bits = codes.view(torch.uint8) & 0x7F
    code, factor = LARGEST[codes.dtype]
    is_zero, numbers = x == 0, torch.where(finite, magnitude, 0)
    clipped = finite & (bits == code) & (magnitude > read.abs() * factor)
    counts = [is_zero, finite & ~is_zero & (bits == 0), clipped, ~finite]
    error = torch.where(finite, x - read, 0)
    squares = [part.to(torch.float64).square().sum() for part in (numbers, error)]
    elements = sums.new_tensor(x.numel())
    sums[: len(SUMS)] += torch.stack((elements, *(count.sum(dtype=torch.float64) for count in counts), *squares))
    extremes[0] = torch.maximum(extremes[0], numbers.max())
    bins = (torch.frexp(numbers).exponent - 1 - LOWEST).clamp_(0, EXPONENTS - 1)
    sums[len(SUMS) :].index_add_(0, bins.flatten(), (numbers != 0).flatten().to(sums.dtype))
