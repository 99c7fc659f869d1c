"""A fair timer, an error measure, and results with their provenance, for all benchmarks."""

from __future__ import annotations

import csv
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.subjects import RESULTS, ROOT, git

UNCOMMITTED = ROOT / "runs/benchmarks"  # not in git


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, calls: int = 1, warmup: int = 1
) -> dict[str, list[float]]:
    """Return seconds a call, ``rounds`` readings a variant, in turn, so that drift of the machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + rounds):
        for name, call in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """Return the median over rounds of this variant's time by the base's in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def device_name() -> str:
    """Return a short name of the device that FP8 runs on here, fit for a file name."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    match = re.search(r"model name\s*:\s*(.+)", text)
    return f"cpu {match.group(1) if match else platform.processor() or platform.machine()}"


def commit() -> str:
    """Return the commit checked out, with + if the tree is changed; without git, the value of OCTAVO_COMMIT."""
    if named := os.environ.get("OCTAVO_COMMIT"):
        return named
    changed = "+" if git("status", "--porcelain", "--", "octavo", "emulator", "benchmarks/*.py") else ""
    return (git("rev-parse", "--short", "HEAD") or "").strip() + changed


def provenance() -> dict[str, str]:
    """Return the provenance of a row: device, threads, versions, commit."""
    return {
        "device": device_name(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": commit(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def write_results(
    subject: str,
    rows: Sequence[Mapping[str, object]],
    path: Path | None = None,
    origin: Mapping[str, str] | None = None,
) -> Path:
    """Write rows, each with its provenance, to results/<subject>-<device>.csv.

    ``origin`` is the provenance of what doesn't depend on the device, and is written to results/<subject>.csv. Rows of
    changes that are not committed go to runs/benchmarks/: nobody could make them again. A row of an earlier run brings
    its own.
    """
    name = f"{subject}-{device_name()}.csv" if origin is None else f"{subject}.csv"
    origin = provenance() if origin is None else origin
    path = path or (UNCOMMITTED if origin.get("commit", "").endswith("+") else RESULTS) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys([*rows[0], *origin]))
        writer.writeheader()
        writer.writerows({**origin, **row} for row in rows)
    return path


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as text, columns aligned."""
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


class LiveTable:
    """Prints rows one by one, in columns of fixed widths; a row's ``note`` goes under it."""

    def __init__(self, widths: Mapping[str, int]) -> None:
        self._widths = widths
        self._printed_header = False

    def add(self, row: Mapping[str, object]) -> None:
        """Print one row."""
        if not self._printed_header:
            self._print({name: name for name in self._widths})
            self._printed_header = True
        self._print(row)
        if row.get("note"):
            print(f"    {row['note']}", flush=True)

    def _print(self, row: Mapping[str, object]) -> None:
        cells = (str(row.get(name, "")).ljust(width) for name, width in self._widths.items())
        print(" ".join(cells).rstrip(), flush=True)
