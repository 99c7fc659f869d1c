"""Inputs of checkpointed layers kept in FP8: the bytes, and what their rounding does to gradients and to a training.

Bytes are those of saved_bytes' Llama, each layer a region; nothing is computed. The others are of a GPT as the demo's,
of 64 features, in FP8 by ``dynamic``, each block a region: the final validation loss of a training; and the
signal-to-noise ratio of the gradient of a batch, of a trained model's weights, to that of inputs as they are, which
``dynamic`` itself has to high precision. "float scales" are what octavo doesn't take.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import markdown, read, signed
from benchmarks.training.saved_bytes import build
from octavo.kernels.triton.agreement import sqnr
from octavo.nn import checkpointing
from octavo.nn.saved import predicted_by_kind
from octavo.train import BASELINE, GPT, Batches, ModelConfig, load_corpus, next_byte_loss
from octavo.train.trainer import build_model

TAKES = "10 minutes"
MEASURES = ("octavo/nn/checkpointing.py", "octavo/kernels/reference/cast.py", "octavo/recipes.py")
KINDS = "as they are", "FP8"
SIZE, BATCH, STEPS, RATE, WINDOWS = ModelConfig(width=64, layers=2, heads=2, context=32), 8, 300, 1.5e-3, 64


def saved(in_fp8: bool) -> dict[str, Any]:
    """Return MiB of regions' inputs, and of all that a forward saves for backward."""
    model, inputs = build("Llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    octavo.nn.checkpoint_model_in_fp8(model)
    with checkpointing.region_counts() as counts:
        predicted_by_kind(model, (), inputs)
    with checkpointing.region_counts(in_fp8):
        whole = sum(predicted_by_kind(model, (), inputs).values())
    return {"MiB of inputs": f"{counts[''][1 + in_fp8] / 2**20:.3f}", "MiB in all": f"{whole / 2**20:.3f}"}


def regions(recipe: str, seed: int) -> GPT:
    """Return the model of a seed, its blocks regions."""
    model = build_model(SIZE, recipe, seed)
    for at, block in enumerate(model.blocks):
        model.blocks[at] = checkpoint_wrapper(block, checkpoint_fn=octavo.checkpoint_in_fp8)
    return model


def gradient(model: nn.Module, windows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient of one batch, as a vector."""
    model.zero_grad()
    next_byte_loss(model(windows[0]), windows[1]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained(in_fp8: bool, seed: int) -> dict[str, Any]:
    """Train; return the final validation loss, and the SQNR of gradients of the trained weights."""
    model, batches = regions("dynamic", seed), Batches(load_corpus(None), SIZE.context, BATCH, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - step / STEPS))
    with checkpointing.region_counts(in_fp8):
        for step in range(STEPS):
            gradient(model, batches.training(step))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
        with torch.no_grad():
            losses = [next_byte_loss(model(x), y).item() for x, y in batches.validation(WINDOWS)]
    high, last = regions(BASELINE, seed), batches.training(STEPS)
    high.load_state_dict(model.state_dict())
    rounded = gradient(model, last)
    with mock.patch.object(checkpointing, "quantize", lambda x, *to, **_: octavo.quantize(x, *to)):
        by_float = gradient(model, last)
    with checkpointing.region_counts(False):
        exact, unrounded = gradient(model, last), gradient(high, last)
    pairs = {"SQNR, dB": (rounded, exact), "by float scales": (by_float, exact), "of dynamic": (exact, unrounded)}
    ratios = {name: f"{sqnr(*pair):.2f}" for name, pair in pairs.items()}
    return {"loss": f"{statistics.fmean(losses):.5f}", **ratios}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks checkpointing", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    torch.set_num_threads(1)
    runs = [(seed, in_fp8) for seed in parser.parse_args(arguments).seeds for in_fp8 in (False, True)]
    rows = [{"inputs": KINDS[in_fp8], "seed": seed, **saved(in_fp8), **trained(in_fp8, seed)} for seed, in_fp8 in runs]
    print(table(rows), write_results("checkpointing", rows), sep="\n")
    return 0


def regions_table() -> str:
    """Return a table of the rows, with the gap of each loss to the one of its seed without FP8."""
    rows = read("checkpointing")
    plain = {row["seed"]: float(row["loss"]) for row in rows if row["inputs"] == KINDS[0]}
    gaps = [signed(100 * (float(row["loss"]) / plain[row["seed"]] - 1)) for row in rows]
    names = [*rows[0]][:8]
    return markdown([*names, "gap, %"], [[*map(row.get, names), gap] for row, gap in zip(rows, gaps, strict=True)])


TABLES = {"inputs of regions": regions_table}
