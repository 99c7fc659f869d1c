"""Casts and products of rows in groups, each group with a matrix of its own: what a mixture of experts computes.

Legend: R rows in groups, of which offsets [G] int32 are the cumulative ends (kernels/groups.py), K in features, N out
features. Matrices of all groups are one tensor, weight_GNK. Nothing here reads the sizes of groups on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.granularity import ALL
from octavo.kernels.groups import check_offsets, of_equal_groups, padded_columns
from octavo.kernels.layouts import needs_transposed_codes
from octavo.private import tell_torch_of_products
from octavo.scaling.recipe import Cast
from octavo.tensor.pair import Operands

_ALIGNMENT = 16  # bytes; torch.nn.functional.grouped_mm asks it of strides


def transposed_codes(q_RC: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Return codes of rows in groups transposed [C, Rp] and padded, as ``cast`` writes them."""
    rows, columns = q_RC.shape
    laid = q_RC.new_zeros(columns, padded_columns(rows, len(offsets), pad), dtype=torch.uint8)
    laid[:, _columns_of_rows(offsets, rows, pad)] = q_RC.view(torch.uint8).t()
    return laid.view(q_RC.dtype)


def rows_of_codes(q_CR: Tensor, offsets: Tensor | None, rows: int, pad: int) -> Tensor:
    """Return transposed codes as rows [R, C], in groups or not; those of rows in no group may be anything."""
    if offsets is None or q_CR.shape[1] == rows:
        return q_CR.t()[:rows]
    return q_CR.view(torch.uint8).t()[_columns_of_rows(offsets, rows, pad)].view(q_CR.dtype)


def _columns_of_rows(offsets: Tensor, rows: int, pad: int) -> Tensor:
    """Return the column [R] of each row in transposed codes [C, Rp]."""
    group = group_of_rows(offsets, rows).clamp(max=offsets.shape[0] - 1)
    shifts = F.pad(padded_ends(offsets, pad) - offsets, (1, 0))[:-1]
    return torch.arange(rows, device=offsets.device) + shifts[group]


