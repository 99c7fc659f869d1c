"""Every kernel on a GPU: time, bytes, share of the measured peak; beside it the same by others.

A cast or a norm is held against the copy bandwidth, a product against the FP8 rate, both measured in the same run. A
kernel whose results are not its reference's has no time, but FAILED and what differs. The aim is for 16384x8192. Times
are of the device alone: the host runs ahead. Of casts and norms rate is TB/s; of products TFLOP/s, and inductor_us is
bf16's torch.mm. Others: torch.compile of plain torch, torchao, and of activations and norms Liger-Kernel, which writes
bf16, and Transformer Engine (te); a column is empty where a library is not installed or has no such kernel.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.measure import LiveTable, write_results
from benchmarks.common.pages import markdown, read
from benchmarks.common.rehearsal import rehearsed
from benchmarks.common.roofline import Peaks, floor_seconds, peaks, product_bytes, product_flop
from benchmarks.kernels.libraries import torchao_product
from benchmarks.kernels.rivals import RIVALS, rivals_of
from octavo.kernels.triton import cases
from octavo.tune.timing import ON_GPU, Deadline, describe, precompile, timings

TAKES = "a GPU; 4 minutes"
MEASURES = ("octavo/kernels/triton",)

SHAPES = ((16384, 8192), (4096, 4096), (2048, 1408))
PRODUCT_SHAPES = ((8192, 8192, 8192), (15872, 4096, 4096))
TOY_SHAPE, TOY_PRODUCT_SHAPES = (128, 128), ((32, 48, 128),)
TOY_SHAPE_OF = {**dict.fromkeys(cases.FUSED, (128, 256)), "five weights at once": (32, 64)}
AIM = 0.85  # of copy bandwidth, casts and norms at the first shape
BUILD_S = 2.0  # to compile one rival that was compiled ahead

COLUMNS = {"op": 44, "shape": 15, "us": 8, "moved_mb": 8, "rate": 7, "of_peak": 7}
COLUMNS |= {"inductor_us": 11, "torchao_us": 10, "liger_us": 8, "te_us": 8}

Row = dict[str, str]


def compile_one(name: str, shape: tuple[int, ...]) -> None:
    """Run a case and its rivals, or a product, once, to fill the compilers' caches: a worker's task."""
    cases.ALL_CASES[name].call_of(shape)()
    if name not in cases.PRODUCTS:
        for rival in rivals_of(name, False).values():
            rival.bound(cases.reads(name, shape))()
    elif torchao := torchao_product(name, shape):
        torchao()


def _row(name: str, shape: tuple[int, ...], **values: object) -> Row:
    """Return a row with all columns."""
    return {
        "op": name,
        "shape": "x".join(map(str, shape)),
        **dict.fromkeys(("us", "moved_mb", "rate", "of_peak", *(f"{who}_us" for who in RIVALS), "floor_us"), ""),
        **{key: str(value) for key, value in values.items()},
    }


def _number(value: float, digits: int = 1) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def moved_bytes(name: str, inputs: Sequence[Tensor], result: Any) -> int:
    """Return the least bytes that a case must move."""
    outputs = (result,) if isinstance(result, Tensor) else result
    read = sum(tensor.nbytes for tensor in inputs)
    return cases.CASES[name].reads * read + sum(output.nbytes for output in outputs)


def cast_row(name: str, shape: tuple[int, ...], peak: Peaks, toy: bool, with_rivals: bool) -> Row:
    """Time one case at one shape, and return its row."""
    if problem := cases.ALL_CASES[name].wrong(shape):
        return _row(name, shape, us="FAILED", note=problem)
    call, inputs = cases.ALL_CASES[name].call_of(shape), cases.reads(name, shape)
    nbytes = moved_bytes(name, inputs, call())
    others = rivals_of(name, toy) if with_rivals else {}
    bound = {who: rival.bound(inputs) for who, rival in others.items()}
    times = timings({"octavo": call, **bound}, 1 if toy else 15)
    seconds = times.median("octavo")
    if "octavo" in times.errors:
        return _row(name, shape, us="FAILED", note=times.errors["octavo"])
    notes = [f"{who}: {error}" for who, error in times.errors.items()]
    notes += [rival.note for who, rival in others.items() if rival.note and who in times.seconds]
    return _row(
        name,
        shape,
        us=_number(seconds * 1e6),
        moved_mb=_number(nbytes / 1e6),
        rate=_number(nbytes / seconds / 1e12, 3),
        of_peak=_number(nbytes / seconds / peak.copy, 3),
        floor_us=_number(floor_seconds(peak, nbytes) * 1e6),
        note="; ".join(notes),
        **{f"{who}_us": _number(times.median(who) * 1e6) for who in RIVALS},
    )


def product_row(name: str, shape: tuple[int, ...], peak: Peaks, toy: bool, with_rivals: bool) -> Row:
    """Time one product, and return its row; bf16's time is in inductor's column."""
    note, fast = "", name.endswith("fast")
    if problem := cases.ALL_CASES[name].wrong(shape):
        return _row(name, shape, us="FAILED", note=problem)
    a, b = (cases.normal((rows, shape[2])) for rows in shape[:2])
    variants: dict[str, Callable[[], Any]] = {
        "octavo": cases.ALL_CASES[name].call_of(shape),
        "bf16": lambda: torch.mm(a, b.t()),
    }
    try:
        torchao = torchao_product(name, shape) if with_rivals else None
    except Exception as error:
        torchao, note = None, f"torchao: {describe(error)}; "
    if torchao is not None:
        variants["torchao"] = torchao
    times = timings(variants, 1 if toy else 10)
    seconds, flop = times.median("octavo"), product_flop(*shape)
    if "octavo" in times.errors:
        return _row(name, shape, us="FAILED", note=times.errors["octavo"])
    nbytes = product_bytes(*shape)
    return _row(
        name,
        shape,
        us=_number(seconds * 1e6),
        moved_mb=_number(nbytes / 1e6),
        rate=_number(flop / seconds / 1e12, 0 if ON_GPU else 6),
        of_peak=_number(flop / seconds / (peak.fp8 if fast else peak.fp8_exact), 3),
        floor_us=_number(floor_seconds(peak, nbytes, flop, fast) * 1e6),
        inductor_us=_number(times.median("bf16") * 1e6),
        torchao_us=_number(times.median("torchao") * 1e6),
        note=note + "; ".join(f"{who}: {error}" for who, error in times.errors.items()),
    )


Task = tuple[str, tuple[int, ...], Callable[[Peaks, bool], Row]]


def _tasks(toy: bool) -> Iterator[Task]:
    """Yield the tasks, the most important first: (name, shape, the function that makes its row)."""
    product_shapes, passes = (TOY_PRODUCT_SHAPES, 1) if toy else (PRODUCT_SHAPES, len(SHAPES))

    def cast(name: str, number: int) -> Task:
        shape = TOY_SHAPE_OF.get(name, TOY_SHAPE) if toy else SHAPES[number]
        return name, shape, lambda peak, rival: cast_row(name, shape, peak, toy, rival)

    def product(name: str, shape: tuple[int, ...]) -> Task:
        return name, shape, lambda peak, rival: product_row(name, shape, peak, toy, rival)

    yield from (cast(name, 0) for name in cases.CASES)
    yield from (product(name, product_shapes[0]) for name in cases.PRODUCTS)
    yield from (cast(name, number) for number in range(1, passes) for name in cases.CASES)
    yield from (product(name, shape) for shape in product_shapes[1:] for name in cases.PRODUCTS)


def has_aim(op: str) -> bool:
    """Whether AIM is meant for this kernel: a cast or a norm."""
    return op.startswith("cast") or op in cases.FUSED


def verdicts(rows: list[Row], main_shape: str) -> int:
    """Print ok or MISSED for each cast and norm at the main shape; return 1 if one was missed or failed."""
    missed = [row["op"] for row in rows if row["us"] == "FAILED"]
    for name in missed:
        print(f"FAILED: {name}")
    for row in rows:
        is_cast = has_aim(row["op"]) and row["shape"] == main_shape and row["us"] != "FAILED"
        if is_cast and float(row["of_peak"]) < AIM:
            missed.append(row["op"])
            print(f"MISSED: {row['op']} {row['of_peak']} of copy bandwidth, aim {AIM}")
        elif is_cast:
            print(f"ok: {row['op']} {row['of_peak']} of copy bandwidth, aim {AIM}")
    return int(bool(missed))


def _times(row: Row, key: str) -> str:
    """Return how many times as long another library takes; "" if it was not timed."""
    return f"{float(row[key]) / float(row['us']):.2f}" if row.get(key) else ""


def casts_table() -> str:
    """Return the table of docs/kernels.md: casts and norms at the largest shape."""
    rows = (row for row in read("kernels") if row["shape"] == "x".join(map(str, SHAPES[0])))
    modelled = {row["op"]: row["us"] for row in read("predictions") if row["measured_us"]}
    lines = (
        [
            *(row["op"], row["us"], f"{float(row['of_peak']):.2f}", _times(row, "inductor_us")),
            *(_times(row, "torchao_us"), modelled.get(row["op"], "")),
        ]
        for row in rows
    )
    columns = (
        "cast",
        "us",
        "of copy bandwidth",
        "torch.compile's time by ours",
        "torchao's",
        "us modelled, of kernels now",
    )
    return markdown(columns, lines)


def products_table() -> str:
    """Return the table of docs/kernels.md: products by octavo's kernel and by torch's."""
    rows = {row["op"]: row for row in read("kernels") if row["op"] in cases.PRODUCTS or "torch" in row["op"]}
    lines = []
    for name in cases.PRODUCT_BLOCKS:
        pairs = [rows.get(f"{name}, {who}{fast}") for fast in (", fast", "") for who in ("Triton", "torch")]
        lines.append([name, *("" if row is None else row["rate"] for row in pairs)])
    ways = [f"{who}, {sums}" for sums in ("short sums", "float32 sums") for who in ("Triton", "torch")]
    return markdown(("TFLOP/s", *ways), lines)


def liger_table() -> str:
    """Return the table of docs/hugging-face.md: SwiGLU with its cast, and Liger-Kernel's SwiGLU before a cast."""
    shape = "x".join(map(str, SHAPES[0]))
    rows = {row["op"]: row for row in read("kernels") if row["shape"] == shape}
    lines = []
    for op, row in rows.items():
        function, _, cast = op.partition(" + ")
        alone = rows.get(cast) or rows.get(f"cast {cast}")
        if function.startswith("swiglu") and row["liger_us"] and alone is not None:
            both = float(row["liger_us"]) + float(alone["us"])
            lines.append([function, alone["op"], row["us"], row["liger_us"], f"{both:.1f}"])
    columns = ("function", "cast", "octavo, both in one, us", "Liger's function, us", "and octavo's cast after it, us")
    return markdown(columns, lines)


