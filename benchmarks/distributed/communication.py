"""What FSDP2 sends in a training step: counted here, and by formulas for Llama 3 on up to 1,024 GPUs.

Counted: a small bf16 GPT on gloo processes of this machine, each block and the model sharded; every collective's bytes.
The formulas (communication_model.py) must give the same bytes. Their step times are a model's, not measurements: they
are held against the one speed-up that torchao has published for 8 H100, and written to a file of their own.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.common.measure import commit, table, write_results
from benchmarks.distributed.communication_model import (
    LLAMA,
    RECIPES,
    Hardware,
    Shapes,
    Traffic,
    step,
    traffic,
    transformer,
)
from benchmarks.distributed.communication_ranks import on_ranks
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

# torchao's README, float8 training: Llama 3 8B, 8 H100, one sequence of 8,192, torch.compile, FSDP2, per-op SAC
PUBLISHED_TOKENS, PUBLISHED_BF16 = 8192, 6150.0  # tokens a step and GPU; tokens/s a GPU
PUBLISHED = {"tensorwise, gathered in FP8": ("dynamic", 25.03), "rowwise, gathered in bf16": ("rowwise", 10.05)}  # %
GPUS = (8, 64, 256, 1024)
TOKENS = (8192, 1024)  # a GPU and step, one sequence
STATE_BYTES = 16  # a parameter: itself, its gradient and Adam's two moments in fp32
SHOWN = ("bf16", "dynamic", "blockwise", "rowwise")  # delayed is sent as dynamic, mx as rowwise


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


def modelled_rows(hardware: Hardware) -> list[dict[str, object]]:
    """One row for each model, number of tokens, number of GPUs and recipe."""
    return [
        modelled_row(shapes, tokens, ranks, recipe, hardware)
        for shapes in LLAMA
        for tokens in TOKENS
        for ranks in GPUS
        for recipe in RECIPES
    ]


def modelled_row(shapes: Shapes, tokens: int, ranks: int, recipe: str, hardware: Hardware) -> dict[str, object]:
    """Bytes are exact by the formulas; what starts with modelled rests on the constants of Hardware."""
    base, base_moved = step(shapes, "bf16", ranks, tokens, hardware), traffic(shapes, "bf16", ranks)
    taken, moved = step(shapes, recipe, ranks, tokens, hardware), traffic(shapes, recipe, ranks, reduce_bytes=4)
    return {
        "model": shapes.name,
        "tokens_a_gpu": tokens,
        "gpus": ranks,
        "recipe": recipe,
        "all_gather_gb": f"{moved.gathered / 1e9:.2f}",
        "reduce_scatter_gb": f"{moved.scattered / 1e9:.2f}",
        "amax_bytes": moved.reduced,
        "collectives": moved.gathers + moved.scatters + moved.reduces,
        "weights_by_bf16": f"{moved.weights / base_moved.weights:.4f}",
        "state_gb_a_gpu": f"{STATE_BYTES * shapes.parameters / ranks / 1e9:.1f}",
        "modelled_compute_s": f"{taken.compute:.3f}",
        "modelled_wire_s": f"{taken.wire:.3f}",
        "modelled_exposed_s": f"{taken.exposed:.3f}",
        "modelled_step_s": f"{taken.seconds:.3f}",
        "modelled_speedup": f"{base.seconds / taken.seconds:.3f}",
    }


def against_published(hardware: Hardware) -> str:
    """The model's speed-ups beside torchao's."""
    shapes, ranks, tokens = LLAMA[0], 8, PUBLISHED_TOKENS
    own = step(shapes, "bf16", ranks, tokens, hardware)
    as_published = tokens / PUBLISHED_BF16 - own.exposed
    lines = [f"bf16: modelled {tokens / own.seconds:.0f} tokens/s a GPU, published {PUBLISHED_BF16:.0f}"]
    for name, (recipe, percent) in PUBLISHED.items():
        gains = []
        for compute in (None, as_published):
            base = step(shapes, "bf16", ranks, tokens, hardware, bf16_compute=compute)
            gains.append(base.seconds / step(shapes, recipe, ranks, tokens, hardware, bf16_compute=compute).seconds - 1)
        lines.append(
            f"{name}: modelled +{gains[0]:.1%}, with the published bf16 step +{gains[1]:.1%}, published +{percent} %"
        )
    lines.append("(in the model all recipes' products are as fast; that casts by rows cost more is not in it)")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks communication", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="processes; none: formulas only")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # as each process does
    shapes = transformer("measured", WIDTH, HIDDEN, options.layers, WIDTH, VOCABULARY)
    rows, wrong = [], []
    for ranks in options.ranks:
        more, failures = measured_rows(ranks, shapes, HIDDEN)
        rows, wrong = rows + more, wrong + failures
    if rows:
        print(f"MEASURED: bytes and calls of a step, {shapes.parameters:,} bf16 parameters, gloo")
        print(table(rows))
        print("\n".join(f"WRONG: {line}" for line in wrong) or "ok: the formulas give every count exactly")
    hardware = Hardware()
    modelled = modelled_rows(hardware)
    print(f"\nMODELLED, not measured: gradients reduced in fp32, {hardware}")
    print(table([row for row in modelled if row["recipe"] in SHOWN and row["gpus"] in (GPUS[0], GPUS[1], GPUS[-1])]))
    print("\nMODELLED beside torchao's published numbers (Llama 3 8B, 8 H100):")
    print(against_published(hardware))
    if not options.no_write:
        origin = {"source": "formulas of communication_model.py, not measured", "commit": commit()}
        if rows:
            print(f"written to {write_results('communication', rows)}")
        print(f"written to {write_results('communication_model', modelled, origin=origin)}")
    return int(bool(wrong))
