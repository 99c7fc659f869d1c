import importlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import octavo
from octavo import cli
from octavo.train import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig, report, run
from octavo.train.checkpoint import RunFolder
from octavo.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(400))
TINY = "--width 16 --layers 1 --heads 2 --context 16 --batch 2 --steps 6 --eval-windows 2 --device cpu".split()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text(TEXT)
    return tmp_path


def train(*arguments):
    return cli.main(["train", *TINY, "--data", "text.py", *arguments])


def one_line(capsys):
    """The one line of a fault."""
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 1 and lines[0].startswith("octavo: error: "), (out, err)
    return lines[0]


@pytest.fixture
def no_plot(monkeypatch):
    """Training draws nothing, which takes longer than the training here."""
    monkeypatch.setattr("octavo.cli._report", lambda results, config: print(f"wrote {config.run.out}") or 0)


def test_version_help_and_info(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"
    assert cli.main(["--help"]) == 0
    assert all(command in capsys.readouterr().out for command in ("train",))
    assert cli.main(["info"]) == 0
    assert "torch" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "compare"])
def test_each_option_has_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for config in cli._configs():
        for name in config.__dataclass_fields__:
            assert "--" + name.replace("_", "-") in text


def test_train_leaves_a_log_a_checkpoint_a_table_and_a_plot(capsys):
    pytest.importorskip("matplotlib")
    assert train("--recipe", "delayed", "--out", "here") == 0
    out, err = capsys.readouterr()
    assert "delayed" in out and "nats/byte" in out and "here/loss.png" in out
    assert err.startswith("delayed: 6 steps on cpu; what is not FP8 is ") and "\nabout " in err
    assert "step 6/6" in err and "tokens/s" in err and "left" in err
    assert sorted(path.name for path in Path("here/delayed").iterdir()) == ["checkpoint.pt", "log.csv"]
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


def test_folders_are_chosen_when_none_is_given(capsys, no_plot):
    assert train() == train() == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["train-001", "train-002"]
    assert train("--resume") == 0
    assert "runs/train-002" in capsys.readouterr().out
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "COMMAND"),
        ("evaluate", "evaluate"),
        ("train --stepz 3", "--stepz"),
        ("train --steps many", "many"),
        ("train --steps -5", "steps is -5"),
        ("train --width 100 --heads 3", "choose width 96 or 102"),
        ("train --width 1000000 --heads 1", "GiB"),
        ("train --layers 99999999", "GiB"),
        ("train --recipe fp8", "unknown recipe 'fp8'"),
        ("compare --recipes bf16 fp8", "unknown recipe 'fp8'"),
        ("train --lr nan", "lr is nan"),
        ("train --beta1 .99 --beta2 .9 --master fp16_scaled", "choose a larger beta2"),
        ("train --beta1 .99 --beta2 .9 --weight-storage fp8", "choose a larger beta2"),
        ("train --recipe bf16 --schedule bf16-then-fp8@0.5", "switches FP8 layers, and bf16 has none"),
        ("compare --data text.py --weight-storage fp8", "needs an FP8 recipe, not bf16"),
        ("compare --data text.py --weight-storage fp8 --recipes dynamic rowwise", "can't be stored in FP8"),
        ("compare --data text.py --recipes dynamic --steps 3 --schedule fp8-then-bf16@0.9", "would begin at step"),
        ("train --device cuda:77", "cuda:77"),
        ("train --dtype int8", "auto, bfloat16 or float32"),
        ("compare --recipes bf16 dynamic --dtype float32", "choose one dtype"),
        ("train --data nowhere.txt", "no such file or folder: nowhere.txt"),
        ("train --data empty.txt", "is empty"),
        ("train --data junk.bin", "NUL at byte 0"),
        ("train --data latin.txt", "not UTF-8"),
        ("train --data bare", "no text in bare"),
        ("train --data short.txt", "too small"),
        ("train --data text.py --context 5000", "--context"),
        ("train --data text.py --out text.py", "cannot write to text.py"),
        ("train --data text.py --out /proc/octavo", "cannot write to /proc/octavo"),
        ("train --data text.py --out old", "already holds a run"),
        ("train --data text.py --shard zero", "choose none, fsdp or ddp"),
        ("train --data text.py --shard fsdp", "torchrun --nproc-per-node 2 -m octavo train --shard fsdp"),
        ("compare --data text.py --shard ddp", "compare trains in one process"),
        ("train --data text.py --resume", "nothing to resume"),
        ("train --data text.py --out bare --resume", "nothing to resume"),
        ("train --data text.py --out old --resume", "damaged"),
    ],
)
def test_wrong_input_is_one_line_and_loses_nothing(arguments, says, folder, capsys):
    (folder / "empty.txt").touch()
    (folder / "junk.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "latin.txt").write_bytes("naïve ".encode("latin-1") * 1000)
    (folder / "short.txt").write_text("too short")
    (folder / "bare").mkdir()
    (folder / "old" / "dynamic").mkdir(parents=True)
    (folder / "old" / "dynamic" / "checkpoint.pt").write_bytes(b"precious")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert cli.main(shlex.split(arguments)) == 2
    assert says in one_line(capsys)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


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


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "log.csv"), "log.csv: No space left on device"),
        (MemoryError(), "out of memory: lower --width"),
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


