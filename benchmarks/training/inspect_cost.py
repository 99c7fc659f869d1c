"""Cost of octavo.inspect in a training of the demo GPT on this CPU: CPU time of a step, bytes a layer.

"recorded" is a step in which a Recorder counts, of which there is one in 50; "twin" one that is also computed once more
in high precision, its twin; "between" one of the others; "traced" a step under trace_faults. Each is measured beside a
step without any, in turn. And in ops that compute, of which a GPU launches one kernel or more each: what a recorded
step has more, with tensors in as few chunks as on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from benchmarks.common.measure import table, write_results
from octavo.kernels.arguments import Counted
from octavo.kernels.cpu import codes
from octavo.nn.recipe_module import RecipeModule
from octavo.train import ModelConfig, TrainConfig, load_corpus
from octavo.train.trainer import Trainer, build_model, recipe_named

TAKES = "2 minutes"
MEASURES = ("octavo/inspect", "octavo/autograd", "octavo/kernels/reference/cast_statistics.py")

EVERY = 50
LIMIT, TWIN_LIMIT = 1.0, 3.0  # % of a step, without and with the twin


def trainer(recipe: str, config: TrainConfig) -> Trainer:
    model = build_model(config.model, recipe, 0)
    return Trainer(config, model, load_corpus(None), recipe=recipe_named(recipe))


def variants(recipe: str, config: TrainConfig, folder: Path) -> dict[str, Callable[[], None]]:
    """Return a step of each variant."""
    steps: dict[str, Callable[[], None]] = {}
    for name, every in (("plain", 0), ("recorded", 1), ("twin", 1), ("between", 10**9), ("traced", 0)):
        training = trainer(recipe, config)
        watcher = None
        if every:
            options = {"optimizer": training.optimizer, "twin": name != "recorded"}
            watcher = octavo.inspect.Recorder(training.model, folder / recipe / name, every, **options)
        elif name == "traced":
            watcher = octavo.inspect.trace_faults(training.model)
        steps[name] = _step(training, watcher)
    return steps


def _step(training: Trainer, watcher: octavo.inspect.Recorder | octavo.inspect.FaultTrace | None) -> Callable[[], None]:
    done = [0]

    def step() -> None:
        loss, norm, _ = training.step(done[0] % 20)
        if watcher is not None:
            watcher.step(loss, norm)
        done[0] += 1

    return step


def cpu_seconds(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each step, in turn; the first two rounds are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn >= 2:
                seconds[name].append(time.process_time() - start)
    return seconds


class Ops(TorchDispatchMode):
    """Counts ops that compute: all but views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.namespace != "profiler"
        return func(*args, **(kwargs or {}))


def ops_of_steps(recipe: str, config: TrainConfig, folder: Path) -> tuple[int, int]:
    """Return (ops of a step, ops that a recorded one adds: also in the step before, at whose end weights are kept)."""
    counts, chunk = [], codes.CHUNK
    codes.CHUNK = codes.CHUNK_ELSEWHERE
    for every in (10**9, 2):
        training = trainer(recipe, config)
        options = {"optimizer": training.optimizer, "twin": False}
        step = _step(training, octavo.inspect.Recorder(training.model, folder / f"ops {every}", every, **options))
        step(), step(), step()
        with Ops() as ops:
            step(), step()
        counts.append(ops.count)
    codes.CHUNK = chunk
    return counts[0] // 2, counts[1] - counts[0]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks inspect_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recipes", nargs="+", default=["dynamic", "delayed"])
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for recipe in options.recipes:
        with tempfile.TemporaryDirectory() as folder:
            steps = variants(recipe, TrainConfig(ModelConfig()), Path(folder))
            seconds = cpu_seconds(steps, options.rounds)
            ops, more_ops = ops_of_steps(recipe, TrainConfig(ModelConfig()), Path(folder))
        model = build_model(ModelConfig(), recipe, 0)
        layers = sum(isinstance(module, RecipeModule) for module in model.modules())
        casts = len(octavo.inspect.rows.Table(model).rows)
        size = 8 * (len(Counted.sums) + Counted.exponents) + 4 * len(Counted.extremes)
        median = {name: statistics.median(times) for name, times in seconds.items()}
        more = {
            name: 100 * statistics.median(a / b - 1 for a, b in zip(times, seconds["plain"], strict=True))
            for name, times in seconds.items()
        }
        rows.append(
            {
                "recipe": recipe,
                "step_ms": 1000 * median["plain"],
                "recorded_ms": 1000 * median["recorded"],
                f"percent_every_{EVERY}": more["recorded"] / EVERY,
                "with_twin_ms": 1000 * median["twin"],
                f"percent_with_twin_every_{EVERY}": more["twin"] / EVERY,
                "percent_between": more["between"],
                "percent_traced": more["traced"],
                "step_ops": ops,
                f"percent_ops_every_{EVERY}": 100 * more_ops / ops / EVERY,
                "bytes_a_layer": casts * size / layers,
            }
        )
    print(table(rows))
    if not options.no_write:
        print(f"written to {write_results('inspect_cost', rows)}")
    limits = {f"percent_every_{EVERY}": LIMIT, f"percent_with_twin_every_{EVERY}": TWIN_LIMIT}
    missed = [row["recipe"] for row in rows if any(row[name] > limit for name, limit in limits.items())]  # type: ignore[operator]
    print(f"{len(missed)} of {len(rows)} recipes cost more than {LIMIT} %, or {TWIN_LIMIT} % with the twin: {missed}")
    return int(bool(missed))
