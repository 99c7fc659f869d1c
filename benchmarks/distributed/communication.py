"""What FSDP2 sends in a training step, counted, and whether the formulas say so.

A small bf16 GPT on gloo processes of this machine, each block and the model sharded; every collective's bytes. The
formulas (fsdp_traffic.py) must give the same bytes; what they come to on many GPUs is communication_model.py's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.distributed.communication_ranks import on_ranks
from benchmarks.distributed.fsdp_traffic import RECIPES, Shapes, Traffic, traffic, transformer
from octavo import recipes
from octavo.nn import TransformerBlock
from octavo.train.config import VOCABULARY, ModelConfig
from octavo.train.model import GPT, HEAD, next_byte_loss
from tests.support.byte_counter import GATHER, REDUCE, SCATTER, ByteCounter

TAKES = "1 minute"
MEASURES = ("octavo/nn/gather.py", "octavo/nn/gather_group.py")

WIDTH, LAYERS, HIDDEN, CONTEXT = 512, 2, 1024, 16  # on 2 and 4 ranks every shard is of whole 128x128 blocks
STEPS = 3
AIM = 0.52  # of bf16's bytes, of weights gathered in FP8
AMAX_COLLECTIVES = {"dynamic": 1, "delayed": 1, "blockwise": 0}


def sharded(mesh: Any, recipe: str, width: int, hidden: int, layers: int) -> nn.Module:
    """A GPT of bf16 parameters, its blocks' layers converted, and sharded."""
    from torch.distributed.fsdp import fully_shard

    model = GPT(ModelConfig(width=width, layers=layers, heads=4, context=CONTEXT))
    model.blocks = nn.ModuleList(
        TransformerBlock(width, hidden, 4, recipe=recipes.high_precision()) for _ in range(layers)
    )
    model.bfloat16()
    if recipe != "bf16":
        octavo.convert(model, getattr(recipes, recipe)(), select=lambda module, name: name != HEAD)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def count(mesh: Any, width: int, hidden: int, layers: int) -> dict[str, list[dict[str, int]]]:
    """Calls and bytes of each of some steps, by recipe."""
    tokens = torch.randint(0, VOCABULARY, (1, CONTEXT))
    found: dict[str, list[dict[str, int]]] = {}
    for recipe in RECIPES:
        model = sharded(mesh, recipe, width, hidden, layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        found[recipe] = []
        for _ in range(STEPS):
            with ByteCounter() as counter:
                next_byte_loss(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            found[recipe].append(as_counts(counter.calls, counter.bytes))
    return found


def as_counts(calls: Any, bytes: Any) -> dict[str, int]:
    """Columns of one step."""
    return {
        f"{kind}_{what}": numbers[kind]
        for kind in (GATHER, SCATTER, REDUCE)
        for what, numbers in (("calls", calls), ("bytes", bytes))
    }


def modelled_counts(moved: Traffic) -> dict[str, int]:
    """The same columns by the formulas."""
    return as_counts(
        {GATHER: moved.gathers, SCATTER: moved.scatters, REDUCE: moved.reduces},
        {GATHER: moved.gathered, SCATTER: moved.scattered, REDUCE: moved.reduced},
    )


def measured_rows(ranks: int, shapes: Shapes, hidden: int) -> tuple[list[dict[str, object]], list[str]]:
    """One row a recipe, and what is not as it should be."""
    rows, wrong, plain = [], [], {}
    counted = on_ranks(count, ranks, shapes.width, hidden, shapes.layers)
    for recipe in RECIPES:
        every = [found for rank in counted for found in rank[recipe]]
        found, moved = every[-1], traffic(shapes, recipe, ranks)
        wrong += [
            f"{recipe}, {ranks} ranks: a step counts {other}, another {found}" for other in every if other != found
        ]
        if found != modelled_counts(moved):
            wrong.append(f"{recipe}, {ranks} ranks: counted {found}, by formula {modelled_counts(moved)}")
        weights = found[f"{GATHER}_bytes"] - (moved.gathered - moved.weights)
        plain = plain or {"all": found[f"{GATHER}_bytes"], "weights": weights}
        share = weights / plain["weights"]
        if recipe in AMAX_COLLECTIVES and (share > AIM or found[f"{REDUCE}_calls"] != AMAX_COLLECTIVES[recipe]):
            wrong.append(
                f"{recipe}, {ranks} ranks: {share:.4f} of bf16's bytes, {found[f'{REDUCE}_calls']} all-reduces"
            )
        rows.append(
            {"ranks": ranks, "recipe": recipe}
            | found
            | {"weight_bytes": weights, "weights_by_bf16": f"{share:.4f}"}
            | {"all_gathered_by_bf16": f"{found[f'{GATHER}_bytes'] / plain['all']:.4f}"}
        )
    return rows, wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks communication", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # as each process does
    shapes = transformer("measured", WIDTH, HIDDEN, options.layers, WIDTH, VOCABULARY)
    rows, wrong = [], []
    for ranks in options.ranks:
        more, failures = measured_rows(ranks, shapes, HIDDEN)
        rows, wrong = rows + more, wrong + failures
    print(f"bytes and calls of a step, {shapes.parameters:,} bf16 parameters, gloo")
    print(table(rows))
    print("\n".join(f"WRONG: {line}" for line in wrong) or "ok: the formulas give every count exactly")
    if not options.no_write:
        print(f"written to {write_results('communication', rows)}")
    return int(bool(wrong))
