"""Operands of products of pairs, and how near two products must be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.granularity import Tile
from octavo.kernels.arguments import unpacking
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.helpers import sqnr
from tests.support.triton_kernels import TritonKernels

ROWS, BLOCK, SQUARE, MX = (1, -1), (1, 128), (128, 128), (1, 32)


def operand(rows: int, cols: int, tile: Tile, fmt: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scale_inv, of MX's tiles in E8M0."""
    x = torch.randn(rows, cols) * torch.logspace(-2, 2, rows)[:, None]
    return REFERENCE["cast"](x, None, 0, fmt, tile, tile == MX, 0)[:3:2]


def of_flat(product: Callable[..., Any]) -> Callable[..., Any]:
    """With the op's own arguments."""
    return unpacking({"matmul": product})["matmul"]


def operands(shape: tuple[int, int, int], tiles: tuple[Tile, Tile], formats: tuple[Any, Any]) -> tuple[Any, ...]:
    M, N, K = shape
    return *operand(M, K, tiles[0], formats[0]), tiles[0], *operand(N, K, tiles[1], formats[1]), tiles[1]


def sums_shortly(kernels: TritonKernels) -> bool:
    """Whether products run, or are emulated, on tensor cores with a short accumulator: Ada's or Hopper's."""
    from triton.runtime.driver import driver

    return not kernels.interpreted and driver.active.get_current_target().arch < 100


def close(ours: Tensor, theirs: Tensor, kernels: TritonKernels, fast: bool = False) -> None:
    """As near as sums in another order are; the tensor cores' short accumulator has 14 bits."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.is_contiguous()
    least = {torch.float32: 110, torch.float16: 60, torch.bfloat16: 48}[ours.dtype]
    least = min(least, 40 if fast else 55) if sums_shortly(kernels) else least
    assert torch.equal(ours, theirs) or sqnr(ours, theirs) > least
