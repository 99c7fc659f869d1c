"""Every Triton kernel's machine code for Hopper and Blackwell, made and checked without a GPU.

The ops are called as recipes call them, and at sizes that use every row of configs.json. A row is a distinct kernel,
with the first case that launches it. machine_code.py says what is checked; the exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.machine_code import examine
from benchmarks.measure import commit, table, write_results
from benchmarks.offline import SHARED_MEMORY, offline
from octavo.granularity import ALL, Tile, granularity_of
from octavo.kernels.triton import KERNELS
from octavo.kernels.triton.launch import TABLE
from octavo.kernels.triton.matmul import triton_matmul

CAPABILITIES = tuple(SHARED_MEMORY)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, COLUMN = (ALL, ALL), (1, ALL), (ALL, 1)
VECTOR, SQUARE, MX = (1, 128), (128, 128), (1, 32)
PAD = 16


class Case(NamedTuple):
    """A call of an op that launches kernels, whose accesses of tiles should have so many ``bits``."""

    op: str
    what: str
    call: Callable[[], object]
    bits: int = 128


def _sizes() -> list[tuple[int, int]]:
    """Shapes of which each row of configs.json serves one."""
    *bounds, _ = sorted({row[0] for rows in TABLE.values() for row in rows})  # the last row serves any larger size
    logs = [*bounds, bounds[-1] + 4 if bounds else 24]
    return [(1 << (log - 1 - log // 2), 1 << (log // 2)) for log in logs]


SIZES = _sizes()
LARGE = SIZES[-1]
RAGGED = (1000, 8176)  # not made of whole tiles, yet aligned


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_").removesuffix("fn")


def _describe(tile: Tile, codes: torch.dtype, x: Tensor, *more: str) -> str:
    rows, cols = x.shape
    words = [
        granularity_of(tile),
        _name(codes),
        *(word for word in more if word),
        f"of {_name(x.dtype)} [{rows}, {cols}]",
    ]
    return " ".join(map(str, words))


def _x(shape: tuple[int, int] = LARGE, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # never read, so its memory isn't even touched


def _cast(
    op: str,
    tile: Tile,
    codes: torch.dtype = E4M3,
    x: Tensor | None = None,
    column_sum: bool = False,
    power_of_two: bool = False,
    state: Tensor | None = None,
    pad: int = PAD,
) -> Case:
    x = _x() if x is None else x
    extra = (
        "delayed" if state is not None else "",
        "power of two" if power_of_two else "",
        "column sum" if column_sum else "",
    )
    arguments = (x, state, 0, codes, tile, power_of_two, 0, pad, column_sum)
    return Case(op, _describe(tile, codes, x, *extra), functools.partial(KERNELS[op], *arguments))


def amax() -> Iterator[Case]:
    for tile in (TENSOR, ROW, SQUARE):
        call = functools.partial(KERNELS["amax"], _x(), tile)
        yield Case("amax", f"{granularity_of(tile)} of bfloat16 {list(LARGE)}", call)


UPDATE = (448.0, 448.0, 57344.0), (False,) * 3, (0,) * 3, "max"


def _state(length: int = 16) -> tuple[Tensor, Tensor]:
    """(scale, history) of a module that has stepped, so that no amax is looked for before the cast."""
    state = torch.ones(3), torch.zeros(3, length)
    one = torch.ones(1, 1)
    KERNELS["delayed_update"](*state, one, one, one, *UPDATE)
    return state


def per_tensor() -> Iterator[Case]:
    for op in ("cast", "cast_transpose"):
        for shape in SIZES:
            yield _cast(op, TENSOR, E5M2, _x(shape), column_sum=True)
        yield _cast(op, TENSOR)
        yield _cast(op, TENSOR, state=_state()[0])
    yield _cast("cast_transpose", TENSOR, state=torch.ones(3))  # a first step, whose scale may not exist
    yield _cast("cast_transpose", TENSOR, x=_x(RAGGED), power_of_two=True)
    yield _cast("cast_transpose", TENSOR, x=_x(dtype=FP32))
    yield _cast("cast", TENSOR, x=_x().t())


def per_row() -> Iterator[Case]:
    for tile, shape in itertools.product((ROW, COLUMN), ((4096, 1024), (1024, 8192), RAGGED)):
        yield _cast("cast", tile, x=_x(shape))
    yield _cast("cast", COLUMN, column_sum=True)
    yield _cast("cast", ROW, E5M2, x=_x().t())
    yield _cast("cast_transpose", ROW)
    yield _cast("cast", ROW, x=_x(dtype=FP32))
    yield _two_scalings(ROW, COLUMN, True, True)


def per_block() -> Iterator[Case]:
    for tile in (VECTOR, (128, 1), SQUARE, MX, (32, 1)):
        for op in ("cast", "cast_transpose"):
            yield _cast(op, tile, power_of_two=True)
    yield _cast("cast", VECTOR, E5M2, column_sum=True)
    yield _cast("cast_transpose", SQUARE, x=_x(dtype=FP32), power_of_two=True)
    yield _cast("cast_transpose", SQUARE, x=_x(RAGGED), power_of_two=True)
    yield _cast("cast_transpose", (3, 5), x=_x((1000, 999)), pad=1)._replace(bits=8)


def two_scalings() -> Iterator[Case]:
    pairs = (VECTOR, (128, 1)), (MX, (32, 1))
    for (first, second), transpose, column_sum in itertools.product(pairs, (True, False), (True, False)):
        yield _two_scalings(first, second, transpose, column_sum)
    yield _two_scalings(VECTOR, (128, 1), True, False, RAGGED)


def _two_scalings(first: Tile, second: Tile, transpose: bool, column_sum: bool, shape: tuple[int, int] = LARGE) -> Case:
    x = _x(shape)
    arguments = (x, E4M3, first, True, 0, E4M3, second, True, 0, transpose, PAD, column_sum)
    extra = "transposed" if transpose else "", "column sum" if column_sum else ""
    what = _describe(first, E4M3, x, f"and {granularity_of(second)} {_name(E4M3)}", *extra)
    return Case("cast_two_scalings", what, functools.partial(KERNELS["cast_two_scalings"], *arguments))


def commit_cases() -> Iterator[Case]:
    one = torch.ones(1, 1)
    calls = [(shape, True, True, one) for shape in SIZES]
    calls += [(LARGE, False, True, one), (LARGE, True, False, one), (LARGE, True, True, None)]
    for shape, transpose, column_sum, amax_weight in calls:
        x = _x(shape)
        arguments = (x, *_state(), one, amax_weight, E5M2, False, 0, *UPDATE, transpose, PAD, column_sum)
        extra = (
            "transposed" if transpose else "",
            "column sum" if column_sum else "",
            "weight cached" if amax_weight is None else "",
        )
        call = functools.partial(KERNELS["cast_and_commit"], *arguments)
        yield Case("cast_and_commit", _describe(TENSOR, E5M2, x, *extra), call)
    for length in (16, 1024):
        call = functools.partial(KERNELS["delayed_update"], *_state(length), one, one, None, *UPDATE)
        yield Case("delayed_update", f"input and weight, history of {length}", call)


def dequantize() -> Iterator[Case]:
    for codes, tile, dtype in ((E4M3, TENSOR, BF16), (E4M3, TENSOR, FP32), (E5M2, ROW, BF16), (E4M3, SQUARE, BF16)):
        q = _x(dtype=codes)
        scale_inv = torch.empty(granularity_of(tile).scale_shape(LARGE))
        call = functools.partial(KERNELS["dequantize"], q, scale_inv, tile, dtype)
        yield Case("dequantize", f"{granularity_of(tile)} {_name(codes)} to {_name(dtype)} {list(LARGE)}", call)


def matmul() -> Iterator[Case]:
    """The Triton kernel for every pair of granularities, though for some a GPU runs torch's own product."""
    for shape in SIZES:
        yield _product(shape, E4M3, TENSOR, TENSOR, fast=True, bias=True)
        yield _product(shape, E4M3, VECTOR, SQUARE)
    yield _product(LARGE, E5M2, TENSOR, TENSOR)
    yield _product(LARGE, E4M3, ROW, ROW)
    yield _product(LARGE, E4M3, VECTOR, VECTOR)
    yield _product(LARGE, E4M3, MX, MX)._replace(bits=64)  # a step of b is 8 bytes a thread
    yield _product(LARGE, E4M3, TENSOR, TENSOR, dtype=FP32, K=4096 + 16)


