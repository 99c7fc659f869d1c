"""What eight bits do to Adam's state: each formula of docs/study/optimizer-state.md beside a Monte-Carlo check.

Every table of that page is printed from results/optimizer_state-<device>.csv, the last one from
optimizer_convergence's: ``--tables`` prints them again without a run. The checks below a run are those of the page.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.common.measure import RESULTS, device_name, write_results
from benchmarks.optimizer.optimizer_state_rounding import STUDIES as ROUNDING
from benchmarks.optimizer.optimizer_state_rounding import TOY, Row, Sizes
from benchmarks.optimizer.optimizer_state_runs import STUDIES as RUNS

TAKES = "3 minutes"
MEASURES = ("octavo/optim/moment.py",)

# What was derived is measured within this part of it. (The noise of rounding is derived to first order.)
HOLDS = {
    "error": 0.03,
    "limit": 0.001,
    "ratchet": 0.03,
    "noise": 0.15,
    "update": 0.15,
    "without v": 0.03,
    "bound": 1e-9,
}


def as_cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Rows of a CSV; what was not derived or not measured is empty."""

    def text(value: float | None) -> str:
        return "" if value is None or math.isnan(value) else f"{value:.5g}"

    return [
        {
            "study": row.study,
            "case": row.case,
            "quantity": row.quantity,
            "derived": text(row.derived),
            "measured": text(row.measured),
        }
        for row in rows
    ]


def tables(cells: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A table in Markdown for each study: cases down, quantities across; of two numbers the first was derived."""
    found = {}
    for study in dict.fromkeys(row["study"] for row in cells):
        of = {(row["case"], row["quantity"]): row for row in cells if row["study"] == study}
        cases, quantities = (list(dict.fromkeys(key[i] for key in of)) for i in (0, 1))
        columns = []
        for quantity in quantities:
            column = [of.get((case, quantity), {"derived": "", "measured": ""}) for case in cases]
            kinds = [kind for kind in ("derived", "measured") if any(row[kind] for row in column)]
            columns.append([" / ".join(short(row[kind]) for kind in kinds) for row in column])
        lines = [["", *quantities], ["---"] * (len(quantities) + 1)]
        lines += [[case, *(column[i] for column in columns)] for i, case in enumerate(cases)]
        found[study] = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return found


def short(value: str) -> str:
    """A number as tables have it."""
    if not value:
        return "–"
    return f"{float(value):.4g}".replace("-", "−")


def convergence_table() -> str:
    """What optimizer_convergence found, as a table in Markdown; every committed file of it."""
    of: dict[str, dict[str, Mapping[str, str]]] = {}
    for path in sorted(RESULTS.glob("optimizer_convergence*.csv")):
        for row in rows_of(path):
            if {"scheme", "beta2", "mean_gap", "largest_gap"} <= row.keys():
                of.setdefault(row["scheme"], {})[row["beta2"]] = row
    betas = sorted({beta2 for found in of.values() for beta2 in found})
    lines = [["scheme", *(f"β2 = {b}: loss, mean gap, largest" for b in betas)], ["---"] * (len(betas) + 1)]
    for scheme, found in of.items():
        parts = [
            [found[b][name] for name in ("loss", "mean_gap", "largest_gap")] if b in found else ["–"] for b in betas
        ]
        lines.append([scheme, *(", ".join(part).replace("-", "−") for part in parts)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def missed(rows: Sequence[Row]) -> list[Row]:
    """The rows whose measured number is not the derived one."""
    pairs = [row for row in rows if row.study in HOLDS and row.derived is not None and row.measured is not None]
    return [row for row in pairs if abs(row.measured - row.derived) > HOLDS[row.study] * max(abs(row.derived), 0.3)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizer_state", description=__doc__)
    parser.add_argument("--tables", action="store_true", help="print the committed results as tables, run nothing")
    parser.add_argument("--toy", action="store_true", help="run it all, tiny; the numbers mean nothing")
    parser.add_argument("--output", type=Path, help="the CSV to write")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if options.tables:
        print_tables(rows_of(options.output or committed()))
        return 0
    torch.set_num_threads(1)
    sizes = TOY if options.toy else Sizes()
    rows = [row for study in (*ROUNDING, *RUNS) for row in study(sizes)]
    cells = as_cells(rows)
    print_tables(cells)
    if not options.no_write:
        print(f"written to {write_results('optimizer_state', cells, options.output)}")
    if options.toy:
        return 0
    wrong = missed(rows)
    for row in wrong:
        print(f"MISSED: {row}")
    print(f"{'MISSED' if wrong else 'ok'}: what was derived is what was measured")
    return int(bool(wrong))


def committed() -> Path:
    """This device's results, or else another's."""
    own = RESULTS / f"optimizer_state-{device_name()}.csv"
    return own if own.exists() else sorted(RESULTS.glob("optimizer_state-*.csv"))[0]


def print_tables(cells: Sequence[Mapping[str, str]]) -> None:
    for study, table in tables(cells).items():
        print(f"{study}\n\n{table}\n")
    print(f"training runs\n\n{convergence_table()}\n")
