import argparse
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

import octavo
from octavo import cli
from octavo.cli import command
from octavo.cli.command import _COMMANDS, add_options, examples_of, option_errors
from octavo.nn import machine
from octavo.train import DataConfig, ModelConfig, OptimizerConfig, RunConfig, RunResult, TrainConfig, run
from octavo.train.config import TrainError, option
from octavo.train.loop import trained_model
from octavo.train.trainer import Trainer
from octavo_command import COMMANDS
from tests.support.command_line import TEXT, TINY, one_line, train

ROOT = Path(octavo.__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """An option of each kind."""

    how_many: int = option(3, "a number, 100 % of it", 1)
    every: int = option(0, "none", 0)
    share: float = option(0.5, "another", 0, 1, metavar="SHARE")
    kind: Literal["a", "b"] = option("a", "one of two")
    note: str = option("", "a text", metavar="TEXT")
    where: Path | None = option(None, "a place (default: here)", metavar="FOLDER")  # noqa: RUF009 (it is a field)
    fast: bool = option(False, "or not")


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Options)
    return parser


def test_flags_have_the_kinds_names_and_defaults_of_fields(parser):
    flags = "--how-many 4 --share 0.25 --kind b --note x --where runs --no-fast".split()
    wanted = {"how_many": 4, "share": 0.25, "kind": "b", "note": "x", "where": Path("runs"), "fast": False}
    assert vars(parser.parse_args(flags)) == wanted
    assert vars(parser.parse_args([])) == {}
    shown = " ".join(parser.format_help().split())
    for line in (
        "An option of each kind:",
        "--how-many N a number, 100 % of it (default: 3)",
        "--every N none (default: 0)",
        "--share SHARE another (default: 0.5)",
        "--kind {a,b} one of two (default: a)",
        "--note TEXT a text (default: no) --where FOLDER a place (default: here)",
        "--fast, --no-fast or not (default: no)",
    ):
        assert line in shown


def test_options_in_messages_are_flags():
    for said, shown in (
        ("batch 3: 2 micro_batches of_micro_batches, --lr", "batch 3: 2 --micro-batches of_micro_batches, --lr"),
        ("lr is 0.0: choose lr", "--lr is 0.0: choose lr"),
    ):
        with pytest.raises(TrainError, match=f"^{shown}$"), option_errors():
            raise ValueError(said)


