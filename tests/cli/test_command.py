import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

import octavo
from octavo import cli
from octavo.cli.command import file_of
from octavo.train.checkpoint import LOCK
from octavo_command import COMMANDS
from tests.support.command_line import one_line


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_says_in_a_narrow_terminal_what_a_command_does_with_examples_that_it_takes(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 60 and "examples:\n" in text
    for name in [command] if command else COMMANDS:
        assert COMMANDS[name][1:15] in text
    for example in file_of(command).EXAMPLES if command else ():
        assert f"  {example}\n" in text.replace(" \\\n    ", " ")
        _, _, arguments = example.partition("octavo ")
        assert cli.parser().parse_args(shlex.split(arguments)).command is file_of(command).run


def test_each_command_is_a_file_and_named_in_the_list_of_rooms():
    room = Path(cli.__file__).parent
    assert {file.stem for file in room.glob("*.py")} - {"__init__", "command", "options"} == {*COMMANDS}
    rooms = (room.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    (row,) = (line for line in rooms.splitlines() if line.startswith("| `cli/` |"))
    assert [command for command in COMMANDS if f"`{command}`" not in row and f"`octavo {command}`" not in row] == []


def test_each_command_has_a_description_and_its_options_only_where_it_is_named():
    assert cli.parser(["info", "--measure"]).parse_args(["info", "--measure"]).measure
    with pytest.raises(SystemExit):
        cli.parser(["info"]).parse_args(["train", "--steps", "3"])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shtab_writes_completions(shell):
    written = pytest.importorskip("shtab").complete(cli.parser(), shell)
    assert "--weight-storage" in written and "split24" in written


def test_version_and_info(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"
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
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    assert {path: path.read_bytes() for path in files} == before


def test_sigterm_ends_it_at_once_from_the_very_first_import(capsys, monkeypatch):
    monkeypatch.setattr("octavo.cli.command.parser", lambda arguments: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "octavo: interrupted\n" and signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_torchrun_started_ends_without_waiting_for_threads(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["octavo", "--version"])
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    cli.main()
    assert ended == [0] and capsys.readouterr().out == f"octavo {octavo.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["octavo", "evaluate"])
    cli.main()
    assert ended == [0, 2]


def test_a_reader_that_has_gone_is_no_fault_of_the_command(capfd, monkeypatch):
    """Whatever is printed after it goes to os.devnull, also by Python's exit, which flushes stdout."""

    def printing(arguments):
        raise BrokenPipeError

    with monkeypatch.context() as patch, open(os.dup(1), "w") as stdout:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr("octavo.cli.command.parser", printing)
        assert cli.main(["info"]) == 2
        assert os.fstat(stdout.fileno()).st_rdev == os.stat(os.devnull).st_rdev
    assert capfd.readouterr() == ("", "")


def test_a_compiler_that_fails_is_named(capsys, monkeypatch):
    error = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})
    monkeypatch.setattr("octavo.cli.command.parser", lambda arguments: (_ for _ in ()).throw(error("no C++\nmore")))
    assert cli.main(["train"]) == 2
    assert one_line(capsys).endswith("--compile failed (no C++): leave it out, or see what torch.compile needs here")
