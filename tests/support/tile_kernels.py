"""A kernel around each function of octavo/kernels/triton/tiles.py that tests call by itself, on vectors of [n]."""

import triton
import triton.language as tl

from octavo.kernels.triton.tiles import (
    decode,
    decode_bits,
    encode,
    encode_finite,
    finite_abs,
    is_last_program,
    narrow,
    raise_amax,
    round_by_bits,
    scale_from_amax,
    scale_inv_from_scale,
    take_amax,
)


@triton.jit
def round_kernel(x_ptr, code_ptr, n, E5M2: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if E5M2:
        codes = round_by_bits(x, 2, 15, 0x47600000)
    else:
        codes = round_by_bits(x, 3, 7, 0x43E00000)
    tl.store(code_ptr + i, codes, mask=i < n)


@triton.jit
def encode_kernel(x_ptr, scale_ptr, code_ptr, n, E5M2: tl.constexpr, FINITE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    scale = tl.load(scale_ptr)
    if FINITE:
        codes = encode_finite(x, scale, E5M2)
    else:
        codes = encode(x, scale, E5M2)
    tl.store(code_ptr + i, codes, mask=i < n)


@triton.jit
def decode_kernel(code_ptr, by_bits_ptr, value_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    codes = tl.load(code_ptr + i)
    tl.store(by_bits_ptr + i, decode_bits(codes))
    tl.store(value_ptr + i, decode(codes))


@triton.jit
def narrow_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, narrow(tl.load(x_ptr + i, mask=i < n), out_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def scale_kernel(
    amax_ptr, scale_ptr, scale_inv_ptr, n, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = scale_from_amax(tl.load(amax_ptr + i, mask=i < n, other=0.0), LIMIT, POWER_OF_TWO)
    tl.store(scale_ptr + i, scale, mask=i < n)
    tl.store(scale_inv_ptr + i, scale_inv_from_scale(scale, POWER_OF_TWO), mask=i < n)


@triton.jit
def finite_abs_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, finite_abs(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


@triton.jit
def largest_kernel(x_ptr, work_ptr, amax_ptr, ends_ptr, PROGRAMS: tl.constexpr):
    """The largest of an element a program; ends counts the programs that took themselves for the last."""
    raise_amax(work_ptr, tl.load(x_ptr + tl.program_id(0)))
    if is_last_program(work_ptr + 1, PROGRAMS):
        tl.store(amax_ptr, take_amax(work_ptr))
        tl.atomic_add(ends_ptr, 1)
