"""All checks and benchmarks that need a GPU, in stages that each have their time, in the order of what they decide.

Without --stages they are those of one command of 8 minutes: each kernel once, replays, and a Llama's steps, whose rows
may be cut at any point. The rehearsal (--toy) is the same without a GPU. In stages 1, 4 to 6, 10 and 11 kernels are
compiled for Hopper, and their PTX runs in the emulator; replays run in Triton's interpreter; in the others, of which
torch.compile makes code, layers and optimizers run the reference. Every stage is a process of its own. One that fails
or runs out of its time is named, and the next begins; rows are in its CSV as they come. ``--stages`` picks some,
``--minutes`` ends before a stage that would not fit, and a stage that an earlier call finished in the same folder is
not run again. The last lines are a table of ours, the limit and the others.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.subjects import ROOT

TAKES = "8 minutes of a GPU; with all --stages 35, in commands of 9"
MEASURES = ("octavo/kernels/triton",)

# a plugin that times tests, where it is installed, warns beside xdist, which is an error
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu"]
DONE = "stages.json"
TESTS = ("tests/kernels", "tests/integration", "tests/tune", "tests/nn", "tests/compile", "tests/test_recipes.py")


class Stage(NamedTuple):
    """Benchmarks to run one after the other, or the tests; ``seconds``: of all of them together."""

    about: str
    seconds: int
    commands: tuple[tuple[str, ...], ...] = ()  # {output} is the folder


def _subject(name: str, *arguments: str) -> tuple[str, ...]:
    return name, *arguments, "--output", f"{{output}}/{name}.csv"


STAGES = {
    1: Stage("smoke: every kernel once, a step of every recipe", 65, (("smoke", "--minutes", "0.5"),)),
    2: Stage("replays of casts, on two streams and in graphs", 45, (("replays", "--seconds", "25"),)),
    3: Stage("a Llama's step, by rows", 360, (_subject("llama_step", "--minutes", "5.9"),)),
    4: Stage("the tests marked gpu", 400),
    5: Stage("tune", 360, (("tune", "--minutes", "5.5"),)),
    6: Stage("kernels beside copy, and others'", 270, (_subject("kernels", "--minutes", "4"),)),
    7: Stage("layers beside bf16 and torchao", 150, (_subject("layer", "--minutes", "2"),)),
    8: Stage(
        "optimizer steps",
        120,
        (_subject("optimizer_step", "--seconds", "3"), _subject("update_overlap", "--seconds", "2")),
    ),
    9: Stage("FSDP2 over NCCL", 60, (("nccl",),)),
    10: Stage("compute-sanitizer: every kernel once under three tools", 150, (("sanitizer",),)),
    11: Stage("launches for the emulator", 90, (("silicon", "--record", "{output}/silicon.record"),)),
}
FIRST = (1, 2, 3)  # one command of 8 minutes
TOY = {
    1: STAGES[1]._replace(seconds=300),
    2: Stage(STAGES[2].about, 300, (("replays", "--toy", "--seconds", "20"),)),
    5: Stage(STAGES[5].about, 300, (("tune", "cast", "matmul", "--toy"),)),
    9: STAGES[9]._replace(seconds=120),
    11: STAGES[11]._replace(seconds=300),
}
TOY_TESTS = ("-k", "delayed_update", "--compiled", "sm_90")


def toy(number: int) -> Stage:
    """Return a stage of the rehearsal, without a GPU."""
    stage = TOY.get(number, STAGES[number])
    if number in TOY:
        return stage
    commands = tuple((name, "--toy", *options) for name, *options in stage.commands)
    return stage._replace(seconds=300, commands=commands)


def run(command: list[str], seconds: float, log: Path) -> str:
    """Run a command, its output shown and appended to ``log``: "ok", or what went wrong."""
    if seconds <= 0:
        return "left out, no time"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    limited = ["timeout", "--signal=INT", "--kill-after=5", str(seconds), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(limited, cwd=ROOT, env=environment, **pipes) as process,  # type: ignore[call-overload]
    ):
        for line in process.stdout:
            file.write(line)
            sys.stdout.write(line[:300])
            sys.stdout.flush()
    code = process.returncode
    out_of_time = code in (124, 137, -signal.SIGINT, -signal.SIGKILL)
    return "ok" if code == 0 else f"out of its {seconds:.0f} s" if out_of_time else f"failed, exit status {code}"


def tests(processes: int, seconds: float, output: Path, options: Sequence[str]) -> str:
    """Run the tests marked ``gpu``, shared out over processes, for most of their time is compiling."""
    deadline = time.monotonic() + seconds
    collect = [*PYTEST, "-q", "--collect-only", *TESTS, *options]
    listed = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        print(listed.stdout[-2000:] + listed.stderr[-2000:])
        return "found no tests"
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.log" for index in range(min(processes, len(names)))]
        for index, file in enumerate(files):
            share = Path(folder) / f"{index}.txt"
            share.write_text("\n".join(names[index::processes]))
            with file.open("w") as out:
                command = [*PYTEST, "-v", "--tb=short", *options, f"@{share}"]
                running.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, text=True))
        late = 0
        for process in running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late += 1
        text = "\n".join(file.read_text(errors="replace") for file in files)
    (output / "tests.log").write_text(text)
    failures = [line for line in text.splitlines() if "::" in line and re.search(r" (FAILED|ERROR)\b", line)]
    for line in failures[:30]:
        print(line[:300])
    print(f"{len(names)} tests, {len(failures)} failed, {late} of {len(running)} processes out of time", flush=True)
    passed = not failures and not late and all(process.returncode in (0, 5) for process in running)
    return "ok" if passed else f"{len(failures)} failed, {late} processes out of time"


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return a CSV's rows, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def summary(output: Path) -> list[str]:
    """Return a table of octavo's numbers, the limits and the others', from the CSVs that are there."""
    lines = ["", "kernel, shape: us, its floor by peaks, others"]
    for row in rows_of(output / "kernels.csv"):
        others = " ".join(
            f"{key[:-3]} {row[key]}" for key in row if key.endswith("_us") and key != "floor_us" and row[key]
        )
        lines.append(f"  {row['op']} {row['shape']}: {row['us']}, {row['floor_us']}, {others}")
    for name, keys in (
        ("layer", ("variant", "shape", "ms", "by_eager", "by_compiled")),
        ("optimizer_step", ("optimizer", "step_ms", "graph_ms", "of_roofline")),
        ("llama_step", ("variant", "mode", "ms", "by_bf16", "peak_gib", "mhz", "note")),
        ("llama_profile", ("variant", "kind", "ms", "share")),
    ):
        rows = rows_of(output / f"{name}.csv")
        if name == "layer":
            rows = [row for row in rows if row["shape"].endswith("layers")]
        lines += [f"{name}: {', '.join(keys)}"] * bool(rows)
        lines += ["  " + ", ".join(row.get(key, "") for key in keys) for row in rows]
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks on_gpu", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a folder for logs, CSVs and what is done")
    about = "; ".join(f"{number} {stage.about}" for number, stage in STAGES.items())
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(FIRST), help=f"of {about}")
    parser.add_argument("--minutes", type=float, default=60.0, help="no stage is begun that would end later")
    parser.add_argument("--toy", action="store_true", help="the rehearsal, without a GPU")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="that share the tests")
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    record = options.output / DONE
    done: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    start = time.monotonic()
    for number in options.stages:
        stage = toy(number) if options.toy else STAGES[number]
        left = 60 * options.minutes - (time.monotonic() - start)
        if done.get(str(number)) == "ok":
            continue
        if left < min(stage.seconds, 60):
            done[str(number)] = "left out, no time"
            continue
        seconds, began = min(stage.seconds, left), time.monotonic()
        print(f"--- stage {number}, {stage.about}: {seconds:.0f} s at most", flush=True)
        if stage.commands:
            results = []
            for command in stage.commands:
                words = [word.format(output=options.output) for word in command]
                seconds_left = seconds - (time.monotonic() - began)
                results.append(
                    run([sys.executable, "-m", "benchmarks", *words], seconds_left, options.output / f"{words[0]}.log")
                )
            done[str(number)] = "; ".join(dict.fromkeys(results))
        else:
            select = TOY_TESTS if options.toy else ()
            done[str(number)] = tests(options.processes, seconds, options.output, select)
        record.write_text(json.dumps(done))
        print(f"--- stage {number}: {done[str(number)]}, {time.monotonic() - began:.0f} s", flush=True)
    print(*summary(options.output), sep="\n")
    for number, result in sorted(done.items()):
        print(f"stage {number}, {STAGES[int(number)].about}: {result}")
    return int(any(done.get(str(number)) != "ok" for number in options.stages))
