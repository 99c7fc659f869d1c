"""The cases of compiled.py whose rows are in groups, as experts' are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from benchmarks.machine_code.compiled_case import (
    BF16,
    COLUMN,
    E4M3,
    E5M2,
    FP32,
    LARGE,
    MX,
    PAD,
    RAGGED,
    ROW,
    SIZES,
    SQUARE,
    TENSOR,
    VECTOR,
    Case,
    delayed_state,
    describe,
    name_of,
    scales,
    tensor,
    terms_scales,
)
from octavo.granularity import Tile, granularity_of, scale_shape
from octavo.kernels.arguments import unpacking
from octavo.kernels.groups import grouped_scale_shape, padded_columns
from octavo.kernels.triton import KERNELS
from octavo.kernels.triton.grouped_matmul import triton_grouped_matmul
from octavo.kernels.triton.library_matmul import library_grouped_matmul

GROUPS = 128


def offsets(groups: int = GROUPS) -> torch.Tensor:
    """Groups' ends, which nothing reads."""
    return torch.empty(groups, dtype=torch.int32)


def grouped() -> Iterator[Case]:
    """Casts as each recipe makes them of tokens, gradients and weights; then the products."""
    for shape, transpose in itertools.product(SIZES, (False, True)):
        yield _cast(TENSOR, transpose, shape=shape)
        yield _cast(TENSOR, transpose, shape=shape, delayed=True)
    for shape in (LARGE, RAGGED):
        yield _cast(COLUMN, True, as_is=False, shape=shape)
        yield _cast(ROW, False, shape=shape)
        for tile in (VECTOR, MX):
            yield _cast(tile, False, shape=shape)
            yield _cast(tile[::-1], True, as_is=False, shape=shape)
        yield _cast(SQUARE, True, shape=shape)
    for extras in (("swiglu",), ("swiglu", True)):
        for tile, transpose in ((TENSOR, True), (ROW, False), (VECTOR, False), ((128, 1), True), ((32, 1), True)):
            yield _cast(tile, transpose, tile != (128, 1), LARGE, tile == TENSOR, *extras)
        yield _cast(COLUMN, True, False, LARGE, False, *extras)
        yield _cast((128, 1), True, False, LARGE, False, *extras, h_tile=VECTOR)
    for shape in SIZES:
        yield _rows(shape, TENSOR, TENSOR)
        yield _rows(shape, VECTOR, SQUARE)
    yield _rows(LARGE, ROW, ROW, dtype=FP32, bias=True)
    yield _rows(LARGE, MX, MX)
    yield _rows((16384, 4096), VECTOR, SQUARE)
    for tile in (TENSOR, ROW, VECTOR, MX):
        yield _terms(tile)
    for tile in (ROW, MX):
        yield _rows(LARGE, tile, tile, call=_library)


def statistics() -> Iterator[Case]:
    """What octavo.inspect reads of rows in groups."""
    one, found = torch.ones(1, dtype=torch.int32), torch.zeros(4)
    for tile in (TENSOR, ROW, SQUARE):
        q, scale_inv = tensor(dtype=E4M3), torch.empty(grouped_scale_shape(LARGE, GROUPS, tile))
        where = f"{granularity_of(tile)} e4m3 {list(LARGE)} in {GROUPS} groups"
        sums, extremes = torch.empty(GROUPS, 71, dtype=torch.float64), torch.empty(GROUPS, 3)
        counted = tensor(), q, scale_inv, tile, sums, extremes, offsets()
        yield Case("cast_statistics", where, functools.partial(KERNELS["cast_statistics"], *counted))
        noted = tensor(), q, scale_inv, None, one, found, one, offsets()
        yield Case("note_faults", where, functools.partial(KERNELS["note_faults"], *noted))


