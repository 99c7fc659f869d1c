"""Which rows of a product's operand have faults, by an element of each row of the result, and the operand's scales."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.tiles import Source, decode, raise_amax

_BLOCK = 256
_COLUMNS = 8  # of the operand, where it is looked at
_SCALE_BLOCKS = 16  # of scales that a program reads


@triton.jit
def note_faults_kernel(
    y,  # Source
    operand,  # Source: codes of any padding, or numbers
    scale_inv_ptr,
    scales,  # how many, side by side in memory
    amax_ptr,
    place_ptr,
    found_ptr,
    first_ptr,
    offsets_ptr,  # of groups
    count,  # of groups
    HAS_SCALES: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    IS_CODES: tl.constexpr,
    IN_GROUPS: tl.constexpr,
    BY_GROUP: tl.constexpr,  # a scale a group
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add what the reference finds."""
    begin = tl.program_id(0) * BLOCK
    place = tl.arange(0, BLOCK)
    rows = begin + place
    inside = rows < y.R
    value = tl.load(y.ptr + rows.to(tl.int64) * y.stride_r, mask=inside, other=0.0).to(tl.float32)
    suspects = inside & ((tl.abs(value) < float("inf")) == 0)
    if tl.max(suspects.to(tl.int32), 0) > 0:
        faults = tl.zeros([BLOCK], tl.int32)
        for at in range(0, operand.C, COLUMNS):
            cols = at + tl.arange(0, COLUMNS)
            offsets = rows.to(tl.int64)[:, None] * operand.stride_r + cols.to(tl.int64)[None, :] * operand.stride_c
            mask = suspects[:, None] & (cols < operand.C)[None, :]
            numbers = tl.load(operand.ptr + offsets, mask=mask, other=0.0)
            numbers = decode(numbers) if IS_CODES else numbers.to(tl.float32)
            faults = tl.maximum(faults, tl.max((tl.abs(numbers) < float("inf")).to(tl.int32) ^ 1, 1))
        faulty = tl.sum(faults, 0)
        if faulty > 0:
            tl.atomic_add(found_ptr, faulty.to(tl.float32), sem="relaxed")
            where = tl.load(place_ptr)
            if IN_GROUPS:
                row = tl.min(tl.where(faults > 0, rows, y.R), 0)
                for at in range(0, count, BLOCK):
                    ends = tl.load(offsets_ptr + at + place, mask=at + place < count, other=y.R)
                    where += tl.sum((ends <= row).to(tl.int32), 0)
            tl.atomic_cas(first_ptr, 0, where, sem="relaxed")
    if begin == 0:
        tl.atomic_add(found_ptr + 1, tl.full((), 0.0, tl.float32) + y.R, sem="relaxed")
    shared = found_ptr.to(tl.pointer_type(tl.int32))
    if HAS_SCALES:
        largest = tl.zeros([BLOCK], tl.float32)
        for at in range(begin, scales, tl.num_programs(0) * BLOCK):
            inside = at + place < scales
            if BY_GROUP:
                ends = tl.load(offsets_ptr + at + place, mask=inside, other=0)
                inside &= ends > tl.load(offsets_ptr + at + place - 1, mask=inside & (at + place > 0), other=0)
            largest = tl.maximum(largest, tl.load(scale_inv_ptr + at + place, mask=inside, other=0.0))
        raise_amax(shared + 2, tl.max(largest, 0))
    if HAS_AMAX:
        if begin == 0:
            raise_amax(shared + 3, tl.load(amax_ptr))


def note_faults(
    y: Tensor,
    operand: Tensor,
    scale_inv: Tensor | None,
    amax: Tensor | None,
    place: Tensor,
    found: Tensor,
    first: Tensor,
    offsets: Tensor | None = None,
) -> None:
    """``octavo::note_faults``."""
    if y.numel() == 0:
        return
    scales = 0 if scale_inv is None else scale_inv.numel()
    programs = triton.cdiv(max(y.shape[0], scales // _SCALE_BLOCKS), _BLOCK)
    sources = (Source(x, *x.shape, *x.stride()) for x in (y, operand))
    given = found if scale_inv is None else scale_inv, scales, found if amax is None else amax
    ends, count = (first, 0) if offsets is None else (offsets.contiguous(), offsets.shape[0])
    by_group = offsets is not None and scale_inv is not None and scale_inv.shape[0] == count
    constants = scales > 0, amax is not None, operand.itemsize == 1, offsets is not None, by_group, _BLOCK, _COLUMNS
    arguments = *sources, *given, place, found, first, ends, count, *constants
    launch(note_faults_kernel, programs, arguments, num_warps=4)
