"""Turn queries and keys by their positions in one launch, whose contract is in signatures.py.

A program turns a few heads of its positions, whose angles it reads once. reference/rotary.py has the formula.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.arguments import RotaryHeads, new_rotary
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.tiles import narrow

ELEMENTS = 1024  # elements of half heads that a program turns: 8 a thread, which loads them at once
HEADS = 8  # heads of a program, which reads angles once for all of them


class Heads(NamedTuple):
    """Queries, keys or values [B, S, H, D], each head's elements beside each other."""

    ptr: Any
    count: Any  # H
    stride_b: Any
    stride_s: Any
    stride_h: Any


@triton.jit
def place(heads, head, sequences, positions):
    """Return the offset from heads.ptr at which a head of these positions begins."""
    rows = sequences.to(tl.int64) * heads.stride_b + positions.to(tl.int64) * heads.stride_s
    return rows + tl.cast(head, tl.int64) * heads.stride_h


@triton.jit
def rotary_kernel(
    q,
    k,
    v,
    cos_ptr,  # [1 or B, S, HALF + SHIFT]
    sin_ptr,
    angles_stride_b,
    out_ptr,  # [B, S, all heads, 2 HALF]
    tokens,  # B S
    positions,  # S
    HALF: tl.constexpr,
    SHIFT: tl.constexpr,  # from the angles of a head's first half to those of its second: HALF, or 0
    INVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Turn q's and k's heads, and copy v's."""
    heads = q.count + k.count + v.count
    groups = tl.cdiv(heads, GROUP)
    rows = tl.program_id(0) // groups * TILE_R + tl.arange(0, TILE_R)
    sequence, position = rows // positions, rows % positions
    cols = tl.arange(0, TILE_C)[None, :]
    inside = (rows < tokens)[:, None] & (cols < HALF)
    angles = (sequence.to(tl.int64) * angles_stride_b + position.to(tl.int64) * (HALF + SHIFT))[:, None] + cols
    c = tl.load(cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(cos_ptr + angles + SHIFT, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin_ptr + angles, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(sin_ptr + angles + SHIFT, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        s, t = -t, -s
    first_head = tl.program_id(0) % groups * GROUP
    for head in range(first_head, tl.minimum(first_head + GROUP, heads)):
        if head < q.count:
            ptr = q.ptr + place(q, head, sequence, position)
        elif head < q.count + k.count:
            ptr = k.ptr + place(k, head - q.count, sequence, position)
        else:
            ptr = v.ptr + place(v, head - q.count - k.count, sequence, position)
        x_ptr = ptr[:, None] + cols
        a = tl.load(x_ptr, mask=inside, other=0.0)
        b = tl.load(x_ptr + HALF, mask=inside, other=0.0)
        if head < q.count + k.count:
            wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
            a = narrow(wide_a * c - wide_b * s, out_ptr.dtype.element_ty)
            b = narrow(wide_b * d + wide_a * t, out_ptr.dtype.element_ty)
        y_ptr = out_ptr + ((rows.to(tl.int64) * heads + head) * (2 * HALF))[:, None] + cols
        tl.store(y_ptr, a, mask=inside)
        tl.store(y_ptr + HALF, b, mask=inside)


def rotary(heads: RotaryHeads) -> Tensor:
    """Compute the op ``octavo::rotary``; its contract is in signatures.py."""
    *inputs, cos, sin, inverse = heads
    result, (sequences, positions, _, width) = new_rotary(heads), heads.q.shape
    if result.numel() == 0:
        return result
    cos, sin, half = cos.contiguous(), sin.contiguous(), width // 2
    laid = [x if x.stride(3) == 1 else x.contiguous() for x in inputs]
    sources = [Heads(x, x.shape[2], *x.stride()[:3]) for x in laid]
    tokens, tile_c = sequences * positions, max(triton.next_power_of_2(half), 16)
    tile_r = max(ELEMENTS // tile_c, 1)
    programs = triton.cdiv(tokens, tile_r) * triton.cdiv(sum(x.shape[2] for x in laid), HEADS)
    angles = cos, sin, 0 if len(cos) == 1 else cos.stride(0)
    constants = half, cos.shape[2] - half, inverse, HEADS, tile_r, tile_c
    launch(rotary_kernel, programs, (*sources, *angles, result, tokens, positions, *constants), 4)
    return result
