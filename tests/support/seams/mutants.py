"""Faults where features meet, one guard, reset or ignore list each, and the cell that finds it: mutants.csv.

``python -m tests.support.seams.mutants [part of a file's name]`` makes each in a copy of octavo and runs its cell,
which has to fail; it prints what the cell says. A process is forked for each, which imports octavo anew.
"""

from __future__ import annotations

import csv
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.mutate import ROOT, WARM, in_a_fork


class Mutant(NamedTuple):
    """A fault: in ``file`` of octavo/, ``old`` (there once) is replaced by ``new``; (feature, situation) is the
    cell.
    """

    file: str
    old: str
    new: str
    feature: str
    situation: str


with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
    MUTANTS = [Mutant(**row) for row in csv.DictReader(file)]


def finds(mutant: Mutant, root: Path) -> str:
    """Return what the mutant's cell says in a process that has not imported octavo yet; "" if all is well."""
    sys.path.insert(0, str(root))
    os.chdir(root)  # from where ranks import
    os.environ["PYTHONPATH"] = str(root)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    cells = importlib.import_module("tests.support.seams.cells")
    ranks = cells.SITUATIONS[mutant.situation].ranks
    try:
        if not ranks:
            return str(cells.fault(None, mutant.feature, mutant.situation))
        pool = importlib.import_module("tests.support.pool").Pool()
        try:
            return str(max(pool.run(cells.fault, ranks, mutant.feature, mutant.situation, seconds=120)))
        finally:
            pool.stop()
    except BaseException as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def in_copy(mutant: Mutant) -> str:
    """The same of a copy of the repository with the mutant, in a fork."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("octavo", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        path = root / "octavo" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        said = in_a_fork(lambda: finds(mutant, root), 600, root / "log")
        return "it did not end" if said is None else said


if __name__ == "__main__":
    for name in WARM:
        importlib.import_module(name)
    missed = 0
    for mutant in MUTANTS:
        if all(part in mutant.file for part in sys.argv[1:]):
            said = in_copy(mutant)
            missed += not said
            cell = f"{mutant.feature} x {mutant.situation}"
            print(f"{mutant.file}: {mutant.old.strip()!r}, {cell}: {said[:120] or 'NOT FOUND'}", flush=True)
    sys.exit(f"{missed} are not found" if missed else 0)
