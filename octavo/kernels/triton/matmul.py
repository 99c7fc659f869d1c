"""The product of two pairs, a . b^T: torch's scaled product where it serves, a Triton one for all others.

LIBRARY, of configs.json, says for which granularities torch's is called, where the device computes it rightly
(library_matmul.py). Blocks that no step of 32 along K divides go to the reference.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq
from triton.runtime.driver import driver

from octavo.granularity import ALL, Tile
from octavo.kernels.arguments import OperandPair, ProductArguments, have_e8m0_blocks
from octavo.kernels.reference.matmul import matmul as reference_matmul
from octavo.kernels.triton.launch import LIBRARY, Config, as_argument, block_size, config, launch
from octavo.kernels.triton.library_matmul import is_right, library_matmul
from octavo.kernels.triton.tiles import decode, load_scale_inv, narrow


class Operand(NamedTuple):
    """Codes [rows, K], contiguous along K, and their scale_inv."""

    ptr: Any
    rows: Any
    stride: Any
    scale_inv: Any
    scale_stride_r: Any
    scale_stride_c: Any
    first_scale: Any = None  # offset from scale_inv of the first row's first scale, None for 0


class Product(NamedTuple):
    """Operands [M, K] and [N, K], and the bias [N] or None; made in a kernel, not passed to one.

    Passed as a tuple of tuples, Triton 3.6 loses its integers that are 1.
    """

    a: Any
    b: Any
    bias: Any
    K: Any


class ProductTiling(NamedTuple):
    """A program's part of a product; a step of tile_k lies in one block of each operand."""

    a_block: tuple[int, int]  # (rows, columns) that share a scale; columns -1 for all
    b_block: tuple[int, int]
    fast: bool
    even_k: bool  # K is whole steps
    tile_m: int
    tile_n: int
    tile_k: int
    dots: int  # products a step, of one or two halves of the columns
    scaled: bool = False  # by the tensor cores, whose steps hold several blocks: scales are E8M0


@triton.jit
def matmul_kernel(a, b, bias_ptr, K, out_ptr, tiling: tl.constexpr):
    """Write out [M, N] = a [M, K] . b [N, K]^T + bias; tiling: ProductTiling."""
    m, n = place_of_program(tl.cdiv(a.rows, tiling.tile_m), tl.cdiv(b.rows, tiling.tile_n))
    a = Operand(a.ptr, a.rows, a.stride, a.scale_inv, variable(a.scale_stride_r), variable(a.scale_stride_c))
    b = Operand(b.ptr, b.rows, b.stride, b.scale_inv, variable(b.scale_stride_r), variable(b.scale_stride_c))
    write_part(Product(a, b, bias_ptr, K), out_ptr, m * tiling.tile_m, n * tiling.tile_n, tiling)


@triton.jit
def variable(stride):
    """Return a stride of scales as no constant: with a bias Triton 3.6 loses those that are 1."""
    return tl.zeros((), tl.int32) + stride


@triton.jit
def write_part(product, out_ptr, first_m, first_n, tiling: tl.constexpr):
    """Write a program's part of a product."""
    A_COLS: tl.constexpr = tiling.a_block[1]
    B_COLS: tl.constexpr = tiling.b_block[1]
    if tiling.scaled or (A_COLS == -1 and B_COLS == -1):
        store_part(product, sum_of_codes(product, first_m, first_n, tiling), out_ptr, first_m, first_n)
    else:
        COLS: tl.constexpr = tiling.tile_n // tiling.dots
        left, right, is_extreme = sum_of_steps(product, first_m, first_n, tiling, False)
        store_part(product, left, out_ptr, first_m, first_n)
        if tiling.dots == 2:
            store_part(product, right, out_ptr, first_m, first_n + COLS)
        if is_extreme:
            for n in range(first_n, first_n + tiling.tile_n, COLS):
                left, right, _ = sum_of_steps(product, first_m, n, tiling, True)
                store_part(product, left, out_ptr, first_m, n)