def _cast(
    tile: Tile,
    transpose: bool,
    as_is: bool = True,
    shape: tuple[int, int] = LARGE,
    delayed: bool = False,
    activation: str = "",
    gradient: bool = False,
    h_tile: Tile | None = None,
) -> Case:
    rows, cols = shape
    h = tensor((rows, 2 * cols), BF16 if h_tile is None else E4M3)
    scale_inv = None if h_tile is None else torch.empty(grouped_scale_shape((rows, 2 * cols), GROUPS, h_tile))
    x: torch.Tensor = tensor(shape) if gradient or not activation else h
    extras: tuple[Any, ...] = (activation, h if gradient else None, scale_inv, h_tile or TENSOR)
    codes = E5M2 if gradient else E4M3
    state = delayed_state()[0] if delayed else None
    power_of_two = tile not in (TENSOR, ROW, COLUMN)
    groups = {"offsets": offsets(), "as_is": as_is}
    arguments = x, state, 0, codes, tile, power_of_two, 0, transpose, PAD, False, *extras
    words = (
        "only transposed" if transpose and not as_is else "transposed" if transpose else "",
        "delayed" if delayed else "",
        f"{activation}{' gradient' * gradient}{' of codes' * (h_tile is not None)}",
    )
    what = f"{describe(tile, codes, x, *words)} in {GROUPS} groups"
    bits = 64 if gradient and TENSOR[0] in tile else 128  # with eight codes a thread two tiles fit its registers
    return Case("grouped_cast", what, functools.partial(KERNELS["cast"], *arguments, **groups), bits)


_TRITON = unpacking({"grouped_matmul": triton_grouped_matmul})["grouped_matmul"]
_LIBRARY = unpacking({"grouped_matmul": lambda operands, _, fast: library_grouped_matmul(operands, fast)})


def _library(*arguments: Any) -> None:
    """What octavo launches around torch's own product."""
    with mock.patch.object(F, "scaled_grouped_mm", lambda a, b, *_, **__: a.new_empty(len(a), b.shape[-1], dtype=BF16)):
        _LIBRARY["grouped_matmul"](*arguments)


def _product(what: str, *arguments: Any, call: Callable[..., Any] = _TRITON) -> Case:
    return Case("grouped_matmul", what, functools.partial(call, *arguments))


def _rows(
    shape: tuple[int, int],
    a_tile: Tile,
    b_tile: Tile,
    K: int = 2048,
    dtype: torch.dtype = BF16,
    bias: bool = False,
    call: Callable[..., Any] | None = None,
) -> Case:
    M, N = shape
    groups = 8
    a, b = tensor((M, K), E4M3), tensor((groups, N, K), E4M3)
    shapes = grouped_scale_shape((M, K), groups, a_tile), scale_shape(b.shape, b_tile)
    if b_tile == TENSOR:
        shapes = shapes[0], (groups, 1, 1)
    of_a, of_b = (scales(shape, tile) for shape, tile in zip(shapes, (a_tile, b_tile), strict=True))
    added = torch.empty(groups, N, dtype=dtype) if bias else None
    what = f"{granularity_of(a_tile)} e4m3 . {granularity_of(b_tile)} e4m3 to {name_of(dtype)}{' bias' * bias}"
    arguments = a, of_a, a_tile, b, of_b, b_tile, offsets(groups), added, dtype, False
    what += f" [{M}, {N}, {K}], rows in {groups} groups{', by torch' * (call is not None)}"
    return _product(what, *arguments, call=call or _TRITON)


def _terms(tile: Tile, N: int = 2048, K: int = 2048, rows: int = 16384) -> Case:
    groups = 8
    columns = padded_columns(rows, groups, PAD)
    pairs = [(tensor((size, columns), E4M3), terms_scales((rows, size), groups, tile), tile) for size in (N, K)]
    what = f"{granularity_of(tile)} e4m3 . the same to bfloat16 [{N}, {K}, {rows}], terms in {groups} groups"
    return _product(what, *pairs[0], *pairs[1], offsets(groups), None, BF16, False, PAD)
