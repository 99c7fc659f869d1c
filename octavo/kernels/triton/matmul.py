"""The product of two pairs, a . b^T: torch's scaled product where it serves, a Triton one for all others.

LIBRARY, of configs.json, says for which granularities torch's is called, where the device computes it rightly
(library_matmul.py). Tiles that no step of 32 along K divides go to the reference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.granularity import ALL, Tile
from octavo.kernels.arguments import Operands, Pair
from octavo.kernels.reference.matmul import matmul as reference_matmul
from octavo.kernels.triton.launch import LIBRARY, Config, config, launch
from octavo.kernels.triton.library_matmul import is_right, library_matmul
from octavo.kernels.triton.tiles import decode, narrow


class Operand(NamedTuple):
    """Codes [rows, K], contiguous along K, and their scale_inv."""

    ptr: Any
    rows: Any
    stride: Any
    scale_inv: Any
    scale_stride_r: Any
    scale_stride_c: Any


class Product(NamedTuple):
    """Operands [M, K] and [N, K], and the bias [N] or None; made in a kernel, for Triton 3.6 takes no tuple of tuples.

    It loses their integers that are 1.
    """

    a: Any
    b: Any
    bias: Any
    K: Any


class ProductTiling(NamedTuple):
    """A program's part of a product; a step of block_k lies in one tile of each operand."""

    a_tile: tuple[int, int]  # (rows, columns) that share a scale; columns -1 for all
    b_tile: tuple[int, int]
    fast: bool
    even_k: bool  # K is whole steps
    block_m: int
    block_n: int
    block_k: int


@triton.jit
def matmul_kernel(a, b, bias_ptr, K, out_ptr, tiling: tl.constexpr):
    """Out [M, N] = a [M, K] . b [N, K]^T + bias; tiling: ProductTiling."""
    product = Product(a, b, bias_ptr, K)
    first_m, first_n = first_of_program(product, tiling)
    m = first_m + tl.arange(0, tiling.block_m)
    n = first_n + tl.arange(0, tiling.block_n)
    result = narrow(product_tile(product, first_m, first_n, tiling), out_ptr.dtype.element_ty)
    offsets = m.to(tl.int64)[:, None] * product.b.rows + n[None, :]
    tl.store(out_ptr + offsets, result, mask=(m < product.a.rows)[:, None] & (n < product.b.rows)[None, :])


