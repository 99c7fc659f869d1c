"""Tables of pages that octavo.cost predicts from GPUs' rates, as ``octavo plan`` does: nothing is measured.

A product takes its operations or its bytes, whichever is longer, and a cast its bytes.
"""

from __future__ import annotations

import dataclasses

from benchmarks.common.pages import markdown
from octavo import recipes
from octavo.cost.rates import PUBLISHED, Rates
from octavo.cost.work import LinearWork
from octavo.scaling.recipe import Recipe

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


def gain(recipe: Recipe, rates: Rates, size: tuple[int, int], tokens: int, weight_kept: bool = False) -> float:
    """Return the time in bf16 divided by the recipe's."""
    work = LinearWork("", tokens * EXPERTS, *size, True, True, EXPERTS)
    products, casts = work.seconds(recipe, rates)
    if weight_kept:
        casts -= work.cast_seconds(recipe, rates)["weight"]
    return sum(work.seconds(recipes.high_precision(), rates)) / (products + casts)


def pays_from(recipe: Recipe, rates: Rates, size: tuple[int, int], weight_kept: bool = False) -> int | str:
    """Return the fewest tokens an expert from which on the recipe is always faster; "" if it never is."""
    slower = [tokens for tokens in TOKENS if gain(recipe, rates, size, tokens, weight_kept) <= 1]
    faster = [tokens for tokens in TOKENS if tokens > max(slower, default=0)]
    return faster[0] if faster else ""


def pays_table() -> str:
    """Return docs/study/mixture-of-experts.md's table: tokens from which all products pay together, and the gain."""
    columns = [("H200", "delayed"), ("H200", "rowwise"), ("H200", "blockwise"), ("B200", "delayed"), ("B200", "mx")]
    rows = []
    for layer, size in SIZES.items():
        whole = [(getattr(recipes, name)(), PUBLISHED[gpu], size) for gpu, name in columns]
        cells = (f"{pays_from(*one) or 'none'} ({gain(*one, LARGE):.2f})" for one in whole)
        rows.append([layer, f"{size[0]} × {size[1]}", *cells])
    return markdown(("matrices", "K × N", *map(" ".join, columns)), rows)


def products_table() -> str:
    """Return that page's table of each product alone, by the usual recipe of each GPU."""
    rows = []
    for gpu, name in {"H200": "blockwise", "B200": "mx"}.items():
        recipe, rates = getattr(recipes, name)(), PUBLISHED[gpu]
        for layer, size in SIZES.items():
            cells = [pays_from(dataclasses.replace(recipe, **others), rates, size) for others in ALONE.values()]
            cells.append(pays_from(recipe, rates, size, weight_kept=True))
            rows.append([f"{gpu} {name}", layer, *(str(tokens or "none") for tokens in cells)])
    return markdown(("", "matrices", *(name.replace("_", " ") for name in (*ALONE, "weights_kept"))), rows)


def casts_table() -> str:
    """Return milliseconds of a step's casts of a block of Llama 3 8B on an H100, published rates, 8,192 tokens."""
    sizes = {"q": (4096, 4096, 1), "k": (4096, 1024, 1), "v": (4096, 1024, 1), "o": (4096, 4096, 2)}
    sizes |= {"gate": (4096, 14336, 3), "up": (4096, 14336, 3), "down": (14336, 4096, 4)}
    works = [LinearWork(name, 8192, *size[:2], True, True, 1, size[2]) for name, size in sizes.items()]
    lines, rates = [], PUBLISHED["H100"]
    for name in ("dynamic", "delayed", "rowwise", "blockwise"):
        recipe = getattr(recipes, name)()
        products = sum(work.seconds(recipe, rates)[0] for work in works)
        casts = [work.cast_seconds(recipe, rates) for work in works]
        inputs = (
            [seconds["input"] for seconds in casts],
            {work.input_reader: seconds["input"] for work, seconds in zip(works, casts, strict=True)}.values(),
        )
        others = sum(seconds["weight"] + seconds["grad_output"] for seconds in casts)
        separate, shared = (sum(each) for each in inputs)
        numbers = [separate, shared, separate + others, shared + others, products]
        lines.append([f"`{name}`", *(f"{1e3 * each:.2f}" for each in numbers)])
    head = ["", "7 casts of inputs", "4 casts of inputs", "all casts before", "all casts", "products"]
    return markdown(head, lines)


def kept_table() -> str:
    """Return docs/modules.md's table: percent of time that casting weights a micro-batch adds to kept ones, H100."""
    work, rates, rows = LinearWork("", 8192, 4096, 4096, True, True), PUBLISHED["H100"], []
    for micro_batches in (1, 4, 16):
        cells = []
        for recipe in (recipes.dynamic(), recipes.delayed(), recipes.blockwise()):
            weight, whole = work.cast_seconds(recipe, rates)["weight"], sum(work.seconds(recipe, rates))
            kept_seconds = micro_batches * (whole - weight) + weight
            cells.append(f"{100 * (micro_batches * whole / kept_seconds - 1):.1f}")
        rows.append([str(micro_batches), *cells])
    return markdown(("micro-batches a step", "`dynamic`", "`delayed`", "`blockwise`"), rows)


MODULES = {"shared casts": casts_table, "kept weights": kept_table}
MIXTURES = {"pays": pays_table, "products": products_table}
