"""How gradients are clipped when weights are updated in backward: validation losses of the trainer's run.

In backward a step's global norm is not known yet. Beside clipping by it, after backward: by EstimatedNorm, by
LastStepNorm, and not at all; in the default run in bf16 with float32 AdamW, where the clip is all that differs, and
with all in FP8. Updates come by 64 KiB of gradients, so most alone. ``divisor_error`` is the root mean square, over
steps and elements, of log(what gradients were divided by / what the step's norm, known at its end, says). Written to
results/backward_clip-<device>.csv.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measure import table, write_results
from benchmarks.optimizer_training import BASE, FULL, RECIPE, SCHEMES, config_of
from octavo.optim import EstimatedNorm, LastStepNorm
from octavo.train import BASELINE, StateConfig, loop, run
from octavo.train.trainer import Trainer

THRESHOLD = SCHEMES[FULL].update_in_backward
SETTINGS = {"bf16, fp32 AdamW": BASE, "all in FP8": FULL}  # whose recipe and state they have
EXACT = "global norm, after backward"
CLIPS: dict[str, Any] = {
    EXACT: None,
    "estimated norm": EstimatedNorm,
    "last step's norm": LastStepNorm,
    "none": lambda most: EstimatedNorm(math.inf),
}
Task = tuple[str, str, int, bool]  # setting, clip, seed, toy


class _Clipping(Trainer):
    """A trainer whose updates in backward are clipped in a way of their own; notes what gradients are divided by."""

    clip = ""
    squares: list[float]  # mean of the squared logarithms' errors, a step

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: list[tuple[Tensor, int]] = []
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
    setting, clip, seed, toy = task
    torch.set_num_threads(1)
    scheme = SETTINGS[setting]
    state = dataclasses.replace(SCHEMES[scheme], update_in_backward="" if clip == EXACT else THRESHOLD)
    if scheme == BASE and clip != EXACT:
        assert state == StateConfig(update_in_backward=THRESHOLD)  # octavo's AdamW, whose float32 is torch's
    config = dataclasses.replace(config_of((scheme, seed, 0, toy)), state=state)
    squares: list[float] = []
    kind = type("Clipping", (_Clipping,), {"clip": clip, "squares": squares})
    with mock.patch.object(loop, "Trainer", kind):
        loss = run(config, RECIPE.get(scheme, BASELINE)).final_validation
    return loss, math.sqrt(statistics.mean(squares)) if squares else 0.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks backward_clip", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--toy", action="store_true", help="a tiny model, three steps")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    tasks = [(*names, seed, options.toy) for names in product(SETTINGS, CLIPS) for seed in options.seeds]
    found = {}
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for task, result in zip(tasks, pool.map(one_run, tasks), strict=True):
            found[task] = result
            print(*task[:3], *result, flush=True)
    rows = [
        {
            "setting": setting,
            "clip": clip,
            "seed": seed,
            "val_loss": f"{loss:.5f}",
            "gap_percent": f"{100 * (loss / found[setting, EXACT, seed, toy][0] - 1):+.4f}",
            "divisor_error": f"{error:.4f}",
        }
        for (setting, clip, seed, toy), (loss, error) in found.items()
    ]
    print(table(rows))
    if not options.toy or options.output:
        print(f"written to {write_results('backward_clip', rows, options.output)}")
    for setting, clip in product(SETTINGS, CLIPS):
        gaps = [float(row["gap_percent"]) for row in rows if (row["setting"], row["clip"]) == (setting, clip)]
        print(f"{setting}, {clip}: {statistics.mean(gaps):+.3f} % of {EXACT}")
    return 0
