"""The products of operands in groups: torch's where it serves (library_matmul.py), else all groups in one launch.

    rows in groups     a program writes a part of one group's rows (groups.py); programs without a group write the rows
                       that are in no group
    terms in groups    each group's product has programs of its own, whose sums are as long as the group

A part is written as matmul.py writes it. Blocks that no step of 32 along the contraction divides go to the reference,
which waits for the groups' sizes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.arguments import GroupedOperands, OperandPair
from octavo.kernels.reference.matmul import grouped_matmul as reference_grouped_matmul
from octavo.kernels.triton.groups import fill_part, locate, on_device, pieces_of, scales_before, sizes_of
from octavo.kernels.triton.launch import Config, config, launch
from octavo.kernels.triton.library_matmul import is_right_in_groups, library_grouped_matmul
from octavo.kernels.triton.matmul import (
    Operand,
    Product,
    bias_of,
    in_one_dtype,
    is_scaled,
    operand_of,
    place_of_program,
    product_config,
    step_along,
    tiling_of,
    write_part,
)

LARGE_GROUP = 1024  # rows


@triton.jit(do_not_specialize=["parts"])
def rows_in_groups_kernel(
    a,
    b,
    b_stride,  # from group to group
    b_scale_stride,
    bias_ptr,  # [groups, N] or None
    K,
    groups,
    parts,  # along the rows, enough for any groups
    out_ptr,
    grouping: tl.constexpr,  # Grouping
    tiling: tl.constexpr,  # ProductTiling
):
    """Write out [R, N]: of each group's rows a [., K] . its b [N, K]^T + its bias [N]; 0 of rows in no group."""
    TILE_M: tl.constexpr = tiling.tile_m
    TILE_N: tl.constexpr = tiling.tile_n
    index, n = place_of_program(parts, tl.cdiv(b.rows, TILE_N))
    place = locate(groups, index, a.rows, TILE_M, grouping)
    first_n = n * TILE_N
    if place.size == 0:
        _, is_wrong = sizes_of(groups, a.rows, grouping)
        value = tl.where(is_wrong, float("nan"), 0.0)
        fill_part(out_ptr, value, a.rows, b.rows, place.start + place.first, first_n, TILE_M, TILE_N)
    else:
        group = place.group.to(tl.int64)
        start = place.start.to(tl.int64)
        a_of_group = operand_at(a, start * a.stride, place.size, place.scale_row * a.scale_stride_r)
        b_of_group = operand_at(b, group * b_stride, b.rows, place.group * b_scale_stride)
        bias = None if bias_ptr is None else bias_ptr + group * b.rows
        write_part(Product(a_of_group, b_of_group, bias, K), out_ptr + start * b.rows, place.first, first_n, tiling)


@triton.jit
def terms_in_groups_kernel(
    a,
    b,
    groups,
    out_ptr,
    grouping: tl.constexpr,  # Grouping, whose block_r and h_block_r are of a's and of b's columns
    tiling: tl.constexpr,  # ProductTiling
):
    """Write out [groups, N, K]: a's columns of a group [N, .] . b's [K, .]^T."""
    TILE_M: tl.constexpr = tiling.tile_m
    TILE_N: tl.constexpr = tiling.tile_n
    PAD: tl.constexpr = grouping.pad
    A_COLS: tl.constexpr = grouping.block_r
    B_COLS: tl.constexpr = grouping.h_block_r
    height = tl.cdiv(a.rows, TILE_M)
    m, n = place_of_program(height * groups.count, tl.cdiv(b.rows, TILE_N))
    group = m // height
    first_m = (m % height) * TILE_M
    first_n = n * TILE_N
    sizes, is_wrong = sizes_of(groups, groups.columns, grouping)
    pieces = pieces_of(sizes, PAD)
    is_wrong = is_wrong | (tl.sum(pieces, 0) * PAD > groups.columns)
    out_ptr += group.to(tl.int64) * a.rows * b.rows
    if is_wrong:
        fill_part(out_ptr, float("nan"), a.rows, b.rows, first_m, first_n, TILE_M, TILE_N)
    else:
        groups_before = tl.arange(0, grouping.width) < group
        start = tl.multiple_of(tl.sum(tl.where(groups_before, pieces, 0), 0) * PAD, PAD)
        terms = tl.multiple_of(tl.sum(tl.where(tl.arange(0, grouping.width) == group, pieces, 0), 0) * PAD, PAD)
        a_of_group = operand_at(a, start, a.rows, scales_before(group, sizes, groups_before, A_COLS) * a.scale_stride_c)
        b_of_group = operand_at(b, start, b.rows, scales_before(group, sizes, groups_before, B_COLS) * b.scale_stride_c)
        write_part(Product(a_of_group, b_of_group, None, terms), out_ptr, first_m, first_n, tiling)


