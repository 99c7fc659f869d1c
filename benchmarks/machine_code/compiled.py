"""Every Triton kernel's machine code for Ada, Hopper and Blackwell, made and checked without a GPU.

The ops are called as recipes call them, and at sizes that use every row of configs.json. A row is a distinct kernel,
with the first case that launches it. machine_code.py says what is checked; the exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import triton
from torch import Tensor

from benchmarks.common.measure import RESULTS, commit, table, write_results
from benchmarks.machine_code.compiled_activations import activations
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
    UPDATE,
    VECTOR,
    Case,
    delayed_state,
    describe,
    name_of,
    scales,
    tensor,
)
from benchmarks.machine_code.compiled_groups import grouped, statistics
from benchmarks.machine_code.compiled_norms import norm, norm_backward
from benchmarks.machine_code.compiled_optimizer import optimizer
from benchmarks.machine_code.machine_code import examine
from benchmarks.machine_code.offline import SHARED_MEMORY, offline
from octavo.granularity import Tile, granularity_of, scale_shape
from octavo.kernels.arguments import unpacking
from octavo.kernels.triton import KERNELS
from octavo.kernels.triton.matmul import triton_matmul
from octavo.tune.cases import second as second_scaling

TAKES = "12 minutes"
MEASURES = ("octavo/kernels/triton",)

CAPABILITIES = tuple(SHARED_MEMORY)
_TRITON_MATMUL = unpacking({"matmul": triton_matmul})["matmul"]


def _cast(
    transpose: bool,
    tile: Tile,
    codes: torch.dtype = E4M3,
    x: Tensor | None = None,
    column_sum: bool = False,
    power_of_two: bool = False,
    state: Tensor | None = None,
    pad: int = PAD,
) -> Case:
    x = tensor() if x is None else x
    extra = (
        "transposed" if transpose else "",
        "delayed" if state is not None else "",
        "power of two" if power_of_two else "",
        "column sum" if column_sum else "",
    )
    arguments = (x, state, 0, codes, tile, power_of_two, 0, transpose, pad, column_sum)
    return Case("cast", describe(tile, codes, x, *extra), functools.partial(KERNELS["cast"], *arguments))


def amax() -> Iterator[Case]:
    for tile in (TENSOR, ROW, SQUARE):
        call = functools.partial(KERNELS["amax"], tensor(), tile)
        yield Case("amax", f"{granularity_of(tile)} of bfloat16 {list(LARGE)}", call)


def per_tensor() -> Iterator[Case]:
    for transpose in (False, True):
        for shape in SIZES:
            yield _cast(transpose, TENSOR, E5M2, tensor(shape), column_sum=True)
        yield _cast(transpose, TENSOR)
        yield _cast(transpose, TENSOR, state=delayed_state()[0])
    yield _cast(True, TENSOR, state=torch.ones(3))  # a first step, whose scale may not exist
    yield _cast(True, TENSOR, x=tensor(RAGGED), power_of_two=True)
    yield _cast(True, TENSOR, x=tensor(dtype=FP32))
    yield _cast(False, TENSOR, x=tensor().t())


def per_row() -> Iterator[Case]:
    for tile, shape in itertools.product((ROW, COLUMN), ((4096, 1024), (1024, 8192), RAGGED)):
        yield _cast(False, tile, x=tensor(shape))
    yield _cast(False, COLUMN, column_sum=True)
    yield _cast(False, ROW, E5M2, x=tensor().t())
    yield _cast(True, ROW)
    yield _cast(False, ROW, x=tensor(dtype=FP32))
    yield _two_scalings(ROW, COLUMN, True, True)


def per_block() -> Iterator[Case]:
    for tile in (VECTOR, (128, 1), SQUARE, MX, (32, 1)):
        for transpose in (False, True):
            yield _cast(transpose, tile, power_of_two=True)
    yield _cast(False, VECTOR, E5M2, column_sum=True)
    yield _cast(True, SQUARE, x=tensor(dtype=FP32), power_of_two=True)
    yield _cast(True, SQUARE, x=tensor(RAGGED), power_of_two=True)


def two_scalings() -> Iterator[Case]:
    pairs = (VECTOR, (128, 1)), (MX, (32, 1))
    for (first, second), transpose, column_sum in itertools.product(pairs, (True, False), (True, False)):
        yield _two_scalings(first, second, transpose, column_sum)
    yield _two_scalings(VECTOR, (128, 1), True, False, RAGGED)


def _two_scalings(first: Tile, second: Tile, transpose: bool, column_sum: bool, shape: tuple[int, int] = LARGE) -> Case:
    x = tensor(shape)
    arguments = x, None, 0, E4M3, first, True, 0, transpose, PAD, column_sum
    extra = "transposed" if transpose else "", "column sum" if column_sum else ""
    what = describe(first, E4M3, x, f"and {granularity_of(second)} {name_of(E4M3)}", *extra)
    return Case(
        "cast_two_scalings", what, functools.partial(KERNELS["cast"], *arguments, **second_scaling(second, True))
    )


def commit_cases() -> Iterator[Case]:
    one = torch.ones(1, 1)
    calls = [(shape, True, True, one) for shape in SIZES]
    calls += [(LARGE, False, True, one), (LARGE, True, False, one), (LARGE, True, True, None)]
    for shape, transpose, column_sum, amax_weight in calls:
        x = tensor(shape)
        arguments = (x, *delayed_state(), one, amax_weight, E5M2, False, 0, *UPDATE, transpose, PAD, column_sum)
        extra = (
            "transposed" if transpose else "",
            "column sum" if column_sum else "",
            "weight cached" if amax_weight is None else "",
        )
        call = functools.partial(KERNELS["cast_and_commit"], *arguments)
        yield Case("cast_and_commit", describe(TENSOR, E5M2, x, *extra), call)
    for length in (16, 1024):
        call = functools.partial(KERNELS["delayed_update"], *delayed_state(length), one, one, None, *UPDATE)
        yield Case("delayed_update", f"input and weight, history of {length}", call)


def dequantize() -> Iterator[Case]:
    for codes, tile, dtype in ((E4M3, TENSOR, BF16), (E4M3, TENSOR, FP32), (E5M2, ROW, BF16), (E4M3, SQUARE, BF16)):
        q = tensor(dtype=codes)
        scale_inv = torch.empty(granularity_of(tile).scale_shape(LARGE))
        call = functools.partial(KERNELS["dequantize"], q, scale_inv, tile, dtype)
        yield Case("dequantize", f"{granularity_of(tile)} {name_of(codes)} to {name_of(dtype)} {list(LARGE)}", call)
        sums, extremes = torch.empty(71, dtype=torch.float64), torch.empty(3)
        call = functools.partial(KERNELS["cast_statistics"], tensor(dtype=dtype), q, scale_inv, tile, sums, extremes)
        yield Case(
            "cast_statistics", f"{granularity_of(tile)} {name_of(codes)} of {name_of(dtype)} {list(LARGE)}", call
        )


def note_faults() -> Iterator[Case]:
    one, found = torch.ones(1, dtype=torch.int32), torch.zeros(4)
    for shape, tile, dtype, amax in (
        (LARGE, TENSOR, E5M2, torch.ones(1, 1)),
        (LARGE, VECTOR, E4M3, None),
        (LARGE, ROW, BF16, None),
        ((1, 1), TENSOR, E4M3, None),
    ):
        scale_inv = torch.empty(granularity_of(tile).scale_shape(shape))
        call = functools.partial(
            KERNELS["note_faults"], tensor(shape), tensor(shape, dtype), scale_inv, amax, one, found, one
        )
        extra = "" if amax is None else ", Delayed"
        yield Case("note_faults", f"{granularity_of(tile)} {name_of(dtype)} {list(shape)}{extra}", call)


def matmul() -> Iterator[Case]:
    """The Triton kernel for every pair of granularities, though for some a GPU runs torch's own product."""
    for shape in SIZES:
        yield _product(shape, E4M3, TENSOR, TENSOR, fast=True, bias=True)
        yield _product(shape, E4M3, VECTOR, SQUARE)
    yield _product(LARGE, E5M2, TENSOR, TENSOR)
    yield _product(LARGE, E4M3, ROW, ROW)
    yield _product(LARGE, E4M3, VECTOR, VECTOR)
    yield _product(LARGE, E4M3, MX, MX)
    yield _product(SIZES[0], E4M3, MX, MX)
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
    a, b = tensor((M, K), a_codes), tensor((N, K), E4M3)
    scale_invs = [scales(scale_shape(q.shape, tile), tile) for q, tile in ((a, a_tile), (b, b_tile))]
    added = torch.empty(N, dtype=dtype) if bias else None
    arguments = (a, scale_invs[0], a_tile, b, scale_invs[1], b_tile, added, dtype, fast)
    kinds = f"{granularity_of(a_tile)} {name_of(a_codes)} . {granularity_of(b_tile)} {name_of(E4M3)}"
    what = f"{kinds} to {name_of(dtype)}{' bias' * bias}{' fast' * fast} [{M}, {N}, {K}]"
    return Case("matmul", what, functools.partial(_TRITON_MATMUL, *arguments))


