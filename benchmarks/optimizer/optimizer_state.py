"""Adam's state in eight bits: each formula of docs/study/optimizer-state.md beside a Monte-Carlo check.

Every table of that page is made of results/optimizer_state-<device>.csv, the last one of optimizer_convergence's. The
checks below a run are those of the page.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.common.measure import write_results
from benchmarks.common.pages import markdown, read
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
    """Return rows of a CSV; a number that was not derived or not measured is empty."""

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
    """Return {study: its table in Markdown}: cases down, quantities across; of two numbers the first was derived."""
    tables_by_study = {}
    for study in dict.fromkeys(row["study"] for row in cells):
        rows_by_key = {(row["case"], row["quantity"]): row for row in cells if row["study"] == study}
        cases, quantities = (list(dict.fromkeys(key[i] for key in rows_by_key)) for i in (0, 1))
        columns = []
        for quantity in quantities:
            column = [rows_by_key.get((case, quantity), {"derived": "", "measured": ""}) for case in cases]
            kinds = [kind for kind in ("derived", "measured") if any(row[kind] for row in column)]
            columns.append([" / ".join(short(row[kind]) for kind in kinds) for row in column])
        lines = ([case, *(column[i] for column in columns)] for i, case in enumerate(cases))
        tables_by_study[study] = markdown(["", *quantities], lines)
    return tables_by_study


def short(value: str) -> str:
    """Return a number as tables have it."""
    if not value:
        return "–"
    return f"{float(value):.4g}".replace("-", "−")


def missed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose measured number is not the derived one."""
    pairs = [row for row in rows if row.study in HOLDS and row.derived is not None and row.measured is not None]
    return [row for row in pairs if abs(row.measured - row.derived) > HOLDS[row.study] * max(abs(row.derived), 0.3)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizer_state", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="run it all, tiny; the numbers mean nothing")
    parser.add_argument("--output", type=Path, help="the CSV to write")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = TOY if options.toy else Sizes()
    rows = [row for study in (*ROUNDING, *RUNS) for row in study(sizes)]
    cells = as_cells(rows)
    for study, table in tables(cells).items():
        print(f"{study}\n\n{table}")
    if not options.no_write:
        print(f"written to {write_results('optimizer_state', cells, options.output)}")
    if options.toy:
        return 0
    wrong = missed(rows)
    for row in wrong:
        print(f"MISSED: {row}")
    print(f"{'MISSED' if wrong else 'ok'}: what was derived is what was measured")
    return int(bool(wrong))


def _table(study: str) -> str:
    return tables(read("optimizer_state"))[study]


TABLES = {row["study"]: functools.partial(_table, row["study"]) for row in read("optimizer_state")}
