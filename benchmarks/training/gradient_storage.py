"""What it would cost to keep gradients in FP8 between backward and update: validation losses of the trainer's run.

Each gradient is rounded to codes and back as soon as it is complete; all else is the default run in bf16 with torch's
float32 AdamW, whose losses are those of optimizer_training's rows. "stored" is no simulation but gradient_storage="fp8"
of octavo's AdamW with float32 moments. Its rounding is that of "E4M3, blocks of 128", its arithmetic differs by last
bits: clipping multiplies scales instead of values, and torch's AdamW is the fused one. "simulated as stored" does both
as octavo does, so its losses must be the stored ones to the last digit; "exact, octavo's AdamW" rounds nothing: what
last bits alone make of a loss. A gap of more than 0.5 % on average is too much. Written to
results/gradient_storage-<device>.csv; rows of other schemes that are there stay.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import octavo
from benchmarks.common.measure import RESULTS, device_name, provenance, table, write_results
from benchmarks.optimizer.optimizer_training import BASE, LIMIT, config_of
from octavo import E4M3, E5M2, PerBlock, PerTensor, quantize
from octavo.formats import Format
from octavo.granularity import Granularity
from octavo.tensor.stored_gradient import StoredGradient
from octavo.train import BASELINE, StateConfig, loop, run, trainer
from octavo.train.trainer import Trainer, build_optimizer

TAKES = "20 minutes"
MEASURES = ("octavo/optim/gradients.py", "octavo/tensor/stored_gradient.py")

SCHEMES: dict[str, tuple[Format, Granularity]] = {
    "E4M3, blocks of 128": (E4M3, PerBlock(1, 128)),
    "E5M2, blocks of 128": (E5M2, PerBlock(1, 128)),
    "E4M3, one scale": (E4M3, PerTensor()),
    "E5M2, one scale": (E5M2, PerTensor()),
}
STORED = "stored: E4M3, blocks of 128"
TWIN = "simulated as stored"
EXACT = "exact, octavo's AdamW"
CHOICES = [*SCHEMES, STORED, TWIN, EXACT]
Task = tuple[str, int, bool]  # scheme, seed, toy


def rounded(param: Tensor, fmt: Format, granularity: Granularity) -> None:
    """Round a parameter's gradient to FP8."""
    grad = param.grad
    assert grad is not None
    matrix = grad.view(grad.shape[0], -1) if grad.ndim > 1 else grad.view(1, -1)
    grad.copy_(quantize(matrix, fmt, granularity).dequantize().view(grad.shape))


class _Rounding(Trainer):
    """A trainer whose gradients are rounded as they come."""

    scheme = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        fmt, granularity = SCHEMES[self.scheme]
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(partial(rounded, fmt=fmt, granularity=granularity))


class _Twin(Trainer):
    """A trainer that keeps pairs beside the gradients: clipping multiplies their scales, and gradients follow."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pairs: dict[Tensor, StoredGradient] = {}
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(self.round)

    @torch.no_grad()
    def round(self, param: Tensor) -> None:
        assert param.grad is not None
        self.pairs[param] = StoredGradient.cast(param.grad)
        param.grad.copy_(self.pairs[param].dequantize())

    def step(self, step: int) -> Any:
        with mock.patch.object(torch.nn.utils, "clip_grad_norm_", self.clip):
            return super().step(step)

    @torch.no_grad()
    def clip(self, params: Iterable[Tensor], most: float) -> Tensor:
        found = {param: param.grad for param in params if param.grad is not None}
        norm = torch.nn.utils.get_total_norm(list(found.values()))
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        for param, grad in found.items():
            self.pairs[param].mul_(factor)
            grad.copy_(self.pairs[param].dequantize())
        return norm


def octavos(*arguments: Any) -> octavo.optim.AdamW:
    """The run's AdamW, octavo's instead of torch's."""
    names = "params", "lr", "betas", "weight_decay"
    groups = [{name: group[name] for name in names} for group in build_optimizer(*arguments).param_groups]
    return octavo.optim.AdamW(groups, moments="fp32")


def one_run(task: Task) -> float:
    """Train with one scheme and seed: final validation loss."""
    scheme, seed, toy = task
    torch.set_num_threads(1)
    config = config_of((BASE, seed, 0, toy))
    if scheme == STORED:
        return run(dataclasses.replace(config, state=StateConfig(gradient_storage="fp8")), BASELINE).final_validation
    if scheme in (TWIN, EXACT):
        kind = _Twin if scheme == TWIN else Trainer
        with mock.patch.object(loop, "Trainer", kind), mock.patch.object(trainer, "build_optimizer", octavos):
            return run(config, BASELINE).final_validation
    kind = type("Rounding", (_Rounding,), {"scheme": scheme})
    with mock.patch.object(loop, "Trainer", kind):
        return run(config, BASELINE).final_validation


def exact_losses() -> Mapping[int, float]:
    """Float32 AdamW's losses by seed; nan where ``optimizer_training`` was not run on this device."""
    found: defaultdict[int, float] = defaultdict(lambda: math.nan)
    path = RESULTS / f"optimizer_training-{device_name()}.csv"
    if path.exists():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["scheme"] == BASE]
        found.update({int(row["seed"]): float(row["val_loss"]) for row in rows})
    return found


def rows_of_others(path: Path, schemes: list[str]) -> list[dict[str, str]]:
    """What the file holds of other schemes, with their provenance."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["gradients"] not in schemes]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gradient_storage", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--schemes", nargs="+", default=CHOICES, choices=CHOICES)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--toy", action="store_true", help="a tiny model, three steps; no aim counts")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    tasks = [(scheme, seed, options.toy) for scheme in options.schemes for seed in options.seeds]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        losses = list(pool.map(one_run, tasks))
    exact = exact_losses()
    rows = [
        {
            "gradients": scheme,
            "seed": seed,
            "val_loss": f"{loss:.5f}",
            "gap_percent": f"{100 * (loss / exact[seed] - 1):+.4f}",
        }
        for (scheme, seed, _), loss in zip(tasks, losses, strict=True)
    ]
    print(table(rows))
    if not options.toy or options.output:
        path = options.output or RESULTS / f"gradient_storage-{device_name()}.csv"
        found = [*rows_of_others(path, options.schemes), *({**row, **provenance()} for row in rows)]
        print(f"written to {write_results('gradient_storage', found, path, origin={})}")
    missed = False
    for scheme in options.schemes:
        mean = statistics.mean(float(row["gap_percent"]) for row in rows if row["gradients"] == scheme)
        print(f"{scheme}: {mean:+.3f} % (at most {LIMIT})")
        missed |= not abs(mean) <= LIMIT
    return int(missed and not options.toy)
