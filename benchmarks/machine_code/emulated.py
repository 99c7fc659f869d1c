"""Every kernel's compiled PTX run by the emulator on four architectures: right or not, and what its accesses cost.

The cases are those of ``kernels``, and the products. Of each launch: instructions of threads an element; sectors of 32
bytes that global loads and stores touch, beside the fewest that hold their bytes; shared memory's wavefronts, beside
the fewest. Tiles are those of large tensors.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import triton

from benchmarks.common.measure import commit, table, write_results
from emulator import Options
from emulator.counters import Count
from emulator.parse import Instruction
from octavo.kernels.triton import launch as launching
from octavo.tune import cases, products
from octavo.tune.step_cases import CASES as STEPS
from tests.support.emulated import DEVICES, Done, emulating

TAKES = "40 minutes"
MEASURES = ("octavo/kernels/triton", "emulator")

SHAPE = (256, 512)
PRODUCT = (256, 256, 512)


def kind_of(key: tuple[Instruction, str]) -> str:
    """What a counted access is: shared, or of global memory a load (an asynchronous copy too) or a store."""
    one, space = key
    return "shared" if space == "shared" else "store" if one.name.startswith(("st", "red")) else "load"


def rows_of(capability: int, name: str) -> list[dict[str, object]]:
    """A row for each kernel that a case launches."""
    is_product = name in products.PRODUCTS
    elements = PRODUCT[0] * PRODUCT[1] if is_product else SHAPE[0] * SHAPE[1]
    began = time.perf_counter()
    with _large_tiles(), emulating(capability, Options(counts=True)) as done:
        problem = products.wrong(name, PRODUCT) if is_product else cases.wrong(name, cases.inputs(*SHAPE, 1)[0])
    by_kernel: dict[str, list[Done]] = defaultdict(list)
    for one in done:
        by_kernel[one.kernel].append(one)
    seconds = time.perf_counter() - began
    return [_row(capability, name, kernel, found, elements, problem, seconds) for kernel, found in by_kernel.items()]


@contextmanager
def _large_tiles() -> Iterator[None]:
    """Kernels take the configurations of large tensors."""
    original = launching.config

    def config(kernel: str, log2_elements: int) -> launching.Config:
        return original(kernel, max(log2_elements, 27))

    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("octavo.kernels.triton.") and getattr(module, "config", None) is original:
                patches.enter_context(mock.patch.object(module, "config", config))
        yield


def _row(
    capability: int, case: str, kernel: str, launches: list[Done], elements: int, problem: str, seconds: float
) -> dict[str, object]:
    counts: defaultdict[str, Count] = defaultdict(Count)
    for one in launches:
        for key, count in one.launch.counts.items():
            counts[kind_of(key)] += count
    executed = sum(sum(one.launch.executed) for one in launches)

    def over(kind: str) -> str:
        return f"{counts[kind].got / counts[kind].least:.2f}" if counts[kind].least else ""

    return {
        "architecture": f"sm_{capability}",
        "case": case,
        "kernel": kernel,
        "right": problem or "yes",
        "launches": len(launches),
        "programs": launches[0].grid[0],
        "instructions_an_element": f"{executed / len(launches) / elements:.1f}",
        "loaded_bytes_an_element": f"{counts['load'].bytes / len(launches) / elements:.2f}",
        "load_sectors_by_least": over("load"),
        "stored_bytes_an_element": f"{counts['store'].bytes / len(launches) / elements:.2f}",
        "store_sectors_by_least": over("store"),
        "shared_wavefronts_by_least": over("shared"),
        "case_seconds": f"{seconds:.1f}",
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks emulated", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--architectures", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    names = [*cases.CASES, *STEPS, *(name for name in products.PRODUCTS if name.endswith("Triton"))]
    rows: list[dict[str, object]] = []
    for capability in options.architectures:
        for name in names:
            if options.only in name:
                torch.manual_seed(0)
                found = rows_of(capability, name)
                print(*table(found).splitlines()[-len(found) :], sep="\n", flush=True)
                rows += found
    wrong = [row for row in rows if row["right"] != "yes"]
    if not options.no_write and not options.only:
        print(
            f"written to {write_results('emulated', rows, origin={'triton': triton.__version__, 'commit': commit()})}"
        )
    print(f"{len(rows) - len(wrong)} of {len(rows)} right")
    return int(bool(wrong))
