"""Statistics of a cast: how many elements it flushed to zero or clipped, and how large its rounding errors are.

The counts are in two tensors, to which any number of casts are added. ``sums``, float64, has the numbers below and then
the histogram of binary exponents. ``extremes``, float32, has the largest amax, scale_inv and scale so far, or 0. Rows
in groups have a row of counts for each group.

    elements    all
    zeros       elements that are 0
    flushed     finite elements that are not 0, but whose code is, or, of E2M1, whose whole block reads 0
    clipped     finite elements too large to round to the format's largest number
    nonfinite   inf or NaN
    power       the sum of the finite elements' squares
    error       the sum of squares of the differences between finite elements and what their codes read; of E2M1 without
                those that read NaN, as an element of their block is not finite

And how many rows of a product's operand have an inf or a NaN, found from one column of the product's result. A fault in
a row of the operand makes the whole row of the result faulty. So a row of the operand is read only where the first
element of the result's row is not finite: that may also come from an overflow or from the other operand. The op's
``faults``, float32, belongs to a layer's role in a step: the number of faulty rows and of all rows, added up over
calls; the largest scale_inv and amax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.formats import CAST_FORMATS, E2M1, format_of
from octavo.kernels.arguments import Counted, CountedCast, WatchedOperand
from octavo.kernels.groups import check_offsets, places
from octavo.kernels.layouts import unpack_pairs
from octavo.kernels.reference.codes import decode

# (the largest number's code, the factor by which a number must exceed it to be more than rounded to it)
LARGEST_CODES = {dtype: (fmt.max_code, fmt.overflow / fmt.max) for dtype, fmt in CAST_FORMATS.items()}


def measured(
    x: Tensor, codes: Tensor, scale_inv: Tensor, tile: Sequence[int], decode: Callable[..., Tensor] = decode
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sums, amax, how many elements have each of float32's exponents, 0 to 255) of x [R, C] and codes, float64.

    The exponents show faults and zeros without further passes. Codes of E2M1 are [R, C' / 2], of a C' from C on.
    """
    x, is_packed = x.to(torch.float32).resolve_neg().contiguous(), codes.dtype is E2M1.dtype
    read = decode(codes, torch.float32, scale_inv, tile)[:, : x.shape[1]]
    exponents = torch.bincount(x.view(torch.int32).bitwise_right_shift(23).to(torch.uint8).flatten(), minlength=256)
    nonfinite = exponents[255]
    numbers, error = x, x - read
    if nonfinite:
        finite = x.isfinite()
        numbers, error = (torch.where(finite, values, 0) for values in (numbers, error))
    amax = torch.stack(torch.aminmax(numbers)).abs().max()
    if is_packed:
        error = error.masked_fill(read.isnan(), 0.0)
        magnitudes = (unpack_pairs(codes)[:, : x.shape[1]] & 7).masked_fill_(read == 0, 0)
    else:
        magnitudes = codes.view(torch.uint8) & 0x7F
    zeros = exponents[0] and x.numel() - x.count_nonzero()
    code, factor = LARGEST_CODES[codes.dtype]
    clipped = exponents.new_zeros(())
    if is_packed or amax > scale_inv.to(torch.float32).min() * format_of(codes.dtype).max * factor:
        clipped = (magnitudes == code).logical_and_(numbers.abs() > read.abs() * factor).count_nonzero()
    wide = (values.flatten().to(torch.float64) for values in (numbers, error))
    squares = [torch.dot(values, values) for values in wide]
    counts = x.numel(), zeros, x.numel() - magnitudes.count_nonzero() - zeros, clipped, nonfinite, *squares
    sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=x.device) for number in counts])
    return sums, amax.double(), exponents.double()


def count(
    x: Tensor,
    codes: Tensor,
    scale_inv: Tensor,
    tile: Sequence[int],
    sums: Tensor,
    extremes: Tensor,
    measured: Callable[..., tuple[Tensor, Tensor, Tensor]] = measured,
) -> None:
    """Add the counts of x [R, C] to ``sums``, and raise ``extremes``."""
    if x.numel() == 0:
        return
    counts, amax, exponents = measured(x, codes, scale_inv, tile)
    scale_inv = scale_inv.to(torch.float32)
    smallest = scale_inv
    if codes.dtype is E2M1.dtype:  # blocks of zeros have the scale_inv 0, faulty ones NaN
        scale_inv, smallest = (torch.where(scale_inv > 0, scale_inv, value) for value in (0.0, torch.inf))
    torch.maximum(extremes, torch.stack((amax.float(), scale_inv.max(), 1 / smallest.min())), out=extremes)
    sums[: len(Counted.sums)] += counts
    exponents[0] -= counts[Counted.sums.index("zeros")]
    bins = (torch.arange(255, device=x.device) - 127 - Counted.lowest).clamp_(0, Counted.exponents - 1)
    sums[len(Counted.sums) :].index_add_(0, bins, exponents[:255])


def cast_statistics(cast: CountedCast, count: Callable[..., None] = count) -> None:
    """Compute the op ``octavo::cast_statistics``; its contract is in signatures.py."""
    x, qdata, scale_inv, tile, sums, extremes, offsets = cast
    codes = qdata if qdata.dtype is E2M1.dtype else qdata[:, : x.shape[1]]
    if offsets is None:
        count(x, codes, scale_inv, tile, sums, extremes)
        return
    for place, *counts in zip(places(check_offsets(offsets, x.shape[0]), tile[0]), sums, extremes, strict=True):
        count(x[place.rows], codes[place.rows], scale_inv[place.scale_rows], tile, *counts)


def note_faults(watched: WatchedOperand) -> None:
    """Compute the op ``octavo::note_faults``; its contract is in signatures.py."""
    y, operand, scale_inv, amax, place, faults, first, offsets = watched
    if y.numel() == 0:
        return
    faults[1] += y.shape[0]
    if offsets is not None and scale_inv is not None and len(scale_inv) == len(offsets):
        scale_inv = scale_inv[offsets.diff(prepend=offsets.new_zeros(1)) > 0]
    for at, values in ((2, scale_inv), (3, amax)):
        if values is not None and values.numel() > 0:
            faults[at] = torch.maximum(faults[at], values.to(torch.float32).max())
    suspects = y[:, 0].isfinite().logical_not_()
    if suspects.any():
        faulty = suspects.nonzero()[operand[suspects].float().isfinite().all(1).logical_not_()].flatten()
        faults[0] += len(faulty)
        if len(faulty) and first == 0:
            group = 0 if offsets is None else torch.searchsorted(offsets, faulty[0].to(torch.int32), right=True)
            first.copy_(place + group)