def test_it_names_versions_devices_and_extras(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = command.describe_machine()
    assert octavo.__version__ in text and torch.__version__ in text and "python" in text and "triton" in text
    assert "cpu" in text and command.EMULATED in text
    assert re.search(r"\nrecipes on cpu\n(  .*\n)*  mx +the reference; lost: FP8's speed: emulated\n", text)
    assert "\n".join(machine.attention_on([torch.device("cpu")])) in text
    assert re.search(r"\nrecipes on cpu\n  casts +\S.* kept in .*octavo\n", text)
    assert f"matplotlib is not installed: pip install '{ROOT}[cli]'" in text and "onnx         installed" in text
    monkeypatch.chdir(ROOT)
    assert "matplotlib is not installed: pip install '.[cli]'" in command.describe_machine()
    monkeypatch.setattr("octavo.errors.__file__", str(tmp_path / "site/octavo/errors.py"))
    assert "matplotlib is not installed: pip install 'octavo[cli]'" in command.describe_machine()


@pytest.mark.parametrize(
    ("hip", "capability", "fp8"), [(None, (9, 0), command.NATIVE), ("6", (9, 4), command.EMULATED)]
)
def test_gpus_of_two_makers(monkeypatch, hip, capability, fp8):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert ("cuda:0", "a GPU" if hip else "a GPU, sm_90", fp8) in command.devices()


def test_train_leaves_a_log_a_checkpoint_a_table_and_a_plot(capsys):
    pytest.importorskip("matplotlib")
    assert train("--recipe", "delayed", "--out", "here") == 0
    out, err = capsys.readouterr()
    assert "delayed" in out and "nats/byte" in out and "here/loss.png" in out
    assert err.startswith("delayed: 6 steps on cpu; what is not FP8 is ") and "\nabout " in err
    assert "step 6/6" in err and "tokens/s" in err and " left" not in err.splitlines()[-1]
    assert sorted(path.name for path in Path("here/delayed").iterdir()) == ["checkpoint", "config.json", "log.csv"]
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
    result, config = (
        RunResult("dynamic", 6, [], 0, 0, "float32"),
        TrainConfig(run=RunConfig(resume="auto", out=Path("a"))),
    )
    command._stopped(result, config, ["train", "--out", "a", "--resume", "auto"])
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
    assert err.endswith("; try a lower --lr; octavo inspect here/dynamic says what the record shows")
    assert cli.main(["inspect", "here"]) == 0
    assert "finding" in capsys.readouterr().out
    assert cli.main(["export", "here", "--safetensors", "served"]) == 2
    assert "has no checkpoint, as the run ended before its first" in one_line(capsys)


def test_divergence_is_one_line_with_what_was_kept(capsys):
    assert train("--out", "here", "--lr", "1e3", "--clip", "0", "--steps", "60", "--checkpoint-every", "1") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("octavo: error: dynamic diverged") and "is kept in here/dynamic" in err and "--lr" in err
    assert Path("here/dynamic/checkpoint").exists()


def signals_in_step(monkeypatch, number, *stops):
    """Sends signals to this process within the step of this number, counted from 0 over all runs."""
    step, count = Trainer.step, itertools.count()

    def send(trainer, index):
        result = step(trainer, index)
        for stop in stops if next(count) == number else ():
            os.kill(os.getpid(), stop)
        return result

    monkeypatch.setattr(Trainer, "step", send)


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


def test_a_second_ctrl_c_does_not_wait_and_a_second_sigterm_does(capfd, monkeypatch, no_plot):
    with monkeypatch.context() as patch:
        signals_in_step(patch, 2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT)
        assert train("--out", "here") == 130
    err = capfd.readouterr().err
    assert err.count("stopping after this step") == 1 and err.splitlines()[-1] == "octavo: interrupted"
    assert train("--out", "here", "--resume", "auto") == 0


ROOT = Path(__file__).parents[2]


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
    """Export a run, and check the messages about the file and about its check."""
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


def test_export_of_weights_that_servers_read(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    assert cli.main(["export", "runs/delayed", "--safetensors", "served"]) == 0
    assert capsys.readouterr().out.startswith("wrote served: ")
    assert json.loads(Path("served/config.json").read_text())["quantization_config"]["format"] == "float-quantized"
    shutil.rmtree("served")


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
    assert cli.main(["inspect", "runs/delayed/inspect", "--runs", "3", "--device", "H100"]) == 2
    assert "--runs, --device: runs/delayed/inspect is a record" in one_line(capsys)
    assert cli.main(["inspect", "runs/delayed", "--recipes", "dynamic", "--min-features", "8"]) == 0
    assert Path("runs/delayed/inspect/what_if.json").exists()
    shutil.rmtree("runs/delayed/inspect")
    capsys.readouterr()
    arguments = ["--recipes", "delayed", "--device", "H100", "--data", "text.py", "--keep", "1"]
    assert cli.main(["inspect", "runs", *arguments]) == 0
    out = capsys.readouterr().out
    assert "blocks.0.mlp.fc1" in out and '"default": "delayed"' in out and "head" not in out


def test_remedies_of_a_run_are_applied(folder, capsys, no_plot):
    assert train("--recipe", "delayed", "--out", "a") == 0
    assert cli.main(["inspect", "a", "--recipes", "delayed", "--keep", "1", "--apply"]) == 0
    assert "rules.json: octavo train --config a/delayed" in capsys.readouterr().out
    arguments = "--config", "a/delayed", "--out", "b", "--lr", "0.001"
    assert (
        train(*arguments)
        == train(*arguments, "--resume")
        == train("--recipe", "a/delayed/rules.json", "--out", "c")
        == 0
    )
    rules = json.loads(Path("a/delayed/rules.json").read_text())
    assert len(rules["rules"]) == 1 and json.loads(Path("b/delayed/config.json").read_text())["recipe"] == rules
    for out in ("b", "c"):
        layers = {n: m.recipe.name for n, m in trained_model(Path(out)).named_modules() if hasattr(m, "recipe")}
        assert [name for name, recipe in layers.items() if recipe == "high_precision"] == list(rules["rules"])
    capsys.readouterr()
    assert cli.main(["inspect", "a/delayed/checkpoint", "--apply"]) == 2
    assert "is no run of octavo train: give --write FILE" in one_line(capsys)


def test_nothing_is_said_before_a_plan(folder, capsys, monkeypatch):
    def build(path):
        logging.getLogger("torchao").warning("Failed to load")
        return torch.nn.Sequential(torch.nn.Embedding(64, 64, device="meta"), torch.nn.Linear(64, 64, device="meta"))

    logging.getLogger("torchao").addHandler(handler := logging.StreamHandler())
    monkeypatch.setattr("octavo.cost.from_flags.from_hugging_face", build)
    assert cli.main(["plan", "config.json", "--context", "64", "--device", "H100"]) == 0
    logging.getLogger("torchao").removeHandler(handler)
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[0].endswith(" B parameters, 256 sequences of 64 tokens")


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
        (["runs/delayed", "--onnx", "no/m.onnx"], "the folder no does not exist"),
        (["runs/delayed", "--onnx", "m.onnx", "--opset", "3"], "opset=3: use 21 to 24"),
        (["runs/delayed", "--onnx", "m.onnx", "--data", "none"], "none"),
        (["runs/delayed", "--safetensors", "served", "--layout", "mxfp8"], "layout='compressed-tensors' holds those"),
    ],
)
def test_an_export_that_fails_is_one_line_and_writes_nothing(arguments, says, trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    before = sorted(trained.rglob("*"))
    assert cli.main(["export", "--data", "text.py", *arguments]) == 2
    assert says in one_line(capsys)
    assert sorted(trained.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_and_shows_examples_that_it_takes(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"{COMMANDS[command][1:15]}" in text
    run, _ = _COMMANDS[command]
    assert examples_of(command)
    for example in examples_of(command):
        assert f"  {example}\n" in text.replace(" \\\n    ", " ")
        _, _, arguments = example.partition("octavo ")
        assert cli.parser().parse_args(shlex.split(arguments)).command is run


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_narrow_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 60
    joined = text.replace(" \\\n    ", " ")
    assert "examples:\n" in text and all(f"  {example}\n" in joined for example in examples_of(command or "none"))


def test_each_command_has_a_description_and_its_options_only_where_it_is_named():
    assert _COMMANDS.keys() == COMMANDS.keys()
    assert cli.parser(["info", "--measure"]).parse_args(["info", "--measure"]).measure
    with pytest.raises(SystemExit):
        cli.parser(["info"]).parse_args(["train", "--steps", "3"])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shtab_writes_completions(shell):
    shtab = pytest.importorskip("shtab")
    written = shtab.complete(cli.parser(), shell)
    assert "--weight-storage" in written and "split24" in written


def test_version_help_and_info(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in COMMANDS)
    assert cli.main(["info"]) == 0
    assert "torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "COMMAND"),
        ("evaluate", "evaluate"),
        ("train --stepz 3", "--stepz 3 (see octavo train --help)"),
        ("train --learning-rate 3e-4", "--learning-rate 3e-4 (see octavo train --help); did you mean --lr?"),
        ("train --stepz 3 --batch_size=4", "--help); did you mean --steps, --batch?"),
        ("plan --epochs=3", "--epochs=3 (see octavo plan --help)"),
        ("train --steps many", "many"),
        ("train --steps -5", "--steps is -5: choose a whole number from 1"),
        ("train --width 1000000 --heads 1", "GiB"),
        ("train --recipe fp8", "--recipe: unknown recipe 'fp8': choose from baseline, bf16"),
        ("train --beta1 .99 --beta2 .9 --weight-storage fp8", "choose a larger beta2"),
        ("train --recipe bf16 --schedule bf16-then-fp8@0.5", "switches FP8 layers, and bf16 has none"),
        ("compare --data text.py --dtype bfloat16 --weight-storage fp8", "needs an FP8 recipe, not bf16"),
        ("compare --data text.py --weight-storage fp8 --recipes dynamic rowwise", "can't be stored in FP8"),
        ("compare --data text.py --recipes dynamic --steps 3 --schedule fp8-then-bf16@0.9", "would begin at step"),
        ("train --device cuda:77", "cuda:77"),
        ("train --batch 10 --micro-batches 4", "batch 10 does not divide into 4 --micro-batches: choose a batch of 12"),
        ("plan --width 7", "width 7 is not a multiple"),
        ("plan --experts 2 --top-k 3", "choose --top-k 2"),
        ("train --tensor-parallel 2", "--tensor-parallel 2 with shard none: choose shard fsdp"),
        ("train --config nowhere", "nowhere: No such file or directory: give a run's folder, its config.json"),
        ("compare --recipes bf16 dynamic --dtype float32", "choose one dtype"),
        ("train --data junk.bin", "NUL at byte 0"),
        ("train --data text.py --context 5000", "--context"),
        ("train --data text.py --out /proc/octavo", "cannot write to /proc/octavo"),
        ("train --data text.py --out old", "already holds a run"),
        ("train --data text.py --shard fsdp", "torchrun --nproc-per-node 2 -m octavo train --shard fsdp"),
        ("train --data text.py --out ''", "--out is '': choose a Path"),
        ("train --data text.py --device meta", "device 'meta' cannot be used here"),
        ("train --data text.py --out old --resume", "damaged"),
    ],
)
def test_wrong_input_is_one_line_and_loses_nothing(arguments, says, folder, capsys):
    (folder / "junk.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "old/dynamic/checkpoint/save-00000001").mkdir(parents=True)
    (folder / "old/dynamic/checkpoint/save-00000001/.metadata").write_bytes(b"precious")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert cli.main(shlex.split(arguments)) == 2
    assert says in one_line(capsys)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


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
    monkeypatch.setattr("octavo.cli.command.parser", lambda arguments: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "octavo: interrupted\n" and signal.getsignal(signal.SIGTERM) is before
