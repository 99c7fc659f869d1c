"""Rounding to float8 codes and reading them back.

torch's conversion rounds correctly (to nearest, ties to even, subnormals included) in every version. Beyond the largest
value versions and formats differ: so values are clamped first, and the codes of inf and NaN written afterwards:

    NaN -> 0x7F        +-inf -> 0x7F in E4M3, +-inf in E5M2        finite -> saturates at +-max
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.formats import E2M1, format_of
from octavo.kernels.layouts import multiply_tiles_
from octavo.kernels.reference.nvfp4 import values_of_packed


def encode(x: Tensor, scale: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Round x [R, C] times its tiles' scales, a float32 product, to codes."""
    fmt, wide = format_of(dtype), x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    wide = multiply_tiles_(wide, scale, tile).clamp_(-fmt.max, fmt.max)
    codes = wide.to(dtype, memory_format=torch.contiguous_format)
    raw, inf = codes.view(torch.uint8), x.isinf()
    if fmt.has_inf:
        raw.copy_(torch.where(inf, torch.where(x < 0, 0xFC, 0x7C), raw))
        inf = torch.zeros_like(inf)
    raw.masked_fill_(x.isnan() | inf, fmt.nan_code)
    return codes


def decode(codes: Tensor, dtype: torch.dtype, scale_inv: Tensor, tile: Sequence[int]) -> Tensor:
    """Read codes [R, C] times their scale_inv in float32, rounded once to dtype; of E2M1 codes are [R, C / 2]."""
    numbers = values_of_packed(codes) if codes.dtype is E2M1.dtype else codes.to(torch.float32)
    return multiply_tiles_(numbers, scale_inv.to(torch.float32), tile).to(dtype)


def dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute the op ``octavo::dequantize``; its contract is in signatures.py."""
    return decode(qdata, dtype, scale_inv, tile).clone(memory_format=torch.contiguous_format)
