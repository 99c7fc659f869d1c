"""The products of two pairs that are timed: their operands, and that their results are right.

A product's shape is (M, N, K): [M, K] . [N, K]^T, both in E4M3. By their tiles these are the products of the recipes:
tensor . tensor is delayed's and dynamic's, rows . rows rowwise's, 1x128 . 128x128 blockwise's output and grad_input,
1x128 . 1x128 its grad_weight, 1x32 . 1x32 mx's. Those "to" something are cast in the same launch, and held against two
passes: the product in bf16, torch's where it has one here, and our cast of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import benchmarks.common.interpreter  # noqa: F401
from benchmarks.common.gpu_timer import ON_GPU, synchronize
from benchmarks.common.measure import sqnr
from benchmarks.common.roofline import product_bytes, product_flop
from benchmarks.kernels.cases import E4M3, ROWS, TENSOR, inputs
from benchmarks.kernels.plain_cases import delayed_state
from octavo.granularity import Tile
from octavo.kernels.arguments import unpacking
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.triton import KERNELS as TRITON
from octavo.kernels.triton.library_matmul import library_matmul

# by its path: the function of the same name hides the module
_module = importlib.import_module("octavo.kernels.triton.matmul")
LEAST_SQNR = 35.0  # dB of a result in bf16, whose own rounding is at 50; fast accumulation costs some
LEAST_CAST_SQNR = 25.0  # of one in E4M3, whose own is at 31
CHECKED_ROWS = 256


def _of_flat(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With ``octavo::matmul``'s own arguments."""
    return unpacking({"matmul": product})["matmul"]


class To(NamedTuple):
    """How a result is cast to E4M3: by which tile, per tensor with a delayed scale; whether also written transposed."""

    tile: Tile
    transpose: bool

    def arguments(self) -> tuple[Any, ...]:
        """What a cast takes after x."""
        state = delayed_state(0.5)[0] if self.tile == TENSOR else None  # of thousands of products nothing saturates
        return state, 0, E4M3, self.tile, self.tile[1] > 0, 0


class Product(NamedTuple):
    """Tiles of the two operands, the function, and how the result is cast."""

    a_tile: Tile
    b_tile: Tile
    function: Callable[..., Any]
    to: To | None = None


TILES: dict[str, tuple[Tile, Tile]] = {
    "tensor . tensor": (TENSOR, TENSOR),
    "rows . rows": (ROWS, ROWS),
    "1x128 . 128x128": ((1, 128), (128, 128)),
    "1x128 . 1x128": ((1, 128), (1, 128)),
    "1x32 . 1x32": ((1, 32), (1, 32)),
}
# those that torch's own product has here; a CPU has no blocks
TORCH = [name for name in TILES if name != "1x32 . 1x32" and (ON_GPU or "128" not in name)]
PRODUCTS = {f"{name}, Triton": Product(*tiles, _of_flat(_module.triton_matmul)) for name, tiles in TILES.items()}
PRODUCTS |= {f"{name}, torch": Product(*TILES[name], _of_flat(library_matmul)) for name in TORCH}
TO = {
    "tensor . tensor to delayed": To(TENSOR, False),
    "tensor . tensor to delayed + transpose": To(TENSOR, True),
    "1x128 . 128x128 to 1x128": To((1, 128), False),
    "1x128 . 128x128 to 128x128 + transpose": To((128, 128), True),
    "1x32 . 1x32 to 1x32": To((1, 32), False),
}
PRODUCTS |= {name: Product(*TILES[name.split(" to ")[0]], TRITON["matmul_cast"], to) for name, to in TO.items()}


