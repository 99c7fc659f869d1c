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
from octavo.kernels.reference.codes import decode
from octavo.kernels.reference.tiles import row_runs
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
    a_MK, a_rest = _operand(a, a_scale_inv, a_tile, compute)
    b_NK, b_rest = _operand(b, b_scale_inv, b_tile, compute)
    out_MN = a_MK.new_empty(a_MK.shape[0], b_NK.shape[0])
    # with out=, autocast leaves the products alone: in float16 a sum of codes overflows
    factor = _common_factor(a_rest, b_rest)
    if factor is not None:  # inside the product: one rounding and no second pass over the result
        start, beta = (out_MN, 0) if bias is None else (bias.to(compute), 1)
        torch.addmm(start, a_MK, b_NK.t(), beta=beta, alpha=factor, out=out_MN)
        return out_MN.to(out_dtype)
    torch.mm(a_MK, b_NK.t(), out=out_MN)
    if a_rest is None and b_rest is None and bias is None:
        return out_MN.to(out_dtype)
    tile = (1, ALL) if a_rest is not None and len(a_rest) > 1 else (ALL, ALL)
    for a_run, wide, run in row_runs(tile, a_rest, out_MN):
        wide.copy_(run)
        if a_run is not None:
            wide.mul_(a_run)
        if b_rest is not None:
            wide.mul_(b_rest.t())
        run.copy_(wide if bias is None else wide.add_(bias))
    return out_MN.to(out_dtype)


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