TABLES = {"casts": casts_table, "products": products_table}
LIGER = {"liger": liger_table}


@rehearsed()
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny shapes, with or without a GPU; no aim counts")
    parser.add_argument("--minutes", type=float, default=3.5, help="what is not timed by then is left out")
    parser.add_argument("--no-rivals", action="store_true", help="without torch.compile and other libraries")
    parser.add_argument("--output", type=Path, help="the CSV, instead of results/kernels-<device>.csv")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.toy:
        parser.error("times of kernels need an NVIDIA GPU; --toy runs the code without one")
    deadline = Deadline(options.minutes)
    peak = peaks(options.toy)
    print(peak, flush=True)
    tasks = list(_tasks(options.toy))
    if ON_GPU and not options.toy:
        ahead = list(dict.fromkeys((name, shape) for name, shape, _ in tasks))
        failures = precompile(compile_one, ahead, options.minutes / 2)
        print(f"compiled ahead, {deadline.left():.0f} s left; failed: {failures[:3] or 'none'}", flush=True)
    rows: list[Row] = []
    live = LiveTable(COLUMNS)
    for index, (name, shape, make) in enumerate(tasks):
        if deadline.left() < 5:
            print(f"{len(tasks) - index} rows left out: no time", flush=True)
            break
        # rivals only while there is time for all rows that come after without them
        rival = not options.no_rivals and deadline.left() > 5 + 0.3 * (len(tasks) - index) + BUILD_S
        try:
            row = make(peak, rival)
        except Exception as error:
            row = _row(name, shape, us="FAILED", note=describe(error))
        rows.append({**row, "note": row.get("note", "")})
        live.add(rows[-1])
        if not options.no_write:
            write_results("kernels", rows, options.output)
        if ON_GPU:
            torch.cuda.empty_cache()
    return verdicts(rows, "x".join(map(str, SHAPES[0])))
