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
from octavo.kernels.triton.tiles import Source, decode, load_scale_inv, narrow


@triton.jit
def dequantize_kernel(
    q,  # Source of codes
    scale_inv,  # Source, whose R and C are a tile's rows and columns
    out_ptr,
    ONE_ROW: tl.constexpr,  # all rows share their scales
    ONE_COLUMN: tl.constexpr,  # all columns
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write out [R, C] = codes of any strides, each times its tile's scale_inv."""
    strips = tl.cdiv(q.C, BLOCK_C)
    rows = (tl.program_id(0) // strips) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = (tl.program_id(0) % strips) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (rows < q.R)[:, None] & (cols < q.C)[None, :]
    offsets = rows.to(tl.int64)[:, None] * q.stride_r + cols.to(tl.int64)[None, :] * q.stride_c
    values = decode(tl.load(q.ptr + offsets, mask=mask))
    tile_rows = tl.full([1], 0, tl.int32) if ONE_ROW else rows
    tile_cols = tl.full([1], 0, tl.int32) if ONE_COLUMN else cols
    scale_offsets = (tile_rows // scale_inv.R)[:, None] * scale_inv.stride_r
    scale_offsets += (tile_cols // scale_inv.C)[None, :] * scale_inv.stride_c
    inside = (tile_rows < q.R)[:, None] & (tile_cols < q.C)[None, :]
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
    block_r, block_c, _, num_warps = config("cast", out.numel().bit_length())
    tile_rows, tile_cols = (all_of if size == ALL else size for size, all_of in zip(tile, (rows, cols), strict=True))
    scales = Source(as_argument(scale_inv), tile_rows, tile_cols, *scale_inv.stride())
    arguments = Source(qdata, rows, cols, *qdata.stride()), scales, out
    constants = tile_rows >= rows, tile_cols >= cols, block_r, block_c
    programs = triton.cdiv(rows, block_r) * triton.cdiv(cols, block_c)
    launch(dequantize_kernel, programs, (*arguments, *constants), num_warps)
    return out
