"""Quality at length: final losses of runs of 3,000 steps, in bf16, in every recipe, and with all in FP8.

Runs come from a queue, the most wanted first (--list shows it, what is done, and how long the rest takes). A seed
fixes the initial weights and the order of the data, so that runs pair up: what counts is the mean over seeds of (loss /
bf16's - 1), with its standard error. A run that is stopped, by --for or by force, goes on where its last checkpoint
was, bit for bit; several of these commands share a queue without doing a run twice. Each finished run adds its row to
results/quality-<device>.csv:

    val_loss           over 2,048 windows, computed as in training
    val_loss_bf16      of the same weights, computed in bf16: what the run learned, without what FP8 rounds of it
    val_loss_average   in bf16, of the average of ten weights over the last tenth of the steps
    train_loss         mean of the last tenth of the steps
    curve              validation losses on the way, over 512 windows

All losses are in nats a byte; inf: the run diverged. Attention is torch's plain one, whose backward is faster on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import fcntl
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import octavo
from benchmarks.common.measure import RESULTS, ROOT, UNCOMMITTED, device_name, provenance, table, write_results
from benchmarks.common.pages import read
from benchmarks.training.quality_experiments import (
    EXPERIMENTS,
    MODELS,
    PARITY,
    SIZES,
    STEPS,
    TOY,
    TOY_STEPS,
    TOY_WINDOWS,
    WINDOWS,
    Experiment,
    Task,
    config_of,
    queue,
)
from octavo.train import BASELINE, GPT, DivergedError, Hooks, RunResult, load_corpus, loop, run
from octavo.train.checkpoint import RunFolder, StepRow
from octavo.train.model import HEAD
from octavo.train.trainer import Trainer, build_model, recipe_named
from octavo.weights.stored import StoredWeight

TAKES = "20 hours of one core in all, in pieces; a run of 0.5 million parameters 2 minutes, of 2.5 million 6"
MEASURES = ("octavo/kernels/reference", "octavo/recipes.py", "octavo/autograd")

STATE = ROOT / "runs/quality"  # not in git
AVERAGED, SNAPSHOTS = 0.1, 10  # of the steps, at the end; how many weights are averaged
KEYS = Task._fields


class ExactNorm(Trainer):
    """A trainer whose updates in backward are clipped by the step's exact norm, from another backward before them."""

    def step(self, step: int) -> tuple[Tensor, Tensor, float]:
        with torch.enable_grad():
            loss = self.loss(*self.batches.training(step))
            gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        norm = torch.nn.utils.get_total_norm(gradients)
        with mock.patch.object(self.in_backward._norms, "estimate", lambda: norm):
            return super().step(step)


def values_of(model: GPT) -> dict[str, Tensor]:
    """Return copies of the weights, in float32."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: (p.dequantize() if isinstance(p, StoredWeight) else p).float().clone() for name, p in named.items()}


def convert_head(experiment: Experiment, model: GPT) -> None:
    """Give the output layer its recipe, if it has one."""
    if experiment.head is not None:
        octavo.convert(model, experiment.head, select=lambda module, name: name == HEAD)


def train(task: Task, folder: Path, should_stop: Callable[[], bool] = lambda: False) -> RunResult:
    """Train, or continue, a run in its folder; the weights of its last tenth of steps are saved there."""
    experiment, config, models = EXPERIMENTS[task.experiment], config_of(task), list[GPT]()
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, out=folder, resume=True))
    every = max(int(task.steps * AVERAGED) // SNAPSHOTS, 1)

    def on_model(model: GPT) -> None:
        models.append(model)
        convert_head(experiment, model)

    def on_step(row: StepRow) -> None:
        if row.step > task.steps * (1 - AVERAGED) and row.step % every == 0:
            torch.save(values_of(models[0]), folder / f"weights-{row.step}.pt")

    hooks = Hooks(on_model=on_model, on_step=on_step, should_stop=should_stop)
    with mock.patch.object(loop, "Trainer", ExactNorm if experiment.exact_norm else Trainer):
        return run(config, experiment.recipe, name="run", hooks=hooks)


def evaluate(task: Task, folder: Path) -> dict[str, float]:
    """Return the final validation losses of a complete run."""
    experiment, config = EXPERIMENTS[task.experiment], config_of(task)
    data = dataclasses.replace(config.data, batch=32, eval_windows=TOY_WINDOWS if task.size == TOY else WINDOWS)
    config, corpus = dataclasses.replace(config, data=data), load_corpus()
    model = build_model(config.model, experiment.recipe, task.seed, config.state)
    trainer = Trainer(config, model, corpus, recipe=recipe_named(experiment.recipe))
    run_folder = RunFolder(folder / "run")
    saved = run_folder.load(None)
    assert saved is not None and saved["step"] == task.steps
    trainer.load(run_folder, saved)
    convert_head(experiment, model)

    bf16 = dataclasses.replace(config_of(task._replace(experiment="bf16")), data=data)
    other = build_model(config.model, BASELINE, task.seed)
    in_bf16 = Trainer(bf16, other, corpus)

    def loss_of(values: dict[str, Tensor]) -> float:
        other.load_state_dict(values)
        return in_bf16.validate()

    snapshots = [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights-*.pt"))]
    average = {name: torch.stack([weights[name] for weights in snapshots]).mean(0) for name in snapshots[0]}
    return {
        "val_loss": trainer.validate(),
        "val_loss_bf16": loss_of(values_of(model)),
        "val_loss_average": loss_of(average),
    }


def finish(task: Task, folder: Path, result: RunResult) -> dict[str, Any]:
    """Return the row of a complete run."""
    last = result.losses[-max(int(task.steps * AVERAGED), 1) :]
    losses = evaluate(task, folder) | {"train_loss": statistics.mean(last)}
    curve = " ".join(f"{step}:{loss:.5f}" for step, loss in result.validations)
    return {name: f"{loss:.6f}" for name, loss in losses.items()} | {
        "curve": curve,
        "step_ms": f"{result.seconds_per_step * 1e3:.1f}",
    }


DIVERGED = dict.fromkeys(("val_loss", "val_loss_bf16", "val_loss_average", "train_loss"), math.inf)


def one_run(task: Task, folder: Path, deadline: float) -> dict[str, Any] | None:
    """Return a run's row, or None where the time is over before its end."""
    try:
        with sdpa_kernel([SDPBackend.MATH]):
            result = train(task, folder, lambda: time.monotonic() > deadline)
            if result.interrupted:
                return None
            row = finish(task, folder, result)
    except DivergedError as error:
        print(error)
        row = DIVERGED | {"curve": "", "step_ms": ""}
    return task._asdict() | row


