"""torch.compile beside eager: every kind of model and step in every recipe.

Each cell of compile_cells.py is trained for four steps with aot_eager, where it must equal eager bit for bit, and with
inductor, which computes floats in another order, for bf16 too. Written to results/compile_matrix-<device>.csv. What
compiled steps take, and compiling, is cpu_step's.
"""

from __future__ import annotations

import argparse

from benchmarks.common.measure import write_results
from benchmarks.common.pages import Row, markdown, read

TAKES = "15 minutes"
MEASURES = ("octavo/nn", "octavo/autograd")


def matrix(backends: list[str]) -> list[dict[str, str]]:
    from benchmarks.compile.compile_cells import RECIPES, WHATS, measure

    rows = []
    for backend in backends:
        for what in WHATS:
            for recipe in RECIPES:
                row = {"what": what, "recipe": recipe, "backend": backend}
                try:
                    result = measure(what, recipe, backend, layers=2)
                except Exception as error:  # a cell that can't be compiled is a row too
                    row |= {"graphs": "", "breaks": "", "recompiles": "", "difference": type(error).__name__}
                else:
                    counts = {"graphs": result.graphs, "breaks": result.breaks, "recompiles": result.recompiles}
                    row |= {name: str(count) for name, count in counts.items()}
                    row["difference"] = f"{result.difference:.3g}"
                rows.append(row)
                print(" ".join(row.values()), flush=True)
    return rows


def cells_table() -> str:
    """Return docs/compile.md's table: graphs / breaks / recompiles, largest difference from eager, with aot_eager."""
    rows_by_model: dict[str, list[Row]] = {}
    for row in read("compile_matrix"):
        rows_by_model.setdefault(row["what"], []).extend([row] * (row["backend"] == "aot_eager"))
    rows = []
    for what, model_rows in rows_by_model.items():
        counts = (" / ".join(row[name] for name in ("graphs", "breaks", "recompiles")) for row in model_rows)
        differences = ("equal" if row["difference"] == "0" else row["difference"] for row in model_rows)
        rows.append([what, *map(", ".join, zip(counts, differences, strict=True))])
    return markdown(("", *(f"`{row['recipe']}`" for row in next(iter(rows_by_model.values())))), rows)


TABLES = {"graphs": cells_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compile_matrix", description=__doc__)
    parser.add_argument("--backends", nargs="*", default=["aot_eager", "inductor"])
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows = matrix(options.backends)
    missed = [
        row
        for row in rows
        if (row["graphs"], row["breaks"], row["recompiles"]) != ("1", "0", "0")
        or (row["backend"] == "aot_eager" and row["difference"] != "0")
    ]
    if not options.no_write:
        print(f"written to {write_results('compile_matrix', rows)}")
    print(f"{len(rows)} cells, {len(missed)} missed")
    return int(bool(missed))
