"""Rounding to float8 codes and reading them back, in chunks of rows that fit a cache, with one temporary for all.

Reading back goes through the bit patterns: on a CPU torch's float8 -> bfloat16 costs 2 ns an element, this 0.35
(2048x256: 1808 us against 180 us on 1 core of an AMD EPYC Zen 5), with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.granularity import ALL
from octavo.kernels.layouts import multiply_tiles_
from octavo.kernels.reference.codes import with_faults

_SMALL = 4096  # below this, one conversion at 2 ns an element is faster than eight calls
_FACTOR = {torch.float8_e4m3fn: 256.0, torch.float8_e5m2: 1.0}  # value of a code / value of its bits in a float16
# Elements worked on at a time. Fresh memory costs more than arithmetic on a CPU: reading 2048x1408 codes at once took
# 3.5 to 15 ms, depending on malloc's state, and in chunks with one temporary 1.0 ms (1 core, AMD EPYC Zen 5).
CHUNK = 1 << 18
CHUNK_ELSEWHERE = 1 << 26  # on a GPU each chunk costs launches, and only saves memory: this is 256 MiB of float32


def row_slices(shape: Sequence[int], unit: int, device: torch.device, chunks: int = 1) -> list[slice]:
    """Slices of rows, each of about ``chunks`` times CHUNK elements and, except the last, of whole units."""
    rows, cols = shape
    chunk = CHUNK if device.type == "cpu" else CHUNK_ELSEWHERE
    step = max(chunks * chunk // max(cols, 1) // unit, 1) * unit
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)] or [slice(0, 0)]


def tile_rows(scales: Tensor, tile: Sequence[int], rows: slice) -> Tensor:
    """The scales of some rows, which are whole tiles."""
    return scales if tile[0] == ALL else scales[rows.start // tile[0] : -(-rows.stop // tile[0])]


def encode(
    x: Tensor,
    scale: Tensor | float,
    tile: Sequence[int],
    dtype: torch.dtype,
    all_finite: bool,
    clips: bool,
    into: Tensor | None = None,
    overwrites: bool = False,
) -> Tensor:
    """``reference.codes.encode`` of one chunk, written to ``into`` [R, C] if given; one scale for all may be a number.

    ``all_finite``: x has no inf or NaN; ``clips``: the scale may take an element past the format's max by more than
    float32's rounding; ``overwrites``: x, contiguous float32, may be overwritten.
    """
    limit = format_of(dtype).max
    in_place = overwrites and all_finite  # else x is still read for its faults
    wide = x if in_place else x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    wide = multiply_tiles_(wide, scale, tile)
    if clips or not all_finite:
        wide.clamp_(-limit, limit)
    codes = wide.to(dtype, memory_format=torch.contiguous_format) if into is None else into.copy_(wide)
    return codes if all_finite else with_faults(codes, x)


def dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``octavo::dequantize``."""
    return decode(qdata, dtype, scale_inv, tile).contiguous()


def decode(
    codes: Tensor, dtype: torch.dtype, scale_inv: Tensor, tile: Sequence[int], into: Tensor | None = None
) -> Tensor:
    """``reference.codes.decode`` of codes of any strides; the result has the strides of dense codes.

    ``into``: memory for as many elements of ``dtype``, which the result of dense codes is written to.
    """
    if codes.numel() < _SMALL:
        return multiply_tiles_(codes.to(torch.float32), scale_inv, tile).to(dtype)
    return _decode(codes, dtype, scale_inv, tile, into, _FACTOR[codes.dtype])


def decode_with_factor(codes: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> tuple[Tensor, float]:
    """(numbers [R, C], exact in bfloat16 and float32; a power of two): the codes read the product of both.

    A matrix product multiplies its result by that power at no cost. Arguments as decode's.
    """
    if codes.numel() < _SMALL:
        return codes.to(dtype), 1.0
    return _decode(codes, dtype, None, (ALL, ALL), into, 1.0), _FACTOR[codes.dtype]


def _decode(
    codes: Tensor, dtype: torch.dtype, scale_inv: Tensor | None, tile: Sequence[int], into: Tensor | None, factor: float
) -> Tensor:
    """The numbers that the codes' bits are in a float16, times ``factor`` and scale_inv."""
    if not codes.is_contiguous():
        if codes.t().is_contiguous():
            flipped = None if scale_inv is None else scale_inv.t()
            return _decode(codes.t(), dtype, flipped, (tile[1], tile[0]), into, factor).t()
        codes = codes.contiguous()
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device) if into is None else into.view(codes.shape)
    holds_nan = codes.dtype == torch.float8_e4m3fn and _holds_nan(codes)
    slices = row_slices(codes.shape, max(tile[0], 1), codes.device)
    in_place = dtype == torch.float32
    temporary = values if in_place else values.new_empty((slices[0].stop, codes.shape[1]), dtype=torch.float32)
    for rows in slices:
        target = values[rows]
        wide = target if in_place else temporary[: rows.stop - rows.start]
        _read(codes[rows], wide, holds_nan)
        if factor != 1.0:
            wide.mul_(factor)
        if scale_inv is not None:
            wide = multiply_tiles_(wide, tile_rows(scale_inv, tile, rows), tile)
        if wide.data_ptr() != target.data_ptr():
            target.copy_(wide)
    return values


def _read(codes: Tensor, wide: Tensor, holds_nan: bool) -> None:
    """Write what contiguous codes read, divided by their format's _FACTOR, to float32 memory."""
    # E4M3: s eeee mmm -> s 0eeee mmm0000000, a float16 that is 2^8 too small. (int8 extends the sign to two bits, the
    # mask drops the second.) By way of float16, because a CPU set to flush subnormals does not flush in its conversion.
    # E5M2 is the upper byte of a float16, inf and NaN included.
    bits = codes.view(torch.int8).to(torch.int16)
    bits = bits.mul_(1 << 7).bitwise_and_(-0x4080) if codes.dtype == torch.float8_e4m3fn else bits.mul_(1 << 8)
    wide.copy_(bits.view(torch.float16))
    if holds_nan:
        wide.masked_fill_(codes.view(torch.uint8).bitwise_and(0x7F) == 0x7F, float("nan"))


def _holds_nan(codes: Tensor) -> bool:
    """Whether any E4M3 code is NaN: 0x7F is the largest int8, 0xFF the largest uint8."""
    return bool(codes.view(torch.int8).max() == 0x7F) or bool(codes.view(torch.uint8).max() == 0xFF)
