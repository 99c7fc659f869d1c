"""Every Triton kernel's machine code for Ada, Hopper and Blackwell, made and checked without a GPU.

The ops are called as recipes call them, and at sizes that use every row of configs.json. A row is a distinct kernel,
with the first case that launches it. machine_code.py says what is checked; the exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping

import triton

from benchmarks.common.measure import RESULTS, commit, table, write_results
from benchmarks.machine_code.compiled_cases import GROUPS
from benchmarks.machine_code.machine_code import examine
from benchmarks.machine_code.offline import SHARED_MEMORY, offline
from tests.support.uncompiled import uncompiled

TAKES = "12 minutes"
MEASURES = ("octavo/kernels/triton", ":!octavo/kernels/triton/replay.py")  # a first call's

CAPABILITIES = tuple(SHARED_MEMORY)


def compiled(
    capability: int, group: str, only: tuple[str, str] | None = None
) -> Iterator[tuple[dict[str, object], list[str]]]:
    """Yield the row of each distinct kernel of a group, and the checks it fails; ``only``: of this (op, case) alone."""
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
                    row, misses = examine(launch.kernel, case.bits)
                    assert row["capability"] == f"sm_{capability}"
                    yield {"op": case.op, "case": case.what, **row}, misses
            if only:
                return


@functools.cache
def group_of_cases() -> dict[tuple[str, str], str]:
    """Return the group of each case, by its (op, case); no kernel is compiled."""
    with offline(90), uncompiled():  # making a case may launch
        return {(case.op, case.what): group for group, cases in GROUPS.items() for case in cases()}


def _others(capabilities: Collection[int], groups: Collection[str]) -> list[dict[str, str]]:
    """Return the committed rows of other architectures and of other groups' cases."""
    rows, group_of = [], group_of_cases()
    with (RESULTS / "compiled.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            group, capability = group_of.get((row["op"], row["case"])), int(row["capability"].removeprefix("sm_"))
            if group is not None and not (group in groups and capability in capabilities):
                rows.append(row)
    return rows


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
