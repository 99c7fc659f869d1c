"""Read a pair back: value = qdata x scale_inv."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.triton.launch import config, launch
from octavo.kernels.triton.tiles import decode, narrow


@triton.jit
def dequantize_kernel(
    q_ptr,
    scale_inv_ptr,
    out_ptr,
    R,
    C,
    stride_r,
    stride_c,
    scale_stride_r,
    scale_stride_c,
    ROWS,  # of a tile
    COLS,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Out [R, C] = codes of any strides, each times its tile's scale_inv."""
    strips = tl.cdiv(C, BLOCK_C)
    rows = (tl.program_id(0) // strips) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = (tl.program_id(0) % strips) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
    values = decode(tl.load(q_ptr + offsets, mask=mask))
    scale_offsets = (rows // ROWS)[:, None] * scale_stride_r + (cols // COLS)[None, :] * scale_stride_c
    values *= tl.load(scale_inv_ptr + scale_offsets, mask=mask, other=1.0)
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], narrow(values, out_ptr.dtype.element_ty), mask=mask
    )


def dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``octavo::dequantize``."""
    rows, cols = qdata.shape
    out = qdata.new_empty((rows, cols), dtype=dtype)
    if out.numel() == 0:
        return out
    chosen = config("cast", out.numel().bit_length())
    arguments = (
        qdata,
        scale_inv,
        out,
        rows,
        cols,
        *qdata.stride(),
        *scale_inv.stride(),
        rows if tile[0] == ALL else tile[0],
        cols if tile[1] == ALL else tile[1],
        chosen.block_r,
        chosen.block_c,
    )
    programs = -(-rows // chosen.block_r) * -(-cols // chosen.block_c)
    launch(dequantize_kernel, programs, arguments, chosen.num_warps)
    return out