def test_sigterm_ends_it_at_once_from_the_very_first_import(capsys, monkeypatch):
    monkeypatch.setattr("octavo.cli._parser", lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "octavo: interrupted\n" and signal.getsignal(signal.SIGTERM) is before


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
    monkeypatch.setattr("octavo.cli._report", lambda results, config: print(report.table(results)) or 0)
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


def test_python_dash_m_and_a_light_import():
    code = (
        "import runpy, sys, octavo\n"
        "assert not any(name.startswith(('octavo.train', 'octavo.cli')) for name in sys.modules)\n"
        "sys.argv = ['octavo', '--version']\n"
        "runpy.run_module('octavo', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"octavo {octavo.__version__}\n", "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with text.py and a finished run of delayed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.py").write_text(TEXT)
    sizes = ModelConfig(width=16, layers=1, heads=2, context=32)
    options = RunConfig(out=folder / "runs", device="cpu", eval_every=0)
    data = DataConfig(folder / "text.py", batch=2, eval_windows=2)
    run(TrainConfig(sizes, data, OptimizerConfig(steps=6), options), "delayed")
    return folder


def exported(capsys):
    """Exports the run; what is said of the file, and of its check."""
    assert cli.main(["export", "runs/delayed", "--onnx", "m.onnx", "--data", "text.py"]) == 0
    wrote, checked = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote m.onnx: {Path('m.onnx').stat().st_size:,} bytes, ")
    Path("m.onnx").unlink()
    return checked


def test_export_checks_what_it_wrote(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    seen = []

    def write(model, inputs, path, opset, weights):
        seen.append((model, opset, weights))
        path.write_bytes(b"ONNX")
        return path

    monkeypatch.setattr("octavo.export.to_onnx", write)
    monkeypatch.setattr("octavo.export.sqnr_in_onnxruntime", lambda model, tokens, path: 41.5)
    monkeypatch.setattr("octavo.export.run_onnx", lambda path, tokens: [torch.zeros(*tokens.shape, 256)])
    assert "SQNR 41.5 dB, validation loss 5.5452 nats a byte (octavo " in exported(capsys)
    assert [(opset, weights) for _, opset, weights in seen] == [(21, torch.bfloat16)] and not seen[0][0].training


@pytest.mark.parametrize("source", ["runs/delayed", "runs/delayed/checkpoint.pt"])
def test_what_if_of_a_run(source, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    given = ["--recipes", "delayed", "--device", "H100", "--data", "text.py", "--keep", "1"]
    assert cli.main(["inspect", source, *given]) == 0
    out = capsys.readouterr().out
    assert "blocks.0.mlp.fc1" in out and "octavo.recipes.delayed()" in out and "head" not in out


def test_inspect_of_a_run_is_of_its_record_unless_more_is_asked(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    layer = octavo.nn.Linear(16, 16)
    with octavo.inspect.record(layer, "runs/delayed/inspect") as recorder:
        layer(torch.randn(4, 16)).sum().backward()
        recorder.step()
    assert cli.main(["inspect", "runs/delayed", "--json", "found.json"]) == 0
    assert Path("found.json").exists() and "(all layers)" not in capsys.readouterr().out
    assert cli.main(["inspect", "runs/delayed", "--keep", "1", "--html", "more.html"]) == 2
    assert "--html: runs/delayed is a model" in one_line(capsys)
    assert cli.main(["inspect", "runs/delayed", "--recipes", "dynamic", "--min-features", "8"]) == 0
    assert Path("runs/delayed/inspect/what_if.json").exists()
    shutil.rmtree("runs/delayed/inspect")


def test_what_if_of_a_users_model(folder, capsys):
    lines = "import torch", "def job():", "    model = torch.nn.Linear(16, 16)"
    (folder / "users_job.py").write_text(
        "\n".join([*lines, "    return model, lambda m, x: m(x).sum(), [torch.ones(1, 16)]"])
    )
    assert cli.main(["inspect", "users_job:job", "--min-features", "16", "--recipes", "mx"]) == 0
    assert "(all layers)" in capsys.readouterr().out
    for source, says in (
        ("users_job:jib", "has no function jib"),
        ("runs", "module:function"),
        (".", "holds no record"),
    ):
        assert cli.main(["inspect", source]) == 2
        assert says in one_line(capsys)


@pytest.mark.full
def test_export_writes_a_file_that_onnxruntime_runs(trained, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(trained)
    checked = exported(capsys)
    assert float(checked.split("SQNR ")[1].split(" dB")[0]) >= 30
    theirs, ours = (
        float(part.split()[0].rstrip(")")) for part in (checked.split("loss ")[1], checked.split("octavo ")[1])
    )
    assert abs(theirs / ours - 1) <= 1e-3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no", "--onnx", "m.onnx"], "no does not exist"),
        (["runs", "--onnx", "m.onnx"], "choose one of runs/delayed"),
        (["runs/delayed", "--onnx", "no/m.onnx"], "the folder no does not exist"),
        (["runs/delayed", "--onnx", "m.onnx", "--opset", "3"], "opset=3: use 19 to 24"),
        (["runs/delayed", "--onnx", "m.onnx", "--data", "none"], "none"),
    ],
)
def test_an_export_that_fails_is_one_line_and_writes_nothing(arguments, says, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    before = sorted(trained.rglob("*"))
    assert cli.main(["export", "--data", "text.py", *arguments]) == cli.FAULT
    assert says in one_line(capsys)
    assert sorted(trained.rglob("*")) == before
