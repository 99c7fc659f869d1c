"""Every kernel's compiled PTX run by the emulator on four architectures: right or not, and what its accesses cost.

The cases are those of ``kernels``, of ``octavo tune``, the products, and for the other kernels what test_compiled.py
calls, whose sizes say nothing. Of each launch, an element: instructions of threads; bytes of the sectors of 32 that
global loads and stores touch, and how many times the fewest that hold what they ask for; shared memory's wavefronts,
and how many times the fewest. Tiles are those of large tensors; a norm's gradient, whose programs go over all rows, has
one multiprocessor, so that a program has as many rows as of 8192 on a GPU. Rows that are of the sources as they are
stay: a run that was stopped goes on, and --only makes the named cases anew.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import triton

from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import Row, markdown, read
from benchmarks.subjects import change_since
from emulator import Options
from emulator.memory import SECTOR, Count
from emulator.parse import Instruction
from octavo.kernels.triton import cases
from octavo.kernels.triton import launch as launching
from octavo.tune.timing import describe
from tests.kernels.triton import test_compiled
from tests.support import triton_kernels
from tests.support.emulated import DEVICES, Done, emulating
from tests.support.triton_kernels import PACKAGE

TAKES = "12 minutes"
MEASURES = ("octavo/kernels/triton", ":!octavo/kernels/triton/replay.py", "emulator")  # first calls

SHAPE, TALL, WIDE = (256, 512), (1024, 512), (64, 8192)
PRODUCT = (256, 256, 512)
NAMES = [*cases.CASES, *cases.ONLY_TUNED, *cases.STEPS, *(name for name in cases.PRODUCTS if name.endswith("Triton"))]
NAMES += test_compiled.CALLS
Rows = list[dict[str, object]]


def kind_of(key: tuple[Instruction, str]) -> str:
    """Return the kind of a counted access: shared, or of global memory a load (an asynchronous copy too) or a store."""
    instruction, space = key
    return "shared" if space == "shared" else "store" if instruction.name.startswith(("st", "red")) else "load"


def shape_of(name: str) -> tuple[int, ...]:
    """Return the shape of a case's tensor: groups of whole tiles; a model's rows where a program owns rows."""
    if name in test_compiled.CALLS:
        return (0, 0)
    if name in cases.PRODUCTS:
        return PRODUCT
    return TALL if name.startswith(("grouped", "five")) else WIDE if "norm" in name or "rows" in name else SHAPE


def rows_of(capability: int, name: str) -> Rows:
    """Return a row for each kernel that a case launches."""
    shape = shape_of(name)
    torch.manual_seed(0)
    began = time.perf_counter()
    with emulating(capability, Options(counts=True)) as done, _large_tiles():
        problem = _wrong(name, shape)
    by_kernel: dict[str, list[Done]] = defaultdict(list)
    for launch in done:
        by_kernel[launch.kernel].append(launch)
    seconds = time.perf_counter() - began
    elements, first = shape[0] * shape[1], {"architecture": f"sm_{capability}", "case": name}
    first["shape"] = "x".join(map(str, shape))
    last = {"right": problem or "yes", "case_seconds": f"{seconds:.1f}"}
    return [first | _counted(kernel, kernel_launches, elements) | last for kernel, kernel_launches in by_kernel.items()]


def _wrong(name: str, shape: tuple[int, ...]) -> str:
    if name in test_compiled.CALLS:
        try:
            test_compiled.check(name, triton_kernels.load(False))
        except AssertionError as error:
            return describe(error)
        return ""
    return cases.ALL_CASES[name].wrong(shape)


@contextmanager
def _large_tiles() -> Iterator[None]:
    """Give kernels the configurations of large tensors."""
    original = launching.config

    def config(kernel: str, log2_elements: int) -> launching.Config:
        return original(kernel, max(log2_elements, 27))

    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{PACKAGE}.") and getattr(module, "config", None) is original:
                patches.enter_context(mock.patch.object(module, "config", config))
        gradients = sys.modules[f"{PACKAGE}.norm_kernels"]
        patches.enter_context(mock.patch.object(gradients, "multiprocessors", lambda index: 1))
        yield


def _counted(kernel: str, launches: list[Done], elements: int) -> dict[str, object]:
    """Return the costs of one launch of a kernel, an element."""
    counts: defaultdict[str, Count] = defaultdict(Count)
    for one in launches:
        for key, count in one.launch.counts.items():
            counts[kind_of(key)] += count

    def an_element(value: float, digits: int) -> str:
        return f"{value / len(launches) / elements:.{digits}f}" if elements else ""

    def over(kind: str) -> str:
        return f"{counts[kind].got / counts[kind].least:.2f}" if counts[kind].least else ""

    return {
        "kernel": kernel,
        "launches": len(launches),
        "programs": launches[0].grid[0],
        "instructions_an_element": an_element(sum(sum(one.launch.executed) for one in launches), 1),
        "loaded_bytes_an_element": an_element(counts["load"].got * SECTOR, 3),
        "load_sectors_by_least": over("load"),
        "stored_bytes_an_element": an_element(counts["store"].got * SECTOR, 3),
        "store_sectors_by_least": over("store"),
        "wavefronts_an_element": an_element(counts["shared"].got, 4),
        "wavefronts_by_least": over("shared"),
    }


def committed() -> dict[tuple[int, str], Rows]:
    """Return the committed rows, by capability and case."""
    rows_by_case: dict[tuple[int, str], Rows] = defaultdict(list)
    for row in read("emulated"):
        rows_by_case[int(row["architecture"].removeprefix("sm_")), row["case"]].append({**row})
    return rows_by_case


MOST = 1.05  # times the least sectors, of stores


def _scattered(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of sized cases whose stores touch more sectors than they should."""
    return [row for row in rows if row["stored_bytes_an_element"] and float(row["store_sectors_by_least"] or 0) > MOST]