@triton.jit
def sum_of_codes(product, first_m, first_n, tiling: tl.constexpr):
    """Return a program's part [TILE_M, TILE_N] of the product, float32.

    Scales are constant along K and multiply the sum, or, loaded a step ahead, go to the tensor cores with the codes.
    """
    a = product.a
    b = product.b
    A_ROWS: tl.constexpr = tiling.a_block[0]
    B_ROWS: tl.constexpr = tiling.b_block[0]
    TILE_M: tl.constexpr = tiling.tile_m
    TILE_N: tl.constexpr = tiling.tile_n
    TILE_K: tl.constexpr = tiling.tile_k
    a_rows = rows_from(a, first_m, TILE_M)
    b_rows = rows_from(b, first_n, TILE_N)
    a_ptrs = a.ptr + a_rows.to(tl.int64)[:, None] * a.stride + tl.arange(0, TILE_K)[None, :]
    b_ptrs = b.ptr + b_rows.to(tl.int64)[:, None] * b.stride + tl.arange(0, TILE_K)[None, :]
    a_scales = first_scales(a, a_rows, A_ROWS)
    b_scales = first_scales(b, b_rows, B_ROWS)
    if tiling.scaled:
        a_following = scales_of_step(a, a_scales, 0, product.K, tiling.a_block[1], TILE_K)
        b_following = scales_of_step(b, b_scales, 0, product.K, tiling.b_block[1], TILE_K)
    accumulator = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, product.K, TILE_K):
        a_codes = load_step(a_ptrs, start, product.K, tiling)
        b_codes = load_step(b_ptrs, start, product.K, tiling)
        if tiling.scaled:
            a_scale = a_following
            b_scale = b_following
            a_following = scales_of_step(a, a_scales, start + TILE_K, product.K, tiling.a_block[1], TILE_K)
            b_following = scales_of_step(b, b_scales, start + TILE_K, product.K, tiling.b_block[1], TILE_K)
            accumulator = dot_scaled(a_codes, a_scale, b_codes, b_scale, accumulator)
        else:
            accumulator = add_product(a_codes, b_codes.T, accumulator, tiling.fast)
        a_ptrs += TILE_K
        b_ptrs += TILE_K
    if not tiling.scaled:
        a_scale = load_scale_inv(a.scale_inv + a_scales)
        b_scale = load_scale_inv(b.scale_inv + b_scales)
        accumulator = scaled(accumulator, a_scale[:, None], b_scale[None, :])
    return accumulator


