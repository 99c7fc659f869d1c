"""Benchmarks that need a GPU, or long, run end to end without one, at toy size; every row they write is a number."""

from __future__ import annotations

import collections
import csv
import functools
import importlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run_python

pytest.importorskip("triton")
subjects = importlib.import_module("benchmarks.subjects")


Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a benchmark and return what it printed."""

    def call(subject: str, *arguments: str | Path) -> str:
        status = subjects.module_of(subject).main([*map(str, arguments)])
        output = capsys.readouterr().out
        assert not status, output
        return output

    return call


def run_apart(*arguments: str | Path, root: Path) -> str:
    """The same in a process of its own."""
    result = run_python("-m", "benchmarks", *map(str, arguments), path=str(root), cwd=root, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row["device"] and row["torch"] and row["triton"] and row["python"] for row in rows)
    return rows


# What the run on a GPU writes: the columns that are numbers; torchao's rows are empty where it is not installed.
ON_GPU = {
    "kernels": "us moved_mb rate of_peak floor_us",
    "layer": "ms by_eager by_compiled",
    "optimizer_step": "step_ms ns_an_element state_bytes_an_element peak_bytes_an_element of_roofline",
    "update_overlap": "step_ms most_gradient_bytes launches_a_step",
    "llama_step": "ms tokens_s by_bf16",
}


@pytest.mark.full
def test_the_run_on_a_gpu_rehearsed(tmp_path: Path) -> None:
    """All stages, from a copy of the tree without git, as it lies on a machine with a GPU."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    for name in ("octavo", "emulator", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results", "runs"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    stages = [*map(str, importlib.import_module("benchmarks.on_gpu").STAGES)]
    output = run_apart("on_gpu", "--toy", "--processes", "2", "--output", out, "--stages", *stages, root=tree)
    assert [line for line in output.splitlines() if line.startswith("stage ") and not line.endswith(": ok")] == []
    assert " 0 failed" in output and "losses of one rank" in output
    assert "emulated sm_90: " in output and re.search(r"\b(\d+) of \1 cases are their reference", output)
    assert {row["device"] for row in rows_of(out / "kernels.csv")} == {"emulated-sm-90"}
    for name, columns in ON_GPU.items():
        rows = rows_of(out / f"{name}.csv")
        for row in rows:
            is_others = any(name in row.get("variant", "") for name in ("torchao", "liger"))
            assert is_others or all(float(row[column]) >= 0 for column in columns.split()), row
    again = run_apart("on_gpu", "--toy", "--output", out, root=tree)
    assert "---" not in again and "stage 7" in again  # finished stages do not run again


def test_one_command_on_a_gpu_takes_eight_minutes() -> None:
    """All stages take eight minutes, and a Llama's rows end in time; after 185 s the first five are there."""
    on_gpu, rows = (importlib.import_module(f"benchmarks.{name}") for name in ("on_gpu", "training.llama_rows"))
    assert [*on_gpu.FIRST] == [*on_gpu.STAGES][: len(on_gpu.FIRST)]
    assert sum(on_gpu.STAGES[number].seconds for number in on_gpu.FIRST) <= 480
    (command,) = on_gpu.STAGES[3].commands
    assert 60 * float(command[command.index("--minutes") + 1]) < on_gpu.STAGES[3].seconds
    first = dict([*rows.ORDER.items()][:5])
    assert [*first] == ["bf16", "delayed+fuse", "profile", "delayed+block", "bf16+liger"] and sum(first.values()) <= 185


