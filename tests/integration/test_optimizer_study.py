"""The study of the optimizer's state runs, and makes the rows that are committed."""

import csv
import importlib
from pathlib import Path

import pytest

study = importlib.import_module("benchmarks.optimizer.optimizer_state")
rounding = importlib.import_module("benchmarks.optimizer.optimizer_state_rounding")


@pytest.mark.full
def test_it_runs_at_toy_size(tmp_path: Path) -> None:
    file = tmp_path / "state.csv"
    assert study.main(["--toy", "--output", str(file)]) == 0
    with file.open(newline="", encoding="utf-8") as rows:
        found = list(csv.DictReader(rows))
    assert all(row["derived"] or row["measured"] for row in found if row["study"] != "average, 0.999")
    now = {(row["study"], row["case"], row["quantity"]) for row in found}
    committed = {(row["study"], row["case"], row["quantity"]) for row in study.read("optimizer_state")}
    assert now == committed


def test_what_is_missed_is_found() -> None:
    held = rounding.Row("bound", "case", "R", 2.0, 2.0)
    other = rounding.Row("bound", "case", "R", 2.0, 2.1)
    assert study.missed([held, other, rounding.Row("bound", "case", "R", 2.0)]) == [other]
