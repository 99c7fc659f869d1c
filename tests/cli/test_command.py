import os
import shlex
import signal
import time
from pathlib import Path

import pytest

import octavo
from octavo import cli
from octavo.cli.actions import flag_of
from octavo.cli.command import _COMMANDS
from octavo.train.config import SECTIONS
from octavo_command import COMMANDS
from tests.support.command_line import one_line, train


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_and_shows_examples_that_it_takes(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"{COMMANDS[command][1:15]}" in text
    run, _, examples = _COMMANDS[command]
    for example in examples:
        assert f"  {example}\n" in text
        _, _, arguments = example.partition("octavo ")
        assert cli.parser().parse_args(shlex.split(arguments)).command is run


def test_each_command_has_a_description_and_its_options_only_where_it_is_named():
    assert _COMMANDS.keys() == COMMANDS.keys()
    assert cli.parser(["info", "--measure"]).parse_args(["info", "--measure"]).measure
    with pytest.raises(SystemExit):
        cli.parser(["info"]).parse_args(["train", "--steps", "3"])


@pytest.mark.parametrize("command", ["train", "compare"])
def test_each_option_of_a_run_has_a_flag_with_its_choices_and_default(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for config in SECTIONS.values():
        assert all(f"  {flag_of(name)}" in text for name in config.__dataclass_fields__)
    shown = " ".join(text.split())
    assert "--moments {fp32,bf16,fp8}" in shown and "--timeout SECONDS" in shown and "(default: 0.0015)" in shown


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
        ("train --steps many", "many"),
        ("train --steps -5", "--steps is -5: choose a whole number from 1"),
        ("train --steps 2.5", "--steps: invalid int value: '2.5'"),
        ("train --width 100 --heads 3", "choose width 96 or 102"),
        ("train --width 1000000 --heads 1", "GiB"),
        ("train --layers 99999999", "GiB"),
        ("train --recipe fp8", "--recipe: unknown recipe 'fp8': choose from baseline, bf16"),
        ("compare --recipes bf16 fp8", "--recipes: invalid choice: 'fp8'"),
        ("train --lr nan", "--lr is nan: choose a number above 0"),
        ("train --beta1 .99 --beta2 .9 --weight-storage fp8", "choose a larger beta2"),
        ("train --recipe bf16 --schedule bf16-then-fp8@0.5", "switches FP8 layers, and bf16 has none"),
        ("compare --data text.py --dtype bfloat16 --weight-storage fp8", "needs an FP8 recipe, not bf16"),
        ("compare --data text.py --weight-storage fp8 --recipes dynamic rowwise", "can't be stored in FP8"),
        ("compare --data text.py --recipes dynamic --steps 3 --schedule fp8-then-bf16@0.9", "would begin at step"),
        ("train --device cuda:77", "cuda:77"),
        ("train --batch 10 --micro-batches 4", "batch 10 does not divide into 4 --micro-batches: choose a batch of 12"),
        ("train --recover 3 --update-in-backward 0", "which --update-in-backward does not keep: choose one"),
        ("plan --width 7", "width 7 is not a multiple"),
        ("plan --experts 2 --top-k 3", "choose --top-k 2"),
        ("train --tensor-parallel 2", "--tensor-parallel 2 with shard none: choose shard fsdp"),
        ("train --config nowhere", "nowhere: No such file or directory: give a run's folder, its config.json"),
        ("train --config bare", "bare/config.json: No such file"),
        ("train --config text.py", "text.py is neither JSON nor"),
        ("train --dtype int8", "--dtype: invalid choice: 'int8'"),
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
        ("train --data text.py --shard zero", "--shard: invalid choice: 'zero'"),
        ("train --data text.py --shard fsdp", "torchrun --nproc-per-node 2 -m octavo train --shard fsdp"),
        ("compare --data text.py --shard ddp", "compare trains in one process"),
        ("train --data text.py --out ''", "--out is '': choose a Path"),
        ("train --data text.py --device meta", "device 'meta' cannot be used here"),
        ("train --data text.py --out old --resume", "damaged"),
    ],
)
def test_wrong_input_is_one_line_and_loses_nothing(arguments, says, folder, capsys):
    (folder / "empty.txt").touch()
    (folder / "junk.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "latin.txt").write_bytes("naïve ".encode("latin-1") * 1000)
    (folder / "short.txt").write_text("too short")
    (folder / "bare").mkdir()
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
