"""The product of two pairs, a . b^T, in float32, in which codes and their products are exact.

A scale that is constant along K multiplies the result; one that varies along K must multiply the operand first. The
result is rounded once, at the end, to its dtype. Where operands are in groups, each group has its own product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import GroupedOperands, OperandPair, ProductArguments
from octavo.kernels.groups import check_offsets, places
from octavo.kernels.reference.codes import decode
from octavo.numerics import MAX_SCALE, MIN_SCALE


def matmul(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Compute the op ``octavo::matmul``; its contract is in signatures.py."""
    a, b, bias = operands.plain()
    out_MN = torch.empty(operands.shape, device=a.codes.device, dtype=torch.float32)
    # by out=, because autocast would turn the product into float16, where a sum of codes overflows
    torch.mm(_values(a), _values(b).t(), out=out_MN)
    for scales in result_scales(*(pair.scale_inv if pair.tile[1] == ALL else None for pair in (a, b))):
        out_MN.mul_(scales)
    if bias is not None:
        out_MN.add_(bias.to(torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32))
    return out_MN.to(out_dtype)


def _values(pair: OperandPair) -> Tensor:
    """Return an operand [rows, K] in float32, multiplied by its scales where these vary along K."""
    return pair.codes.to(torch.float32) if pair.tile[1] == ALL else decode(pair.codes, torch.float32, *pair[1:])


def result_scales(a_scale_inv: Tensor | None, b_scale_inv: Tensor | None) -> list[Tensor]:
    """Return the scales, [M, 1] and [1, N], that multiply the result in turn; None: the operand has none left.

    Where both are one number, they are multiplied first, if their product is a normal number in float32.
    """
    both = a_scale_inv, None if b_scale_inv is None else b_scale_inv.t()
    scales = [scale_inv.to(torch.float32) for scale_inv in both if scale_inv is not None]
    if len(scales) == 2 and scales[0].numel() == scales[1].numel() == 1:
        product = scales[0] * scales[1]
        return [product] if MIN_SCALE <= float(product) <= MAX_SCALE else scales
    return scales


def grouped_matmul(
    operands: GroupedOperands, out_dtype: torch.dtype, fast_accum: bool, matmul: Callable[..., Tensor] = matmul
) -> Tensor:
    """Compute the op ``octavo::grouped_matmul``; its contract is in signatures.py."""
    a, b, offsets, bias, pad = operands
    out = a.codes.new_zeros(operands.shape, dtype=out_dtype)
    if operands.has_ragged_rows:
        for group, place in enumerate(places(check_offsets(offsets, a.codes.shape[0]), a.tile[0])):
            group_a = OperandPair(a.codes[place.rows], a.scale_inv[place.scale_rows], a.tile)
            group_b = OperandPair(b.codes[group], b.scale_inv[group], b.tile)
            if group_a.codes.shape[0] > 0:
                arguments = ProductArguments(group_a, group_b, None if bias is None else bias[group])
                out[place.rows] = matmul(arguments, out_dtype, fast_accum)
        return out
    ends = check_offsets(offsets, a.codes.shape[1])
    operands_by_group = (
        [_terms(pair, place.columns, place.scale_rows) for place in places(ends, pair.tile[1], pad)] for pair in (a, b)
    )
    for group, (group_a, group_b) in enumerate(zip(*operands_by_group, strict=True)):
        if group_a.codes.shape[1] > 0:
            out[group] = matmul(ProductArguments(group_a, group_b, None), out_dtype, fast_accum)
    return out


def _terms(pair: OperandPair, columns: slice, scale_columns: slice) -> OperandPair:
    """Return an operand's columns that one group sums over.

    Raises:
        ValueError: if the codes end before the group.
    """
    codes, scale_inv, tile = pair
    if columns.stop > codes.shape[1]:
        raise ValueError(
            f"a group's columns end at {columns.stop}, an operand's at {codes.shape[1]}: give pad as to the cast"
        )
    return OperandPair(codes[:, columns], scale_inv[:, scale_columns], tile)
