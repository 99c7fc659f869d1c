"""Return a pair's values: qdata x scale_inv."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E2M1
from octavo.granularity import ALL
from octavo.kernels.reference.codes import dequantize as reference_dequantize
from octavo.kernels.triton.launch import as_argument, config, launch
from octavo.kernels.triton.tiles import BlockScales, Source, decode, load_scale_inv, narrow


@triton.jit
def dequantize_kernel(
    q,  # Source of codes
    scale_inv,  # BlockScales
    out_ptr,
    ONE_ROW: tl.constexpr,  # all rows share their scales
    ONE_COLUMN: tl.constexpr,  # all columns
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Write out [R, C] = codes of any strides, each times its block's scale_inv."""
    strips = tl.cdiv(q.C, TILE_C)
    rows = (tl.program_id(0) // strips) * TILE_R + tl.arange(0, TILE_R)
    cols = (tl.program_id(0) % strips) * TILE_C + tl.arange(0, TILE_C)
    mask = (rows < q.R)[:, None] & (cols < q.C)[None, :]
    offsets = rows.to(tl.int64)[:, None] * q.stride_r + cols.to(tl.int64)[None, :] * q.stride_c
    values = decode(tl.load(q.ptr + offsets, mask=mask))
    scaled_rows = tl.full([1], 0, tl.int32) if ONE_ROW else rows
    scaled_cols = tl.full([1], 0, tl.int32) if ONE_COLUMN else cols
    scale_offsets = (scaled_rows // scale_inv.block_r)[:, None] * scale_inv.stride_r
    scale_offsets += (scaled_cols // scale_inv.block_c)[None, :] * scale_inv.stride_c
    inside = (scaled_rows < q.R)[:, None] & (scaled_cols < q.C)[None, :]
    values *= load_scale_inv(scale_inv.ptr + scale_offsets, inside)
    offsets = rows.to(tl.int64)[:, None] * q.C + cols[None, :]
    tl.store(out_ptr + offsets, narrow(values, out_ptr.dtype.element_ty), mask=mask)


def dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute the op ``octavo::dequantize``; its contract is in signatures.py."""
    if qdata.dtype is E2M1.dtype:
        return reference_dequantize(qdata, scale_inv, tile, dtype)
    rows, cols = qdata.shape
    out = qdata.new_empty((rows, cols), dtype=dtype)
    if out.numel() == 0:
        return out
    tile_r, tile_c, _, num_warps = config("cast", out.numel().bit_length())
    scales = scales_of_blocks(scale_inv, tile, (rows, cols))
    arguments = Source(qdata, rows, cols, *qdata.stride()), scales, out
    constants = scales.block_r >= rows, scales.block_c >= cols, tile_r, tile_c
    programs = triton.cdiv(rows, tile_r) * triton.cdiv(cols, tile_c)
    launch(dequantize_kernel, programs, (*arguments, *constants), num_warps)
    return out


def scales_of_blocks(scale_inv: Tensor, block: Sequence[int], shape: Sequence[int]) -> BlockScales:
    """Return the scales of a matrix of this shape as kernels read them; its size is that of a block of ALL."""
    sizes = (all_of if size == ALL else size for size, all_of in zip(block, shape, strict=True))
    return BlockScales(as_argument(scale_inv), *sizes, *scale_inv.stride())
