"""The products of two pairs that are timed: their operands, and whether their results are right.

A product of shape (M, N, K) is [M, K] . [N, K]^T, both in E4M3. They are named by the operands' tiles. delayed and
dynamic have tensor . tensor, rowwise has rows . rows, blockwise has 1x128 . 128x128 for output and grad_input and 1x128
. 1x128 for grad_weight, mx has 1x32 . 1x32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.granularity import Tile
from octavo.kernels.arguments import unpacking
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.triton import KERNELS as TRITON
from octavo.kernels.triton.library_matmul import library_matmul
from octavo.tune.agreement import sqnr
from octavo.tune.cases import E4M3, ROWS, TENSOR, inputs
from octavo.tune.timing import ON_GPU

# by its path: the function of the same name hides the module
_module = importlib.import_module("octavo.kernels.triton.matmul")
LEAST_SQNR = 35.0  # dB of a result in bf16, whose rounding alone gives 50; fast accumulation costs some
CHECKED_ROWS = 256


def _of_flat(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product as a function of ``octavo::matmul``'s arguments."""
    return unpacking({"matmul": product})["matmul"]


class ProductKind(NamedTuple):
    """Tiles of the two operands, and the function."""

    a_tile: Tile
    b_tile: Tile
    function: Callable[..., Any]


TILES: dict[str, tuple[Tile, Tile]] = {
    "tensor . tensor": (TENSOR, TENSOR),
    "rows . rows": (ROWS, ROWS),
    "1x128 . 128x128": ((1, 128), (128, 128)),
    "1x128 . 1x128": ((1, 128), (1, 128)),
    "1x32 . 1x32": ((1, 32), (1, 32)),
}
# those that torch has here; on a CPU it has none of blocks, and torch 2.11 has none at all
_ON_CPU = torch.__version__ >= "2.12"
TORCH = [name for name in TILES if name != "1x32 . 1x32" and (ON_GPU or (_ON_CPU and "128" not in name))]
PRODUCTS = {f"{name}, Triton": ProductKind(*tiles, _of_flat(_module.triton_matmul)) for name, tiles in TILES.items()}
PRODUCTS |= {f"{name}, torch": ProductKind(*TILES[name], _of_flat(library_matmul)) for name in TORCH}


def operand(x: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """The pair of x in E4M3; scales of blocks are powers of two."""
    return TRITON["cast"](x, None, 0, E4M3, tile, tile[1] > 0, 0)[:3:2]


def arguments(name: str, shape: tuple[int, ...], fast_accum: bool = False) -> tuple[Any, ...]:
    """What ``octavo::matmul`` takes, from random numbers."""
    rows, cols, contraction = shape
    product = PRODUCTS[name]
    a, b = (
        operand(inputs(rows, contraction, 1)[0], product.a_tile),
        operand(inputs(cols, contraction, 2)[1], product.b_tile),
    )
    return *a, product.a_tile, *b, product.b_tile, None, torch.bfloat16, fast_accum


def calls(name: str, shape: tuple[int, ...], fast_accum: bool = False) -> list[Callable[[], Any]]:
    """A call of the product; on one input, as arithmetic bounds it, and not memory."""
    function, bound = PRODUCTS[name].function, arguments(name, shape, fast_accum)
    return [lambda: function(*bound)]


def wrong(name: str, shape: tuple[int, ...], fast_accum: bool = False) -> str:
    """What is wrong with the product's first rows, by the same pairs multiplied in float32; "" if nothing is."""
    a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, *others = arguments(name, shape, fast_accum)
    result = PRODUCTS[name].function(a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, *others)
    rows = min(CHECKED_ROWS, shape[0])
    exact = _first_rows(a, a_scale_inv, a_tile, rows)
    exact = exact @ REFERENCE["dequantize"](b, b_scale_inv, b_tile, torch.float32).t()
    found = sqnr(result[:rows].float(), exact)
    return "" if found > LEAST_SQNR else f"{found:.1f} dB"


def _first_rows(q: Tensor, scale_inv: Tensor, tile: Tile, rows: int) -> Tensor:
    """A pair's first rows in float32."""
    scales = scale_inv if tile[0] == -1 else scale_inv[: -(-rows // tile[0])]
    return REFERENCE["dequantize"](q[:rows], scales, tile, torch.float32)
