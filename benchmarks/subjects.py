"""The subjects of ``python -m benchmarks``, the committed results, and which of these are older than their code.

A subject is a file under benchmarks/ that says how long it takes. Each CSV of benchmarks/results is made again for
every release by ``./dev bench all`` (ALL), or it is history (STUDIES): too long, answered, or of another CPU.
"""

from __future__ import annotations

import ast
import csv
import functools
import importlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"

# What ./dev bench all makes, in this order: a subject, and its CSVs but for the device's name.
ALL: dict[str, tuple[str, ...]] = {
    "cpu_step": ("cpu_step",),
    "gpu_host": ("gpu_host",),
    "saved_bytes": ("saved_bytes",),
    "memory_kinds": ("memory_kinds",),
    "accumulation": ("accumulation",),
    "communication": ("communication", "communication_links", "communication_wire"),
    "planned_step": ("planned_step",),
    "communication_model": ("communication_model", "communication_model_published"),
    "gather_host": ("gather_host",),
    "grouped_accuracy": ("grouped_accuracy",),
    "optimizer_step": ("optimizer_step",),
    "checkpointing": ("checkpointing",),
    "llama_convergence": ("llama_convergence",),
    "compile_matrix": ("compile_matrix",),
    "compiled_bytes": ("compiled_bytes",),
    "onnx_export": ("onnx_export",),
    "sharded_load": ("sharded_load",),
    "causes": ("causes",),
    "inspect_cost": ("inspect_cost",),
    "optimizer_state": ("optimizer_state",),
    "compiled": ("compiled",),
    "predicted_products": ("predicted_products",),
    "predictions": ("predictions",),
    "emulated": ("emulated",),
}
OF_TRITON = {"compiled", "predicted_products", "predictions", "emulated"}  # machine code, which differs by release
TRITON = "3.9"  # whose machine code is committed

# History, and the page that shows it and names its commits: ``./dev bench report`` writes there what `history` says. A
# script that nobody needs any more lies in that commit alone.
STUDIES = {
    "quality": "docs/study/training-quality.md",
    "gradient_error": "docs/study/training-quality.md",
    "mixture_convergence_summary": "docs/study/mixture-of-experts.md",
    "fp8_reduce": "docs/study/gradient-reduction.md",
    "fp8_reduce_training": "docs/study/gradient-reduction.md",
    "optimizer_convergence": "docs/study/optimizer-state.md",
    "muon_training": "docs/optimizer.md",
    "muon_step": "docs/optimizer.md",
    "stored_weights": "docs/weights.md",
    "adaptive": "docs/adaptive.md",
    "causes_earlier": "docs/inspect.md",  # draws whose question is answered
    # on a GPU, which not every release has
    "kernels": "docs/kernels.md",
    "layer": "docs/kernels.md",
    "llama_step": "docs/kernels.md",
    "gpu_host_earlier": "docs/plan.md",  # of the commit of llama_step
    "gpu_host_planned": "docs/plan.md",  # the host whose times octavo.cost takes
    "silicon": "docs/emulator.md",
}
# A state that was rewritten before it was merged, or was not committed: the commit that its rows came with.
CAME_WITH = {"a5a2346": "161ce4a", "c1c2b31+": "7836095"}


class Subject(NamedTuple):
    """A benchmark.

    ``takes``: its time on two cores, or of a GPU; ``measures``: files and folders whose changes make its results old,
    and after ":!" one whose changes don't.
    """

    name: str
    module: str
    about: str
    takes: str
    measures: tuple[str, ...]


def subjects() -> dict[str, Subject]:
    """Return every file under benchmarks/ with TAKES and MEASURES, by name; none is imported for it."""
    subjects_by_name = {}
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
            subjects_by_name[path.stem] = Subject(path.stem, module, about, values["TAKES"], values["MEASURES"])
    return subjects_by_name


NAMED = ("TAKES", "MEASURES")


def module_of(name: str) -> ModuleType:
    """Return a subject's module, imported."""
    return importlib.import_module(subjects()[name].module)


def results() -> Iterator[tuple[str, Path]]:
    """Yield each committed CSV, and its name without the device's."""
    for path in sorted(RESULTS.glob("*.csv")):
        yield re.split(r"-(?:cpu|nvidia)-", path.stem)[0], path


def commits_of(path: Path) -> list[str]:
    """Return the commits that the rows of a CSV name."""
    with path.open(newline="", encoding="utf-8") as file:
        return sorted({row.get("commit", "") for row in csv.DictReader(file)})


def stale() -> list[str]:
    """Return a line for each result of `ALL` whose rows are older than the code that they measure, or of no commit."""
    known = subjects()
    measures = {name: known[subject].measures for subject, names in ALL.items() for name in names}
    lines = []
    for name, path in results():
        for commit in commits_of(path) if name in measures else ():
            change = change_since(commit, measures[name])
            if change is None:
                lines.append(f"{path.name}: rows of {commit or 'no commit'}, which this history does not hold")
            elif change:
                lines.append(f"{path.name}: rows of {commit}; since then {change} changed")
    return lines


def change_since(commit: str, measures: Sequence[str]) -> str | None:
    """Return a file among these that has changed since a commit; "" for none, None if the history does not hold it.

    Comments, docstrings and layout of Python are no code.
    """
    changed = git("diff", "--name-only", commit, "--", *measures) if commit else None
    return None if changed is None else next((name for name in changed.splitlines() if _changed(commit, name)), "")


@functools.cache
def _changed(commit: str, name: str) -> bool:
    path = ROOT / name
    now = path.read_text(encoding="utf-8") if path.exists() else None
    before = git("show", f"{commit}:{name}")
    if now is None or before is None or path.suffix != ".py":
        return now != before
    return _code(now) != _code(before)


def _code(text: str) -> str:
    """Return a Python file as its syntax tree, without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def history(page: str) -> str:
    """Return, for a page, the commits that its studies measured."""
    parts = []
    for name, path in results():
        if STUDIES.get(name) == page:
            commits = (
                f"{one} (not in the history; its rows came with {CAME_WITH[one]})" if one in CAME_WITH else one
                for one in commits_of(path)
            )
            parts.append(f"- [{name}]({'../' * page.count('/')}benchmarks/results/{path.name}): {', '.join(commits)}\n")
    about = "What is history: measured once, at these commits, which have its scripts, and not again for each release."
    return f"{about}\n\n{''.join(parts)}"


def git(*arguments: str) -> str | None:
    """Return git's output; None where it fails, or there is none."""
    try:
        run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout if run.returncode == 0 else None
