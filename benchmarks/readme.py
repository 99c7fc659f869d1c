"""README's table of what was measured, made of the results that are committed, for ``report``."""

from __future__ import annotations

import csv

from benchmarks.common.pages import read, signed
from benchmarks.subjects import RESULTS, ROOT
from benchmarks.training.quality_study import OWN, Runs

README = ROOT / "README.md"
BEGIN, END = "<!-- made by ./dev bench readme -->\n", "<!-- until here -->\n"
DEVICE, SIZE = "cpu-amd-epyc", "0.5M"
RECIPES = ("dynamic", "delayed", "rowwise", "blockwise", "mx")
BESIDE = {  # torchao's recipes beside ours
    "dynamic": {"tensorwise": "tensorwise"},
    "rowwise": {"rowwise": "rowwise", "rowwise_with_gw_hp": "with high-precision dW"},
}


def filled() -> str:
    """README with its table made anew."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def table() -> str:
    """The rows, in Markdown."""
    steps = {row["variant"]: float(row["by_bf16"]) for row in _rows("cpu_step")}
    runs = Runs(read("quality"))
    lines = [
        "| recipe | final validation loss above bf16's, mean ± standard error | seeds "
        "| training step on the CPU, bf16 = 1 | torchao's step |",
        "|---|---|---|---|---|",
    ]
    for recipe in RECIPES:
        theirs = (f"{steps[f'torchao {name}']:.2f} ({text})" for name, text in BESIDE.get(recipe, {}).items())
        found = runs.gap([recipe], SIZE, OWN)
        assert found is not None
        gap = f"{signed(found.mean)} ± {found.error:.2f} % | {len(found.gaps)}"
        step = steps[f"octavo {recipe}"]
        lines.append(f"| `{recipe}` | {gap} | {step:.2f} | {', '.join(theirs)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _rows(subject: str) -> list[dict[str, str]]:
    with (RESULTS / f"{subject}-{DEVICE}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
