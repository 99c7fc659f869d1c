"""Multiply two pairs by torch's product (cuBLAS), or operands in groups (CUTLASS), once a device proved it right.

What torch's product supports, and the layout that it wants scales in, differ between GPUs and between releases of
torch, and a wrong layout is a wrong result and no error. So before a kind of product is given to torch for the first
time, a small one, whose scales differ by row, column and block, must be what the reference computes. The answer holds
for the process; ``octavo info`` shows it.

In groups torch's product takes E4M3 codes with a scale a row, or, where rows are in groups, E8M0's of 1x32 blocks. It
returns bfloat16, and leaves rows that are in no group unwritten. It reads where the offsets say, so it gets checked
ones, and a launch after it writes the rows that it left: three launches, two more that swizzle scales, and torch's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from octavo.granularity import ALL, MX, PADDING, Tile, granularity_of, scale_shape, tiles_along
from octavo.kernels.arguments import (
    CastSource,
    GroupedOperands,
    OperandPair,
    Output,
    ProductArguments,
    Scaling,
    have_e8m0_blocks,
)
from octavo.kernels.layouts import swizzled
from octavo.kernels.reference.cast import cast as reference_cast
from octavo.kernels.reference.matmul import grouped_matmul as reference_grouped_matmul
from octavo.kernels.reference.matmul import matmul as reference_matmul
from octavo.kernels.triton.cast_blocks import swizzled_place
from octavo.kernels.triton.groups import fill_part, locate, on_device, pieces_of, sizes_of
from octavo.kernels.triton.launch import LIBRARY, as_argument, is_capturing, launch
from octavo.kernels.triton.replay import recorder
from octavo.numerics import E8M0
from octavo.private import pytree

_logger = logging.getLogger("octavo")
_TENSOR, _ROW, _BLOCK = (ALL, ALL), (1, ALL), (1, 128)
_MULTIPLE = 16  # torch's products take sizes that are multiples of it
assert PADDING % _MULTIPLE == 0, "what casts pad, torch's products take"

# The names of blocks in torch's product; those of 128 are for Hopper, those of 32 for later GPUs.
_SCALINGS = {
    _TENSOR: ScalingType.TensorWise,
    _ROW: ScalingType.RowWise,
    _BLOCK: ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
    MX: ScalingType.BlockWise1x32,
}
_ERROR = 0.02  # largest error of a row or column: bfloat16 rounds by 0.002, Hopper's short accumulator by some 0.005
_PLAIN = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16), False  # the dtypes of operands and result, no bias
_known: dict[tuple[Any, ...], bool] = {}


def is_right(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> bool:
    """Whether torch's product takes these operands, and computes such products rightly on their device."""
    if not takes(operands, out_dtype):
        return False
    a, b, bias = operands
    dtypes = a.codes.dtype, b.codes.dtype, out_dtype
    return _ask(_agrees, (a.codes.device, a.tile, b.tile, dtypes, bias is not None, fast_accum))


def reads_swizzled(device: torch.device) -> bool:
    """Whether a device's product of E8M0's blocks is torch's, which reads scales swizzled."""
    return (MX, MX, False) in LIBRARY and _ask(_agrees, (device, MX, MX, *_PLAIN, False))


def _ask(agrees: Callable[..., bool], kind: tuple[Any, ...]) -> bool:
    """Whether a device computes a kind of products rightly, asked once: (device, a's block, b's block, ...)."""
    if (is_right_here := _known.get(kind)) is not None:
        return is_right_here
    if (recording := recorder()) is not None:
        recording.is_postponed = True
    if is_capturing():  # a graph can't look at results
        return False
    is_right_here = _known[kind] = agrees(*kind)
    verdict = "torch's" if is_right_here else "octavo's Triton kernel, for torch's is not right here"
    groups = " in groups" * (agrees is _agrees_in_groups)
    _logger.info("%s . %s%s on %s: %s", granularity_of(kind[1]), granularity_of(kind[2]), groups, kind[0], verdict)
    return is_right_here


def _is_near(product: Callable[..., Tensor], arguments: tuple[Any, ...], reference: Tensor) -> bool:
    """Whether torch computes a product without a refusal, and in every row and column near the reference's."""
    try:
        result = product(*arguments).to("cpu", torch.float32)
    except torch.OutOfMemoryError:  # which says nothing of the product
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        _logger.info("torch's product: %s", str(error).partition("\n")[0])
        return False
    miss = result - reference
    return all(bool((miss.norm(dim=dim) <= _ERROR * reference.norm(dim=dim)).all()) for dim in (-1, -2))