def many_tensors() -> Iterator[Case]:
    xs = [tensor(shape) for shape in (SIZES[0], LARGE, LARGE)]
    for tile, transpose, delayed in ((TENSOR, True, False), (TENSOR, False, True), (SQUARE, True, False)):
        laid = [torch.empty(x.shape[::-1], dtype=E4M3) for x in xs] if transpose else []
        found = [[torch.empty(granularity_of(tile).scale_shape(x.shape)) for x in xs] for _ in range(2)]
        scales = [delayed_state()[0] for _ in xs] if delayed else []
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
    "note faults": note_faults,
    "matmul": matmul,
    "many tensors": many_tensors,
    "activations": activations,
    "grouped": grouped,
    "statistics of groups": statistics,
    "norm": norm,
    "norm backward": norm_backward,
    "optimizer": optimizer,
}


def compiled(
    capability: int, group: str, only: tuple[str, str] | None = None
) -> Iterator[tuple[dict[str, object], list[str]]]:
    """The row of each distinct kernel of a group, and what is amiss with it; of ``only`` one (op, case) where given."""
    seen = set()
    with offline(capability) as launches:
        for case in GROUPS[group]():
            if only not in (None, (case.op, case.what)):
                continue
            launches.clear()  # making a case may launch too
            case.call()
            for launch in launches:
                if launch.kernel.hash not in seen:
                    seen.add(launch.kernel.hash)
                    found, misses = examine(launch.kernel, case.bits)
                    assert found["capability"] == f"sm_{capability}"
                    yield {"op": case.op, "case": case.what, **found}, misses


