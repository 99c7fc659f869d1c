"""``octavo tune``: the file it writes, its rows after an interruption, its output, and how it is forgotten."""

import importlib
import json
import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from octavo import cli
from octavo.tune import command

pytest.importorskip("triton")
tuned, cases = (importlib.import_module(f"octavo.kernels.triton.{name}") for name in ("launch", "cases"))

ORIGIN = {"device": "a GPU", "torch": "2", "triton": "3"}


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tuner, of which "amax" finds a row, "cast" fails, and "cast_rows" is interrupted."""
    module = importlib.import_module("octavo.tune.tuner")

    def tune(kind: str, extent: object, rows: dict[str, Any]) -> Any:
        if kind == "cast":
            raise RuntimeError("no room")
        if kind == "cast_rows":
            raise KeyboardInterrupt
        return module.Tuned([[64, 8, 128, 1, 4]] if kind == "amax" else [], 1.25 if kind == "amax" else math.nan)

    monkeypatch.setattr(module, "tune", tune)
    monkeypatch.setitem(cases.CASES_OF_KIND, "library", {})
    monkeypatch.setattr("octavo.tune.timing.precompile", lambda function, tasks, minutes: [])
    return module


def options(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(arguments)


def test_what_is_found_is_written_and_other_rows_stay(tuner: ModuleType, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "new" / "table.json"
    assert command.tune(output, ORIGIN, options("amax")) == 0
    assert "times as fast as by octavo's own rows: 1.25 (amax 1.25)\n1 kinds tuned; wrote" in capsys.readouterr().out
    written, shipped = tuned.TileTable.read(output), tuned.TileTable.read(None)
    assert written.configs == {**shipped.configs, "amax": [[64, 8, 128, 1, 4]]} and written.library == shipped.library
    assert json.loads(output.read_text())["measured_on"] == "a GPU, torch 2, triton 3"
    command.tune(None, ORIGIN, options("amax"))
    assert "nothing is kept" in capsys.readouterr().out


def test_a_kind_that_fails_and_an_interrupt_leave_what_is_written(tuner: Any, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "table.json"
    assert command.tune(output, ORIGIN, options("cast", "amax")) == 1
    assert "cast: FAILED, RuntimeError: no room" in capsys.readouterr().err
    output.unlink()
    with pytest.raises(KeyboardInterrupt):
        command.tune(output, ORIGIN, options("amax", "cast_rows"))
    assert f"wrote {output}" in capsys.readouterr().out and json.loads(output.read_text())["configs"]["amax"]
    assert command.tune(output, ORIGIN, options("--minutes", "0")) == 1
    assert "library: left out, no time\nnothing was found" in capsys.readouterr().out
    for minutes in ("nan", "inf", "-1"):
        with pytest.raises(SystemExit):
            options("--minutes", minutes)
        assert f"invalid value: '{minutes}' (choose a number of minutes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options("--minutes", "nine")
    assert "invalid minutes value: 'nine'" in capsys.readouterr().err


def test_a_kind_without_a_right_row_is_a_failure_and_a_gpu_compiles_ahead(
    tuner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.tune(tmp_path / "table.json", ORIGIN, options("matmul", "amax")) == 1
    assert json.loads((tmp_path / "table.json").read_text())["configs"]["amax"] == [[64, 8, 128, 1, 4]]
    assert "compiled ahead" not in capsys.readouterr().out
    monkeypatch.setattr("octavo.tune.timing.ON_GPU", True)
    minutes: list[float] = []
    monkeypatch.setattr("octavo.tune.timing.precompile", lambda function, tasks, time: minutes.append(time) or ["(1,)"])
    assert command.tune(None, ORIGIN, options("amax", "--toy", "--minutes", "8")) == 0
    count = len(tuner.tasks(["amax"], tuner.TOY))
    assert f"{count} configurations compiled ahead; failed: ['(1,)']" in capsys.readouterr().out
    assert minutes == [4.0]


def test_products_of_torchs(tuner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.tune(tmp_path / "table.json", ORIGIN, options("library")) == 0
    assert tuned.TileTable.read(tmp_path / "table.json").library == set()  # none is faster
    with pytest.raises(command.TuneError, match=r"no such kind: cost; known: cast_transpose, .*, library"):
        command.tune(None, ORIGIN, options("cost"))
    monkeypatch.delitem(cases.CASES_OF_KIND, "library")
    with pytest.raises(command.TuneError, match=r"no such kind: library; known: .*, matmul$"):
        command.tune(None, ORIGIN, options("library"))


def test_on_a_gpu(tuner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "runs_natively", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert cli.main(["tune", "amax", "--toy"]) == 0 and not tuned.TileTable.tuned_file().exists()
    assert cli.main(["tune", "amax"]) == 0
    assert f"wrote {tuned.TileTable.tuned_file()}: new processes use it" in capsys.readouterr().out
    assert tuned.TileTable.read(tuned.TileTable.tuned_file()).configs["amax"] == [[64, 8, 128, 1, 4]]
    assert cli.main(["tune", "--forget"]) == cli.main(["tune", "--forget"]) == 0
    out = capsys.readouterr().out
    assert "forgotten: " in out and "nothing was tuned here" in out and not tuned.TileTable.tuned_file().exists()


def test_where_there_is_nothing_to_tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2
    assert "octavo: error: there is nothing to tune here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "runs_natively", lambda device: True)
    monkeypatch.setitem(sys.modules, "octavo.kernels.triton.launch", None)
    assert cli.main(["tune", "--toy"]) == 2 and "Triton can't be imported" in capsys.readouterr().err
