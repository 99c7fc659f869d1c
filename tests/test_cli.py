import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import octavo
from octavo import cli

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


def start(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "octavo", *arguments]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


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
    assert "step 6/6" in err and "tokens/s" in err and "left" in err
    assert sorted(path.name for path in Path("here/delayed").iterdir()) == ["checkpoint.pt", "log.csv"]
    assert Path("here/loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(Path("here/delayed/log.csv").read_text().splitlines()) == 7


def test_compare_shows_the_gap_and_resumes_with_one_more_recipe(capsys):
    pytest.importorskip("matplotlib")
    arguments = ["compare", *TINY, "--data", "text.py", "--out", "here", "--recipes"]
    assert cli.main([*arguments, "bf16", "dynamic"]) == 0
    out, _ = capsys.readouterr()
    assert "gap to bf16" in out and "+0.00 %" in out
    kept = Path("here/bf16/log.csv").read_bytes()
    assert cli.main([*arguments, "bf16", "dynamic", "mx", "--resume"]) == 0
    out, _ = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["bf16", "dynamic", "mx"]
    assert Path("here/bf16/log.csv").read_bytes() == kept


def test_folders_are_chosen_when_none_is_given(capsys):
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
        ("train --device cuda:77", "cuda:77"),
        ("train --dtype int8", "bfloat16 or float32"),
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


def test_resuming_with_other_options_is_refused(capsys):
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


def test_ctrl_c_before_training_is_quiet(capsys, monkeypatch):
    def interrupt(data):
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.train.loop.load_corpus", interrupt)
    assert train() == 130
    assert capsys.readouterr().err == "octavo: interrupted\n"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_is_saved_says_how_to_go_on_and_does(stop, folder, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["compare", *TINY, "--data", "text.py", "--recipes", "bf16", "dynamic", "--steps", "60"]
    assert cli.main([*arguments, "--out", "whole"]) == 0
    whole = json.dumps([line.split(",")[:3] for line in Path("whole/dynamic/log.csv").read_text().splitlines()])
    process = start(*arguments)
    log = folder / "runs" / "compare-001" / "dynamic" / "log.csv"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    last = err.splitlines()[-1]
    assert last.startswith("octavo: stopped dynamic at step ") and "go on with: octavo compare" in last
    capsys.readouterr()
    again = shlex.split(last.partition("go on with: ")[2])[1:]
    assert cli.main(again) == 0
    assert "gap to bf16" in capsys.readouterr().out
    assert json.dumps([line.split(",")[:3] for line in log.read_text().splitlines()]) == whole


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
def test_a_disk_that_is_full_keeps_the_checkpoint_before(folder):
    code = (
        "import resource, signal, sys\n"
        "from octavo import cli\n"
        "from octavo.train import checkpoint\n"
        "save = checkpoint.RunFolder.save\n"
        "def save_once(self, state):\n"
        "    save(self, state)\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"  # a file may not grow beyond: as on a full disk
        "checkpoint.RunFolder.save = save_once\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    arguments = ["train", *TINY, "--data", "text.py", "--out", "here", "--checkpoint-every", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("octavo: error: cannot write here/dynamic/checkpoint.pt: File too large; step 2 is kept"), (
        last
    )
    assert "Traceback" not in done.stderr
    assert cli.main([*arguments, "--resume"]) == 0


def test_python_dash_m_and_a_light_import():
    process = start("--version")
    assert process.communicate(timeout=60) == (f"octavo {octavo.__version__}\n", "")
    code = "import sys, octavo; sys.exit(any(name.startswith(('octavo.train', 'octavo.cli')) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


def test_export_writes_a_file_that_onnxruntime_runs(capsys):
    pytest.importorskip("onnxruntime")
    train("--recipe", "delayed", "--out", "runs/it", "--context", "32")
    capsys.readouterr()
    for source in ("runs/it/delayed", "runs/it/delayed/checkpoint.pt"):
        assert cli.main(["export", source, "--onnx", "m.onnx", "--data", "text.py"]) == 0
        wrote, checked = capsys.readouterr().out.splitlines()
        assert wrote.startswith(f"wrote m.onnx: {Path('m.onnx').stat().st_size:,} bytes, ")
        assert float(checked.split("SQNR ")[1].split(" dB")[0]) >= 30
        theirs, ours = (
            float(part.split()[0].rstrip(")")) for part in (checked.split("loss ")[1], checked.split("octavo ")[1])
        )
        assert abs(theirs / ours - 1) <= 1e-3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no", "--onnx", "m.onnx"], "no does not exist"),
        (["runs", "--onnx", "m.onnx"], "choose one of runs/dynamic"),
        (["runs/dynamic", "--onnx", "no/m.onnx"], "the folder no does not exist"),
        (["runs/dynamic", "--onnx", "m.onnx", "--opset", "3"], "opset=3: use 19 to 24"),
        (["runs/dynamic", "--onnx", "m.onnx", "--data", "none"], "none"),
    ],
)
def test_an_export_that_fails_is_one_line_and_writes_nothing(arguments, says, folder, capsys):
    train("--out", "runs")
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert cli.main(["export", "--data", "text.py", *arguments]) == cli.FAULT
    assert says in one_line(capsys)
    assert sorted(folder.rglob("*")) == before
