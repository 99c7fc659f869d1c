"""The subjects of ``python -m benchmarks``, found by their files: those that say how long they take."""

from __future__ import annotations

import ast
import csv
import importlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


class Subject(NamedTuple):
    """A benchmark.

    ``takes``: its time on two cores, or of a GPU; ``measures``: files and folders whose changes make its results old.
    """

    name: str
    module: str
    about: str
    takes: str
    measures: tuple[str, ...]


def subjects() -> dict[str, Subject]:
    """Every file under benchmarks/ with TAKES and MEASURES, by name; none is imported for it."""
    found = {}
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        values = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in NAMED
        }
        if len(values) == len(NAMED):
            about = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[path.stem] = Subject(path.stem, module, about, values["TAKES"], values["MEASURES"])
    return found


NAMED = ("TAKES", "MEASURES")


def module_of(name: str) -> ModuleType:
    """A subject's module, imported."""
    return importlib.import_module(subjects()[name].module)


def stale() -> list[str]:
    """A line for each committed result whose rows are older than the code that they speak of, or of no commit."""
    lines, known = [], subjects()
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            commits = {row.get("commit", "") for row in csv.DictReader(file)}
        names = [name for name in known if path.stem.startswith(name)]
        if not names:
            continue
        measures = known[max(names, key=len)].measures
        for commit in sorted(commits):
            if not commit or commit.endswith("+"):
                lines.append(f"{path.name}: rows of {commit or 'no commit'}: nobody can make them again")
                continue
            changes = commits_since(commit, measures)
            if changes is None:
                lines.append(f"{path.name}: rows of {commit}, which this history does not hold")
            elif changes:
                lines.append(f"{path.name}: rows of {commit}; {len(changes)} commits changed their code since")
    return lines


def commits_since(commit: str, measures: Sequence[str]) -> list[str] | None:
    """Those that changed the code that rows of this commit speak of; None if the history does not hold it."""
    log = _git("log", "--oneline", f"{commit}..HEAD", "--", *measures)
    return None if log is None else log.splitlines()


def _git(*arguments: str) -> str | None:
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else None
