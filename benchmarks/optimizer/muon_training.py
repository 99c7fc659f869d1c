"""Muon with its momentum in FP8, beside AdamW and float32: losses, bytes, the time of a step by part.

Byte-level GPTs of two sizes in float32 with no product in FP8, so that the optimizer alone differs; one thread. A seed
fixes the initial weights and the data. A row is added as its run ends, and a run that has one is left out: the same
command goes on. Muon of the larger model multiplies bf16 values in float32 and rounds to bf16, which gives torch's
products but for the order of sums: on a CPU without bf16 those take 12 times as long. bitsandbytes (committed rows:
0.50.2) has no Muon, and its AdamW in 8 bits runs on a CPU.

Written to results/muon_training-<device>.csv and, 50 steps alone, muon_step.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import octavo
from benchmarks.common.measure import provenance, table, write_results
from benchmarks.common.pages import markdown, read, signed
from benchmarks.training.quality import results_path, rows_of
from benchmarks.training.quality_experiments import SIZES
from octavo.optim import muon
from octavo.optim.state import bytes_of
from octavo.private import orthogonalize
from octavo.train import Batches, ModelConfig, OptimizerConfig, StateConfig, load_corpus
from octavo.train.model import GPT, next_byte_loss
from octavo.train.trainer import build_model, build_optimizer, learning_rate

TAKES = "4 hours"
MEASURES = ("octavo/optim", "octavo/kernels/reference/optimizer_step.py", "octavo/kernels/reference/optimizer_state.py")

BASELINE, EXACT, EIGHT_BITS = "AdamW, float32", "Muon, float32", "AdamW in 8 bits, bitsandbytes"
VARIANTS: dict[str, tuple[str, str, str]] = {  # algorithm, how a momentum in FP8 is rounded, directions
    BASELINE: ("adamw", "", ""),
    EXACT: ("muon", "", "bf16"),
    "Muon, FP8, stochastic": ("muon", "stochastic", "bf16"),
    "Muon, FP8, to nearest": ("muon", "nearest", "bf16"),
    "Muon, FP8, hybrid": ("muon", "hybrid", "bf16"),
    "Muon, FP8, stochastic, directions in FP8": ("muon", "stochastic", "fp8"),
    EIGHT_BITS: ("bitsandbytes", "", ""),
}
SMALL, LARGE = "0.14M", "2.5M"
MODELS = {SMALL: ModelConfig(width=64, layers=2, heads=2, context=64), LARGE: SIZES[LARGE]}
BATCH, STEPS, TIMED, WINDOWS = 8, 1000, 50, 512
RATES = {  # of the small model the best of four each, of seed 7 after 300 steps without rounding; the other has half
    SMALL: {"adamw": 6e-3, "muon": 2e-2},
    LARGE: {"adamw": 3e-3, "muon": 1e-2},
}
PARTS = {"_direction": "momentum", "_orthogonal": "orthogonalisation", "_move": "weights"}


def one_run(
    size: str, variant: str, seed: int, steps: int, rate: float | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train; return a row of results, and one of times."""
    algorithm, rounding, directions = VARIANTS[variant]
    config, ours = MODELS[size], algorithm == "muon"
    options = OptimizerConfig(steps=steps, lr=rate or RATES[size]["muon" if ours else "adamw"])
    model, batches = build_model(config, "bf16", seed), Batches(load_corpus(None), config.context, BATCH, seed)
    state = StateConfig("fp32", algorithm="muon") if ours else StateConfig()
    optimizer: Any = build_optimizer(model, options, state)
    if variant == EIGHT_BITS:
        eight_bits = importlib.import_module("bitsandbytes.optim").AdamW8bit
        optimizer = eight_bits(optimizer.param_groups, options.lr, (options.beta1, options.beta2))
    if rounding:
        moment = octavo.optim.Moment(octavo.E4M3, rounding=rounding)  # type: ignore[arg-type]
        optimizer = octavo.optim.Muon(optimizer.param_groups, moments=moment)
    muon.orthogonalize = orthogonalize if size == SMALL else in_float32
    seconds = defaultdict[str, float](float)
    if directions:
        optimizer.directions = directions
        for name, part in PARTS.items():
            setattr(optimizer, name, timed(getattr(optimizer, name), part, seconds))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.zero_grad()
        loss_of(model, batches.training(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        start = time.perf_counter()
        optimizer.step()
        seconds["step"] += time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        loss = statistics.fmean(float(loss_of(model, windows)) for windows in batches.validation(WINDOWS))
    values = [value for states in optimizer.state.values() for name, value in states.items() if name != "step"]
    once = {tensor.data_ptr(): tensor for tensor in values if isinstance(tensor, Tensor)}  # bitsandbytes shares tables
    row = {"model": size, "steps": steps, "seed": seed, "variant": variant, "val_loss": f"{loss:.5f}"}
    row["state_bytes_a_parameter"] = f"{bytes_of(once.values()) / config.parameters:.2f}"
    times = {f"ms_{part}": f"{1e3 * seconds[part] / steps:.2f}" for part in ("step", *PARTS.values())}
    return row, {"variant": variant, **times}


def in_float32(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return torch's orthogonalisation in bf16, with products computed in float32 and rounded."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = rounded(matrix.mT if is_tall else matrix)
    wide = rounded(wide / rounded(wide.norm()).clamp(min=eps))
    for _ in range(steps):
        square = rounded(wide @ wide.mT)
        wide = rounded(torch.addmm(wide, rounded(torch.addmm(square, square, square, beta=b, alpha=c)), wide, beta=a))
    return (wide.mT if is_tall else wide).bfloat16()


def rounded(values: Tensor) -> Tensor:
    """Return float32 values rounded to bf16."""
    return values.bfloat16().float()


def loss_of(model: GPT, windows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss, nats a byte."""
    return next_byte_loss(model(windows[0]), windows[1])


def timed(function: Any, part: str, seconds: dict[str, float]) -> Any:
    """Return the function wrapped so that it adds its time to a part's."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **named)
        seconds[part] += time.perf_counter() - start
        return result

    return call


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks muon_training", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rates", type=float, nargs="+", help="print the losses of seed 7 at these rates, and no more")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.rates:
        for size, variant, rate in itertools.product(options.models, options.variants, options.rates):
            print(rate, one_run(size, variant, 7, options.steps, rate)[0], flush=True)
        return 0
    path = results_path("muon_training", None)
    for size, seed, variant in itertools.product(options.models, options.seeds, options.variants):
        wanted = {"model": size, "steps": options.steps, "seed": seed, "variant": variant}
        if any(all(row[name] == str(value) for name, value in wanted.items()) for row in rows_of(path)):
            continue
        row, _ = one_run(size, variant, seed, options.steps)
        print(row, flush=True)
        write_results("muon_training", [*rows_of(path), row | provenance()], path, origin={})
        if (size, variant, seed) == (SMALL, EXACT, 0):
            exact = [one_run(SMALL, variant, 0, TIMED)[1] for variant in VARIANTS if variant != EIGHT_BITS]
            print(table(exact), write_results("muon_step", exact))
    return 0


def losses_table(size: str) -> str:
    """Return a table of final losses and bytes of state by variant, of the usual number of steps; times if small."""
    rows = [row for row in read("muon_training") if row["model"] == size]
    rows = [row for row in rows if row["steps"] == statistics.mode(row["steps"] for row in rows)]
    losses = {(row["variant"], row["seed"]): float(row["val_loss"]) for row in rows}
    state = {row["variant"]: row["state_bytes_a_parameter"] for row in rows}
    times = {row["variant"]: row for row in read("muon_step")} if size == SMALL else {}
    seeds, cells = sorted({row["seed"] for row in rows}), []
    for variant in filter(state.__contains__, VARIANTS):
        both = [seed for seed in seeds if (variant, seed) in losses and (EXACT, seed) in losses]
        gaps = [100 * (losses[variant, seed] / losses[EXACT, seed] - 1) for seed in both]
        gap = f"{signed(statistics.fmean(gaps))} %" if gaps else ""
        losses_by_seed = [f"{losses[variant, seed]:.4f}" if (variant, seed) in losses else "" for seed in seeds]
        cells.append([variant, *losses_by_seed, gap, state[variant]])
        if variant in times:
            whole, *parts = (f"{float(times[variant][f'ms_{part}']):.1f}" for part in ("step", *PARTS.values()))
            cells[-1].append(f"{whole} ({', '.join(parts)})" if variant != BASELINE else whole)
        elif times:
            cells[-1].append("")
    header = ["", *(f"seed {seed}" for seed in seeds), "of Muon in float32", "bytes of state a parameter"]
    return markdown([*header, "ms a step"] if times else header, cells)


TABLES = {
    "Muon's losses": functools.partial(losses_table, SMALL),
    "Muon's losses, 2.5M": functools.partial(losses_table, LARGE),
}