@triton.jit
def scales_of_step(operand, first, start, K, COLS: tl.constexpr, TILE_K: tl.constexpr):
    """Load E8M0's codes [rows, TILE_K / 32] of a step, 1's beyond K; first [rows]: offset of a row's first scale."""
    k = start + tl.arange(0, TILE_K // 32) * 32
    ptrs = operand.scale_inv + (first[:, None] + scale_column(k, operand, COLS)[None, :])
    return tl.load(ptrs, mask=(k < K)[None, :], other=127)


@triton.jit
def sum_of_steps(product, first_m, first_n, tiling: tl.constexpr, EXTREME: tl.constexpr):
    """Return a program's part, float32, where a scale changes along K, and whether scales are too extreme for that.

    For each step along K the tensor cores sum the codes, and one FFMA an element adds that sum, times the product of
    both scales, to the earlier steps' sum. If a product of scales is below 2^-126 or above float32, the result is right
    only with EXTREME, which is right for any. If tiling.dots is 2, the part is two tensors side by side, else the left.
    """
    a = product.a
    b = product.b
    A_ROWS: tl.constexpr = tiling.a_block[0]
    A_COLS: tl.constexpr = tiling.a_block[1]
    B_ROWS: tl.constexpr = tiling.b_block[0]
    B_COLS: tl.constexpr = tiling.b_block[1]
    TILE_M: tl.constexpr = tiling.tile_m
    TILE_N: tl.constexpr = tiling.tile_n // tiling.dots
    TILE_K: tl.constexpr = tiling.tile_k
    ONE: tl.constexpr = B_ROWS % tiling.tile_n == 0  # all of the program's columns share b's scale
    STAGES: tl.constexpr = 1 if EXTREME else None
    k = tl.arange(0, TILE_K)[None, :]
    a_rows = rows_from(a, first_m, TILE_M)
    a_ptrs = a.ptr + a_rows.to(tl.int64)[:, None] * a.stride + k
    b_ptrs = b.ptr + rows_from(b, first_n, TILE_N).to(tl.int64)[:, None] * b.stride + k
    right_ptrs = b.ptr + rows_from(b, first_n + TILE_N, TILE_N).to(tl.int64)[:, None] * b.stride + k
    left = tl.zeros([TILE_M, TILE_N], tl.float32)
    right = left
    if ONE:
        a_scales = first_scales(a, a_rows, A_ROWS)  # 32 bits, where pointers take two registers
        b_scales = first_scales(b, first_n, B_ROWS)
    else:
        # Both in one load, a step ahead, then exchanged. As two, a thread would load 34: those of its rows and columns.
        tl.static_assert(TILE_M == TILE_N)
        i = tl.arange(0, 2 * TILE_M)
        scales = scales_of_program(product, first_m, first_n, A_ROWS, B_ROWS, TILE_M)
        following = load_scale_inv(scales, i * 0 < product.K)  # a K of 0 has no scale
        farthest = tl.zeros([2 * TILE_M], tl.int32)
    for start in tl.range(0, product.K, TILE_K, num_stages=STAGES):
        a_codes = load_step(a_ptrs, start, product.K, tiling)
        b_codes = load_step(b_ptrs, start, product.K, tiling)
        if ONE:
            a_scale = load_scale_inv(a.scale_inv + (a_scales + scale_column(start, a, A_COLS)))[:, None]
            b_scale = load_scale_inv(b.scale_inv + (b_scales + scale_column(start, b, B_COLS)))
            scale = a_scale * b_scale
            scale = tl.where(scale < 2.0**-126, float("nan"), scale)  # the sums are then NaN, or inf
        else:
            both = following
            farthest = tl.maximum(farthest, distance_from_1(both))
            next_k = tl.minimum(start + TILE_K, product.K - 1)
            step = tl.where(i < TILE_M, scale_column(next_k, a, A_COLS), scale_column(next_k, b, B_COLS))
            following = load_scale_inv(scales + step)
            a_scale, b_scale = as_factors(both)
            scale = a_scale * b_scale
        step_sum = dot(a_codes, b_codes.T, tl.zeros([TILE_M, TILE_N], tl.float32))
        left += scaled(step_sum, a_scale, b_scale) if EXTREME else step_sum * scale
        if tiling.dots == 2 and not EXTREME:
            right_codes = load_step(right_ptrs, start, product.K, tiling)
            right += dot(a_codes, right_codes.T, tl.zeros([TILE_M, TILE_N], tl.float32)) * scale
            right_ptrs += TILE_K
        a_ptrs += TILE_K
        b_ptrs += TILE_K
    if ONE:  # NaN in the codes looks the same, and costs a second computation
        is_extreme = tl.min((tl.abs(left + right) < float("inf")).to(tl.int32)) == 0
    else:
        a_farthest, b_farthest = halves(farthest)
        is_extreme = tl.max(a_farthest) + tl.max(b_farthest) > (126 << 23)
    return left, right, is_extreme


@triton.jit
def rows_from(operand, first, COUNT: tl.constexpr):
    """Return the numbers of so many rows; beyond the end 0."""
    rows = first + tl.arange(0, COUNT)
    return tl.where(rows < operand.rows, rows, 0)


@triton.jit
def load_step(ptrs, start, K, tiling: tl.constexpr):
    """Load codes [rows, TILE_K], 0 beyond K."""
    if tiling.even_k:
        codes = tl.load(ptrs)
    else:
        codes = tl.load(ptrs, mask=(start + tl.arange(0, tiling.tile_k) < K)[None, :], other=0.0)
    return codes


@triton.jit
def first_scales(operand, rows, ROWS: tl.constexpr):
    """Return the offset from scale_inv of each row's first scale."""
    offsets = (rows // ROWS) * operand.scale_stride_r
    if operand.first_scale is not None:
        offsets += operand.first_scale
    return offsets


@triton.jit
def scale_column(k, operand, COLS: tl.constexpr):
    """Return the offset from a row's first scale of the scale for this place along K."""
    return 0 if COLS == -1 else (k // COLS) * operand.scale_stride_c


@triton.jit
def distance_from_1(scale):
    """Return how far the bits of float32 numbers are from 1's; of powers of two, |log2| times 2^23."""
    return tl.abs(scale.to(tl.int32, bitcast=True) - (127 << 23))


@triton.jit
def halves(both):
    """Return a vector's first half and its second."""
    return tl.split(tl.trans(tl.reshape(both, [2, both.shape[0] // 2])))


@triton.jit
def as_factors(both):
    """Return the scales of a program's rows [M, 1] and of its columns [1, N], from a vector of both."""
    a_scale, b_scale = halves(both)
    return a_scale[:, None], b_scale[None, :]


@triton.jit
def scales_of_program(product, first_m, first_n, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Return pointers to the first scales of a program's rows, followed by those of its columns, as many."""
    a = product.a
    b = product.b
    a_scales = a.scale_inv + first_scales(a, rows_from(a, first_m, 2 * COUNT), A_ROWS)
    b_scales = b.scale_inv + first_scales(b, rows_from(b, first_n - COUNT, 2 * COUNT), B_ROWS)
    return tl.where(tl.arange(0, 2 * COUNT) < COUNT, a_scales, b_scales)


@triton.jit
def scaled(x, a_scale, b_scale):
    """Return x * a_scale * b_scale, inf or 0 only where that is, for scales from 2^-126 to 2^126 and x a sum of codes.

    As x * root * b_scale * rest, where root * rest is a_scale and both are near its root: if a_scale and b_scale lie on
    both sides of 1, none of these is far from x, and else each lies between x and the result.
    """
    bits = a_scale.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) + 127) >> 1
    root = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return x * root * b_scale * (a_scale * inverse)


@triton.jit
def store_part(product, result, out_ptr, first_m, first_n):
    """Write a part of the result from this row and column on, plus the bias."""
    m = first_m + tl.arange(0, result.shape[0])
    n = first_n + tl.arange(0, result.shape[1])
    if product.bias is not None:
        result += tl.load(product.bias + rows_from(product.b, first_n, result.shape[1])).to(tl.float32)[None, :]
    offsets = m.to(tl.int64)[:, None] * product.b.rows + n[None, :]
    inside = (m < product.a.rows)[:, None] & (n < product.b.rows)[None, :]
    tl.store(out_ptr + offsets, narrow(result, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def place_of_program(height, width):
    """Return the tile (row, column) of height x width that a program computes.

    Programs go through bands of eight rows of tiles, column by column: neighbours share b's rows in the cache.
    """
    BAND: tl.constexpr = 8
    in_band = BAND * width
    first = (tl.program_id(0) // in_band) * BAND
    rows = tl.minimum(height - first, BAND)
    place = tl.program_id(0) % in_band
    return first + place % rows, place // rows


@triton.constexpr_function
def sums_shortly():
    """Whether the tensor cores that this is compiled for sum products of codes in some 14 bits: Ada's and Hopper's."""
    return not cuda_capability_geq(10)


@triton.jit
def add_product(a, b, accumulator, FAST: tl.constexpr):
    """Add a [M, K] . b [K, N]; unless FAST, no short accumulator of tensor cores sums more than this K."""
    if sums_shortly() and not FAST:
        # not as tl.dot's max_num_imprecise_acc: for Hopper Triton then adds up what is not waited for, and for Ada
        # nothing; a plain + would become tl.dot(a, b, accumulator) there
        result = tl.fma(dot(a, b, tl.zeros_like(accumulator)), 1.0, accumulator)
    else:
        result = dot(a, b, accumulator)
    return result


if triton.knobs.runtime.interpret:

    @triton.jit
    def dot(a, b, accumulator):
        """Add a [M, K] . b [K, N] in float32."""
        return tl.dot(decode(a), decode(b), accumulator, input_precision="ieee")

    @triton.jit
    def dot_scaled(a, a_scale, b, b_scale, accumulator):
        """Add a [M, K] . b [N, K]^T, whose 32 columns each have a scale, E8M0's code [., K / 32]."""
        a_values = multiplied(decode(a), a_scale)
        b_values = multiplied(decode(b), b_scale)
        return tl.dot(a_values, b_values.T, accumulator.to(tl.float64), out_dtype=tl.float64).to(tl.float32)

    @triton.jit
    def multiplied(values, scale):
        """Return the float64 values [rows, K] times their scales."""
        factor = ((scale.to(tl.int64) + (1023 - 127)) << 52).to(tl.float64, bitcast=True)
        factor = tl.where(scale == 255, float("nan"), factor)
        blocks = tl.reshape(values, [scale.shape[0], scale.shape[1], 32]).to(tl.float64) * factor[:, :, None]
        return tl.reshape(blocks, values.shape)

else:

    @triton.jit
    def dot(a, b, accumulator):
        """Add a [M, K] . b [K, N] by the tensor cores."""
        return tl.dot(a, b, accumulator)

    @triton.jit
    def dot_scaled(a, a_scale, b, b_scale, accumulator):
        """Add a [M, K] . b [N, K]^T, whose 32 columns each have a scale, E8M0's code [., K / 32]."""
        A: tl.constexpr = "e5m2" if a.dtype == tl.float8e5 else "e4m3"
        B: tl.constexpr = "e5m2" if b.dtype == tl.float8e5 else "e4m3"
        return tl.dot_scaled(a, a_scale, A, b.T, b_scale, B, accumulator)


def matmul(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Compute the op ``octavo::matmul``; its contract is in signatures.py."""
    blocks = operands.a.tile, operands.b.tile
    if (*blocks, fast_accum) in LIBRARY and is_right(operands, out_dtype, fast_accum):
        return library_matmul(operands, out_dtype, fast_accum)
    if step_along(*blocks) == 0:
        return reference_matmul(operands, out_dtype, fast_accum)
    return triton_matmul(operands, out_dtype, fast_accum)


@functools.cache
def step_along(a_block: Tile, b_block: Tile) -> int:
    """Return how far along K the Triton kernels may go under one scale, up to 128; 0 where not even 32."""
    columns = [cols for _, cols in (a_block, b_block) if cols != ALL]
    return next((step for step in (128, 64, 32) if all(cols % step == 0 for cols in columns)), 0)


def triton_matmul(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return the Triton kernel's product, for blocks whose columns are a multiple of 32, or all."""
    *pairs, bias = operands.plain()
    a, b = in_one_dtype(*pairs)
    (M, N), K = operands.shape, a.codes.shape[1]
    out = a.codes.new_empty((M, N), dtype=out_dtype)
    if out.numel() > 0:
        chosen = product_config(a, b, (M, N))
        tiling = tiling_of(a, b, fast_accum, chosen, K)
        arguments = operand_of(a), operand_of(b), bias_of(bias, out_dtype), K, out, tiling
        programs = triton.cdiv(M, chosen.tile_r) * triton.cdiv(N, chosen.tile_c)
        launch(matmul_kernel, programs, arguments, chosen.num_warps, True, chosen.depth)
    return out


def is_scaled(a: OperandPair, b: OperandPair) -> bool:
    """Whether the tensor cores multiply by the scales."""
    return have_e8m0_blocks(a, b) and (_INTERPRETED or scales_blocks(_architecture()))


@functools.cache
def scales_blocks(architecture: int) -> bool:
    """Whether Triton has the tensor cores scale blocks.

    3.6 does not compile this kernel's for sm_100, and for sm_121 3.6 and 3.7 multiply in bfloat16 instead.
    """
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    return architecture == 120 or (architecture // 10 == 10 and release >= (3, 7))


def product_config(a: OperandPair, b: OperandPair, shape: tuple[int, int]) -> Config:
    """Return a product's configuration: another one where a scale changes along K, for two accumulators."""
    log2_elements = math.prod(shape).bit_length()
    if a.tile[1] == b.tile[1] == ALL:
        return config("matmul", log2_elements)
    if is_scaled(a, b):  # sm_100 accumulates in tensor memory, sm_120 in registers
        return config("matmul" if _architecture() == 120 else "matmul_scaled", log2_elements)
    chosen = config("matmul_blocks", log2_elements)
    if b.tile[0] == ALL or b.tile[0] % 128 == 0:
        square = config("matmul_square_blocks", log2_elements)
        if square.num_warps <= 8 or _architecture() in (0, 90):  # no other's tensor cores work for 16 warps in Triton
            chosen = square
    return chosen


_INTERPRETED = triton.knobs.runtime.interpret  # as the kernels above are


def _architecture() -> int:
    """Return the architecture of the current device: 90 is Hopper's, 0 the interpreter's."""
    return 0 if _INTERPRETED else int(driver.active.get_current_target().arch)


def tiling_of(a: OperandPair, b: OperandPair, fast_accum: bool, chosen: Config, K: int) -> ProductTiling:
    """Return how programs share a product whose sums are of K terms."""
    scaled = is_scaled(a, b)
    step = 128 if scaled else step_along(a.tile, b.tile)
    a_block, b_block = ((block_size(pair.tile[0]), pair.tile[1]) for pair in (a, b))
    dots = 2 if chosen.num_warps > 8 else 1  # of 16 warps a thread has 128 registers, too few for two sums of 64 each
    sizes = chosen.tile_r, chosen.tile_c, step
    return ProductTiling(a_block, b_block, fast_accum, K % step == 0, *sizes, dots, scaled)


def in_one_dtype(a: OperandPair, b: OperandPair) -> tuple[OperandPair, OperandPair]:
    """Return a product's operands, whose scales a program reads in one load: in float32 where one's are E8M0."""
    if a.scale_inv.dtype != b.scale_inv.dtype:
        a, b = (pair._replace(scale_inv=pair.scale_inv.to(torch.float32)) for pair in (a, b))
    return a, b


def bias_of(bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """Return a bias as kernels take it: rounded first where the result is bfloat16."""
    return None if bias is None else (bias.to(out_dtype) if out_dtype is torch.bfloat16 else bias).contiguous()


def operand_of(pair: OperandPair) -> Operand:
    """Return an operand as kernels take it, copied where rows don't lie in order; scales of E8M0 as uint8."""
    codes = pair.codes if pair.codes.stride(1) == 1 else pair.codes.contiguous()
    return Operand(codes, codes.shape[0], codes.stride(0), as_argument(pair.scale_inv), *pair.scale_inv.stride())
