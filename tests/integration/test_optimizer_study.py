"""The study of the optimizer's state: it runs, and its page holds the tables of the committed results."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
study = importlib.import_module("benchmarks.optimizer.optimizer_state")
rounding = importlib.import_module("benchmarks.optimizer.optimizer_state_rounding")


@pytest.mark.full
def test_it_runs_at_toy_size(tmp_path: Path) -> None:
    file = tmp_path / "state.csv"
    assert study.main(["--toy", "--output", str(file)]) == 0
    found = study.rows_of(file)
    assert all(row["derived"] or row["measured"] for row in found if row["study"] != "average, 0.999")
    now = {(row["study"], row["case"], row["quantity"]) for row in found}
    committed = {(row["study"], row["case"], row["quantity"]) for row in study.rows_of(study.committed())}
    assert now == committed


def test_the_page_holds_the_committed_tables() -> None:
    page = (ROOT / "docs/study/optimizer-state.md").read_text(encoding="utf-8")
    tables = study.tables(study.rows_of(study.committed()))
    assert [name for name, table in tables.items() if table not in page] == []


def test_what_is_missed_is_found() -> None:
    held = rounding.Row("bound", "case", "R", 2.0, 2.0)
    other = rounding.Row("bound", "case", "R", 2.0, 2.1)
    assert study.missed([held, other, rounding.Row("bound", "case", "R", 2.0)]) == [other]