def _agrees(
    device: torch.device, a_block: Tile, b_block: Tile, dtypes: Sequence[torch.dtype], has_bias: bool, fast_accum: bool
) -> bool:
    """Whether torch's product of a small case is the reference's, in every row and column; dtypes: of a, b and it."""
    a_dtype, b_dtype, out_dtype = dtypes
    generator = torch.Generator().manual_seed(0)
    rows, cols = 144, 272  # two blocks of rows and three of columns, the last not whole
    terms = 384 if a_block[1] != ALL or b_block[1] != ALL else 272  # an odd number of blocks, or none

    def pair(count: int, block: Tile, dtype: torch.dtype) -> OperandPair:
        codes = torch.randn(count, terms, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        return _with_random_scales(codes, scale_shape(codes.shape, block), block, generator)

    bias = torch.randn(cols, generator=generator, dtype=torch.float32, device="cpu") * 100 if has_bias else None
    case = ProductArguments(pair(rows, a_block, a_dtype), pair(cols, b_block, b_dtype), bias)
    reference = reference_matmul(case, torch.float32, False)
    return _is_near(library_matmul, (_on(device, case), out_dtype, fast_accum), reference)


def _with_random_scales(codes: Tensor, shape: Sequence[int], block: Tile, generator: torch.Generator) -> OperandPair:
    """Return codes with random scales between 1 and 16, which are powers of two for 1 x 32."""
    log2 = 4 * torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    return OperandPair(codes, torch.exp2(log2.round()).to(E8M0) if block == MX else torch.exp2(log2), block)


def _on(device: torch.device, case: ProductArguments | GroupedOperands) -> Any:
    """Return a product's operands on another device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), case)


def library_kinds(device: torch.device) -> dict[str, bool]:
    """Return whether the device computes rightly each kind of product that configs.json gives to torch, by its name."""
    right_by_name = {}
    for a_block, b_block, fast_accum in sorted(LIBRARY):
        name = f"{granularity_of(a_block)} . {granularity_of(b_block)}{', fast accumulation' * fast_accum}"
        right_by_name[name] = _agrees(device, a_block, b_block, *_PLAIN, fast_accum)
    return right_by_name


def takes(operands: ProductArguments, out_dtype: torch.dtype) -> bool:
    """Whether torch's product takes these operands: whether its checks and cuBLAS's are met."""
    (a, _, a_block), (b, _, b_block), bias = operands
    (M, K), N = a.shape, b.shape[0]
    if K % _MULTIPLE or N % _MULTIPLE or not a.stride() == b.stride() == (K, 1):
        return False
    if M * N * K == 0 or a.dtype is b.dtype is torch.float8_e5m2:
        return False
    if a_block == b_block == _TENSOR:
        return out_dtype is torch.bfloat16 or bias is None
    if out_dtype is not torch.bfloat16:
        return False
    if a_block == MX or b_block == MX:
        return a_block == b_block and have_e8m0_blocks(operands.a, operands.b) and K % MX[1] == 0
    # the scales of 1x128 blocks lie row by row, in sixteens of bytes
    aligned = all(block != _BLOCK or rows % 4 == 0 for block, rows in ((a_block, M), (b_block, N)))
    return (a_block == b_block == _ROW) or (aligned and K % 128 == 0)


def library_matmul(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return torch's product, of operands that it ``takes``."""
    a, b, bias = operands
    swizzle = SwizzleType.SWIZZLE_32_4_4 if a.tile == MX else None
    a_scaling = laid_scale_inv(a.scale_inv, a.tile, 1), _SCALINGS[a.tile]
    b_scaling = laid_scale_inv(b.scale_inv, b.tile, 0), _SCALINGS[b.tile]
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        *(*a_scaling, *b_scaling, swizzle, swizzle),
        bias=None if bias is None else bias.to(out_dtype).contiguous(),
        output_dtype=out_dtype,
        use_fast_accum=fast_accum and a.tile[1] == ALL,  # blocks have none
    )


