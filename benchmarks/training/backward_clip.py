"""How gradients are clipped when weights are updated in backward: validation losses of the trainer's run.

In backward a step's global norm is not known yet. Beside clipping by it, after backward: by EstimatedNorm and by
LastStepNorm; in the default run in bf16 with float32 AdamW, where the clip is all that differs, and with all in FP8,
whose random bits have several seeds: optimizer_training's is 0, and runs of one data seed differ by chance. Updates
come by 64 KiB of gradients, so most alone. ``gap_percent`` is above optimizer_training's rows of bf16 with torch's
AdamW. ``divisor_error`` is the root mean square, over steps and elements, of log(what gradients were divided by / what
the step's norm, known at its end, says). Rows are written as they come, to results/backward_clip-<device>.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common.measure import table, write_results
from benchmarks.optimizer.optimizer_training import BASE, FULL, RECIPE, SCHEMES, config_of
from benchmarks.training.gradient_storage import exact_losses
from octavo.optim import EstimatedNorm, LastStepNorm
from octavo.train import BASELINE, loop, run
from octavo.train.trainer import Trainer

TAKES = "30 minutes"
MEASURES = ("octavo/optim/in_backward.py",)

THRESHOLD = SCHEMES[FULL].update_in_backward
SETTINGS = {"bf16, fp32 AdamW": BASE, "all in FP8": FULL}  # whose recipe and state they have
EXACT = "global norm, after backward"
CLIPS: dict[str, Any] = {
    EXACT: None,
    "estimated norm": EstimatedNorm,
    "last step's norm": LastStepNorm,
}
BF16, FP8 = SETTINGS
Task = tuple[str, str, int, int, bool]  # setting, clip, seed, seed of the random bits, toy


class _Clipping(Trainer):
    """A trainer whose updates in backward are clipped in a way of their own; notes what gradients are divided by."""

    clip, rounding = "", 0
    squares: list[float]  # mean of the squared logarithms' errors, a step

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: list[tuple[Tensor, int]] = []
        optimizer: Any = self.optimizer
        optimizer.seed = self.rounding
        if self.in_backward is None:
            return
        self.in_backward.clip = CLIPS[self.clip](self.config.optimizer.clip)
        divisor_of = self.in_backward._clipped

        def noting(params: list[Any]) -> Tensor:
            divisor = divisor_of(params)
            self.noted.append((divisor, sum(param.numel() for param in params)))
            return divisor

        self.in_backward._clipped = noting

    def step(self, step: int) -> tuple[Tensor, Tensor, float]:
        loss, norm, lr = super().step(step)
        exact = max(float(norm) / self.config.optimizer.clip, 1.0)
        if self.noted:
            errors = [count * math.log(float(divisor) / exact) ** 2 for divisor, count in self.noted]
            self.squares.append(sum(errors) / sum(count for _, count in self.noted))
            self.noted.clear()
        return loss, norm, lr


def one_run(task: Task) -> tuple[float, float]:
    """Train with one clip and seed: final validation loss, divisor_error."""
    setting, clip, seed, rounding, toy = task
    torch.set_num_threads(1)
    config, scheme = config_of((SETTINGS[setting], seed, 0, toy)), SETTINGS[setting]
    state = dataclasses.replace(config.state, update_in_backward="" if clip == EXACT else THRESHOLD)
    config = dataclasses.replace(config, state=state, run=dataclasses.replace(config.run, eval_every=0))
    squares: list[float] = []
    kind = type("Clipping", (_Clipping,), {"clip": clip, "rounding": rounding, "squares": squares})
    with mock.patch.object(loop, "Trainer", kind):
        loss = run(config, RECIPE.get(scheme, BASELINE)).final_validation
    return loss, math.sqrt(statistics.mean(squares)) if squares else 0.0


def tasks_of(seeds: list[int], roundings: list[int], toy: bool) -> list[Task]:
    """All runs; bf16's exact ones are optimizer_training's."""
    tasks: list[Task] = [(BF16, clip, seed, 0, toy) for clip in CLIPS if clip != EXACT for seed in seeds]
    return tasks + [(FP8, clip, seed, rounding, toy) for rounding in roundings for clip in CLIPS for seed in seeds]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks backward_clip", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--roundings", type=int, nargs="+", default=[1, 2], help="seeds of the random bits")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--toy", action="store_true", help="a tiny model, three steps")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    tasks, exact = tasks_of(options.seeds, options.roundings, options.toy), exact_losses()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for task, (loss, error) in zip(tasks, pool.map(one_run, tasks), strict=True):
            row: dict[str, Any] = dict(zip(("setting", "clip", "seed", "rounding"), task, strict=False))
            row |= {"val_loss": f"{loss:.5f}", "gap_percent": f"{100 * (loss / exact[task[2]] - 1):+.4f}"}
            rows.append(row | {"divisor_error": f"{error:.4f}"})
            print(*rows[-1].values(), flush=True)
            if not options.toy or options.output:
                write_results("backward_clip", rows, options.output)
    print(table(rows))
    for names in dict.fromkeys(task[:2] for task in tasks):
        gaps = [float(row["gap_percent"]) for row in rows if (row["setting"], row["clip"]) == names]
        print(f"{', '.join(names)}: {statistics.mean(gaps):+.3f} %")
    return 0
