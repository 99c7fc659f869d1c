"""The trainer's default run, its optimizer's state in few bytes: validation losses beside torch's AdamW in float32.

Layers compute in bf16, so that only the optimizer differs: torch's AdamW on float32 weights, and octavo's with moments
in FP8 on every master. Of the last schemes, the blocks compute in FP8 too (dynamic), and their weights live in FP8;
updates in backward, in launches of 64 KB, 1 MB or (all gradients of this small model) 64 MB, clip gradients by an
estimate of their norm (EstimatedNorm), all others by the norm. A seed fixes the initial weights and the order of the
data, so that runs pair up. Asserted: for each scheme the mean over seeds of (final validation loss / float32's - 1) is
within 0.5 % of 0. Written to results/optimizer_training-<device>.csv, and the losses on the way of the last schemes
and float32's to results/optimizer_training_curves-<device>.csv.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.measure import RESULTS, device_name, provenance, table, write_results
from octavo.train import (
    BASELINE,
    DataConfig,
    DivergedError,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    RunResult,
    StateConfig,
    TrainConfig,
    run,
)

TAKES = "10 minutes"
MEASURES = ("octavo/optim", "octavo/kernels/reference")

LIMIT = 0.5  # %
BASE = "torch AdamW, fp32"
SCHEMES = {BASE: StateConfig()} | {
    f"fp8, master {master}": StateConfig("fp8", master) for master in ("fp32", "split32", "split24", "none")
}
FULL, AFTER = "all in FP8, updates in backward", "all in FP8"
OUTSTANDING = {FULL: "64KB", f"{FULL}, 1MB": "1MB", f"{FULL}, 64MB": "64MB"}  # of 3.6 MB of gradients
RECIPE = dict.fromkeys((AFTER, *OUTSTANDING), "dynamic")  # of the blocks; of all others bf16
SCHEMES |= {AFTER: StateConfig("fp8", "split16", "fp8")}
SCHEMES |= {name: StateConfig("fp8", "split16", "fp8", waiting) for name, waiting in OUTSTANDING.items()}
CURVES, AVERAGED, EVAL_EVERY = (BASE, *RECIPE), 10, 40  # whose curves are kept, steps a row, a validation
TOY_MODEL = ModelConfig(width=32, layers=1, heads=2, context=32)
DATA, TOY_DATA = DataConfig(eval_windows=512), DataConfig(batch=4, eval_windows=4)
Task = tuple[str, int, int, bool]  # scheme, seed, steps (0: the default run's), toy


class Result(NamedTuple):
    """Final validation loss, inf where it diverged; seconds a step; rows of the curve."""

    loss: float
    seconds: float
    curve: list[dict[str, Any]]


def config_of(task: Task) -> TrainConfig:
    """All options of a run: the trainer's defaults but for the state, the seed, and that it writes nothing."""
    scheme, seed, steps, toy = task
    config = TrainConfig(
        run=RunConfig(seed=seed, eval_every=EVAL_EVERY, dtype="bfloat16"),
        data=DATA,
        optimizer=OptimizerConfig(steps=240),
        state=SCHEMES[scheme],
    )
    if toy:
        config = dataclasses.replace(config, model=TOY_MODEL, data=TOY_DATA, optimizer=OptimizerConfig(steps=3))
    if steps:
        config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, steps=steps))
    return config


def one_run(task: Task) -> Result:
    """Train with one scheme and seed."""
    torch.set_num_threads(1)
    try:
        result = run(config_of(task), RECIPE.get(task[0], BASELINE))
    except DivergedError:
        return Result(math.inf, math.nan, [])
    return Result(result.final_validation, result.seconds_per_step, curve_of(task, result))


def curve_of(task: Task, result: RunResult) -> list[dict[str, Any]]:
    """Mean training loss of ten steps, and the validation loss where one was taken."""
    if task[0] not in CURVES:
        return []
    validations, rows = dict(result.validations), []
    for start in range(0, len(result.losses), AVERAGED):
        losses = result.losses[start : start + AVERAGED]
        step = start + len(losses)
        row = {"scheme": task[0], "seed": task[1], "step": step, "train_loss": f"{statistics.mean(losses):.4f}"}
        rows.append(row | {"val_loss": f"{validations[step]:.5f}" if step in validations else ""})
    return rows


def rows_of(tasks: list[Task], results: list[Result]) -> list[dict[str, Any]]:
    """A row a scheme and seed: final validation loss, and how far above float32's of that seed it is."""
    exact = {task[1]: result.loss for task, result in zip(tasks, results, strict=True) if task[0] == BASE}
    return [
        {
            "scheme": task[0],
            "seed": task[1],
            "steps": config_of(task).optimizer.steps,
            "val_loss": f"{result.loss:.5f}",
            "gap_percent": f"{100 * (result.loss / exact[task[1]] - 1):+.4f}",
            "step_ms": f"{result.seconds * 1e3:.0f}",
        }
        for task, result in zip(tasks, results, strict=True)
    ]


def check(rows: list[dict[str, Any]]) -> int:
    """Print a verdict a scheme; 1 if one fails."""
    missed = False
    for scheme in dict.fromkeys(row["scheme"] for row in rows if row["scheme"] != BASE):
        gaps = [float(row["gap_percent"]) for row in rows if row["scheme"] == scheme]
        mean, worst = statistics.mean(gaps), max(gaps, key=abs)
        ok = abs(mean) <= LIMIT  # which nan is not
        missed |= not ok
        print(f"{'ok' if ok else 'MISSED'}: {scheme} {mean:+.3f} % of {BASE} (aim {LIMIT}), at most {worst:+.3f} %")
    return int(missed)


def write(subject: str, rows: list[dict[str, Any]], path: Path | None, merge: bool) -> None:
    """Write rows; ``merge``: beside those of other schemes that are there, in the schemes' order."""
    path, ran = path or RESULTS / f"{subject}-{device_name()}.csv", {row["scheme"] for row in rows}
    earlier = list(csv.DictReader(path.read_text().splitlines())) if merge and path.exists() else []
    origin = provenance()
    every = [row | origin for row in rows] + [row for row in earlier if row["scheme"] not in ran]
    every.sort(key=lambda row: list(SCHEMES).index(row["scheme"]))
    print(f"written to {write_results(subject, every, path, origin={})}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizer_training", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--steps", type=int, default=0, help="instead of the default run's")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--toy", action="store_true", help="a tiny model, three steps; no aim counts")
    parser.add_argument("--output", type=Path, help="the CSV, instead of results/optimizer_training-<device>.csv")
    parser.add_argument("--merge", action="store_true", help="keep the CSVs' rows of other schemes")
    parser.add_argument("--no-write", action="store_true", help="print only; a toy writes to --output alone")
    options = parser.parse_args(arguments)
    schemes = list(dict.fromkeys([BASE, *options.schemes]))
    tasks = [(scheme, seed, options.steps, options.toy) for scheme in schemes for seed in options.seeds]
    results = []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for (scheme, seed, *_), result in zip(tasks, pool.map(one_run, tasks), strict=True):
            results.append(result)
            print(f"{scheme}, seed {seed}: {result.loss:.5f} nats/byte", flush=True)
    rows = rows_of(tasks, results)
    print(table(rows))
    if not options.no_write and (options.output or not options.toy):
        write("optimizer_training", rows, options.output, options.merge)
        curves, beside = [row for result in results for row in result.curve], options.output
        if beside is not None:
            beside = beside.with_stem(f"{beside.stem}_curves")
        write("optimizer_training_curves", curves, beside, options.merge)
    return 0 if options.toy else check(rows)
