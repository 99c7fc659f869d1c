"""A part of ./dev lint: the names that the upper rooms take from the rooms below are public, or stand in a list.

    python -m tests.support.seam

A name is public if docs/reference lists it. Every other name that a file of UPPER imports from a module below UPPER,
also inside of a function, or reads as an attribute of such a module, has to stand in SEAM, by the module that defines
it: of the bottom modules, too, such as errors, private and numerics, and ops of octavo.kernels.
The lint prints a line for each name that SEAM lacks, for each of SEAM that nobody takes, and if SEAM has more than MOST
names; it ends with 1 if there is any. MOST only ever falls.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
UPPER = ("cli", "train", "integrations", "compat", "inspect", "tune", "cost", "export", "schedule")
MOST = 60
SEAM = {
    "autograd.linear_cross_entropy": "ROWS",
    "autograd.observer": "LayerCounts",
    "autograd.timed": "TimedCalls",
    "cache": "cache_folder",
    "distributed.checkpoint": "checkpoints_in PlainModel",
    "distributed.files": "PARTIAL reason_of replacing",
    "distributed.ranks": "Ranks",
    "errors": "first_line require",
    "granularity": "BLOCK",
    "in_flight": "InFlight",
    "kernels.arguments": "Counted",
    "kernels.capability": "fast_dtype runs_natively",
    "kernels.onnx": "VERSION decompositions",
    "kernels.triton.cases": "CASES_OF_KIND",
    "kernels.triton.launch": "TileTable",
    "nn.candidates": "Select of_subclass sizes_of",
    "nn.convert": "gather_anew storage_after storage_now",
    "nn.counting": "OperationCounter",
    "nn.inputs": "finds_shapes",
    "nn.known_forwards": "fused_modules",
    "nn.linear": "SeparateSplits",
    "nn.machine": "described_on",
    "nn.recipe_module": "RecipeModule",
    "nn.saved": "fakes_of predicted_by_kind",
    "optim.base": "CompactOptimizer",
    "optim.conversion": "Conversion",
    "optim.masters": "MasterForm",
    "optim.state": "Settings largest_gradient",
    "private": "hooks_after_gradients keep_gpu_busy pytree running_backward",
    "reading": "file_inside read_json",
    "recipes": "NAMED",
    "scaling.recipe": "OPERANDS ROLES",
    "weights.files": "SCALE_INV checked_granularity",
    "weights.fsdp2": "forget_failed_pass on_this_rank own_slices whole",
    "weights.operands": "pair_reader plain_within weight_of",
    "weights.stored": "StoredWeight take_values",
}
REMEDY = "use a public name, move it to the one room that uses it, or let one function below answer in its place"

Name = tuple[str, str]  # a module and a name that it defines; "": the module itself


@cache
def tree(module: str) -> ast.Module | None:
    """Return the syntax tree of a module of octavo; None if there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def imports(node: ast.AST) -> Iterator[tuple[str, Name]]:
    """Yield (the name that it binds, what it is) for each name that a node of Python's syntax imports from octavo."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "octavo":
        yield from ((alias.asname or alias.name, (str(node.module), alias.name)) for alias in node.names)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "octavo":
                yield (alias.asname, (alias.name, "")) if alias.asname else ("octavo", ("octavo", ""))
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):  # x = importlib.import_module("octavo.y")
        called, *arguments = path_of(node.value.func)[-1], *node.value.args
        module = getattr(arguments[0], "value", None) if arguments else None
        if called == "import_module" and str(module).split(".")[0] == "octavo":
            yield from ((target.id, (str(module), "")) for target in node.targets if isinstance(target, ast.Name))


@cache
def imported(module: str) -> dict[str, Name]:
    """Return all that a module imports from octavo, by the names that it binds."""
    return dict(pair for node in ast.walk(tree(module) or ast.Module([], [])) for pair in imports(node))


def definition(module: str, name: str) -> Name:
    """Return where a name that a module has is defined."""
    source = imported(module).get(name)  # a function may hide the module of its name
    if source is not None and source != (module, name):
        return definition(*source)
    is_module = not name or tree(f"{module}.{name}") is not None
    return (f"{module}.{name}".rstrip("."), "") if is_module else (module, name)


@cache
def public() -> set[Name]:
    """Return the definitions of all names of docs/reference, and octavo.__version__."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    paths = [path for page in pages for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    names = [path.rpartition(".")[::2] for path in (*paths, "octavo.__version__")]
    return {definition(module, name) for module, name in names if tree(module) is not None}


def path_of(node: ast.AST) -> list[str]:
    """Return the names of ``a.b.c``; "" in place of what is no name."""
    if isinstance(node, ast.Attribute):
        return [*path_of(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def used(source: str) -> Iterator[tuple[int, Name]]:
    """Yield (line, what) for each name of octavo that a file imports, or reads as an attribute of a module."""
    nodes, modules = [*ast.walk(ast.parse(source))], {}
    for node in nodes:
        for bound, what in imports(node):
            module, name = definition(*what)
            if name:
                yield getattr(node, "lineno", 1), (module, name)
            else:
                modules[bound] = module
    for node in nodes:
        first, *parts = path_of(node) if isinstance(node, ast.Attribute) else [""]
        module = modules.get(first, "")
        while module and parts:
            module, name = definition(module, parts.pop(0))
            if name:
                yield getattr(node, "lineno", 1), (module, name)
                break


def taken(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, module and name) for each name that a file takes from below UPPER and that is not public."""
    for line, (module, name) in used(source):
        if not set(module.split(".")[1:2]) & set(UPPER) and (module, name) not in public() and name.isidentifier():
            yield line, f"{module}.{name}".removeprefix("octavo.")


def faults() -> Iterator[str]:
    """Yield a line for each name that SEAM lacks, or has though nobody takes it, and for a SEAM that has grown."""
    listed = {f"{module}.{name}" for module, names in SEAM.items() for name in names.split()}
    seen = set()
    for path in sorted(path for room in UPPER for path in (ROOT / "octavo" / room).rglob("*.py")):
        for line, name in taken(path.read_text(encoding="utf-8")):
            if name not in listed and name not in seen:
                yield f"{path.relative_to(ROOT)}:{line}: octavo.{name} is neither public nor in SEAM: {REMEDY}"
            seen.add(name)
    yield from (f"SEAM has octavo.{name}, which no upper room takes: leave it out" for name in sorted(listed - seen))
    if len(listed) > MOST:
        yield f"SEAM has {len(listed)} names, and may have {MOST}: {REMEDY}"


def main() -> int:
    """Print all faults; return 1 if there is one, else 0."""
    lines = list(faults())
    print("\n".join(lines) or f"seam: upper rooms take public names from below, and {MOST} others")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
