import importlib
import itertools
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from octavo import cli
from octavo.train import report
from octavo.train.checkpoint import RunFolder
from octavo.train.trainer import Trainer
from tests.support.command_line import TINY, one_line, train

ROOT = Path(__file__).parents[2]


def test_train_leaves_a_log_a_checkpoint_a_table_and_a_plot(capsys):
    pytest.importorskip("matplotlib")
    assert train("--recipe", "delayed", "--out", "here") == 0
    out, err = capsys.readouterr()
    assert "delayed" in out and "nats/byte" in out and "here/loss.png" in out
    assert err.startswith("delayed: 6 steps on cpu; what is not FP8 is ") and "\nabout " in err
    assert "step 6/6" in err and "tokens/s" in err and "left" in err
    assert sorted(path.name for path in Path("here/delayed").iterdir()) == ["checkpoint.pt", "config.json", "log.csv"]
    assert Path("here/loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(Path("here/delayed/log.csv").read_text().splitlines()) == 7


def test_compare_shows_the_gap_and_resumes_with_one_more_recipe(capsys):
    pytest.importorskip("matplotlib")
    arguments = ["compare", *TINY, "--data", "text.py", "--out", "here", "--dtype", "float32", "--recipes"]
    assert cli.main([*arguments, "baseline", "dynamic"]) == 0
    out, _ = capsys.readouterr()
    assert "gap to float32" in out and "+0.00 %" in out and "computed in float32" in out
    kept = Path("here/float32/log.csv").read_bytes()
    assert cli.main([*arguments, "float32", "dynamic", "delayed", "--resume"]) == 0
    out, _ = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["float32", "dynamic", "delayed"]
    assert Path("here/float32/log.csv").read_bytes() == kept


def test_a_runs_options_are_a_file_that_trains_it_again(capsys, no_plot):
    assert train("--recipe", "delayed", "--out", "here", "--master", "split24", "--eval-every", "3") == 0
    for source, more in (("here/delayed", ()), ("here/delayed/config.json", ("--lr", "1e-9", "--no-compile"))):
        assert cli.main(["train", "--config", source, *more]) == 0
    logs = [path / "delayed" / "log.csv" for path in (Path("here"), Path("runs/train-001"), Path("runs/train-002"))]
    losses = [[line.split(",")[1] for line in log.read_text().splitlines()] for log in logs]
    assert losses[0] == losses[1] != losses[2]
    kept = [json.loads((log.parent / "config.json").read_text()) for log in logs]
    assert kept[0] == kept[1] and kept[2] == kept[0] | {"optimizer": kept[0]["optimizer"] | {"lr": 1e-9}}
    capsys.readouterr()
    assert cli.main(["compare", "--config", "here/delayed"]) == 2
    assert "gives recipe, and octavo compare needs recipes: add --recipes" in one_line(capsys)


def test_folders_are_chosen_when_none_is_given(capsys, no_plot):
    assert train() == train() == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-001", "train-002"]
    assert train("--resume") == 0
    assert "runs/train-002" in capsys.readouterr().out
    assert len(list(Path("runs").iterdir())) == 2
    Path("runs/train-999").mkdir()
    assert train() == train() == 0
    assert Path("runs/train-1000/dynamic").is_dir() and Path("runs/train-1001/dynamic").is_dir()


def test_one_set_of_flags_begins_a_run_and_goes_on_with_it(capsys, no_plot):
    kept = []
    for said in ("octavo: nothing to resume: here holds no run of dynamic; it begins anew in here\n", ""):
        assert train("--resume", "--out", "here") == 0
        assert capsys.readouterr().err.startswith(said or "dynamic: 6 steps")
        kept.append(Path("here/dynamic/log.csv").read_bytes())
    assert kept[0] == kept[1]
    assert train("--resume", "--recipe", "delayed") == train("--resume", "--recipe", "mx") == 0
    assert sorted(path.name for path in Path("runs").glob("*/*")) == ["delayed", "mx"]  # each in a folder of its own
    assert len(list(Path("runs").iterdir())) == 2


def test_train_needs_no_extra(capsys, monkeypatch):
    monkeypatch.setattr("octavo.train.report.find_spec", lambda name: None)
    monkeypatch.setattr("octavo.train.progress.find_spec", lambda name: None)
    assert train("--out", "here") == 0
    out, err = capsys.readouterr()
    assert "nats/byte" in out and "pip install octavo[cli]" in err and "loss.png" not in out


def test_compare_asks_for_the_extra_before_it_trains(capsys, monkeypatch):
    monkeypatch.setattr("octavo.train.report.find_spec", lambda name: None)
    assert cli.main(["compare", *TINY, "--data", "text.py", "--out", "here"]) == 2
    assert "pip install octavo[cli]" in one_line(capsys)
    assert not Path("here").exists()


def test_resuming_with_other_options_is_refused(capsys, no_plot):
    assert train("--out", "here") == 0
    capsys.readouterr()
    assert train("--out", "here", "--resume", "--seed", "3") == 2
    assert "has seed 0, not 3" in one_line(capsys)


def test_divergence_is_one_line_with_what_was_kept(capsys):
    assert train("--out", "here", "--lr", "1e3", "--clip", "0", "--steps", "60", "--checkpoint-every", "1") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("octavo: error: dynamic diverged") and "is kept in here/dynamic" in err and "--lr" in err
    assert Path("here/dynamic/checkpoint.pt").exists()


def signals_in_step(monkeypatch, number, *stops):
    """Sends signals to this process within the step of this number, counted from 0 over all runs."""
    step, count = Trainer.step, itertools.count()

    def send(trainer, index):
        result = step(trainer, index)
        for stop in stops if next(count) == number else ():
            os.kill(os.getpid(), stop)
        return result

    monkeypatch.setattr(Trainer, "step", send)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_is_saved_says_how_to_go_on_and_does(stop, capfd, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("octavo.cli.training._report", lambda results, config: print(report.table(results)) or 0)
    arguments = ["compare", *TINY, "--data", "text.py", "--recipes", "bf16", "dynamic"]
    assert cli.main([*arguments, "--out", "whole"]) == 0
    whole = json.dumps([line.split(",")[:3] for line in Path("whole/dynamic/log.csv").read_text().splitlines()])
    with monkeypatch.context() as patch:
        signals_in_step(patch, 6 + 3, stop)
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


def test_a_second_ctrl_c_does_not_wait_and_a_second_sigterm_does(capfd, monkeypatch, no_plot):
    with monkeypatch.context() as patch:
        signals_in_step(patch, 2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
        assert train("--out", "here") == 130
    err = capfd.readouterr().err
    assert err.count("stopping after this step") == 1 and err.splitlines()[-1] == "octavo: interrupted"
    assert train("--out", "here", "--resume") == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
def test_a_disk_that_is_full_keeps_the_checkpoint_before(capfd, monkeypatch, no_plot):
    resource = importlib.import_module("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = RunFolder.save

    def save_once(self, *arguments):
        save(self, *arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))  # a file may not grow beyond: as on a full disk

    arguments = ["--out", "here", "--checkpoint-every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", save_once)
        try:
            assert train(*arguments) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("octavo: error: cannot write here/dynamic/checkpoint.pt: File too large; step 2 is kept")
    assert train(*arguments, "--resume") == 0
