"""What casting weights in every micro-batch costs beside KeptWeights, which cast them once a step.

On the CPU four layers of 1,024 features are trained with SGD on micro-batches of 512 tokens; for GPUs published rates
predict a layer of 4,096 features on micro-batches of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.common.measure import interleaved, ratio, table, write_results
from octavo import recipes
from octavo.cost.estimate import LinearWork
from octavo.cost.rates import PUBLISHED

TAKES = "4 minutes"
MEASURES = ("octavo/kernels/reference", "octavo/autograd", "octavo/nn/recipe_module.py", "octavo/cost")

MICRO_BATCHES = (1, 4, 16)
RECIPES = ("dynamic", "delayed", "blockwise")
WIDTH, TOKENS = 1024, 512
GPU_WIDTH, GPU_TOKENS = 4096, 8192


def step_of(recipe: str, micro_batches: int, keeps: bool) -> Callable[[], None]:
    """A training step of so many micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    octavo.convert(model, getattr(recipes, recipe)())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = octavo.nn.KeptWeights(model) if keeps else None
    x = torch.randn(TOKENS, WIDTH)

    def step() -> None:
        if kept is not None:
            kept.cast()
        for _ in range(micro_batches):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(rounds: int) -> list[dict[str, Any]]:
    """This CPU's rows."""
    rows = []
    for micro_batches in MICRO_BATCHES:
        variants = {
            f"{recipe}, {how}": step_of(recipe, micro_batches, how == "kept")
            for recipe in RECIPES
            for how in ("cast in every forward", "kept")
        }
        seconds = interleaved(variants, rounds)
        for recipe in RECIPES:
            own = f"{recipe}, cast in every forward"
            milliseconds = statistics.median(seconds[own]) * 1e3
            share = ratio(seconds, own, f"{recipe}, kept") - 1
            rows.append(_row("measured", recipe, micro_batches, milliseconds, share))
    return rows


def predicted() -> list[dict[str, Any]]:
    """GPUs' rows, of one layer."""
    rows = []
    for device, rates in PUBLISHED.items():
        for name in RECIPES:
            recipe = getattr(recipes, name)()
            work = LinearWork("", GPU_TOKENS, GPU_WIDTH, GPU_WIDTH, True, True)
            weight, whole = work.cast_seconds(recipe, rates)[1], sum(work.seconds(recipe, rates))
            for micro_batches in MICRO_BATCHES:
                kept = micro_batches * (whole - weight) + weight
                row = _row(
                    "predicted", name, micro_batches, micro_batches * whole * 1e3, micro_batches * whole / kept - 1
                )
                rows.append(row | {"on": device})
    return rows


def _row(how: str, recipe: str, micro_batches: int, milliseconds: float, share: float) -> dict[str, Any]:
    return {
        "how": how,
        "on": "this CPU",
        "recipe": recipe,
        "micro_batches": micro_batches,
        "step_ms": f"{milliseconds:.3f}",
        "longer_than_kept_percent": f"{100 * share:.1f}",
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks weight_casts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows = [*measured(options.rounds), *predicted()]
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('weight_casts', rows)}")
    return 0