def test_kernels_under_compute_sanitizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Findings of Compute Sanitizer, and its absence, fail the stage; a script stands in its place."""
    sanitizer, script = subjects.module_of("sanitizer"), tmp_path / "compute-sanitizer"
    monkeypatch.setattr(sanitizer, "ON_GPU", True)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    assert sanitizer.main([]) == 1 and "there is no compute-sanitizer here" in capsys.readouterr().out
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: str(script))
    script.write_text(f'#!/bin/sh\n[ "$2" = racecheck ] && exit {sanitizer.FOUND}\n[ "$2" = memcheck ]\n')
    script.chmod(0o755)
    assert sanitizer.main([]) == 1
    assert capsys.readouterr().out.split("\n")[:3] == ["memcheck: ok", "racecheck: found faults", "initcheck: status 1"]


def test_what_was_emulated_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Results of the sources as they are stay, and are emulated again only where --only names them."""
    emulated, written = subjects.module_of("emulated"), []
    row = {"right": "yes", "made": "before", "triton": "", "commit": "new"}
    rows_by_case = {(90, "amax"): [row], (90, "cast rows"): [row | {"commit": "old"}], (100, "cast rows"): [row]}
    monkeypatch.setattr(emulated, "committed", lambda: collections.defaultdict(list, rows_by_case))
    monkeypatch.setattr(emulated, "change_since", lambda commit, measures: "" if commit == "new" else "a file")
    monkeypatch.setattr(emulated, "NAMES", ["amax", "cast rows"])
    monkeypatch.setattr(emulated, "rows_of", lambda capability, name: [row | {"made": name}])
    monkeypatch.setattr(emulated, "write_results", lambda subject, rows, origin: written.append(rows))
    assert emulated.main(["--architectures", "90"]) == 0 and "1 of 1 right" in capsys.readouterr().out
    assert [one["made"] for one in written[-1]] == ["before", "cast rows", "before"]
    assert emulated.main(["--architectures", "90", "--only", "amax"]) == 0
    assert [one["made"] for one in written[-1]] == ["amax", "before", "before"]


def test_what_tensor_cores_lose() -> None:
    """A few new sums are as good as the committed ones."""
    accumulation = importlib.import_module("benchmarks.kernels.accumulation")
    committed = {tuple(row.values())[:5]: row for row in accumulation.read("accumulation")}
    sums_lost = [*accumulation.rows(16, (256, 1024))]
    assert len(sums_lost) == len(committed) // 2
    for row in sums_lost:
        committed_row = committed[tuple(str(value) for value in row.values())[:5]]
        assert abs(float(row["sqnr_db"]) - float(committed_row["sqnr_db"])) < 3 or not row["instruction"], row


def test_subjects_say_what_they_are_and_what_they_measure():
    all_subjects = subjects.subjects()
    assert {"cpu_step", "kernels", "communication"} <= all_subjects.keys()
    for subject in all_subjects.values():
        assert subject.about and subject.takes, subject
        assert all((ROOT / path.removeprefix(":!")).exists() for path in subject.measures), subject


def test_llama_saves_its_floor() -> None:
    """Llama's saved bytes are within 3 % of the last count, by kind."""
    saved = importlib.import_module("benchmarks.training.saved_bytes")
    rows = [row for row in saved.read("saved_bytes") if row["model"] == "Llama"]
    counts = [row for row in rows if row["recipe"] in ("dynamic", "delayed")]
    assert len(counts) == 2 * 6
    for row in counts:
        for how in ("converted", "fused") if row["kind"] != "weights" else ():
            assert 1 <= int(row[how]) / saved.floor(row["kind"], how == "fused") < 1.03, (row["kind"], how)


def test_tables_and_pictures_are_those_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("benchmarks.report").main(["--check"]) == 0, capsys.readouterr().out


def test_pages_have_every_table_that_is_made_for_them():
    report, pages = (importlib.import_module(f"benchmarks.{name}") for name in ("report", "common.pages"))
    for page, tables in report.tables_of().items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [name for name in tables if pages.BEGIN.format(name) not in text] == [], page
        assert text.count("made by ./dev bench report") == len(tables), page


def test_numbers_in_prose_are_written_into_their_sentences(monkeypatch):
    sentences = importlib.import_module("benchmarks.sentences")
    of_page = {"takes {} ms instead of {} (`a`)": lambda: ["1,024.5", "−2"]}
    monkeypatch.setattr(sentences, "SENTENCES", {"page": of_page})
    text = sentences.written("page", "It\ntakes 7 ms\n  instead of 3.25 (`a`), 9.")
    assert text == "It\ntakes 1,024.5 ms\n  instead of −2 (`a`), 9."
    assert sentences.written("another page", "takes 7 ms") == "takes 7 ms"
    for text in ("takes long", "takes 1 ms instead of 2 (`a`) takes 1 ms instead of 2 (`a`)"):
        with pytest.raises(ValueError, match=r"page has [02] times"):
            sentences.written("page", text)