def _others(capabilities: Collection[int], groups: Collection[str]) -> list[dict[str, str]]:
    """The committed rows of other architectures and of other groups' cases."""
    with offline(90):  # making a case may launch
        group_of = {(case.op, case.what): group for group, cases in GROUPS.items() for case in cases()}
    kept = []
    with (RESULTS / "compiled.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            group, capability = group_of.get((row["op"], row["case"])), int(row["capability"].removeprefix("sm_"))
            if group is not None and not (group in groups and capability in capabilities):
                kept.append(row)
    return kept


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compiled", description=__doc__)
    parser.add_argument(
        "--capability", type=int, choices=CAPABILITIES, nargs="+", default=CAPABILITIES, help="architectures"
    )
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=[*GROUPS], help="groups of cases")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows: list[Mapping[str, object]] = []
    failures = []
    for capability, group in itertools.product(options.capability, options.only):
        for row, misses in compiled(capability, group):
            rows.append(row)
            failures += [
                f"MISSED: {row['kernel']} {row['capability']}, {row['op']} {row['case']}: {miss}" for miss in misses
            ]
    print(table(rows))
    if not options.no_write:
        origin = {"triton": triton.__version__, "commit": commit()}
        every = [*_others(options.capability, options.only), *rows]  # which stay as they are
        print(f"written to {write_results('compiled', every, origin=origin)}")
    print(*failures, f"{len(rows)} kernels, {len(failures)} checks missed", sep="\n")
    return int(bool(failures))