@triton.jit
def operand_at(operand, first, rows, first_scale):
    """Return an operand from its code ``first`` and its scale ``first_scale`` on, of so many rows."""
    _, _, stride, scale_inv, stride_r, stride_c, _ = operand
    return Operand(operand.ptr + first, rows, stride, scale_inv, stride_r, stride_c, first_scale)


def grouped_matmul(operands: GroupedOperands, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Compute the op ``octavo::grouped_matmul``; its contract is in signatures.py."""
    if is_right_in_groups(operands, out_dtype, fast_accum):
        return library_grouped_matmul(operands, fast_accum)
    if step_along(operands.a.tile, operands.b.tile) == 0:
        return reference_grouped_matmul(operands, out_dtype, fast_accum)
    return triton_grouped_matmul(operands, out_dtype, fast_accum)


def triton_grouped_matmul(operands: GroupedOperands, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return the Triton kernels' product, for blocks whose columns are a multiple of 32, or all."""
    out = operands.a.codes.new_empty(operands.shape, dtype=out_dtype)
    if out.numel() > 0:
        a, b = in_one_dtype(operands.a, operands.b)
        operands = operands._replace(a=a, b=b)
        (_rows_in_groups if operands.has_ragged_rows else _terms_in_groups)(operands, out, fast_accum)
    return out


def _rows_in_groups(operands: GroupedOperands, out: Tensor, fast_accum: bool) -> None:
    """Write the product of rows in groups by each group's matrix."""
    a, b, offsets, bias, _ = operands
    codes = b.codes if b.codes.stride(2) == 1 else b.codes.contiguous()
    count, N, K = codes.shape
    first = operand_of(OperandPair(codes[0], b.scale_inv[0], b.tile))
    chosen = grouped_config(a, b, (a.codes.shape[0], N), count)
    parts = a.codes.shape[0] // chosen.tile_r + count + 1
    programs = parts * triton.cdiv(N, chosen.tile_c)
    groups, grouping = on_device(offsets, block_r=a.tile[0], h_block_r=ALL, scale_rows=a.scale_inv.shape[0])
    strides, tiling = (codes.stride(0), b.scale_inv.stride(0)), tiling_of(a, b, fast_accum, chosen, K)
    arguments = operand_of(a), first, *strides, bias_of(bias, out.dtype), K, groups, parts, out, grouping, tiling
    launch(rows_in_groups_kernel, programs, arguments, chosen.num_warps, True, chosen.depth)


def _terms_in_groups(operands: GroupedOperands, out: Tensor, fast_accum: bool) -> None:
    """Write each group's product of terms in groups."""
    a, b, offsets, _, pad = operands
    count, N, K = out.shape
    chosen = grouped_config(a, b, (N, K))
    groups, grouping = on_device(offsets, pad, a.tile[1], b.tile[1], columns=a.codes.shape[1])
    tiling = tiling_of(a, b, fast_accum, chosen, 1)  # of any number of terms
    arguments = operand_of(a), operand_of(b), groups, out, grouping, tiling
    programs = count * triton.cdiv(N, chosen.tile_r) * triton.cdiv(K, chosen.tile_c)
    launch(terms_in_groups_kernel, programs, arguments, chosen.num_warps, True, chosen.depth)


def grouped_config(a: OperandPair, b: OperandPair, shape: tuple[int, int], groups: int = 1) -> Config:
    """Return a product's configuration; parts of small groups are 128 high, as half of a group's last part is empty.

    Args:
        a, b: as of a product.
        shape: of a product, or of all that share the rows.
        groups: that share the rows.
    """
    if shape[0] >= LARGE_GROUP * groups or is_scaled(a, b):
        return product_config(a, b, shape)
    return config("matmul" if a.tile[1] == b.tile[1] == ALL else "matmul_blocks", math.prod(shape).bit_length())
