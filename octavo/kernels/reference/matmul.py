"""The product of two pairs, a . b^T, in float32, in which codes and their products are exact.

A scale that is constant along K multiplies the result; one that varies along K must multiply the operand first. All is
applied before the one rounding to the result's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import Operands, Pair
from octavo.kernels.reference.codes import decode
from octavo.numerics import MAX_SCALE, MIN_SCALE


def matmul(operands: Operands, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """``octavo::matmul``."""
    a, b, bias = operands
    out_MN = torch.empty(operands.shape, device=a.codes.device)
    # by out=, because autocast would turn the product into float16, where a sum of codes overflows
    torch.mm(_values(a), _values(b).t(), out=out_MN)
    for scales in result_scales(*(pair.scale_inv if pair.tile[1] == ALL else None for pair in (a, b))):
        out_MN.mul_(scales)
    if bias is not None:
        out_MN.add_(bias.to(torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32))
    return out_MN.to(out_dtype)


def _values(pair: Pair) -> Tensor:
    """An operand [rows, K], with the scales that vary along K."""
    return pair.codes.to(torch.float32) if pair.tile[1] == ALL else decode(pair.codes, torch.float32, *pair[1:])


def result_scales(a_scale_inv: Tensor | None, b_scale_inv: Tensor | None) -> list[Tensor]:
    """What multiplies the result, one after the other: [M, 1] and [1, N], or one number; of operands that have None.

    Two of one number multiply each other first, where float32 holds their product as a normal number.
    """
    scales = [] if a_scale_inv is None else [a_scale_inv]
    scales += [] if b_scale_inv is None else [b_scale_inv.t()]
    if len(scales) == 2 and scales[0].numel() == scales[1].numel() == 1:
        product = scales[0] * scales[1]
        return [product] if MIN_SCALE <= float(product) <= MAX_SCALE else scales
    return scales
