"""The benchmarks that need a GPU run end to end without one, at toy size, and every row they write is a number."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "octavo/kernels/triton/configs.json"


def run(*arguments: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # they set it where there is no GPU
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row["device"] and row["torch"] and row["triton"] and row["python"] for row in rows)
    return rows


def assert_numbers(rows: list[dict[str, str]], *columns: str) -> None:
    for row in rows:
        assert all(float(row[column]) >= 0 for column in columns), row


def test_all_that_runs_on_a_gpu(tmp_path: Path) -> None:
    """The tests, kernels and layer."""
    output = run("on_gpu", "--toy", "--processes", "2", "--output", tmp_path)
    assert " 0 failed" in output
    check_kernels(tmp_path, output)
    check_layer(tmp_path)


def check_kernels(tmp_path: Path, output: str) -> None:
    rows = rows_of(tmp_path / "kernels.csv")
    assert_numbers(rows, "us", "moved_mb", "rate", "of_peak", "floor_us")
    casts = [row for row in rows if row["op"].startswith(("amax", "cast"))]
    assert_numbers(casts, "inductor_us")
    assert len(casts) >= 13 and len(rows) > len(casts)
    assert all(row["op"] in output for row in rows)


def check_layer(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "layer.csv")
    octavos = [row for row in rows if not row["variant"].startswith("torchao")]  # may not be installed
    assert_numbers(octavos, "ms", "by_eager", "by_compiled")
    assert {"octavo delayed", "octavo dynamic", "bf16"} <= {
        row["variant"] for row in rows if row["shape"] == "4 layers"
    }


def test_tune(tmp_path: Path) -> None:
    before = TABLE.read_bytes()
    run("tune", "--toy", "--log", tmp_path / "tune.csv")
    assert TABLE.read_bytes() == before
    rows = rows_of(tmp_path / "tune.csv")
    assert_numbers(rows, "us")
    assert_numbers([row for row in rows if row["kind"] != "library"], "by_fastest", "num_warps")
    kinds = {row["kind"] for row in rows}
    assert {"library", "amax", "cast", "cast_transpose", "cast_rows", "cast_blocks", "matmul"} <= kinds


def test_tune_writes_a_table(tmp_path: Path) -> None:
    run("tune", "amax", "--toy", "--output", tmp_path / "configs.json")
    written = (tmp_path / "configs.json").read_text()
    assert '"measured_on": "cpu' in written
    unchanged = [line.rstrip(",") for line in TABLE.read_text().splitlines() if '"cast_rows"' in line]
    assert all(line in written for line in unchanged)
