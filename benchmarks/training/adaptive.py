"""Precision that changes while a model trains: all high, all low, low then high, high then low, and by itself.

Low: FP8 products (dynamic), weights that live in FP8 without a master, FP8 moments: 3.07 bytes a parameter of the
blocks; beside it, with a master of 8 bits more (split16), and FP8 products alone. High: bf16 products, float32 masters
and moments. Two models of the trainer: the default one (240 steps), and a small one (64 wide, 2 layers, 400 steps). A
seed fixes the initial weights and the data, so that runs pair up. Columns: final validation loss, its difference from
bf16's of the seed, where phases began, the share of all products' operations that ran in FP8, and bytes a parameter of
weights, masters and moments, averaged over steps and at most. Asserted: low then high, at 70 % and of the small model,
is no worse than all high in 7 of 8 seeds, and better than all low. Written to results/adaptive-<device>.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import table, write_results
from octavo.train import (
    BASELINE,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    RunResult,
    StateConfig,
    TrainConfig,
    run,
)
from octavo.train.trainer import build_model, build_optimizer

TAKES = "40 minutes"
MEASURES = ("octavo/schedule", "octavo/train/trainer.py")

SMALL, DEFAULT = "small", "default"
DATA = DataConfig(eval_windows=512)
CONFIGS = {
    SMALL: TrainConfig(ModelConfig(width=64, layers=2, heads=2, context=64), DATA, OptimizerConfig(steps=400, lr=3e-3)),
    DEFAULT: TrainConfig(data=DATA, optimizer=OptimizerConfig(steps=240)),
}
TOY = TrainConfig(
    ModelConfig(width=32, layers=1, heads=2, context=32), DataConfig(batch=4, eval_windows=4), OptimizerConfig(steps=10)
)
SEEDS = {SMALL: range(8), DEFAULT: range(3)}
LOWS = {
    "no master": StateConfig("fp8", "none", "fp8"),
    "split16": StateConfig("fp8", "split16", "fp8"),
    "products": StateConfig(),
}
LOW = "no master"
HIGH, ALL_LOW, BEST = "bf16", "fp8", "fp8-then-bf16@0.7"
SCHEMES = [HIGH, ALL_LOW, BEST, "fp8-then-bf16@0.8", "fp8-then-bf16@0.9", "bf16-then-fp8@0.3", "auto"]
WINS = 7
OTHERS = [ALL_LOW, BEST]  # of the other lows, and of the small model only
Task = tuple[str, str, str, int, bool]  # model, low, scheme, seed, toy


def one_run(task: Task) -> dict[str, Any]:
    """Train: a row."""
    model, low, scheme, seed, toy = task
    torch.set_num_threads(1)
    config = TOY if toy else CONFIGS[model]
    constant = {HIGH: StateConfig(), ALL_LOW: LOWS[low]}
    state = constant[scheme] if scheme in constant else dataclasses.replace(LOWS[low], schedule=scheme)
    config = dataclasses.replace(config, run=RunConfig(seed=seed, eval_every=0, dtype="bfloat16"), state=state)
    recipe = BASELINE if scheme == HIGH else "dynamic"
    result = run(config, recipe)
    part = steps_in_fp8(result, recipe) / result.steps
    begun = " ".join(f"{switch.name}@{switch.step}" for switch in result.switches[1:])
    row: dict[str, Any] = {"model": model, "low": low, "scheme": scheme, "seed": seed}
    mean, most = bytes_of(config, LOWS[low], part)
    row |= {"val_loss": f"{result.final_validation:.5f}", "phases": begun}
    row |= {"fp8_flops_percent": f"{100 * fp8_share(config.model) * part:.1f}"}
    return row | {"mean_bytes": f"{mean:.2f}", "most_bytes": f"{most:.2f}"}


def steps_in_fp8(result: RunResult, recipe: str) -> int:
    """Steps whose products ran in FP8."""
    if not result.switches:
        return 0 if recipe == BASELINE else result.steps
    ends = [switch.step for switch in result.switches[1:]] + [result.steps]
    spans = zip(result.switches, ends, strict=True)
    return sum(end - switch.step for switch, end in spans if switch.name != "high_precision")


def fp8_share(model: ModelConfig) -> float:
    """The share of a step's operations in products that a low phase computes in FP8: a token's, forward."""
    blocks = model.layers * (4 * model.width**2 + 3 * model.width * model.hidden)
    attention = model.layers * 2 * model.context * model.width  # scores and values
    return blocks / (blocks + attention + 256 * model.width)


def bytes_of(config: TrainConfig, low: StateConfig, part: float) -> tuple[float, float]:
    """(mean, most) bytes a parameter of weights, masters and moments; ``part``: of the steps in a low phase."""
    found = []
    for state, recipe in ((low, "dynamic"), (StateConfig(), BASELINE)):
        model = build_model(config.model, recipe, 0, state)
        optimizer = build_optimizer(model, config.optimizer, state)
        for param in model.parameters():
            param.grad = torch.zeros(param.shape, dtype=param.dtype)
        optimizer.step()
        kept = [*model.parameters(), *(x for own in optimizer.state.values() for x in own.values() if x.ndim)]
        parts = [part for x in kept for part in ((x.qdata, x.scale_inv) if hasattr(x, "scale_inv") else (x,))]
        found.append(sum(part.numel() * part.element_size() for part in parts) / config.model.parameters)
    in_low, in_high = found
    return part * in_low + (1 - part) * in_high, in_low if part == 1 else in_high


def with_gaps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the difference from bf16's loss of the same model and seed."""
    exact = {(row["model"], row["seed"]): float(row["val_loss"]) for row in rows if row["scheme"] == HIGH}
    return [row | {"gap": f"{float(row['val_loss']) - exact[row['model'], row['seed']]:+.5f}"} for row in rows]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A line a model, low and scheme: mean gap, and in how many seeds it is no worse than bf16, better than all low."""
    lines = []
    gaps: dict[tuple[str, ...], dict[int, float]] = {}
    for row in rows:
        gaps.setdefault((row["model"], row["low"], row["scheme"]), {})[row["seed"]] = float(row["gap"])
    for (model, low, scheme), own_gaps in gaps.items():
        own = [row for row in rows if (row["model"], row["low"], row["scheme"]) == (model, low, scheme)]
        all_low, seeds = gaps.get((model, low, ALL_LOW), {}), len(own_gaps)
        line = {"model": model, "low": low, "scheme": scheme, "mean_gap": f"{statistics.mean(own_gaps.values()):+.4f}"}
        line |= {"no_worse": f"{sum(gap <= 0 for gap in own_gaps.values())} of {seeds}"}
        better = sum(gap < all_low[seed] for seed, gap in own_gaps.items() if seed in all_low)
        line |= {"better_than_all_low": f"{better} of {seeds}" if all_low else ""}
        for name in ("fp8_flops_percent", "mean_bytes", "most_bytes"):
            line[name] = f"{statistics.mean(float(row[name]) for row in own):.2f}"
        lines.append(line)
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks adaptive", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of 0 to 7, and 0 to 2 of the default model")
    parser.add_argument("--no-others", dest="others", action="store_false", help="leave out the other lows")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--toy", action="store_true", help="a tiny model, ten steps; no aim counts")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    schemes = list(dict.fromkeys([HIGH, *options.schemes]))
    tasks = []
    for model in options.models:
        for seed in options.seeds or SEEDS[model]:
            tasks += [(model, LOW, scheme, seed, options.toy) for scheme in schemes]
            others = [name for name in LOWS if name != LOW and model == SMALL and options.others]
            tasks += [(model, low, scheme, seed, options.toy) for low in others for scheme in OTHERS]
    rows = []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for row in pool.map(one_run, tasks):
            rows.append(row)
            print(*row.values(), flush=True)
    rows = with_gaps(rows)
    lines = summary(rows)
    print(table(lines))
    if not options.toy or options.output:
        print(f"written to {write_results('adaptive', rows, options.output)}")
    return 0 if options.toy else check(lines)


def check(lines: list[dict[str, str]]) -> int:
    """Print verdicts; 1 if one fails."""
    missed = False
    for line in lines:
        if (line["model"], line["low"], line["scheme"]) != (SMALL, LOW, BEST):
            continue
        for column, than in (("no_worse", f"no worse than {HIGH}"), ("better_than_all_low", "better than all low")):
            wins, runs = map(int, line[column].split(" of "))
            ok = wins >= WINS * runs / 8
            missed |= not ok
            print(f"{'ok' if ok else 'MISSED'}: {BEST} is {than} in {line[column]} seeds (aim {WINS} of 8)")
    return int(missed)
