"""torch's own product of operands in groups (CUTLASS), and whether a device computes it rightly, asked once.

It takes E4M3 codes with a scale a row and gives bfloat16, and says nothing of rows that are in no group. It reads where
the offsets say, so it gets checked ones, and what it leaves is written after it: three launches and what torch adds.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from octavo.granularity import ALL
from octavo.kernels.arguments import CastSource, GroupedOperands, OperandPair, Output, Scaling
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.reference.matmul import grouped_matmul as reference_grouped_matmul
from octavo.kernels.triton.groups import fill_part, on_device, sizes_of, tiles_of
from octavo.kernels.triton.launch import LIBRARY, is_capturing, launch

_logger = logging.getLogger("octavo")
_ROWS = (1, ALL)
_ERROR = 0.02  # of any row or column, as of other products
_known: dict[tuple[Any, ...], bool] = {}


@triton.jit
def checked_ends_kernel(groups, R, ends_ptr, grouping: tl.constexpr):
    """Each group's end, padded; 0 for all where offsets are wrong."""
    PAD: tl.constexpr = grouping.pad
    e = tl.arange(0, grouping.width)
    sizes, _ = sizes_of(groups, R, grouping)
    ends = tl.cumsum(tiles_of(sizes, PAD), 0) * PAD
    tl.store(ends_ptr + e, tl.where(tl.max(ends, 0) > R, 0, ends), mask=e < groups.count)


@triton.jit
def mend_kernel(groups, R, out_ptr, height, width, grouping: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr):
    """Write 0 to the rows in no group of out [height, width], if RAGGED; NaN to all where offsets are wrong."""
    PAD: tl.constexpr = grouping.pad
    sizes, is_wrong = sizes_of(groups, R, grouping)
    padded = tl.sum(tiles_of(sizes, PAD), 0) * PAD
    is_wrong = is_wrong | (padded > R)
    first = tl.program_id(0) // tl.cdiv(width, BLOCK) * BLOCK
    last = height
    if RAGGED:
        last = padded
    last = tl.where(is_wrong, 0, last)
    if first + BLOCK > last:
        first_n = tl.program_id(0) % tl.cdiv(width, BLOCK) * BLOCK
        value = tl.where(is_wrong, float("nan"), 0.0)
        end = tl.minimum(height, first + BLOCK)
        fill_part(out_ptr, value, end, width, tl.maximum(first, last), first_n, BLOCK, BLOCK)


def is_right(operands: GroupedOperands, out_dtype: torch.dtype, fast_accum: bool) -> bool:
    """Whether torch's product takes these operands, and computes such ones rightly on their device."""
    if (operands.a.tile, operands.b.tile, fast_accum) not in LIBRARY or not takes(operands, out_dtype):
        return False
    kind = operands.a.codes.device, operands.has_ragged_rows, fast_accum
    found = _known.get(kind)
    if found is None:
        if is_capturing():  # a graph can't look at results
            return False
        found = _known[kind] = _agrees(*kind)
        verdict = "torch's" if found else "octavo's Triton kernel, for torch's is not right here"
        form = "rows" if operands.has_ragged_rows else "terms"
        _logger.info("products whose %s are in groups, on %s: %s", form, operands.a.codes.device, verdict)
    return found


def takes(operands: GroupedOperands, out_dtype: torch.dtype) -> bool:
    """Whether torch's product has this case: what its checks and CUTLASS ask for."""
    a, b, _, bias, pad = operands
    codes = a.codes, b.codes
    return (
        a.tile == b.tile == _ROWS
        and out_dtype is torch.bfloat16
        and bias is None
        and all(c.dtype is torch.float8_e4m3fn and c.is_contiguous() and c.numel() > 0 for c in codes)
        and all(size % 16 == 0 for size in (a.codes.shape[-1], *b.codes.shape[-2:]))
        and (operands.has_ragged_rows or (pad == 16 and a.codes.shape[0] % 16 == 0))
    )


def _agrees(device: torch.device, ragged_rows: bool, fast_accum: bool) -> bool:
    """Whether torch's product of a small case is the reference's, in every group, row and column."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([40, 40, 41, 58, 170], dtype=torch.int32)
    groups, rows, N, K = len(offsets), 184, 144, 272
    scaling = Scaling(torch.float8_e4m3fn, (ALL, 1), False, 0)

    def pair(count: int, scales: tuple[int, ...]) -> OperandPair:
        x = torch.randn(K if ragged_rows else rows, count, generator=generator)
        codes = x.t().to(scaling.dtype).contiguous()
        if not ragged_rows:  # whose padding is 0
            codes = reference_cast(CastSource(x), scaling, None, Output(transpose=True, pad=16), offsets)[1]
        return OperandPair(codes, torch.exp2(4 * torch.rand(scales, generator=generator)), _ROWS)

    if ragged_rows:
        a, b = pair(rows, (rows, 1)), pair(groups * N, (groups, N, 1))
        b = b._replace(codes=b.codes.unflatten(0, (groups, N)))
    else:
        a, b = pair(N, (N, groups)), pair(K, (K, groups))
    case = GroupedOperands(a, b, offsets, None, 16)
    mine, theirs = (OperandPair(codes.to(device), scales.to(device), tile) for codes, scales, tile in (a, b))
    there = GroupedOperands(mine, theirs, offsets.to(device), None, 16)
    true = reference_grouped_matmul(case, torch.float32, False)
    try:
        found = library_grouped_matmul(there, fast_accum).to("cpu", torch.float32)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        _logger.info("torch's grouped product: %s", str(error).partition("\n")[0])
        return False
    miss = found - true
    return all(bool((miss.norm(dim=dim) <= _ERROR * true.norm(dim=dim)).all()) for dim in (-1, -2))


def library_grouped_matmul(operands: GroupedOperands, fast_accum: bool) -> Tensor:
    """torch's product, for what ``takes``."""
    a, b, offsets, _, pad = operands
    count, ragged = offsets.shape[0], operands.has_ragged_rows
    (groups, grouping), size = on_device(offsets, 1 if ragged else pad), a.codes.shape[0 if ragged else 1]
    ends = torch.empty_like(groups.offsets)
    launch(checked_ends_kernel, 1, (groups, size, ends, grouping), 4)
    # a scale for each row: [R] and [G, N]; where terms are in groups, of each group in turn, as casts write them
    scales = (a.scale_inv, b.scale_inv.squeeze(-1)) if ragged else (a.scale_inv.t(), b.scale_inv.t())
    scale_a, scale_b = (scale.reshape(-1) for scale in scales)
    out: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a.codes,
        b.codes.transpose(-1, -2),
        scale_a,
        ScalingType.RowWise,
        scale_b.view(count, -1) if ragged else scale_b,
        ScalingType.RowWise,
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )
    width = out.shape[-1]
    height, block = out.numel() // width, 128
    programs = -(-height // block) * -(-width // block)
    launch(mend_kernel, programs, (groups, size, out, height, width, grouping, ragged, block), 4)
    return out