def padded_ends(offsets: Tensor, pad: int) -> Tensor:
    """Return the cumulative ends [G] int32 of groups whose sizes are padded."""
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    return ((sizes + pad - 1) // pad * pad).cumsum(0).to(torch.int32)


def cast_matrices(
    weight_GNK: Tensor, delayed_scale: Tensor | None, role: int, cast: Cast, layouts: tuple[bool, bool], pad: int
) -> Operands:
    """Cast every group's matrix by one scaling: pairs of codes [G, N, K'] as they lie and [G, K, N'] transposed."""
    as_is, transposed = layouts
    dtype, tile, *scaling = cast.arguments if as_is else cast.arguments_transposed
    is_swapped = weight_GNK.mT.is_contiguous() and not weight_GNK.is_contiguous()  # a parameter stored [G, K, N]
    matrices = weight_GNK.mT if is_swapped else weight_GNK.contiguous()
    if is_swapped:  # from here on the layouts are those of ``matrices``
        tile, as_is, transposed = tile[::-1], transposed, as_is
    groups, rows, _ = matrices.shape
    ends = torch.arange(rows, groups * rows + 1, rows, dtype=torch.int32, device=matrices.device)
    writes_transposed = transposed and needs_transposed_codes(matrices.device)
    arguments = matrices.flatten(0, 1), delayed_scale, role, dtype, tile, *scaling, writes_transposed, pad
    q, q_t, scale_inv, amax = kernels.cast(*arguments, offsets=ends, as_is=as_is or not writes_transposed)
    pair = pair_t = None
    if as_is or not writes_transposed:
        pair = of_equal_groups(q, scale_inv, tile, matrices.shape)
    if writes_transposed:
        pair_t = of_equal_groups(q_t, scale_inv, tile, matrices.shape, pad, transposed=True)
    elif transposed:
        pair_t = pair[0].mT, pair[1].mT  # type: ignore[index]
    operands = Operands(pair if as_is else None, pair_t, amax.amax(0, keepdim=True) if cast.is_delayed else None)
    return operands.swapped() if is_swapped else operands


class Routing(NamedTuple):
    """An order of rows: sorted row i is row ``order[i]``, row j is sorted row ``inverse[j]``; [S] both.

    ``offsets`` [E] int32: where each expert's rows end.
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor

    @classmethod
    def by_expert(cls, expert_S: Tensor, experts: int) -> Routing:
        """Sort rows by their expert; those of no expert, E or more, come last and belong to no group."""
        sorted_experts, order = torch.sort(expert_S, stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        expert_numbers = torch.arange(experts, device=sorted_experts.device, dtype=sorted_experts.dtype)
        return cls(order, inverse, torch.searchsorted(sorted_experts, expert_numbers, right=True, out_int32=True))


def group_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return the group [R] int64 of each row; the number of groups for rows in no group."""
    return torch.searchsorted(offsets, torch.arange(rows, dtype=torch.int32, device=offsets.device), right=True)


@torch.library.custom_op("octavo::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Multiply in high precision, in one dtype: a [R, K] . b [G, K, N] -> [R, N]; or a [N, R] . b [R, K] -> [G, N, K].

    It is torch.nn.functional.grouped_mm, but rows in no group are zero; it also takes sizes that that one refuses, and
    compiled the dtypes that its fake refuses (torch 2.13 knows bf16 only).
    """
    if offsets.device.type == "cpu":  # a GPU would have to be waited for
        check_offsets(offsets, (a if b.ndim == 3 else b).shape[0])
    if not a.numel():  # without rows a tensor may have strides of 0, which torch refuses
        return _result(a, b, offsets).zero_()
    ragged_rows = b.ndim == 3
    rows, cols = a.shape[0], b.shape[-1]
    multiple = _ALIGNMENT // a.element_size()
    across, along = -(a.shape[1] if ragged_rows else rows) % multiple, -cols % multiple
    if ragged_rows:
        a, b = _padded(a, across), _padded(b, along, across)
        b = b if b.mT.is_contiguous() else b.contiguous()
        product = F.grouped_mm(a.contiguous(), b, offs=offsets)
        outside = torch.arange(rows, device=offsets.device) >= offsets[-1]
        return product.masked_fill_(outside.unsqueeze(1), 0)[:, :cols].contiguous()
    a, b = _padded(a.t(), across).contiguous(), _padded(b, along).contiguous()
    return F.grouped_mm(a.t(), b, offs=offsets)[:, :rows, :cols].contiguous()


def _padded(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def _result(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (offsets.shape[0], a.shape[0], b.shape[1]))


grouped_mm.register_fake(_result)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, offsets = ctx.saved_tensors
    da = db = None
    if ctx.needs_input_grad[0]:
        da = grouped_mm(grad, b.mT, offsets) if b.ndim == 3 else grouped_mm(b, grad.mT, offsets).t()
    if ctx.needs_input_grad[1]:
        db = grouped_mm(a.t(), grad, offsets)
    return da, db, None


grouped_mm.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
tell_torch_of_products({torch.ops.octavo.grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1]})


def grouped_linear(x_RK: Tensor, weight_GNK: Tensor, bias_GN: Tensor | None, offsets: Tensor) -> Tensor:
    """Return the output product [R, N] in high precision, all of one dtype; rows in no group are zero."""
    y_RN = grouped_mm(x_RK, weight_GNK.mT, offsets)
    if bias_GN is None:
        return y_RN
    # by a product, whose gradient adds rows in float32; an index's gradient would add them in the bias's dtype
    return y_RN + grouped_mm(x_RK.new_ones(x_RK.shape[0], 1), bias_GN.unsqueeze(1), offsets)


def group_sums(x_RN: Tensor, offsets: Tensor) -> Tensor:
    """Return each group's sum of rows [G, N], added in float32 and rounded once; 0 for a group without rows."""
    return grouped_mm(x_RN.new_ones(1, 1).expand(1, x_RN.shape[0]), x_RN, offsets)[:, 0]


def scales_of_rows(scale_inv: Tensor, tile: Sequence[int], offsets: Tensor, rows: int) -> tuple[Tensor, Sequence[int]]:
    """Return the scales that ``cast`` of R rows in groups returned as scales of each row, and the tile of these."""
    if (height := tile[0]) == 1:
        return scale_inv, tile
    group = group_of_rows(offsets, rows).clamp(max=offsets.shape[0] - 1)
    if height == ALL:
        return scale_inv[group], (1, tile[1])
    begins = F.pad(offsets, (1, 0))[:-1]
    tiles = F.pad(((offsets - begins + height - 1) // height).cumsum(0), (1, 0))
    within = (torch.arange(rows, device=offsets.device) - begins[group]) // height
    return scale_inv[(tiles[group] + within).clamp(max=scale_inv.shape[0] - 1)], (1, tile[1])
