"""A kernel around each function of an optimizer's step that tests call by itself."""

import triton
import triton.language as tl

from octavo.kernels.triton.master_weights import read_master, write_master
from octavo.kernels.triton.moment_codes import decode_moment, encode_moment, round_to_bf16
from octavo.kernels.triton.optimizer_state import (
    SECOND,
    WEIGHT_COLUMN,
    WIDTH,
    Gradient,
    Scales,
    gradient_tile,
    place_of,
    read_moment,
    store_at,
    write_moment,
)
from octavo.kernels.triton.step_kernel import adam_weight, finish, leave_scales, lerp, scales_of, sgd_moment, sgd_weight
from octavo.kernels.triton.step_numbers import adam_numbers, corrections, half, random_bits, sgd_numbers, with_number
from octavo.kernels.triton.table import find_tensor, pointer, row_of, size, to_pointer


@triton.jit
def find_kernel(table_ptr, tensor_ptr, row_ptr, TENSORS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    program = tl.program_id(0)
    tensor, row = find_tensor(table_ptr, program, TENSORS, WIDTH, FIRST)
    tl.store(tensor_ptr + program, tensor)
    tl.store(row_ptr + program, tl.load(row))


@triton.jit
def pointer_kernel(row_ptr, out_ptr, ALIGNED: tl.constexpr):
    """A column of an address of float32, and one of a size."""
    tl.store(out_ptr, tl.load(pointer(row_ptr, 1, tl.float32, ALIGNED)))
    tl.store(out_ptr + 1, size(row_ptr, 2, ALIGNED).to(tl.float32))


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
def moment_kernel(
    row_ptr,
    wide_ptr,  # float32, what was read, then what is to be written
    new_ptr,
    bits_ptr,
    scale_ptr,
    found_ptr,
    MOMENT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The second moment read, and then new values written."""
    row = row_of(row_ptr, WIDTH)
    place = place_of(row, tl.program_id(0), BLOCKS, EVEN, False)
    store_at(wide_ptr, place, read_moment(row, SECOND, place, MOMENT, EVEN))
    new = tl.load(new_ptr + place.base + place.offsets, mask=place.inside, other=0.0)
    bits = tl.load(bits_ptr + place.base + place.offsets, mask=place.inside, other=0)
    scale = tl.load(scale_ptr)
    new = tl.sqrt_rn(new) if MOMENT.root else new
    found = write_moment(row, SECOND, place, new, bits, scale, MOMENT, EVEN)
    tl.store(found_ptr + tl.program_id(0), found)


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
def gradient_kernel(
    row_ptr,
    gradient_ptr,
    group_ptr,
    grad_scale_ptr,
    out_ptr,
    OF: tl.constexpr,
    COUPLED: tl.constexpr,
):
    row = row_of(row_ptr, WIDTH)
    place = place_of(row, tl.program_id(0), 4, OF.even, False)
    n = adam_numbers(group_ptr, tl.full((), 0, tl.int64), corrections(group_ptr, tl.full((), 1, tl.int64)))
    grad_scale = None
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr)
    weight = to_pointer(row[WEIGHT_COLUMN], tl.float32, OF.even)
    w = tl.load(weight + place.base + place.offsets, mask=place.inside, other=0)
    scale_inv = tl.load(gradient_ptr + 1) if OF.gradient_fmt is not None else None
    gradient = Gradient(tl.load(gradient_ptr), scale_inv, grad_scale)
    store_at(out_ptr, place, gradient_tile(gradient, place, n, w, OF, True, COUPLED))


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


@triton.jit
def lerp_kernel(a_ptr, b_ptr, weight_ptr, out_ptr, IS_SMALL: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, lerp(tl.load(a_ptr + i), tl.load(b_ptr + i), tl.load(weight_ptr), IS_SMALL))


@triton.jit
def adam_weight_kernel(
    w_ptr, m_ptr, v_ptr, group_ptr, number_ptr, DECOUPLED: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.arange(0, BLOCK)
    n = adam_numbers(group_ptr, tl.full((), 0, tl.int64), corrections(group_ptr, tl.load(number_ptr)))
    root = tl.sqrt_rn(tl.load(v_ptr + i))
    w = adam_weight(tl.load(w_ptr + i), tl.load(m_ptr + i), root, n, DECOUPLED, CLIP)
    tl.store(w_ptr + i, w)


@triton.jit
def sgd_kernel(w_ptr, momentum_ptr, g_ptr, group_ptr, number_ptr, HAS_MOMENTUM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    n = sgd_numbers(group_ptr, tl.full((), 0, tl.int64), tl.load(number_ptr))
    g = tl.load(g_ptr + i)
    momentum = sgd_moment(tl.load(momentum_ptr + i), g, n)
    tl.store(momentum_ptr + i, momentum)
    tl.store(w_ptr + i, sgd_weight(tl.load(w_ptr + i), momentum, g, n, HAS_MOMENTUM))


@triton.jit
def scales_kernel(row_ptr, group_ptr, found_ptr, out_ptr, OF: tl.constexpr, DECOUPLED: tl.constexpr):
    """The first moment's new scale; the master's, and its scale_inv until now."""
    n = adam_numbers(group_ptr, tl.full((), 0, tl.int64), corrections(group_ptr, tl.full((), 3, tl.int64)))
    row = row_of(row_ptr, WIDTH)
    scales = scales_of(row, n, found_ptr, 0, OF, DECOUPLED, 1)
    tl.store(out_ptr, scales.first)
    tl.store(out_ptr + 1, scales.master)
    tl.store(out_ptr + 2, scales.master_inv)


@triton.jit
def leave_kernel(work_ptr, scale_ptr, OF: tl.constexpr, COUNT: tl.constexpr):
    """Each program leaves a tensor's scales."""
    k = tl.program_id(0)
    first, second = tl.load(scale_ptr + 3 * k), tl.load(scale_ptr + 3 * k + 1)
    scales = Scales(first, second, tl.load(scale_ptr + 3 * k + 2), 1.0)
    leave_scales(work_ptr + 1 + k, scales, OF, COUNT)


@triton.jit
def finish_kernel(table_ptr, work_ptr, COUNT: tl.constexpr, ANY_ONE: tl.constexpr):
    finish(table_ptr, work_ptr, COUNT, ANY_ONE)
