"""The product of two pairs, a . b^T, on any device.

Codes are exact in bfloat16, so a CPU multiplies them there: its own float8 product (oneDNN) is 2-8 times slower than
a bf16 one, and there is no float32 output for bf16 operands. A scale that is constant along K multiplies the result;
one that varies along K must multiply the operand first, which is exact for powers of two and otherwise rounds each
operand once more to bf16: at 2^-9 that is 25 dB below the error of the codes themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.reference import tiles
from octavo.kernels.reference.codes import decode
from octavo.kernels.reference.tiles import row_slices, tile_rows
from octavo.numerics import MAX_SCALE, MIN_SCALE


def matmul(
    a: Tensor,
    a_scale_inv: Tensor,
    a_tile: Sequence[int],
    b: Tensor,
    b_scale_inv: Tensor,
    b_tile: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """``octavo::matmul``."""
    compute = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    b_NK, b_rest = _operand(b, b_scale_inv, b_tile, compute)
    bias = None if bias is None else bias.to(compute)
    out_MN = b_NK.new_empty(a.shape[0], b.shape[0])
    if a.numel() <= tiles.RUN:
        _multiply(*_operand(a, a_scale_inv, a_tile, compute), b_NK, b_rest, bias, out_MN)
        return out_MN.to(out_dtype)
    # In runs of a's rows, which stay in the cache between reading them and multiplying them. Of a transposed operand
    # rows are columns in memory, and runs larger: there they only keep all of it from being there in bf16.
    lies_transposed = not a.is_contiguous() and a.t().is_contiguous()
    unit = 1 if a_tile[0] == ALL else a_tile[0]
    runs = row_slices((a.shape[0], a.shape[1]), unit, 4 if lies_transposed else 1)
    for rows in runs if lies_transposed or a.is_contiguous() else [slice(0, a.shape[0])]:
        a_run = a.t()[:, rows].contiguous().t() if lies_transposed else a[rows]
        a_MK, a_rest = _operand(a_run, tile_rows(a_scale_inv, a_tile, rows), a_tile, compute)
        _multiply(a_MK, a_rest, b_NK, b_rest, bias, out_MN[rows])
    return out_MN.to(out_dtype)


def _multiply(
    a_MK: Tensor, a_rest: Tensor | None, b_NK: Tensor, b_rest: Tensor | None, bias: Tensor | None, out_MN: Tensor
) -> None:
    """Write a . b^T times the scales left, plus bias.

    By out=, because autocast would turn the product into float16, where a sum of codes overflows.
    """
    factor = _common_factor(a_rest, b_rest)
    if factor is not None:  # inside the product: one rounding and no second pass over the result
        start, beta = (out_MN, 0) if bias is None else (bias, 1)
        torch.addmm(start, a_MK, b_NK.t(), beta=beta, alpha=factor, out=out_MN)
        return
    torch.mm(a_MK, b_NK.t(), out=out_MN)
    if a_rest is None and b_rest is None and bias is None:
        return
    wide = out_MN.to(torch.float32, copy=True)
    for rest in (a_rest, None if b_rest is None else b_rest.t()):
        if rest is not None:
            wide.mul_(rest)
    out_MN.copy_(wide if bias is None else wide.add_(bias))


def _operand(q: Tensor, scale_inv: Tensor, tile: Sequence[int], compute: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The operand [rows, K] to multiply, and what is left to multiply into the result's rows ([rows, 1] or [1, 1])."""
    if tile[1] != ALL:
        return decode(q, compute, scale_inv, tile), None
    return decode(q, compute), scale_inv


def _common_factor(a_rest: Tensor | None, b_rest: Tensor | None) -> float | None:
    """The one number that multiplies the whole result; None where there is none, or float32 would not hold it."""
    if a_rest is None or b_rest is None or a_rest.numel() != 1 or b_rest.numel() != 1:
        return None
    factor = float(a_rest) * float(b_rest)
    return factor if MIN_SCALE <= factor <= MAX_SCALE else None
