"""Compare a kernel's results with its reference's: bit for bit, or up to float32's roundings before a cast.

A kernel may add in another order, and compute an activation with other instructions. Then few codes may be rounded the
other way, a scale that is a power of two may be its neighbour, and all other results are as close as their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

FEW = 1000  # one in so many codes may differ
FLIPS = 10000  # one in so many scales may be another power of two
CLOSE = 1e-5  # relative difference of float32 numbers
TINY = 2.0**-20  # float32's roundings, relative to the largest number that was cast


def difference(results: Sequence[Tensor], expected: Sequence[Tensor], exact: bool, rows: int) -> str:
    """Return which result differs first, and how; "" if none does.

    Args:
        results: the kernel's.
        expected: the reference's.
        exact: whether all must have the same bits, except sums of columns.
        rows: how many numbers are added in such a sum.
    """
    excused = 0
    for index, (result, truth) in enumerate(zip(results, expected, strict=True)):
        if result.shape != truth.shape or result.dtype != truth.dtype:
            return f"output {index}: {tuple(result.shape)} {result.dtype}, not {tuple(truth.shape)} {truth.dtype}"
        if not exact and _is_scale(result):
            excused += int(_flips(result, truth).sum()) * (results[0].numel() // result.numel())
    for index, (result, truth) in enumerate(zip(results, expected, strict=True)):
        if problem := _difference(result, truth, exact, rows, excused):
            return f"output {index}: {problem}"
    return ""


def same_state(arguments: Sequence[Any], expected: Sequence[Any], exact: bool) -> bool:
    """Whether the kernel left the same numbers in its float32 arguments as the reference."""
    agree: Callable[..., bool] = torch.equal if exact else partial(torch.allclose, rtol=CLOSE, atol=0)
    pairs = zip(arguments, expected, strict=True)
    return all(agree(left, right) for left, right in pairs if isinstance(left, Tensor) and left.dtype == torch.float32)


def sqnr(result: Tensor, exact: Tensor) -> float:
    """Return the signal to quantisation noise in dB: 10 log10(|exact|^2 / |result - exact|^2), in float64."""
    result, exact = result.detach().double(), exact.detach().double()
    noise = (result - exact).pow(2).sum().item()
    return math.inf if noise == 0 else 10 * math.log10(exact.pow(2).sum().item() / noise)


def _difference(result: Tensor, truth: Tensor, exact: bool, rows: int, excused: int) -> str:
    """Return how one result differs from the reference's more than it may; "" if it does not."""
    if result.numel() == 0:
        return ""
    is_sum = result.ndim == 1 and result.dtype != torch.float32
    if exact and not is_sum:
        bits, true_bits = (tensor.flatten().view(torch.uint8) for tensor in (result, truth))
        differing = int((bits != true_bits).sum())
        return f"{differing} of {result.numel()} differ" if differing else ""
    if result.element_size() == 1:
        return _code_difference(result, truth, excused)
    if result.dtype != torch.float32:  # sums of columns; or y or dx, rounded once more
        close = torch.allclose(result, truth, rtol=2**-7, atol=1e-3 * rows**0.5 if is_sum else 1e-5)
        largest = (result.float() - truth.float()).abs().max().item()
        return "" if close else f"{'sums differ' if is_sum else 'differs'} by {largest:.3g}"
    # a mean may be near 0
    near = torch.isclose(result, truth, rtol=CLOSE, atol=1e-6 if result.ndim == 1 else 0.0)
    if _is_scale(result):
        near |= _flips(result, truth)
    return "" if bool(near.all()) else f"differs by {(result / truth - 1).abs().max().item():.3g} relative"


def _code_difference(codes: Tensor, truth: Tensor, excused: int) -> str:
    """Return how codes differ too much; few may be one apart, or further where x near 0 was rounded in float32."""
    a, b = (_ordered(c) for c in (codes, truth))
    differing = a != b
    if int(differing.sum()) > excused + max(1, codes.numel() // FEW):
        return f"{int(differing.sum())} of {codes.numel()} codes differ"
    far = (a - b).abs() > 1
    if bool(far.any()):
        numbers, true_numbers = (c.view(torch.uint8)[far].view(c.dtype).float() for c in (codes, truth))
        largest = (truth.view(torch.uint8) & 0x7F).max().view(truth.dtype).float()
        if (strays := int(((numbers - true_numbers).abs() > TINY * largest).sum())) > excused:
            return f"{strays} of {codes.numel()} codes are further than one apart"
    return ""


def _ordered(codes: Tensor) -> Tensor:
    """Return integers in the codes' order."""
    bits = codes.view(torch.uint8).to(torch.int16)
    return torch.where(bits < 0x80, bits, 0x80 - bits)


def _is_scale(result: Tensor) -> bool:
    """Whether a result is scales or amaxes, by its dtype and dimensions."""
    return result.ndim == 2 and result.dtype == torch.float32


def _flips(result: Tensor, truth: Tensor) -> Tensor:
    """Return which scales are the neighbouring power of two; none of them if too many are."""
    flips = (result == 2 * truth) ^ (2 * result == truth)
    return flips if int(flips.sum()) <= flips.numel() // FLIPS else torch.zeros_like(flips)
