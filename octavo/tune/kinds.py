"""What is tuned: each row of configs.json, the cases that it serves, the configurations tried, and at which sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.kernels.triton.launch import Config

Shape = tuple[int, ...]
Buckets = Mapping[int, Sequence[Shape]]  # largest log2 of elements -> shapes timed


class Kind(NamedTuple):
    """A row of the table: its cases, the first of which decides who is timed again, its grid and its buckets."""

    cases: tuple[str, ...]
    grid: list[Config]
    buckets: Buckets


def _tiles(
    rows: Sequence[int],
    cols: Sequence[int],
    tiles: Sequence[int],
    smallest: int,
    largest: int,
    per_thread: tuple[int, int] = (16, 64),
) -> list[Config]:
    """Tiles of ``smallest`` to ``largest`` elements; each thread holds so many of them, or twice as many of 2^14."""
    found = []
    for r, c, t, warps in itertools.product(rows, cols, tiles, (2, 4, 8, 16)):
        least, most = per_thread[0], per_thread[1] * (2 if r * c >= 1 << 14 else 1)
        if smallest <= r * c <= largest and least <= r * c / (32 * warps) <= most:
            found.append(Config(r, c, t, warps))
    return found


def _products(stages: Sequence[int], warps: Sequence[int] = (4, 8), square: bool = False) -> list[Config]:
    found = []
    for m, n, s, w in itertools.product((64, 128, 256), (64, 128, 256), stages, warps):
        fits = (m + n) * 128 * s <= 220 << 10 and 64 <= m * n / (32 * w) <= 256 and (m == n or not square)
        if fits:
            found.append(Config(m, n, s, w))
    return found


SIZES = {20: ((768, 1024),), 22: ((2048, 1408),), 25: ((4096, 4096),), 64: ((16384, 8192), (15872, 4096))}
WIDE = {**SIZES, 64: ((16384, 8192), (15872, 4096), (15872, 16384))}
# of what plain casts have shown already
FEW = {22: ((2048, 1408),), 64: ((16384, 8192), (15872, 4096))}
TOY_PRODUCTS: tuple[Shape, ...] = ((32, 48, 128),)
PRODUCTS = {20: ((768, 1024, 4096),), 22: ((2048, 1408, 4096),), 64: ((8192, 8192, 8192), (15872, 4096, 4096))}

LAID = _tiles((8, 16, 32, 64), (128, 256, 512, 1024), (1, 2, 4, 8), 2048, 16384)
# two tiles a read, and what they are computed from: half the elements a thread
GRADIENTS = _tiles((8, 16, 32), (128, 256, 512), (1, 4, 8), 2048, 8192, (8, 32))
TRANSPOSED_GRADIENTS = _tiles((32, 64, 128), (32, 64, 128), (1, 4, 8), 2048, 8192, (8, 32))

KINDS = {
    "cast_transpose": Kind(
        ("cast+transpose delayed", "cast+transpose+sum+commit"),
        _tiles((32, 64, 128, 256), (32, 64, 128, 256), (1, 2, 4, 8), 4096, 16384),
        SIZES,
    ),
    "cast": Kind(("cast delayed",), LAID, SIZES),
    "amax": Kind(("amax",), LAID, SIZES),
    "cast_rows": Kind(("cast rows",), _tiles((1, 2, 4), (1024, 2048, 4096, 8192, 16384), (1,), 1024, 16384), WIDE),
    "amax_lines": Kind(
        ("cast columns", "cast rows + columns"),
        _tiles((16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8), 2048, 16384),
        SIZES,
    ),
    "cast_lines": Kind(
        ("cast rows + columns", "cast columns"), _tiles((32, 64, 128), (32, 64, 128), (1, 2, 4, 8), 2048, 16384), SIZES
    ),
    "cast_blocks": Kind(("cast 1x128",), _tiles((1, 4, 8, 16, 32, 64), (128, 256, 512), (1,), 512, 16384), SIZES),
    "cast_blocks_transpose": Kind(
        ("cast 1x128 + 128x1", "cast+transpose 128x128"), _tiles((32, 64, 128), (32, 64, 128), (1,), 1024, 16384), SIZES
    ),
    "amax_gated_gradient": Kind(("swiglu gradient + cast+transpose+sum dynamic",), GRADIENTS, FEW),
    "cast_gated_gradient": Kind(("swiglu gradient + cast+sum delayed",), GRADIENTS, FEW),
    "cast_transpose_gated_gradient": Kind(("swiglu gradient + cast+transpose+sum+commit",), TRANSPOSED_GRADIENTS, FEW),
    "cast_transpose_gated_gradient_of_codes": Kind(
        ("swiglu gradient of codes + cast+transpose+sum+commit",), TRANSPOSED_GRADIENTS, FEW
    ),
    "cast_rows_gated_gradient": Kind(
        ("swiglu gradient + rows",), _tiles((1, 2), (1024, 2048, 4096, 8192), (1,), 1024, 8192, (4, 32)), FEW
    ),
    "norm_cast": Kind(
        ("rmsnorm + cast delayed", "rmsnorm + rows"),
        _tiles((1, 2, 4), (2048, 4096, 8192, 16384), (1, 4), 4096, 16384),
        FEW,
    ),
    "norm_cast_transpose": Kind(
        ("rmsnorm + cast+transpose delayed", "layernorm + cast+transpose delayed"),
        _tiles((8, 16, 32, 64), (64, 128, 256, 512, 1024), (1,), 4096, 16384),
        FEW,
    ),
    "norm_cast_blocks": Kind(("rmsnorm + 1x128",), _tiles((1, 2, 4), (1024, 2048, 4096, 8192), (1,), 2048, 8192), FEW),
    "norm_cast_blocks_transpose": Kind(
        ("rmsnorm + 1x32 + 32x1",), _tiles((32, 64), (32, 64, 128, 256), (1,), 1024, 8192), FEW
    ),
    "norm_backward": Kind(  # tiles: how many programs a multiprocessor has
        ("rmsnorm gradient + residual", "layernorm gradient + residual"),
        _tiles((1,), (2048, 4096, 8192), (1, 2, 4), 2048, 8192, (4, 32)),
        FEW,
    ),
    "optimizer_step": Kind(
        ("AdamW fp8, split32", "AdamW fp8, E4M3 weight in blocks, split16"),
        _tiles((4, 8, 16, 32), (128,), (4, 16, 64), 512, 4096, (8, 16)),
        {64: ((16384, 8192), (2048, 1408))},
    ),
    "matmul_blocks": Kind(("1x128 . 1x128, Triton",), _products((3, 4, 5), square=True), PRODUCTS),
    "matmul_square_blocks": Kind(
        ("1x128 . 128x128, Triton",), [c for c in _products((3, 4, 5), (4, 8, 16)) if c.block_c <= 128], PRODUCTS
    ),
    "matmul": Kind(("rows . rows, Triton",), _products((3, 4, 5)), PRODUCTS),
}