def _product(
    shape: tuple[int, int],
    a_codes: torch.dtype,
    a_tile: Tile,
    b_tile: Tile,
    dtype: torch.dtype = BF16,
    fast: bool = False,
    bias: bool = False,
    K: int = 4096,
) -> Case:
    M, N = shape
    a, b = _x((M, K), a_codes), _x((N, K), E4M3)
    scales = [torch.empty(granularity_of(tile).scale_shape(q.shape)) for q, tile in ((a, a_tile), (b, b_tile))]
    added = torch.empty(N, dtype=dtype) if bias else None
    arguments = (a, scales[0], a_tile, b, scales[1], b_tile, added, dtype, fast)
    kinds = f"{granularity_of(a_tile)} {_name(a_codes)} . {granularity_of(b_tile)} {_name(E4M3)}"
    what = f"{kinds} to {_name(dtype)}{' bias' * bias}{' fast' * fast} [{M}, {N}, {K}]"
    return Case("matmul", what, functools.partial(triton_matmul, *arguments))


def many_tensors() -> Iterator[Case]:
    xs = [_x(shape) for shape in (*SIZES, LARGE)]
    for tile, transpose, delayed in ((TENSOR, True, False), (TENSOR, False, True), (SQUARE, True, False)):
        laid = [torch.empty(x.shape[::-1], dtype=E4M3) for x in xs] if transpose else []
        found = [[torch.empty(granularity_of(tile).scale_shape(x.shape)) for x in xs] for _ in range(2)]
        scales = [_state()[0] for _ in xs] if delayed else []
        qs = [torch.empty(x.shape, dtype=E4M3) for x in xs]
        arguments = (xs, qs, laid, *found, scales, 1, tile, False, 0)
        words = f"{granularity_of(tile)} e4m3{' delayed' * delayed}{' transposed' * transpose} of {len(xs)} bfloat16"
        yield Case("multi_tensor_cast", words, functools.partial(KERNELS["multi_tensor_cast"], *arguments))


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "amax": amax,
    "per tensor": per_tensor,
    "per row": per_row,
    "per block": per_block,
    "two scalings": two_scalings,
    "commit": commit_cases,
    "dequantize": dequantize,
    "matmul": matmul,
    "many tensors": many_tensors,
}


def compiled(capability: int, group: str) -> Iterator[tuple[dict[str, object], list[str]]]:
    """The row of each distinct kernel of a group, and what is amiss with it."""
    seen = set()
    with offline(capability) as launches:
        for case in GROUPS[group]():
            launches.clear()  # making a case may launch too
            case.call()
            for launch in launches:
                if launch.kernel.hash not in seen:
                    seen.add(launch.kernel.hash)
                    found, misses = examine(launch.kernel, case.bits)
                    assert found["capability"] == f"sm_{capability}"
                    yield {"op": case.op, "case": case.what, **found}, misses


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compiled", description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows, failures = [], []
    for capability, group in itertools.product(CAPABILITIES, GROUPS):
        for row, misses in compiled(capability, group):
            rows.append(row)
            failures += [
                f"MISSED: {row['kernel']} {row['capability']}, {row['op']} {row['case']}: {miss}" for miss in misses
            ]
    print(table(rows))
    if not options.no_write:
        origin = {"triton": triton.__version__, "commit": commit()}
        print(f"written to {write_results('compiled', rows, origin=origin)}")
    print(*failures, f"{len(rows)} kernels, {len(failures)} checks missed", sep="\n")
    return int(bool(failures))
