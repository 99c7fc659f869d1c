"""The cases of compiled.py that normalise rows on their way to codes, and those of the gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.machine_code.compiled_case import (
    BF16,
    COLUMN,
    E4M3,
    FP32,
    LARGE,
    MX,
    PAD,
    RAGGED,
    ROW,
    TENSOR,
    VECTOR,
    Case,
    delayed_state,
    describe,
    name_of,
    tensor,
)
from octavo.granularity import Tile, granularity_of
from octavo.kernels.triton import KERNELS
from octavo.tune.cases import second as second_scaling

LONG = (2048, 32768)  # rows that no tile holds


def norm() -> Iterator[Case]:
    for transpose, shape in itertools.product((True, False), (LARGE, LONG)):
        yield _norm("layer_norm", TENSOR, transpose, shape, state=delayed_state()[0])
    yield _norm("layer_norm", TENSOR, True, RAGGED, state=delayed_state()[0], keep=True)
    yield _norm("layer_norm", TENSOR, True, dtype=FP32, state=delayed_state()[0], keep=True)
    for tile, shape in itertools.product((ROW, VECTOR), (LARGE, LONG, RAGGED, (16384, 1024), (4096, 16384))):
        yield _norm("layer_norm", tile, False, shape)
    for kind in ("layer_norm", "rms_norm"):
        yield _norm(kind, TENSOR, True, state=torch.ones(3))  # a first step, whose scale may not exist
        yield _norm(kind, TENSOR, False, dtype=FP32, keep=True)
        yield _norm(kind, TENSOR, True, state=delayed_state()[0])
        yield _norm(kind, ROW, True, RAGGED)
        yield _norm(kind, MX, True)
        for pair in ((ROW, COLUMN), (VECTOR, (128, 1)), (MX, (32, 1))):
            yield _norm_two_scalings(kind, *pair)


def _normed(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Any]]:
    """X, and a norm of it as the cast takes it."""
    gamma = torch.empty(shape[1], dtype=dtype)
    beta = gamma.clone() if kind == "layer_norm" else None
    return tensor(shape, dtype), {"gamma": gamma, "beta": beta, "kind": kind, "eps": 1e-5}


def _norm(
    kind: str,
    tile: Tile,
    transpose: bool,
    shape: tuple[int, int] = LARGE,
    dtype: torch.dtype = BF16,
    state: torch.Tensor | None = None,
    keep: bool = False,
) -> Case:
    x, norm = _normed(kind, shape, dtype)
    extra = kind, "delayed" * (state is not None), "transposed" * transpose, "and y" * keep
    cast = x, state, 0, E4M3, tile, False, 0, transpose, PAD
    call = functools.partial(KERNELS["cast"], *cast, **norm, keep=keep)
    return Case("norm_cast", describe(tile, E4M3, x, *extra), call)


def _norm_two_scalings(kind: str, first: Tile, second: Tile) -> Case:
    x, norm = _normed(kind, LARGE, BF16)
    arguments = x, None, 0, E4M3, first, True, 0, True, PAD
    what = describe(first, E4M3, x, f"and {granularity_of(second)} transposed", kind)
    return Case(
        "norm_cast_two_scalings",
        what,
        functools.partial(KERNELS["cast"], *arguments, **norm, **second_scaling(second, True)),
    )


def norm_backward() -> Iterator[Case]:
    shapes = LARGE, (16384, 1024), (4096, 8192), LONG, RAGGED
    cases = [("layer_norm", shape, dtype, True) for shape, dtype in itertools.product(shapes, (BF16, FP32))]
    cases += [("rms_norm", shape, BF16, False) for shape in (LARGE, LONG)]
    for kind, shape, dtype, residual in cases:
        x, gamma = tensor(shape, dtype), torch.empty(shape[1], dtype=dtype)
        rows = torch.empty(shape[0])
        arguments = x, x, gamma, rows, rows, kind, False, kind == "layer_norm", x if residual else None
        what = f"{kind} of {name_of(dtype)} {list(shape)}{' and a residual' * residual}"
        yield Case("norm_backward", what, functools.partial(KERNELS["norm_backward"], *arguments))
