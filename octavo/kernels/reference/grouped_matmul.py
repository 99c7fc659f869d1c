"""The product of operands in groups: of each group its own, as reference/matmul.py makes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.arguments import GroupedOperands, Operands, Pair
from octavo.kernels.groups import check_offsets, places
from octavo.kernels.reference.matmul import matmul


def grouped_matmul(
    operands: GroupedOperands, out_dtype: torch.dtype, fast_accum: bool, matmul: Callable[..., Tensor] = matmul
) -> Tensor:
    """``octavo::grouped_matmul``."""
    a, b, offsets, bias, pad = operands
    out = a.codes.new_zeros(operands.shape, dtype=out_dtype)
    if operands.has_ragged_rows:
        for group, place in enumerate(places(check_offsets(offsets, a.codes.shape[0]), a.tile[0])):
            mine = Pair(a.codes[place.rows], a.scale_inv[place.scale_rows], a.tile)
            theirs = Pair(b.codes[group], b.scale_inv[group], b.tile)
            if mine.codes.shape[0] > 0:
                part = Operands(mine, theirs, None if bias is None else bias[group])
                out[place.rows] = matmul(part, out_dtype, fast_accum)
        return out
    ends = check_offsets(offsets, a.codes.shape[1])
    of_operands = (
        [_terms(pair, place.columns, place.scale_rows) for place in places(ends, pair.tile[1], pad)] for pair in (a, b)
    )
    for group, (mine, theirs) in enumerate(zip(*of_operands, strict=True)):
        if mine.codes.shape[1] > 0:
            out[group] = matmul(Operands(mine, theirs, None), out_dtype, fast_accum)
    return out


def _terms(pair: Pair, columns: slice, of_scale: slice) -> Pair:
    """A group's terms of an operand.

    Raises:
        ValueError: where codes end before the group.
    """
    codes, scale_inv, tile = pair
    if columns.stop > codes.shape[1]:
        raise ValueError(
            f"a group's columns end at {columns.stop}, an operand's at {codes.shape[1]}: give pad as to the cast"
        )
    return Pair(codes[:, columns], scale_inv[:, of_scale], tile)
