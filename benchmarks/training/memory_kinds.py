"""The memory of a training by kind: weights, masters, moments, gradients and activations, as octavo plans it.

Nothing is measured here: ``PrecisionSchedule.plan`` counts the bytes of tensors, without memory, of the 32 blocks of
Llama 3 8B with one sequence of 4,096 tokens; tests hold the plan against what a training on a CPU holds. Each variant
adds one choice to that before.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.common.measure import commit, table, write_results
from octavo import recipes
from octavo.nn import TransformerBlock
from octavo.schedule import Phase, PrecisionSchedule

TAKES = "4 minutes"
MEASURES = ("octavo/schedule/plan.py", "octavo/optim/state.py", "octavo/autograd/chain.py")

KINDS = ("weights", "masters", "moments", "gradients", "activations")
WAITING = 256 << 20  # bytes of gradients that wait for an update in backward
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16, state in float32": {"moments": "fp32", "master": "fp32"},
    "FP8 products": {"recipe": "delayed"},
    "+ moments in FP8": {"moments": "fp8"},
    "+ masters of 8 bits": {"master": "split16"},
    "+ weights in FP8": {"weight_storage": "fp8"},
    "+ updates in backward": {"in_backward": True},
}


def rows(layers: int, width: int, tokens: int) -> Iterator[dict[str, object]]:
    """Yield one row for each variant, bytes by kind."""
    options: dict[str, Any] = {}
    for name, changed in VARIANTS.items():
        options |= changed
        with torch.device("meta"):
            blocks = [TransformerBlock(width, width * 7 // 2, width // 128, width // 512) for _ in range(layers)]
            model = nn.Sequential(*blocks).bfloat16()
            x = torch.empty(1, tokens, width, dtype=torch.bfloat16)
        recipe = getattr(recipes, options.get("recipe", "high_precision"))()
        octavo.convert(model, recipe, lambda module, name: True, weight_storage=options.get("weight_storage"))
        optimizer = octavo.optim.AdamW(model.parameters(), moments=options["moments"], master=options["master"])
        if options.get("in_backward"):
            octavo.optim.update_in_backward(optimizer, WAITING)
        phase = PrecisionSchedule(model, optimizer, [Phase(recipe)]).plan(example_inputs=(x,)).phases[0]
        yield {"variant": name, "parameters": phase.parameters} | {kind: getattr(phase, kind) for kind in KINDS}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory_kinds", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    new_rows = list(rows(options.layers, options.width, options.tokens))
    print(table(new_rows))
    if not options.no_write:
        origin = {"source": "octavo's plan, not measured", "commit": commit()}
        print(f"written to {write_results('memory_kinds', new_rows, origin=origin)}")
    return 0
