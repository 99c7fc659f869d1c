"""Layouts of codes: tiles that share a scale, padding, transposes, and what a device's FP8 product reads.

Casts that write swizzled scales are frozen: no new features until a GPU shows what they gain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.formats import E2M1
from octavo.granularity import ALL, BLOCK, MX, NV, PADDING, tiles_along
from octavo.kernels.capability import runs_natively
from octavo.numerics import E8M0


def needs_transposed_codes(device: torch.device) -> bool:
    """Whether the product wants both operands contiguous along the contraction, so casts write codes transposed too.

    True where FP8 is native: Ada's and Hopper's FP8 tensor cores have no transposed form, and torch's product takes no
    other layout on later GPUs either. The reference reads any strides.
    """
    return device.type == "cuda" and _is_native(device)


# dynamo, which warns of functools.cache, asks it while it traces; torch.compiler's own mark imports Triton
needs_transposed_codes._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _is_native(device: torch.device) -> bool:
    """Whether a GPU has native FP8, asked once: the driver's answer takes microseconds."""
    return runs_natively(device)


def contraction_multiple(device: torch.device, pads: bool = True, packs: bool = False) -> int:
    """Return the number to whose multiple casts pad the dimension that a product contracts, with zero codes.

    It is PADDING where torch's product takes no other sizes; 1 where operands are strided views, or where a recipe does
    not pad. ``pads``: the recipe's ``may_pad``; ``packs``: its ``has_e2m1``, whose codes are padded everywhere.
    """
    return NV[1] if packs else PADDING if pads and needs_transposed_codes(device) else 1


def pack_pairs(codes: Tensor) -> Tensor:
    """Return codes of 4 bits [..., C], uint8, two in each byte, the first in its lower half: [..., C / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_pairs(qdata: Tensor) -> Tensor:
    """Return the codes, uint8 [..., C], of bytes [..., C / 2] with two each."""
    packed = qdata.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def unpacked_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of the values of codes of this shape."""
    return (*shape[:-1], shape[-1] * 2) if dtype is E2M1.dtype else tuple(shape)


def is_small_block(tile: Sequence[int]) -> bool:
    """Whether a Triton program holds whole blocks of this size: powers of two up to 128."""
    return all(size in (1, 2, 4, 8, 16, 32, 64, 128) for size in tile)


def padded_size(size: int, pad: int) -> int:
    """Return ``size`` rounded up to a multiple of ``pad``.

    Raises:
        ValueError: unless ``pad`` divides PADDING, which a kernel's tile holds.
    """
    if pad < 1 or PADDING % pad:
        divisors = ", ".join(str(size) for size in range(1, PADDING + 1) if PADDING % size == 0)
        raise ValueError(f"pad={pad}: codes are padded to a multiple of one of {divisors}")
    return -(-size // pad) * pad


def with_padding(codes: Tensor, pad: int) -> Tensor:
    """Return ``codes`` with zero codes after each row, up to a multiple of ``pad``."""
    if pad == 1:
        return codes
    missing = padded_size(codes.shape[-1], pad) - codes.shape[-1]
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes


def transposed(x: Tensor) -> Tensor:
    """Return codes [..., R, C] as a contiguous copy [..., C, R]."""
    # not contiguous(): of a single row or column that is x itself, and an op's results must not alias
    return x.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format).view(x.dtype)


def swizzled(scale_inv: Tensor) -> Tensor:
    """Return E8M0's codes [..., R, C] of 1x32 blocks as torch's product reads them on Blackwell: flat, [..., size].

    128 rows and 4 columns at a time (SWIZZLE_32_4_4), the last padded with zero bytes, 2^-127. Rows r, r + 32, r + 64
    and r + 96 lie beside each other, with four columns each.
    """
    codes = scale_inv.view(torch.uint8)
    *lead, rows, cols = codes.shape
    if rows % 128 or cols % 4:
        codes = F.pad(codes, (0, -cols % 4, 0, -rows % 128))
        *_, rows, cols = codes.shape
    parts = codes.view(*lead, rows // 128, 4, 32, cols // 4, 4).transpose(-4, -2)
    return parts.reshape(*lead, rows * cols).view(E8M0)


def swizzled_size(grid: Sequence[int], tile: Sequence[int]) -> int:
    """Return how many elements ``swizzled`` makes of a grid of scales of 1x32 blocks, or of 32x1, transposed."""
    rows, cols = grid if tile[0] == 1 else grid[::-1]
    return tiles_along(rows, 128) * 128 * tiles_along(cols, 4) * 4


def plain_scales(scale_inv: Tensor, shape: Sequence[int], tile: Sequence[int]) -> Tensor:
    """Return scale_inv of codes of this shape in tiles (1, 32) or (32, 1), as before ``swizzled``; others as they are.

    Swizzled scales have one dimension. They are laid as an operand's are: of (32, 1) transposed.
    """
    if scale_inv.ndim != 1 or len(shape) != 2:
        return scale_inv
    rows, terms = shape if tile[1] != 1 else shape[::-1]
    cols = tiles_along(terms, MX[1])
    parts = scale_inv.view(torch.uint8).view(tiles_along(rows, 128), tiles_along(cols, 4), 32, 4, 4)
    scales = parts.permute(0, 3, 2, 1, 4).flatten(3, 4).flatten(0, 2)[:rows, :cols].view(E8M0)
    return scales if tile[1] != 1 else scales.t()


def as_tiles(x_RC: Tensor, tile: Sequence[int]) -> Tensor:
    """View [R, C] as [R / r, r, C / c, c]; a copy padded with zeros where a tile is ragged."""
    rows, cols = x_RC.shape
    r = rows if tile[0] == ALL else tile[0]
    c = cols if tile[1] == ALL else tile[1]
    n_r, n_c = tiles_along(rows, tile[0]), tiles_along(cols, tile[1])
    if (rows, cols) != (n_r * r, n_c * c):
        x_RC = F.pad(x_RC, (0, n_c * c - cols, 0, n_r * r - rows))
    return x_RC.unflatten(1, (n_c, c)).unflatten(0, (n_r, r))


def multiply_tiles_(x_RC: Tensor, scale: Tensor, tile: Sequence[int]) -> Tensor:
    """Multiply each tile of [R, C] by its element of scale [R / r, C / c], in place (in a copy if ragged)."""
    if tile[0] in (ALL, 1) and tile[1] in (ALL, 1):
        return x_RC.mul_(scale)
    tiled = as_tiles(x_RC, tile).mul_(scale[:, None, :, None])
    if tiled.data_ptr() == x_RC.data_ptr():
        return x_RC
    rows, cols = x_RC.shape
    return tiled.flatten(2, 3).flatten(0, 1)[:rows, :cols]


def tile_rows(scales: Tensor, tile: Sequence[int], rows: slice) -> Tensor:
    """Return the scales of some rows, which are whole tiles."""
    return scales if tile[0] == ALL else scales[rows.start // tile[0] : tiles_along(rows.stop, tile[0])]


def as_matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (R, C) of a tensor as the kernels see it: its first dimension by all others; vectors are one row."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def blocks_in_row(cols: int) -> int:
    """Return how many blocks a row has."""
    return tiles_along(cols, BLOCK)
