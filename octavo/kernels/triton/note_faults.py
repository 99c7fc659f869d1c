"""What a product's result says of faults in its operand: two elements of each row, and the operand's scales."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.tiles import Source, raise_amax

_BLOCK = 256
_SCALE_BLOCKS = 16  # of scales that a program reads


@triton.jit
def note_faults_kernel(
    y,  # Source
    end,  # from a row's first element to its last
    scale_inv_ptr,
    scales,  # how many, side by side in memory
    amax_ptr,
    place_ptr,
    found_ptr,
    first_ptr,
    HAS_SCALES: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add what the reference finds."""
    begin = tl.program_id(0) * BLOCK
    place = tl.arange(0, BLOCK)
    rows = begin + place
    inside = rows < y.R
    offsets = rows.to(tl.int64) * y.stride_r
    start = tl.load(y.ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    last = tl.load(y.ptr + offsets + end, mask=inside, other=0.0).to(tl.float32)
    finite = (tl.abs(start) < float("inf")) | (tl.abs(last) < float("inf"))
    faulty = tl.sum((finite == 0).to(tl.int32), 0)
    if faulty > 0:
        tl.atomic_add(found_ptr, faulty.to(tl.float32), sem="relaxed")
        tl.atomic_cas(first_ptr, 0, tl.load(place_ptr), sem="relaxed")
    if begin == 0:
        tl.atomic_add(found_ptr + 1, tl.full((), 0.0, tl.float32) + y.R, sem="relaxed")
    shared = found_ptr.to(tl.pointer_type(tl.int32))
    if HAS_SCALES:
        largest = tl.zeros([BLOCK], tl.float32)
        for at in range(begin, scales, tl.num_programs(0) * BLOCK):
            largest = tl.maximum(largest, tl.load(scale_inv_ptr + at + place, mask=at + place < scales, other=0.0))
        raise_amax(shared + 2, tl.max(largest, 0))
    if HAS_AMAX:
        if begin == 0:
            raise_amax(shared + 3, tl.load(amax_ptr))


def note_faults(
    y: Tensor, scale_inv: Tensor | None, amax: Tensor | None, place: Tensor, found: Tensor, first: Tensor
) -> None:
    """``octavo::note_faults``."""
    if y.numel() == 0:
        return
    scales = 0 if scale_inv is None else scale_inv.numel()
    programs = triton.cdiv(max(y.shape[0], scales // _SCALE_BLOCKS), _BLOCK)
    given = found if scale_inv is None else scale_inv, scales, found if amax is None else amax
    sources = Source(y, *y.shape, *y.stride()), (y.shape[1] - 1) * y.stride(1)
    arguments = *sources, *given, place, found, first, scales > 0, amax is not None, _BLOCK
    launch(note_faults_kernel, programs, arguments, num_warps=4)