@contextlib.contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Yield whether this process got a lock that other processes respect."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def results_path(subject: str, chosen: Path | None) -> Path:
    """Return the file that rows are added to: the chosen one, or the subject's of this device."""
    folder = UNCOMMITTED if provenance()["commit"].endswith("+") else RESULTS
    return chosen or folder / f"{subject}-{device_name()}.csv"


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a results file, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def finished(path: Path) -> list[dict[str, str]]:
    """Return the rows of finished runs; without a chosen file, also those that other machines have committed."""
    return rows_of(path) + (read("quality") if path.parent in (RESULTS, UNCOMMITTED) else [])


def is_done(task: Task, path: Path) -> bool:
    """Whether a run has its row, of whatever machine."""
    return any(all(row[key] == str(value) for key, value in task._asdict().items()) for row in finished(path))


def add(row: dict[str, Any], path: Path, state: Path) -> None:
    """Add a row to the results; other processes may add rows at the same time."""
    with locked(state / "results.lock", wait=True):
        rows = [*rows_of(path), row | provenance()]
        order = {task: place for place, task in enumerate(queue())}
        rows.sort(
            key=lambda entry: order.get(
                Task(*(entry[k] for k in KEYS[:2]), *(int(entry[k]) for k in KEYS[2:])), len(order)
            )
        )
        write_results("quality", rows, path, origin={})


def show(tasks: list[Task], path: Path) -> None:
    """Print the queue: the runs that are done, and how long the others take on one core, by the rows that there are."""
    paces: dict[tuple[str, str], list[float]] = {}
    for row in finished(path):
        if row["step_ms"]:
            for name in (row["experiment"], ""):
                paces.setdefault((row["size"], name), []).append(float(row["step_ms"]))

    def minutes_of(task: Task) -> float:
        """Return minutes by the pace of the experiment's other runs, or of all; of another size, by a rule of thumb."""
        for size in sorted(MODELS, key=lambda size: size != task.size):
            for name in (task.experiment, ""):
                if pace := paces.get((size, name)):
                    larger = config_of(task).model.parameters / config_of(task._replace(size=size)).model.parameters
                    return statistics.median(pace) * larger**0.7 * task.steps / 60e3
        return math.nan

    minutes = {task: 0.0 if is_done(task, path) else minutes_of(task) for task in tasks}
    print(table([t._asdict() | {"state": f"{left:.0f} minutes" if left else "done"} for t, left in minutes.items()]))
    left = sum(left > 0 for left in minutes.values())
    print(f"{left} of {len(tasks)} runs are left: about {sum(minutes.values()) / 60:.0f} hours")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for", dest="minutes", type=float, default=math.inf, help="stop after so many minutes")
    parser.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS), choices=EXPERIMENTS)
    parser.add_argument("--sizes", nargs="+", default=[*SIZES, PARITY], choices=[*SIZES, PARITY])
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone")
    parser.add_argument("--list", action="store_true", help="print the queue and train nothing")
    parser.add_argument("--state", type=Path, default=STATE, help="folder of unfinished runs (default: runs/quality)")
    parser.add_argument("--output", type=Path, help="another results file")
    parser.add_argument("--toy", action="store_true", help="tiny models, 20 steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = results_path("quality", options.output)
    tasks = list(dict.fromkeys(queue(STEPS)))
    tasks = [task for task in tasks if task.experiment in options.experiments and task.size in options.sizes]
    tasks = [task for task in tasks if options.seeds is None or task.seed in options.seeds]
    if options.toy:
        tasks = list(dict.fromkeys(task._replace(size=TOY, steps=TOY_STEPS) for task in tasks))
    if options.list:
        show(tasks, path)
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    for task in tasks:
        folder = options.state / task.folder
        with locked(options.state / f"{task.folder}.lock", wait=False) as got:
            if not got or is_done(task, path):
                continue
            row = one_run(task, folder, deadline)
            if row is None:
                print(f"{task.folder}: stopped; the same command goes on")
                return 0
            add(row, path, options.state)
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{time.strftime('%H:%M')} {task.folder}: {row['val_loss']}", flush=True)
    print(f"all are done, see {os.path.relpath(path)}")
    return 0
