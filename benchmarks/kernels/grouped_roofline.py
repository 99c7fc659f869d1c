"""From how many tokens an expert FP8 pays: its products and casts against bf16's, by a GPU's published rates.

By octavo.cost: a product takes its operations or its bytes, whichever is longer, and a cast its bytes. For each recipe
and size, the fewest tokens an expert (powers of two, 8 to 65536) from which a step's work is faster than bf16's, with
the casts that it needs: of each product alone, were it the only one in FP8, and of all three together, which share
casts. "weights kept": the weight's casts are left out, as where micro-batches share them. Empty: at no number of them.
The last column is the gain of all three together at 8192 tokens an expert, bf16's time by FP8's.
"""

from __future__ import annotations

import argparse
import dataclasses

from benchmarks.common.measure import commit, table, write_results
from benchmarks.common.pages import markdown, read
from octavo.cost.command import RECIPES
from octavo.cost.estimate import LinearWork
from octavo.cost.rates import PUBLISHED, Rates
from octavo.recipes import high_precision
from octavo.scaling.recipe import Recipe

TAKES = "10 seconds"
MEASURES = ("octavo/cost", "octavo/recipes.py")

EXPERTS = 32
TOKENS = tuple(1 << power for power in range(3, 17))
LARGE = 8192
# (K, N): features in and out of an expert's matrices in models of today, and DeepGEMM's published size
SIZES = {
    "Qwen3-30B gate-up": (2048, 1536),
    "Qwen3-30B down": (768, 2048),
    "GPT-OSS gate-up": (2880, 5760),
    "DeepSeek-V3 gate-up": (7168, 4096),
    "DeepSeek-V3 down": (2048, 7168),
    "Mixtral gate-up": (4096, 28672),
}
ALONE = {
    "output": {"grad_input": None, "grad_weight": None},
    "grad_input": {"output": None, "grad_weight": None},
    "grad_weight": {"output": None, "grad_input": None},
    "all": {},
}


def gain(recipe: Recipe, rates: Rates, size: tuple[int, int], tokens: int, kept: bool = False) -> float:
    """How many times as long bf16 takes."""
    work = LinearWork("", tokens * EXPERTS, *size, True, True, EXPERTS)
    products, casts = work.seconds(recipe, rates)
    if kept:
        casts -= work.cast_seconds(recipe, rates)[1]
    return sum(work.seconds(high_precision(), rates)) / (products + casts)


def pays_from(recipe: Recipe, rates: Rates, size: tuple[int, int], kept: bool = False) -> int | str:
    """The fewest tokens an expert from which on it is faster."""
    slower = [tokens for tokens in TOKENS if gain(recipe, rates, size, tokens, kept) <= 1]
    faster = [tokens for tokens in TOKENS if tokens > max(slower, default=0)]
    return faster[0] if faster else ""


def pays_table() -> str:
    """Of docs/study/mixture-of-experts.md: tokens an expert from which the products pay together, and the gain."""
    columns = [("H200", "delayed"), ("H200", "rowwise"), ("H200", "blockwise"), ("B200", "delayed"), ("B200", "mx")]
    found = {(row["layer"], row["gpu"], row["recipe"]): row for row in read("grouped_roofline")}
    rows = []
    for layer, size in SIZES.items():
        ours = [found[layer, *column] for column in columns]
        rows.append([layer, f"{size[0]} × {size[1]}", *(f"{row['all'] or 'none'} ({row['gain']})" for row in ours)])
    return markdown(("matrices", "K × N", *map(" ".join, columns)), rows)


def products_table() -> str:
    """Of the same page: of each product alone, by the usual recipe of each GPU."""
    usual = {"H200": "blockwise", "B200": "mx"}
    names = (*ALONE, "weights_kept")
    rows = [
        [f"{row['gpu']} {row['recipe']}", row["layer"], *(row[name] or "none" for name in names)]
        for row in read("grouped_roofline")
        if usual[row["gpu"]] == row["recipe"]
    ]
    return markdown(("", "matrices", *(name.replace("_", " ") for name in names)), rows)


TABLES = {"pays": pays_table, "products": products_table}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks grouped_roofline", description=__doc__)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for device in ("H200", "B200"):
        rates = PUBLISHED[device]
        for name, make in RECIPES.items():
            recipe = make()
            for layer, size in SIZES.items():
                row: dict[str, object] = {"gpu": device, "recipe": name, "layer": layer, "K": size[0], "N": size[1]}
                for column, others in ALONE.items():
                    row[column] = pays_from(dataclasses.replace(recipe, **others), rates, size)
                row["weights_kept"] = pays_from(recipe, rates, size, kept=True)
                rows.append(row | {"gain": f"{gain(recipe, rates, size, LARGE):.2f}"})
    print(table(rows))
    if not options.no_write:
        origin = {"source": "octavo.cost, by published rates", "commit": commit()}
        print(f"written to {write_results('grouped_roofline', rows, origin=origin)}")
    return 0