def laid_scale_inv(scale_inv: Tensor, block: Tile, dim: int) -> Tensor:
    """Return scale_inv laid as torch's product wants it; blocks of 32 that a cast has not swizzled take a launch.

    Args:
        scale_inv: [1, 1], [rows, 1] for rows, [row blocks, blocks along K] for blocks; of 1x32 in E8M0.
        block: of the operand, the contraction last.
        dim: which dimension of a single column's result has size 1.
    """
    if block == MX:
        return swizzled(scale_inv) if scale_inv.ndim == 2 else scale_inv
    scale_inv = scale_inv.to(torch.float32)
    if block == _TENSOR:
        return scale_inv
    if block[1] == ALL:
        return scale_inv.reshape(-1).unsqueeze(dim)  # even a size of 1 must have the stride of a contiguous tensor
    if block == _BLOCK:
        return scale_inv.t().contiguous().t()  # as casts write it
    # without padding to a multiple of 4 cuBLAS reads wrong scales; F.pad would copy a multiple of 4 too
    missing = -scale_inv.shape[1] % 4
    return (F.pad(scale_inv, (0, missing)) if missing else scale_inv).contiguous().t()


@triton.jit
def checked_ends_kernel(groups, R, ends_ptr, grouping: tl.constexpr):
    """Write each group's end, padded; 0 for all where offsets are wrong."""
    PAD: tl.constexpr = grouping.pad
    indices = tl.arange(0, grouping.width)
    sizes, _ = sizes_of(groups, R, grouping)
    ends = tl.cumsum(pieces_of(sizes, PAD), 0) * PAD
    tl.store(ends_ptr + indices, tl.where(tl.max(ends, 0) > R, 0, ends), mask=indices < groups.count)


@triton.jit
def mend_kernel(groups, R, out_ptr, height, width, grouping: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr):
    """Write 0 to the rows in no group of out [height, width], if RAGGED; NaN to all where offsets are wrong."""
    PAD: tl.constexpr = grouping.pad
    sizes, is_wrong = sizes_of(groups, R, grouping)
    padded = tl.sum(pieces_of(sizes, PAD), 0) * PAD
    is_wrong = is_wrong | (padded > R)
    first = tl.program_id(0) // tl.cdiv(width, TILE) * TILE
    last = tl.where(is_wrong, 0, padded if RAGGED else height)
    if first + TILE > last:
        first_n = tl.program_id(0) % tl.cdiv(width, TILE) * TILE
        value = tl.where(is_wrong, float("nan"), 0.0)
        end = tl.minimum(height, first + TILE)
        fill_part(out_ptr, value, end, width, tl.maximum(first, last), first_n, TILE, TILE)


@triton.jit
def swizzle_groups_kernel(scale_inv, stride_r, stride_c, R, C, groups, out_ptr, grouping: tl.constexpr):
    """Write E8M0's codes [R, C] of rows in groups, swizzled; each group's begin with 128 rows of their own."""
    place = locate(groups, tl.program_id(0), R, 128, grouping)
    rows = place.first + tl.arange(0, 128)
    for start in range(0, C, 16):
        cols = start + tl.arange(0, 16)
        offsets = (place.start + rows).to(tl.int64)[:, None] * stride_r + cols[None, :] * stride_c
        codes = tl.load(scale_inv + offsets, mask=(rows < place.size)[:, None] & (cols < C)[None, :], other=0)
        places = swizzled_place(tl.program_id(0) * 128 + tl.arange(0, 128)[:, None], cols[None, :], C)
        inside = (cols < tl.cdiv(C, 4) * 4) & (place.size > 0)
        tl.store(out_ptr + places, codes, mask=inside[None, :])


def _swizzled_groups(scale_inv: Tensor, offsets: Tensor) -> Tensor:
    """Return a scale_inv [R, C] of rows in groups as torch's product reads it, by a launch."""
    (rows, cols), (groups, grouping) = scale_inv.shape, on_device(offsets)
    parts = rows // 128 + offsets.shape[0]
    out = scale_inv.new_empty((parts * 128, triton.cdiv(cols, 4) * 4))
    arguments = as_argument(scale_inv), *scale_inv.stride(), rows, cols, groups, as_argument(out), grouping
    launch(swizzle_groups_kernel, parts, arguments, 4)
    return out


def is_right_in_groups(operands: GroupedOperands, out_dtype: torch.dtype, fast_accum: bool) -> bool:
    """Whether torch's product takes these operands, and computes such products rightly on their device."""
    if (operands.a.tile, operands.b.tile, fast_accum) not in LIBRARY or not takes_groups(operands, out_dtype):
        return False
    kind = operands.a.codes.device, operands.a.tile, operands.b.tile, operands.has_ragged_rows, fast_accum
    return _ask(_agrees_in_groups, kind)


