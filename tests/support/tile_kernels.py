"""A kernel around each function that tests call by itself: of tiles.py, on vectors of [n], and of a step."""

import triton
import triton.language as tl

from octavo.kernels.triton.master_weights import read_master, write_master
from octavo.kernels.triton.moment_codes import decode_moment, encode_moment, round_to_bf16
from octavo.kernels.triton.optimizer_state import WIDTH, place_of, store_at
from octavo.kernels.triton.step_numbers import adam_numbers, corrections, half, random_bits, sgd_numbers, with_number
from octavo.kernels.triton.table import row_of
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


@triton.jit
def random_bits_kernel(offset_ptr, key, start, out_ptr, LARGE: tl.constexpr, BLOCK: tl.constexpr):
    """The bits as int64, and their halves."""
    i = tl.arange(0, BLOCK)
    begin = tl.full((), start, tl.int64)
    drawn = random_bits(tl.full((), key, tl.int64).to(tl.uint32), begin, tl.load(offset_ptr + i), LARGE)
    tl.store(out_ptr + i, drawn.to(tl.int64))
    tl.store(out_ptr + BLOCK + i, half(drawn, False).to(tl.int64))
    tl.store(out_ptr + 2 * BLOCK + i, half(drawn, True).to(tl.int64))


@triton.jit
def key_kernel(key_ptr, number_ptr, COUNT: tl.constexpr):
    key = tl.load(key_ptr).to(tl.uint32)
    for i in tl.static_range(COUNT):
        key = with_number(key, tl.load(number_ptr + i))
    tl.store(key_ptr, key.to(tl.int64))


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
def place_kernel(
    row_ptr, element_ptr, block_ptr, owner_ptr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr
):
    """Counts how often each element and block is some tile's, and notes each element's block, from 1."""
    row = row_of(row_ptr, WIDTH)
    place = place_of(row, tl.program_id(0), BLOCKS, EVEN, LARGE)
    tl.atomic_add(element_ptr + place.base + place.offsets, 1, mask=place.inside)
    blocks = place.first + place.blocks
    tl.atomic_add(block_ptr + blocks, 1, mask=place.is_block)
    owner = tl.zeros_like(place.offsets) + blocks[:, None] + 1
    tl.store(owner_ptr + place.base + place.offsets, owner, mask=place.inside)


@triton.jit
def master_kernel(
    row_ptr,
    wide_ptr,
    new_ptr,
    bits_ptr,
    scale_ptr,  # scale_inv until now, the new scale
    found_ptr,
    MASTER: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The master read, and then new values written."""
    row = row_of(row_ptr, WIDTH)
    place = place_of(row, tl.program_id(0), BLOCKS, EVEN, False)
    store_at(wide_ptr, place, read_master(row, place, tl.load(scale_ptr), MASTER, EVEN))
    new = tl.load(new_ptr + place.base + place.offsets, mask=place.inside, other=0.0)
    bits = tl.load(bits_ptr + place.base + place.offsets, mask=place.inside, other=0)
    found = write_master(row, place, new, bits, tl.load(scale_ptr + 1), MASTER, EVEN)
    tl.store(found_ptr + tl.program_id(0), found)


@triton.jit
def adam_numbers_kernel(group_ptr, lr_ptr, number_ptr, out_ptr, COUNT: tl.constexpr):
    """The numbers in float64, a row for each of the steps."""
    for i in range(COUNT):
        n = adam_numbers(group_ptr, tl.load(lr_ptr), corrections(group_ptr, tl.load(number_ptr + i)))
        for k in tl.static_range(len(n)):
            tl.store(out_ptr + len(n) * i + k, n[k].to(tl.float64))


@triton.jit
def sgd_numbers_kernel(group_ptr, lr_ptr, number_ptr, out_ptr, COUNT: tl.constexpr):
    for i in range(COUNT):
        n = sgd_numbers(group_ptr, tl.load(lr_ptr), tl.load(number_ptr + i))
        for k in tl.static_range(len(n)):
            tl.store(out_ptr + len(n) * i + k, n[k].to(tl.float64))