def _architectures() -> str:
    """Return a table by architecture: cases, kernels, right rows, and rows that cost more than they must."""
    header = ("architecture", "cases", "kernels", "right", "wavefronts by least, at most", f"stores over {MOST}")
    lines = []
    for name, rows in itertools.groupby(read("emulated"), lambda row: row["architecture"]):
        rows_here = [*rows]
        counts = (str(len({row[column] for row in rows_here})) for column in ("case", "kernel"))
        right = f"{sum(row['right'] == 'yes' for row in rows_here)} of {len(rows_here)} rows"
        wavefronts = max(row["wavefronts_by_least"] for row in rows_here if row["wavefronts_an_element"])
        lines.append((name, *counts, right, wavefronts, f"{len(_scattered(rows_here))} rows"))
    return markdown(header, lines)


def _scattered_stores() -> str:
    """Return a table of the kernels that write more sectors than they must, on Hopper."""
    header = "case", "kernel", "bytes an element", "by least"
    columns = "case", "kernel", "stored_bytes_an_element", "store_sectors_by_least"
    rows = _scattered(row for row in read("emulated") if row["architecture"] == "sm_90")
    return markdown(header, ([row[column] for column in columns] for row in rows))


TABLES = {"emulated": _architectures, "stores": _scattered_stores}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks emulated", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--architectures", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows_by_case, origin = committed(), {"triton": triton.__version__, "commit": commit()}
    fresh = {str(row["commit"]) for row in itertools.chain(*rows_by_case.values())}
    fresh = {one for one in fresh if change_since(one, MEASURES) == ""}
    new_rows: Rows = []
    for capability, name in itertools.product(options.architectures, NAMES):
        key = capability, name
        if options.only not in name or (not options.only and {row["commit"] for row in rows_by_case[key]} & fresh):
            continue
        rows_by_case[key] = [{**row, **origin} for row in rows_of(capability, name)]
        new_rows += rows_by_case[key]
        print(*table(rows_by_case[key]).splitlines()[1:], sep="\n", flush=True)
        if not options.no_write:
            every = itertools.chain.from_iterable(rows_by_case[one] for one in itertools.product(DEVICES, NAMES))
            write_results("emulated", [*every], origin=origin)
    wrong = [row for row in new_rows if row["right"] != "yes"]
    print(f"{len(new_rows) - len(wrong)} of {len(new_rows)} right")
    return int(bool(wrong))
