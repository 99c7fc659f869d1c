import json
import shlex
import signal
from pathlib import Path

import pytest

from octavo import cli
from tests.support.command_line import TINY, signals_in_step


def test_an_interrupted_comparison_is_saved_says_how_to_go_on_and_does(capfd, monkeypatch, no_plot):
    pytest.importorskip("matplotlib")
    arguments = ["compare", *TINY, "--data", "text.py", "--recipes", "bf16", "dynamic"]
    assert cli.main([*arguments, "--out", "whole"]) == 0
    whole = json.dumps([line.split(",")[:3] for line in Path("whole/dynamic/log.csv").read_text().splitlines()])
    with monkeypatch.context() as patch:
        signals_in_step(patch, 6 + 3, signal.SIGINT)
        assert cli.main(arguments) == 130
    lines = capfd.readouterr().err.splitlines()
    assert "octavo: stopping after this step" in lines
    assert lines[-1].startswith("octavo: stopped dynamic at step 4 of 6, saved; go on with: octavo compare")
    again = shlex.split(lines[-1].partition("go on with: ")[2])[1:]
    assert again[-5:] == ["--out", "runs/compare-001", "--dtype", "bfloat16", "--resume"]
    assert cli.main(again) == 0
    assert "gap to bf16" in capfd.readouterr().out
    log = Path("runs/compare-001/dynamic/log.csv")
    assert json.dumps([line.split(",")[:3] for line in log.read_text().splitlines()]) == whole
