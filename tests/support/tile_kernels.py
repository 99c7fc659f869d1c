"""A kernel around each function that tests call by itself: of tiles.py, on vectors of [n], and of a step."""

import triton
import triton.language as tl

from octavo.kernels.triton.moment_codes import decode_moment, encode_moment, round_to_bf16
from octavo.kernels.triton.step_numbers import adam_numbers, corrections
from octavo.kernels.triton.tiles import (
    is_last_program,
    raise_amax,
    take_amax,
)


@triton.jit
def largest_kernel(x_ptr, work_ptr, amax_ptr, ends_ptr, PROGRAMS: tl.constexpr):
    """The largest of an element a program; ends counts the programs that took themselves for the last."""
    raise_amax(work_ptr, tl.load(x_ptr + tl.program_id(0)))
    if is_last_program(work_ptr + 1, PROGRAMS):
        tl.store(amax_ptr, take_amax(work_ptr))
        tl.atomic_add(ends_ptr, 1)


@triton.jit
def decode_moment_kernel(code_ptr, out_ptr, FMT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, decode_moment(tl.load(code_ptr + i), FMT))


@triton.jit
def encode_moment_kernel(
    x_ptr,
    bits_ptr,
    code_ptr,
    n,
    FMT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, bits = tl.load(x_ptr + i, mask=i < n, other=0.0), tl.load(bits_ptr + i, mask=i < n, other=0)
    tl.store(code_ptr + i, encode_moment(x, bits, FMT, STOCHASTIC, BOUNDED), mask=i < n)


@triton.jit
def round_to_bf16_kernel(x_ptr, bits_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, bits = tl.load(x_ptr + i, mask=i < n, other=0.0), tl.load(bits_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + i, round_to_bf16(x, bits), mask=i < n)


@triton.jit
def adam_numbers_kernel(group_ptr, lr_ptr, number_ptr, out_ptr, COUNT: tl.constexpr):
    """The numbers in float64, a row for each of the steps."""
    for i in range(COUNT):
        n = adam_numbers(group_ptr, tl.load(lr_ptr), corrections(group_ptr, tl.load(number_ptr + i)))
        for k in tl.static_range(len(n)):
            tl.store(out_ptr + len(n) * i + k, n[k].to(tl.float64))
