"""README's table of what was measured, made of the results that are committed."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence

from benchmarks.subjects import RESULTS, ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- made by ./dev bench readme -->\n", "<!-- until here -->\n"
DEVICE = "cpu-amd-epyc"
BESIDE = {  # torchao's recipes beside ours
    "dynamic": {"tensorwise": "tensorwise"},
    "rowwise": {"rowwise": "rowwise", "rowwise_with_gw_hp": "with high-precision dW"},
}


def main(argv: Sequence[str]) -> int:
    """Write the table, or with --check say whether it is what the results say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where they differ")
    check = parser.parse_args(argv).check
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = before + BEGIN + table() + END + after
    if check:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


def table() -> str:
    """The rows, in Markdown."""
    steps = {row["variant"]: float(row["by_bf16"]) for row in _rows("cpu_step")}
    gaps: dict[str, list[float]] = {}
    for row in _rows("convergence_summary"):
        gaps.setdefault(row["recipe"], []).append(float(row["gap_percent"]))
    del gaps["bf16"]
    seeds = len(next(iter(gaps.values())))
    lines = [
        f"| recipe | final validation loss, mean difference from bf16 over {seeds} seeds "
        "| training step on the CPU, bf16 = 1 | torchao's step |",
        "|---|---|---|---|",
    ]
    for recipe, found in gaps.items():
        theirs = (f"{steps[f'torchao {name}']:.2f} ({text})" for name, text in BESIDE.get(recipe, {}).items())
        gap = f"{statistics.mean(found):+.2f} %".replace("-", "\N{MINUS SIGN}")
        step = steps[f"octavo {recipe}"]
        lines.append(f"| `{recipe}` | {gap} | {step:.2f} | {', '.join(theirs)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _rows(subject: str) -> list[dict[str, str]]:
    with (RESULTS / f"{subject}-{DEVICE}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
