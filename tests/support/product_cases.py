"""Operands of products of pairs, alone and in groups, their products in float64, and how near two products must be."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.granularity import Tile
from octavo.kernels.arguments import unpacking
from octavo.kernels.groups import of_equal_groups
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support import definitions
from tests.support.casts import ALL, E4M3, E5M2
from tests.support.groups import offsets_of, scale_slices, slices_of
from tests.support.helpers import sqnr
from tests.support.triton_kernels import TritonKernels

ROWS, BLOCK, SQUARE, MX = (1, -1), (1, 128), (128, 128), (1, 32)
TILES = [(ALL, ALL), (ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK), (MX, MX), (ROWS, (128, 64)), (ALL, (64, 96))]


def uneven(rows: int, cols: int) -> Tensor:
    """Return normal values whose rows and columns differ in size, so that a scale from the wrong tile is seen."""
    return torch.randn(rows, cols) * (1 + torch.arange(cols) // 3 % 4) * (1 + torch.arange(rows) // 5 % 3)[:, None]


def pair(x: Tensor, tile: Tile, fmt: torch.dtype = E4M3, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes and scale_inv, of MX's tiles in E8M0."""
    return REFERENCE["cast"](x, None, 0, fmt, tile, power_of_two or tile == MX, 0)[:3:2]


def operands(shape: tuple[int, int, int], tiles: tuple[Tile, Tile], formats: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return operands of a product [M, N] with K terms."""
    M, N, K = shape
    return *pair(uneven(M, K), tiles[0], formats[0]), tiles[0], *pair(uneven(N, K), tiles[1], formats[1]), tiles[1]


def exact_product(a: Tensor, a_scale: Tensor, a_tile: Tile, b: Tensor, b_scale: Tensor, b_tile: Tile) -> Tensor:
    return definitions.dequantize(a, a_scale, a_tile) @ definitions.dequantize(b, b_scale, b_tile).t()


def of_flat(product: Callable[..., Any], op: str = "matmul") -> Callable[..., Any]:
    """Return the product as a function of the op's own arguments."""
    return unpacking({op: product})[op]


def cast_groups(x: Tensor, sizes: Sequence[int], tile: Tile, fmt: torch.dtype, pad: int = 16) -> tuple[Tensor, ...]:
    """Return (codes, transposed, scale_inv), of MX's tiles in E8M0."""
    x = x * torch.logspace(-1, 1, len(x))[:, None]
    return REFERENCE["cast"](x, None, 0, fmt, tile, set(tile) == {*MX}, 0, True, pad, offsets=offsets_of(sizes))[:3]


def rows_in_groups(
    sizes: Sequence[int], ungrouped: int, tiles: tuple[Tile, Tile], n: int, k: int, pad: int = 16
) -> tuple[Any, ...]:
    """Return operands, up to the offsets; rows of codes have no padding."""
    a, _, a_scale_inv = cast_groups(torch.randn(sum(sizes) + ungrouped, k), sizes, tiles[0], E5M2, 1)
    shape = len(sizes), n, k
    weight = cast_groups(torch.randn(len(sizes) * n, k), [n] * len(sizes), tiles[1], E4M3, 1)
    return a, a_scale_inv, tiles[0], *of_equal_groups(*weight[::2], tiles[1], shape), tiles[1], offsets_of(sizes)


def terms_in_groups(
    sizes: Sequence[int], ungrouped: int, tiles: tuple[Tile, Tile], n: int, k: int, pad: int = 16
) -> tuple[Any, ...]:
    """Return the same, of transposed codes."""
    laid = [
        (t, scale_inv.t(), tile)
        for cols, tile in zip((n, k), tiles, strict=True)
        for _, t, scale_inv in [cast_groups(torch.randn(sum(sizes) + ungrouped, cols), sizes, tile[::-1], E4M3, pad)]
    ]
    return *laid[0], *laid[1], offsets_of(sizes)


def exact_groups(sizes: Sequence[int], pad: int, *operands: Any) -> Tensor:
    """Return each group's product in float64, 0 where there is none."""
    a, a_scale, a_tile, b, b_scale, b_tile, _ = operands
    if b.ndim == 3:
        product = torch.zeros(len(a), b.shape[1], dtype=torch.float64)
        for group, (rows, scales) in enumerate(zip(slices_of(sizes), scale_slices(sizes, a_tile[0]), strict=True)):
            product[rows] = exact_product(a[rows], a_scale[scales], a_tile, b[group], b_scale[group], b_tile)
        return product
    product = torch.zeros(len(sizes), len(a), len(b), dtype=torch.float64)
    of_scales = [scale_slices(sizes, tile[1]) for tile in (a_tile, b_tile)]
    for group, (columns, *scales) in enumerate(zip(slices_of(sizes, pad), *of_scales, strict=True)):
        mine = a[:, columns], a_scale[:, scales[0]], a_tile
        product[group] = exact_product(*mine, b[:, columns], b_scale[:, scales[1]], b_tile)
    return product


def sums_shortly(kernels: TritonKernels) -> bool:
    """Whether products run, or are emulated, on tensor cores with a short accumulator: Ada's or Hopper's."""
    from triton.runtime.driver import driver

    return not kernels.interpreted and driver.active.get_current_target().arch < 100


def close(ours: Tensor, theirs: Tensor, kernels: TritonKernels | None = None, fast: bool = False) -> None:
    """Check that products are as near as sums in another order, rounded once; a short accumulator has 14 bits."""
    assert ours.shape == theirs.shape and ours.is_contiguous()
    least = {torch.float32: 110, torch.float16: 60, torch.bfloat16: 48}[ours.dtype]
    if kernels is None:  # of numbers that are rounded twice it is 70.6 and 52.6 dB
        least = {torch.float32: 125, torch.float16: 72, torch.bfloat16: 54}[ours.dtype]
    elif sums_shortly(kernels):
        least = min(least, 40 if fast else 55)
    least -= 15 * (ours.numel() < 400)  # of few elements the error is not that of many
    assert torch.equal(ours, theirs.to(ours.dtype)) or sqnr(ours, theirs) > least