@triton.jit
def product_tile(product, first_m, first_n, tiling: tl.constexpr):
    """A program's part [BLOCK_M, BLOCK_N], float32, from this row and column on; beyond the end the first one again."""
    a = product.a
    b = product.b
    K = product.K
    A_TILE: tl.constexpr = tiling.a_tile
    B_TILE: tl.constexpr = tiling.b_tile
    BLOCK_M: tl.constexpr = tiling.block_m
    BLOCK_N: tl.constexpr = tiling.block_n
    BLOCK_K: tl.constexpr = tiling.block_k
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_rows = tl.where(m < a.rows, m, 0)
    b_rows = tl.where(n < b.rows, n, 0)
    a_ptrs = a.ptr + a_rows.to(tl.int64)[:, None] * a.stride + k[None, :]
    b_ptrs = b.ptr + b_rows.to(tl.int64)[None, :] * b.stride + k[:, None]
    # as offsets of 32 bits: a thread holds one for each of its columns, and pointers take two registers
    a_scales = (a_rows // A_TILE[0]) * a.scale_stride_r
    b_scales = (b_rows // B_TILE[0]) * b.scale_stride_r
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if tiling.even_k:
            a_codes = tl.load(a_ptrs)
            b_codes = tl.load(b_ptrs)
        else:
            a_codes = tl.load(a_ptrs, mask=(start + k < K)[None, :], other=0.0)
            b_codes = tl.load(b_ptrs, mask=(start + k < K)[:, None], other=0.0)
        if A_TILE[1] == -1 and B_TILE[1] == -1:
            accumulator = dot(a_codes, b_codes, accumulator, tiling.fast)
        else:
            part = dot(a_codes, b_codes, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), True)
            if A_TILE[1] != -1:
                part *= tl.load(a.scale_inv + (a_scales + (start // A_TILE[1]) * a.scale_stride_c))[:, None]
            if B_TILE[1] != -1:
                if B_TILE[0] % BLOCK_N == 0:  # one for all of the program's columns
                    row = (first_n // B_TILE[0]) * b.scale_stride_r
                    part *= tl.load(b.scale_inv + row + (start // B_TILE[1]) * b.scale_stride_c)
                else:
                    part *= tl.load(b.scale_inv + (b_scales + (start // B_TILE[1]) * b.scale_stride_c))[None, :]
            accumulator += part
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    if A_TILE[1] == -1:
        accumulator *= tl.load(a.scale_inv + a_scales)[:, None]
    if B_TILE[1] == -1:
        accumulator *= tl.load(b.scale_inv + b_scales)[None, :]
    if product.bias is not None:
        accumulator += tl.load(product.bias + b_rows).to(tl.float32)[None, :]
    return accumulator


@triton.jit
def first_of_program(product, tiling: tl.constexpr):
    """A program's first row and column; eight programs that are neighbours in M share b's rows in the cache."""
    GROUP: tl.constexpr = 8
    in_group = GROUP * tl.cdiv(product.b.rows, tiling.block_n)
    first = (tl.program_id(0) // in_group) * GROUP
    height = tl.minimum(tl.cdiv(product.a.rows, tiling.block_m) - first, GROUP)
    place = tl.program_id(0) % in_group
    return (first + place % height) * tiling.block_m, (place // height) * tiling.block_n


if triton.knobs.runtime.interpret:

    @triton.jit
    def dot(a, b, accumulator, FAST: tl.constexpr):
        """Add a [M, K] . b [K, N] in float32."""
        return tl.dot(decode(a), decode(b), accumulator, input_precision="ieee")

else:

    @triton.jit
    def dot(a, b, accumulator, FAST: tl.constexpr):
        """Add a [M, K] . b [K, N]; unless FAST, Hopper's short accumulator is emptied every K."""
        if FAST:
            result = tl.dot(a, b, accumulator)
        else:
            result = tl.dot(a, b, accumulator, max_num_imprecise_acc=a.shape[1])
        return result


_ALL_ROWS = 1 << 30  # a tile of so many rows holds them all


def matmul(operands: Operands, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """``octavo::matmul``."""
    tiles = operands.a.tile, operands.b.tile
    if (*tiles, fast_accum) in LIBRARY and is_right(operands, out_dtype, fast_accum):
        return library_matmul(operands, out_dtype, fast_accum)
    if step_along(*tiles) == 0:
        return reference_matmul(operands, out_dtype, fast_accum)
    return triton_matmul(operands, out_dtype, fast_accum)


@functools.cache
def step_along(a_tile: Tile, b_tile: Tile) -> int:
    """How far along K the Triton kernels may go under one scale, up to 128; 0 where not even 32."""
    columns = [cols for _, cols in (a_tile, b_tile) if cols != ALL]
    return next((step for step in (128, 64, 32) if all(cols % step == 0 for cols in columns)), 0)


def triton_matmul(operands: Operands, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """The Triton kernel's product, for tiles whose columns are a multiple of 32, or all."""
    if operands.bias is not None and out_dtype is torch.bfloat16:
        operands = operands._replace(bias=operands.bias.to(out_dtype))
    out = operands.a.codes.new_empty(operands.shape, dtype=out_dtype)
    if out.numel() > 0:
        launch_product(matmul_kernel, operands, fast_accum, product_config("matmul", operands), (out,))
    return out


def product_config(kernel: str, operands: Operands) -> Config:
    """Another one where a scale changes along K, as a program then has two accumulators."""
    changes = operands.a.tile[1] != ALL or operands.b.tile[1] != ALL
    return config(f"{kernel}_blocks" if changes else kernel, math.prod(operands.shape).bit_length())


def launch_product(kernel: Any, operands: Operands, fast_accum: bool, chosen: Config, arguments: Sequence[Any]) -> None:
    """Launch a kernel that takes a Product's parts, its own ``arguments`` and the tiling; the result is not empty."""
    (M, N), K, tiles = operands.shape, operands.a.codes.shape[1], (operands.a.tile, operands.b.tile)
    step = step_along(*tiles)
    a_tile, b_tile = ((_ALL_ROWS if rows == ALL else rows, cols) for rows, cols in tiles)
    tiling = ProductTiling(a_tile, b_tile, fast_accum, K % step == 0, chosen.block_r, chosen.block_c, step)
    bias = None if operands.bias is None else operands.bias.contiguous()
    product = _operand(operands.a), _operand(operands.b), bias, K
    programs = -(-M // chosen.block_r) * -(-N // chosen.block_c)
    launch(kernel, programs, (*product, *arguments, tiling), chosen.num_warps, True, chosen.tiles)


def _operand(pair: Pair) -> Operand:
    codes = pair.codes if pair.codes.stride(1) == 1 else pair.codes.contiguous()
    return Operand(codes, codes.shape[0], codes.stride(0), pair.scale_inv, *pair.scale_inv.stride())
