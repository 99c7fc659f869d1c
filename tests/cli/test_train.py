import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from octavo import cli
from octavo.cli.train import _stopped
from octavo.train import RunConfig, RunResult, TrainConfig
from tests.support.command_line import TINY, one_line, signals_in_step, train
from tests.support.processes import ROOT


def test_train_leaves_a_log_a_checkpoint_a_table_and_a_plot(capsys):
    pytest.importorskip("matplotlib")
    assert train("--recipe", "delayed", "--out", "here") == 0
    out, err = capsys.readouterr()
    assert "delayed" in out and "nats/byte" in out and "here/loss.png" in out
    assert err.startswith("delayed: 6 steps on cpu; what is not FP8 is ") and "\nabout " in err
    assert "step 6/6" in err and "tokens/s" in err and " left" not in err.splitlines()[-1]
    files = sorted(path.name for path in Path("here/delayed").iterdir())
    assert files == [".lock", "checkpoint", "config.json", "log.csv"]
    assert Path("here/loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(Path("here/delayed/log.csv").read_text().splitlines()) == 7


def test_a_runs_options_are_a_file_that_trains_it_again(capsys, no_plot):
    assert train("--recipe", "delayed", "--out", "here", "--master", "split24", "--eval-every", "3") == 0
    for source, more in (("here/delayed", ()), ("here/delayed/config.json", ("--lr", "1e-9", "--no-compile"))):
        assert cli.main(["train", "--config", source, *more]) == 0
    logs = [path / "delayed" / "log.csv" for path in (Path("here"), Path("runs/train-001"), Path("runs/train-002"))]
    losses = [[line.split(",")[1] for line in log.read_text().splitlines()] for log in logs]
    assert losses[0] == losses[1] != losses[2]
    configs = [json.loads((log.parent / "config.json").read_text()) for log in logs]
    assert configs[0] == configs[1] and configs[2] == configs[0] | {"optimizer": configs[0]["optimizer"] | {"lr": 1e-9}}
    capsys.readouterr()
    assert cli.main(["compare", "--config", "here/delayed"]) == 2
    assert "gives a recipe, and octavo compare needs several: add --recipes" in one_line(capsys)


def test_folders_are_chosen_when_none_is_given(capsys, no_plot):
    one = "--steps", "1"
    assert train(*one) == train(*one) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-001", "train-002"]
    assert train(*one, "--resume") == 0
    assert "runs/train-002" in capsys.readouterr().out
    assert len(list(Path("runs").iterdir())) == 2
    Path("runs/train-999").mkdir()
    assert train(*one) == train(*one) == 0
    assert Path("runs/train-1000/dynamic").is_dir() and Path("runs/train-1001/dynamic").is_dir()


def test_the_values_of_resume(capsys):
    for flags, value in (([], None), (["--resume"], True), (["--resume", "auto"], "auto"), (["--no-resume"], False)):
        assert getattr(cli.parser(["train"]).parse_args(["train", *flags, "--seed", "1"]), "resume", None) == value
    assert train("--resume", "now") == 2 and "invalid choice: 'now'" in one_line(capsys)
    result, options = RunResult("dynamic", 6, [], 0, 0, "float32"), RunConfig(resume="auto", out=Path("a"))
    _stopped(result, TrainConfig(run=options), ["train", "--out", "a", "--resume", "auto"])
    assert capsys.readouterr().err.endswith("octavo train --out a --resume auto --dtype auto\n")


def test_one_set_of_flags_begins_a_run_and_goes_on_with_it(capsys, no_plot):
    logs = []
    assert train("--resume", "auto") == 2
    assert "resume auto finds its run by the folder: give out, too" in one_line(capsys)
    for said in ("octavo: nothing to resume: here holds no run of dynamic; it begins anew in here\n", ""):
        assert train(*(["--resume", "auto"] if said else ["--resume"]), "--out", "here") == 0
        assert capsys.readouterr().err.startswith(said or "dynamic: 6 steps")
        logs.append(Path("here/dynamic/log.csv").read_bytes())
    assert logs[0] == logs[1]
    assert train("--resume", "--recipe", "delayed") == train("--resume", "--recipe", "mx") == 0
    assert sorted(path.name for path in Path("runs").glob("*/*") if path.is_dir()) == ["delayed", "mx"]
    assert len(list(Path("runs").iterdir())) == 2


def test_without_matplotlib_the_plot_is_left_out(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name, flag in (("compare", "--recipes"), ("train", "--recipe")):
        assert cli.main([name, *TINY, "--data", "text.py", flag, "dynamic", "--out", name]) == 0
        out, err = capsys.readouterr()
        assert "nats/byte" in out and f"wrote {name}/results.csv\n" in out
        assert f"without loss.png: matplotlib is not installed: pip install '{ROOT}[cli]'" in err


def test_a_run_that_diverged_is_read_by_its_folder(capsys, no_plot):
    options = ["--lr", "1e3", "--clip", "0", "--steps", "60", "--checkpoint-every", "0", "--inspect"]
    assert train("--out", "here", *options, "--inspect-every", "1") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("octavo: error: dynamic diverged: ")
    assert err.endswith("; try a lower --lr; octavo inspect here/dynamic says what the record shows")
    assert cli.main(["inspect", "here"]) == 0
    assert "finding" in capsys.readouterr().out
    assert cli.main(["export", "here", "--safetensors", "served"]) == 2
    assert "has no checkpoint, as the run ended before its first" in one_line(capsys)


def test_a_second_ctrl_c_does_not_wait_and_a_second_sigterm_does(capfd, monkeypatch, no_plot):
    with monkeypatch.context() as patch:
        signals_in_step(patch, 2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
        assert train("--out", "here") == 130
    err = capfd.readouterr().err
    assert err.count("stopping after this step") == 1 and err.splitlines()[-1] == "octavo: interrupted"
    assert train("--out", "here", "--resume", "auto") == 0


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "log.csv"), "log.csv: No space left on device"),
        (MemoryError(), "out of memory: take a smaller model or batch (octavo train: lower --width"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "out of memory"),
    ],
)
def test_what_the_machine_lacks_is_one_line(error, says, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("octavo.train.loop.load_corpus", fail)
    assert train() == 2
    assert says in one_line(capsys)


def test_the_line_of_a_fault_names_the_rank(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert train("--batch", "8") == 2
    assert one_line(capsys).startswith("octavo: error: rank 3: 4 processes were started, but shard is none")


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr("octavo.train.loop.load_corpus", lambda data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_are_steps_ends_at_once(stop, capsys, monkeypatch):
    reached = []

    def read(data):
        os.kill(os.getpid(), stop)
        reached.append(time.sleep(0))

    monkeypatch.setattr("octavo.train.loop.load_corpus", read)
    before = signal.getsignal(stop)
    assert train("--out", "here") == 130
    assert capsys.readouterr().err == "octavo: interrupted\n" and not reached
    assert signal.getsignal(stop) is before and not Path("here").exists()
