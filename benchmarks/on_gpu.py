"""All that is to be done on a GPU: the kernels' tests, ``kernels``, ``layer``, optimizer steps; in 10 minutes.

Most of the tests' time is compiling, so they are shared out over processes. ``--tune`` measures the configurations
in place between the tests and the benchmarks, which takes some minutes more. Results go to ``--output``: logs, CSVs,
and configs.json if tuned.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TAKES = "10 minutes of a GPU"
MEASURES = ("octavo/kernels/triton",)

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "octavo/kernels/triton/configs.json"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]


def tests(processes: int, log: Path, select: str) -> bool:
    """Run the tests marked ``gpu`` in so many processes; whether all passed."""
    collect = [*PYTEST, "--collect-only", "tests", *(["-k", select] if select else [])]
    listed = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        print(listed.stdout[-2000:] + listed.stderr[-2000:])
        return False
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(min(processes, len(names))):
            share = Path(folder) / f"{index}.txt"
            share.write_text("\n".join(names[index::processes]))
            command = [*PYTEST, "-rfE", "--tb=short", f"@{share}"]
            running.append(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        outputs = [process.communicate()[0] for process in running]
    log.write_text("\n".join(outputs))
    failures = [line for output in outputs for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    for line in failures[:30]:
        print(line[:300])
    print(f"{len(names)} tests, {len(failures)} failed; all output in {log.name}", flush=True)
    return not failures and all(process.returncode in (0, 5) for process in running)


def subject(name: str, *arguments: str) -> bool:
    """Run a benchmark, its output shown; whether it met its aims."""
    return subprocess.run([sys.executable, "-m", "benchmarks", name, *arguments], cwd=ROOT, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks on_gpu", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a folder for what it writes")
    parser.add_argument("--toy", action="store_true", help="without a GPU: a few tests, and toy sizes")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    toy = ["--toy"] if options.toy else []
    start = time.perf_counter()

    def elapsed(what: str) -> None:
        print(f"--- {what}: {time.perf_counter() - start:.0f} s since the start", flush=True)

    passed = tests(options.processes, options.output / "tests.log", "test_known_scales" if options.toy else "")
    elapsed("tests")
    if options.tune:
        passed &= subject("tune", *toy, "--log", str(options.output / "tune.csv"))
        shutil.copy(TABLE, options.output)
        elapsed("tune")
    limits = {"kernels": ("--minutes", "4"), "layer": ("--minutes", "1.5")}
    limits |= {"optimizer_step": ("--seconds", "3"), "update_overlap": ("--seconds", "2")}
    for name, limit in limits.items():
        passed &= subject(name, *toy, *limit, "--output", str(options.output / f"{name}.csv"))
        elapsed(name)
    return int(not passed)