def takes_groups(operands: GroupedOperands, out_dtype: torch.dtype) -> bool:
    """Whether torch's product takes these operands: whether its checks and CUTLASS's are met."""
    a, b, _, bias, pad = operands
    codes = a.codes, b.codes
    if have_e8m0_blocks(a, b):  # with terms in groups torch takes these by whole blocks, and casts pad to PADDING
        if not (a.tile == b.tile == MX and operands.has_ragged_rows and a.codes.shape[1] % MX[1] == 0):
            return False
    elif not a.tile == b.tile == _ROW:
        return False
    return (
        out_dtype is torch.bfloat16
        and bias is None
        and all(c.dtype is torch.float8_e4m3fn and c.is_contiguous() and c.numel() > 0 for c in codes)
        and all(size % _MULTIPLE == 0 for size in (a.codes.shape[-1], *b.codes.shape[-2:]))
        and (operands.has_ragged_rows or (pad % _MULTIPLE == 0 and a.codes.shape[0] % _MULTIPLE == 0))
    )


def _agrees_in_groups(device: torch.device, block: Tile, _: Tile, ragged_rows: bool, fast_accum: bool) -> bool:
    """Whether torch's product of a small case is the reference's, in every group, row and column."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([40, 40, 41, 58, 170], dtype=torch.int32, device="cpu")
    groups, rows, N, K = len(offsets), 184, 144, 288
    scaling = Scaling(torch.float8_e4m3fn, (ALL, 1), False, 0)

    def pair(count: int, scales: tuple[int, ...]) -> OperandPair:
        x = torch.randn(K if ragged_rows else rows, count, generator=generator, dtype=torch.float32, device="cpu")
        codes = x.t().to(scaling.dtype).contiguous()
        if not ragged_rows:  # a cast, for its padding is 0
            codes = reference_cast(CastSource(x), scaling, None, Output(transpose=True, pad=PADDING), offsets)[1]
        return _with_random_scales(codes, scales, block, generator)

    if ragged_rows:
        cols = tiles_along(K, block[1])
        a, b = pair(rows, (rows, cols)), pair(groups * N, (groups, N, cols))
        b = b._replace(codes=b.codes.unflatten(0, (groups, N)))
    else:
        a, b = pair(N, (N, groups)), pair(K, (K, groups))
    case = GroupedOperands(a, b, offsets, None, PADDING)
    reference = reference_grouped_matmul(case, torch.float32, False)
    return _is_near(library_grouped_matmul, (_on(device, case), fast_accum), reference)


def library_grouped_matmul(operands: GroupedOperands, fast_accum: bool) -> Tensor:
    """Return torch's product, of operands that ``takes_groups`` takes."""
    a, b, offsets, _, pad = operands
    count, ragged = offsets.shape[0], operands.has_ragged_rows
    (groups, grouping), size = on_device(offsets, 1 if ragged else pad), a.codes.shape[0 if ragged else 1]
    ends = torch.empty_like(groups.offsets)
    launch(checked_ends_kernel, 1, (groups, size, ends, grouping), 4)
    if a.tile == MX:
        swizzle = SwizzleType.SWIZZLE_32_4_4
        scale_a, scale_b = _swizzled_groups(a.scale_inv, offsets), swizzled(b.scale_inv)
    else:  # a scale for each row: [R] and [G, N]; where terms are in groups, of each group in turn, as casts write them
        swizzle, by_row = None, [pair.scale_inv if ragged else pair.scale_inv.t() for pair in (a, b)]
        scale_a, scale_b = by_row[0].reshape(-1), by_row[1].reshape((count, -1) if ragged else -1)
    scalings = scale_a, _SCALINGS[a.tile], scale_b, _SCALINGS[b.tile], swizzle, swizzle
    out: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a.codes,
        b.codes.transpose(-1, -2),
        *scalings,
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_accum and a.tile == _ROW,
    )
    width = out.shape[-1]
    height, tile = out.numel() // width, 128
    programs = triton.cdiv(height, tile) * triton.cdiv(width, tile)
    launch(mend_kernel, programs, (groups, size, out, height, width, grouping, ragged, tile), 4)
    return out
