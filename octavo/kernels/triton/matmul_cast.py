"""The product of two pairs that is itself a pair: each program casts the float32 results that it has accumulated.

One launch where a program knows its scales by itself:

    Delayed, whose scale is known to exist    the amax of the result is gathered on the way
    blocks of powers of two up to 128         each lies in one program's tile

Two passes for all others, a float32 product and then the cast of it. Per tensor, Dynamic's scale needs the amax of all
programs, as Delayed's does until one is known to exist; a row's or a column's needs that of all programs along it, and
a block of another size lies in several. So do operands whose blocks no step of 32 along K divides, which the reference
multiplies, and results without elements, of which there is only a scale to write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.arguments import CastSource, Operands, Output, Scaling, new_both_codes, new_scales
from octavo.kernels.layouts import is_small_block
from octavo.kernels.triton.cast import cast
from octavo.kernels.triton.cast_blocks import store_blocks
from octavo.kernels.triton.cast_input import block_scaling_of, codes_to, rounding_of
from octavo.kernels.triton.known_scales import scale_exists
from octavo.kernels.triton.launch import with_room_for, workspace
from octavo.kernels.triton.matmul import (
    Product,
    first_of_program,
    launch_product,
    matmul,
    product_config,
    product_tile,
    step_along,
)
from octavo.kernels.triton.tiles import (
    Outputs,
    Tiling,
    encode,
    finite_abs,
    is_last_program,
    raise_amax,
    scale_inv_from_scale,
    store_codes,
    take_amax,
)


class Shape(NamedTuple):
    """The result's [R, C], as store_codes wants them."""

    R: Any
    C: Any


@triton.jit
def without_rest(tile, product, first_m, first_n, EVEN: tl.constexpr):
    """A part of the product with 0 beyond the result."""
    if not EVEN:
        m = first_m + tl.arange(0, tile.shape[0])
        n = first_n + tl.arange(0, tile.shape[1])
        tile = tl.where((m < product.a.rows)[:, None] & (n < product.b.rows)[None, :], tile, 0.0)
    return tile


@triton.jit
def matmul_cast_kernel(
    a,
    b,
    bias_ptr,
    K,
    out,  # Outputs
    delayed_scale_ptr,
    work_ptr,  # [0] the bits of the shared amax, [1] its counter; 0 before and after
    ROLE: tl.constexpr,
    E5M2: tl.constexpr,
    EVEN: tl.constexpr,  # the result is made of whole programs' tiles
    tiling: tl.constexpr,  # ProductTiling
):
    """One delayed scale for all of the result."""
    scale = tl.load(delayed_scale_ptr + ROLE)
    scale = tl.where(scale == 0, 1.0, scale)  # a CUDA graph replayed after the state was emptied
    if tl.program_id(0) == 0:
        tl.store(out.scale_inv, scale_inv_from_scale(scale, False))
    product = Product(a, b, bias_ptr, K)
    first_m, first_n = first_of_program(product, tiling)
    tile = without_rest(product_tile(product, first_m, first_n, tiling), product, first_m, first_n, EVEN)
    # dimension by dimension Triton 3.6 fails to compile it for sm_100
    raise_amax(work_ptr, tl.max(finite_abs(tile)))
    if is_last_program(work_ptr + 1, tl.num_programs(0)):  # before the codes: the counter would wait for them
        tl.store(out.amax, take_amax(work_ptr))
    m = first_m + tl.arange(0, tiling.block_m)
    n = first_n + tl.arange(0, tiling.block_n)
    store_codes(encode(tile, scale, E5M2), out.codes, m, n, Shape(product.a.rows, product.b.rows), EVEN)


@triton.jit
def matmul_cast_blocks_kernel(
    a,
    b,
    bias_ptr,
    K,
    out,  # Outputs
    scaling: tl.constexpr,  # BlockScaling
    part: tl.constexpr,  # Tiling of the result
    tiling: tl.constexpr,  # ProductTiling
):
    """A scale for each block of the result."""
    product = Product(a, b, bias_ptr, K)
    first_m, first_n = first_of_program(product, tiling)
    tile = without_rest(product_tile(product, first_m, first_n, tiling), product, first_m, first_n, part.even)
    place = (first_m // tiling.block_m, first_n // tiling.block_n)
    store_blocks(tile, 0, place, Shape(product.a.rows, product.b.rows), out, scaling, part)


def matmul_cast(operands: Operands, fast_accum: bool, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::matmul_cast``."""
    a, (M, N), tile = operands.a.codes, operands.shape, scaling.tile
    state = scaling.delayed_scale
    is_local = (
        is_small_block(tile) if state is None else scale_exists(state, scaling.role)
    )  # what a program's scales need
    if not (M * N > 0 and step_along(operands.a.tile, operands.b.tile) > 0 and is_local):
        return cast(CastSource(matmul(operands, torch.float32, fast_accum)), scaling, output)[:4]
    chosen = product_config("matmul_cast", operands)
    if scaling.delayed_scale is None:
        chosen = with_room_for(chosen, tile)
        # with 16 warps Triton doesn't use Blackwell's FP8 tensor cores
        chosen = chosen._replace(num_warps=min(chosen.num_warps, 8))
    q, t = new_both_codes(a, operands.shape, scaling.dtype, output)
    scale_inv, amax = new_scales(a, operands.shape, tile), new_scales(a, operands.shape, tile)
    out = Outputs(codes_to(q, t), scale_inv, amax, *scale_inv.stride())
    rounding, even = rounding_of(scaling), M % chosen.block_r == 0 and N % chosen.block_c == 0
    if scaling.delayed_scale is None:
        part = Tiling(even, chosen.block_r, chosen.block_c)
        arguments = out, block_scaling_of(scaling), part
        launch_product(matmul_cast_blocks_kernel, operands, fast_accum, chosen, arguments)
    else:
        shared, constants = (scaling.delayed_scale, workspace(a, 2)), (scaling.role, rounding.e5m2, even)
        launch_product(matmul_cast_kernel, operands, fast_accum, chosen, (out, *shared, *constants))
    return q, t, scale_inv, amax