def operand(x: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """The pair of x in E4M3; scales of blocks are powers of two."""
    return TRITON["cast"](x, None, 0, E4M3, tile, tile[1] > 0, 0)[:3:2]


def arguments(name: str, shape: tuple[int, ...], fast_accum: bool = False) -> tuple[Any, ...]:
    """What ``octavo::matmul``, or ``matmul_cast``, takes, from random numbers."""
    rows, cols, contraction = shape
    product = PRODUCTS[name]
    a, b = (
        operand(inputs(rows, contraction, 1)[0], product.a_tile),
        operand(inputs(cols, contraction, 2)[1], product.b_tile),
    )
    operands = *a, product.a_tile, *b, product.b_tile, None
    if product.to is None:
        return *operands, torch.bfloat16, fast_accum
    cast = product.to.arguments()
    synchronize()  # the scales' arrival on the host
    return *operands, fast_accum, *cast, product.to.transpose


def calls(name: str, shape: tuple[int, ...], sets: int, fast_accum: bool = False) -> list[Callable[[], Any]]:
    """The product; of one set, for it is arithmetic that bounds it."""
    function, bound = PRODUCTS[name].function, arguments(name, shape, fast_accum)
    return [lambda: function(*bound)]


def two_passes(name: str, shape: tuple[int, ...], fast_accum: bool = False) -> Callable[[], Any] | None:
    """For a product that is cast, the bf16 product and our cast of it."""
    to = PRODUCTS[name].to
    if to is None:
        return None
    bound, tiles = arguments(name, shape, fast_accum), name.split(" to ")[0]
    operands, cast = (*bound[:7], torch.bfloat16, fast_accum), bound[8:-1]
    function = PRODUCTS[f"{tiles}, torch" if tiles in TORCH else f"{tiles}, Triton"].function
    return lambda: TRITON["cast"](function(*operands), *cast, to.transpose)


def flop(shape: tuple[int, ...]) -> float:
    """Of the product."""
    return product_flop(*shape)


def moved_bytes(name: str, shape: tuple[int, ...]) -> float:
    """What the product must move at least, but for scales."""
    to = PRODUCTS[name].to
    return product_bytes(*shape, 2 if to is None or to.transpose else 1)


def wrong(name: str, shape: tuple[int, ...], fast_accum: bool = False) -> str:
    """What is wrong with its first rows, "" for nothing: against the same pairs multiplied in float32."""
    a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, *others = arguments(name, shape, fast_accum)
    result = PRODUCTS[name].function(a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, *others)
    to, rows, least = PRODUCTS[name].to, min(CHECKED_ROWS, shape[0]), LEAST_SQNR
    if to is not None:
        q, t, scale_inv, _ = result
        if to.transpose and not torch.equal(t.view(torch.uint8), q.view(torch.uint8).t()):
            return "the transposed codes are others"
        result, least = _first_rows(q, scale_inv, to.tile, rows), LEAST_CAST_SQNR
    exact = _first_rows(a, a_scale_inv, a_tile, rows)
    exact = exact @ REFERENCE["dequantize"](b, b_scale_inv, b_tile, torch.float32).t()
    found = sqnr(result[:rows].float(), exact)
    return "" if found > least else f"{found:.1f} dB"


def _first_rows(q: Tensor, scale_inv: Tensor, tile: Tile, rows: int) -> Tensor:
    """The pair's first rows in float32; as many as whole blocks of the tile."""
    scales = scale_inv if tile[0] == -1 else scale_inv[: -(-rows // tile[0])]
    return REFERENCE["dequantize"](q[:rows], scales, tile, torch.float32)


def torchao_call(name: str, shape: tuple[int, ...]) -> Callable[[], Tensor] | None:
    """torchao's own kernel for the product's tiles, where it has one: for blocks."""
    if not ON_GPU or name not in ("1x128 . 128x128", "1x128 . 1x128"):
        return None
    try:
        from torchao.prototype.blockwise_fp8_training import kernels
    except Exception:  # absent, or not for this Triton
        return None
    a, b = inputs(shape[0], shape[2], 1)[0], inputs(shape[1], shape[2], 1)[0]
    a_codes, a_scale = kernels.triton_fp8_blockwise_act_quant_lhs(a)
    if name == "1x128 . 128x128":
        b_codes, b_scale = kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(b)
        return lambda: kernels.triton_fp8_gemm_1x128_128x128(a_codes, b_codes, a_scale, b_scale, 128, torch.bfloat16)
    b_codes, b_scale = kernels.triton_fp8_blockwise_act_quant_rhs(b.t().contiguous())
    return lambda: kernels.triton_fp8_gemm_1x128_128x1(a_codes, b_codes, a_scale, b_scale, 128, torch.bfloat16)