def test_every_result_is_made_again_or_is_history() -> None:
    """Each result is written by a subject or is history; pages name history's commits, as `report --check` sees."""
    names_of_results = [name for names in subjects.ALL.values() for name in names]
    assert sorted({name for name, _ in subjects.results()}) == sorted([*names_of_results, *subjects.STUDIES])
    assert subjects.ALL.keys() <= subjects.subjects().keys() and subjects.OF_TRITON <= subjects.ALL.keys()
    for name, path in subjects.results():
        for commit in subjects.commits_of(path) if name in subjects.STUDIES else ():
            held = subjects.CAME_WITH.get(commit, commit)
            assert held and subjects.change_since(held, ["CITATION.cff"]) is not None, (path.name, commit)
    assert ".dev" in importlib.import_module("octavo").__version__ or subjects.stale() == []


def test_results_that_are_older_than_their_code_are_named(tmp_path, monkeypatch):
    git = functools.partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True)
    monkeypatch.setattr(subjects, "ROOT", tmp_path)
    monkeypatch.setattr(subjects, "RESULTS", tmp_path)
    monkeypatch.setattr(subjects, "subjects", lambda: {"cpu_step": subjects.Subject("cpu_step", "", "", "", ("code",))})
    monkeypatch.setattr(subjects, "ALL", {"cpu_step": ("cpu_step",)})
    git(["git", "init", "-q"])
    (tmp_path / "code").mkdir()
    commits = []
    for text in ("a = 1", '"""What it is."""\na = 2', '"""What a is."""\na = 2  # two'):
        (tmp_path / "code/a.py").write_text(text)
        git(["git", "add", "code"])
        git(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", text])
        commits.append(git(["git", "rev-parse", "HEAD"]).stdout.strip())
    for number, commit in enumerate([*commits, commits[2] + "+", ""]):  # old, alike, new, changed, none
        (tmp_path / f"cpu_step-cpu-{number}.csv").write_text(f"row,commit\n1,{commit}\n")
    lines = subjects.stale()
    assert [line.partition(".csv")[0][-1] for line in lines] == ["0", "3", "4"] and "code/a.py changed" in lines[0]


def test_all_makes_what_is_old_and_goes_on(tmp_path, monkeypatch, capsys) -> None:
    everything = importlib.import_module("benchmarks.all_results")
    ran = []

    def run(command, **options):
        ran.append(command[3])
        if command[3] != "fails":
            (tmp_path / f"{command[3]}.csv").write_text("commit\nnew\n")
        return subprocess.CompletedProcess(command, command[3] == "fails")

    monkeypatch.setattr(subjects, "RESULTS", tmp_path)
    names = ("made", "old", "fails")
    one = subjects.Subject("", "", "", "a minute", ())
    replaced = {"ALL": {name: (name,) for name in names}, "subjects": lambda: dict.fromkeys(names, one)}
    replaced |= {"commit": lambda: "new", "change_since": lambda commit, code: "" if commit == "new" else "a file"}
    for name, value in replaced.items():
        monkeypatch.setattr(everything, name, value)
    monkeypatch.setattr(everything.metadata, "version", lambda name: "3.7.1")
    monkeypatch.setattr(everything.subprocess, "run", run)
    monkeypatch.setattr(everything.report, "main", lambda arguments: ran.append("report"))
    for name, commit in {"made": "new", "old": "old"}.items():
        (tmp_path / f"{name}.csv").write_text(f"commit\n{commit}\n")
    assert everything.main([]) == 1 and "fails: not made" in capsys.readouterr().out
    assert everything.main(["--only", "made", "old"]) == 0
    assert ran == ["old", "fails", "report", "report"]


@pytest.mark.full
def test_a_run_of_quality_that_is_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    quality = subjects.module_of("quality")
    for experiment in ("delayed", "full stack in backward, exact norm"):
        task = quality.Task(experiment, "toy", 0, 20)
        parts, whole = tmp_path / f"{experiment} in parts", tmp_path / experiment
        assert quality.train(task, parts, iter([False] * 7 + [True]).__next__).interrupted
        rows = (quality.finish(task, folder, quality.train(task, folder)) for folder in (parts, whole))
        assert len({row["val_loss_average"] for row in rows}) == 1
