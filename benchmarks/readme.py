"""README's table of what was measured, made of the results that are committed, for ``report``."""

from __future__ import annotations

from benchmarks.common.pages import markdown, read, signed
from benchmarks.subjects import ROOT
from benchmarks.training.quality_study import OWN, Runs

README = ROOT / "README.md"
BEGIN, END = "<!-- made by ./dev bench readme -->\n", "<!-- until here -->\n"
SIZE, RECIPES = "0.5M", ("dynamic", "delayed", "rowwise", "blockwise", "mx")
BESIDE = {"dynamic": "tensorwise", "rowwise": "rowwise_with_gw_hp"}  # torchao's recipes beside ours


def filled() -> str:
    """README with its table made anew."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def table() -> str:
    """The rows, in Markdown: final losses, and steps by high precision's, eager and compiled, torchao's in brackets."""
    steps = {(row["width"], row["mode"], row["variant"]): f"{float(row['by_base']):.2f}" for row in read("cpu_step")}
    groups = list(dict.fromkeys(group[:2] for group in steps))
    runs, rows = Runs(read("quality")), []
    for recipe in RECIPES:
        found = runs.gap([recipe], SIZE, OWN)
        assert found is not None
        cells = [f"`{recipe}`", f"{signed(found.mean)} ± {found.error:.2f} %", str(len(found.gaps))]
        for group in groups:
            theirs = steps.get((*group, f"torchao {BESIDE.get(recipe)}"))
            cells.append(steps[*group, f"octavo {recipe}"] + (f" ({theirs})" if theirs else ""))
        rows.append(cells)
    head = ("recipe", "final validation loss above bf16's, mean ± standard error", "seeds")
    return markdown((*head, *(f"step {int(width):,} wide, {mode}" for width, mode in groups)), rows)
