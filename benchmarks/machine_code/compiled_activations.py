"""The cases of compiled.py that compute an activation or its gradient on their way to codes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.machine_code.compiled_case import (
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
    UPDATE,
    VECTOR,
    Case,
    delayed_state,
    describe,
    tensor,
)
from octavo.granularity import Tile, granularity_of
from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.triton import KERNELS
from octavo.tune.cases import second as second_scaling


def activations() -> Iterator[Case]:
    """Each function forward and backward; then SwiGLU in all ways that recipes cast."""
    for name in ACTIVATIONS:
        yield _cast(name, False)
        yield _cast(name, True)
    for gradient in (False, True):
        for shape in (*SIZES, RAGGED):
            yield _cast("swiglu", gradient, shape=shape, delayed=False)
        yield _cast("swiglu", gradient, False)
        yield _cast("swiglu", gradient, dtype=FP32)
        yield _cast("swiglu", gradient, False, ROW)
        yield _cast("swiglu", gradient, False, COLUMN)
        yield _cast("swiglu", gradient, False, VECTOR)
        yield _cast("swiglu", gradient, tile=SQUARE)
        for first, second in ((VECTOR, (128, 1)), (MX, (32, 1)), (ROW, COLUMN)):
            yield _two_scalings("swiglu", gradient, first, second)
            yield _two_scalings("gelu", gradient, first, second)
        for h_tile in (TENSOR, VECTOR):
            yield _cast("swiglu", gradient, h_tile=h_tile)
    yield from (_commit(name, shape) for name, shape in itertools.product(("swiglu", "gelu"), SIZES))


def _arguments(
    name: str, gradient: bool, shape: tuple[int, int], dtype: torch.dtype, h_tile: Tile | None
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """(what an op casts, its last arguments); ``shape`` is that of the activation's output."""
    rows, cols = shape
    gated = ACTIVATIONS[name].gated
    h = tensor((rows, 2 * cols if gated else cols), dtype if h_tile is None else E4M3)
    read_back: tuple[Any, ...] = ()
    if h_tile is not None:
        read_back = torch.empty(granularity_of(h_tile).scale_shape(h.shape)), h_tile
    return (tensor(shape, dtype), (name, h, *read_back)) if gradient else (h, (name, None, *read_back))


def _words(name: str, gradient: bool, h_tile: Tile | None = None) -> str:
    return f"{name}{' gradient' * gradient}{'' if h_tile is None else f' of {granularity_of(h_tile)} codes'}"


def _cast(
    name: str,
    gradient: bool,
    transpose: bool = True,
    tile: Tile = TENSOR,
    shape: tuple[int, int] = LARGE,
    dtype: torch.dtype = torch.bfloat16,
    delayed: bool = True,
    h_tile: Tile | None = None,
) -> Case:
    x, activation = _arguments(name, gradient, shape, dtype, h_tile)
    state = delayed_state()[0] if delayed and tile == TENSOR else None
    codes, power_of_two = (E5M2 if gradient else E4M3), tile not in (TENSOR, ROW, COLUMN)
    arguments = x, state, 0, codes, tile, power_of_two, 0, transpose, PAD, gradient, *activation
    extra = (
        "transposed" * transpose,
        "delayed" * (state is not None),
        "column sum" * gradient,
        _words(name, gradient, h_tile),
    )
    # with eight codes a thread two tiles fit its registers
    bits = 64 if gradient and ACTIVATIONS[name].gated else 128
    return Case("cast", describe(tile, codes, x, *extra), functools.partial(KERNELS["cast"], *arguments), bits)


def _two_scalings(name: str, gradient: bool, first: Tile, second: Tile) -> Case:
    x, activation = _arguments(name, gradient, LARGE, torch.bfloat16, None)
    arguments = x, None, 0, E4M3, first, True, 0, True, PAD, gradient, *activation
    what = describe(first, E4M3, x, f"and {granularity_of(second)} transposed", _words(name, gradient))
    bits = 64 if gradient and first == ROW and ACTIVATIONS[name].gated else 128
    return Case(
        "cast_two_scalings",
        what,
        functools.partial(KERNELS["cast"], *arguments, **second_scaling(second, True)),
        bits,
    )


def _commit(name: str, shape: tuple[int, int]) -> Case:
    x, activation = _arguments(name, True, shape, torch.bfloat16, None)
    one = torch.ones(1, 1)
    arguments = x, *delayed_state(), one, one, E5M2, False, 0, *UPDATE, True, PAD, True, *activation
    call = functools.partial(KERNELS["cast_and_commit"], *arguments)
    what = describe(TENSOR, E5M2, x, "transposed column sum", _words(name, True))
    return Case("cast_and_commit", what, call, 64 if ACTIVATIONS[name].gated else 128)
