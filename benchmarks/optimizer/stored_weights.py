"""What weights that live in FP8 cost by their storage alone: final losses of a small GPT, its products in float32.

The model, data and steps of optimizer_convergence. All Linear weights are E4M3 codes, the output head's too, and are
read back for products (``recipes.high_precision``); torch's AdamW on float32 weights of the same seed is beside them.
Moments are in FP8, or in float32 where they are not to be part of the difference; these runs are at beta2 = 0.999
too. Of masterless weights, which octavo rounds stochastically, there is the same to nearest: the benchmark takes the
random bits away. Asserted: masterless weights are within 0.02 nats a byte of float32 in every run, and to nearest more
than 0.1 above on average. Written to results/stored_weights-<device>.csv.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import octavo
from benchmarks.common.measure import table, write_results
from benchmarks.common.pages import gaps_by_beta, read
from benchmarks.optimizer.optimizer_convergence import LIMIT, LR, STEPS, model_of, ours, trained
from octavo.kernels.reference.optimizer_state import Fp8Weight

TAKES = "20 minutes"
MEASURES = ("octavo/optim", "octavo/tensor/stored_weight.py", "octavo/kernels/reference")

GAP = 0.1  # nats/byte that rounding to nearest costs at least


class Scheme(NamedTuple):
    """How weights and moments are kept."""

    master: str | None
    moments: str = "fp8"
    nearest: bool = False
    beta2: tuple[float, ...] = (0.95,)


BOTH = (0.95, 0.999)
BASE = "torch AdamW, fp32 weights"
SCHEMES = {
    "split16": Scheme("split16"),
    "split24": Scheme("split24"),
    "fp32": Scheme("fp32"),
    "no master": Scheme(None),
    "no master, fp32 moments": Scheme(None, "fp32", False, BOTH),
    "no master, fp32 moments, to nearest": Scheme(None, "fp32", True, BOTH),
}
Task = tuple[str, float, int, int]  # scheme, beta2, seed, steps


def one_run(task: Task) -> float:
    """The mean loss of a run's last steps; inf where it is not finite."""
    name, beta2, seed, steps = task
    torch.set_num_threads(1)
    model, betas = model_of(seed), (0.9, beta2)
    if name == BASE:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, betas=betas, weight_decay=0.1)
        return trained(model, optimizer, seed, steps)
    scheme = SCHEMES[name]
    octavo.convert(model, octavo.recipes.dynamic(), select=lambda module, name: True, weight_storage="fp8")
    octavo.set_recipe(model, octavo.recipes.high_precision())
    optimizer = ours(scheme.moments, master=scheme.master)(model.parameters(), betas)
    write = Fp8Weight.write
    to_nearest = mock.patch.object(
        Fp8Weight, "write", lambda master, piece, wide, bits16: write(master, piece, wide, None)
    )
    with to_nearest if scheme.nearest else nullcontext():
        return trained(model, optimizer, seed, steps)


def rows_of(losses: dict[tuple[str, float, int], float], seeds: list[int]) -> list[dict[str, Any]]:
    """A row a scheme and beta2: mean loss, and its differences from float32's of the same seed."""
    rows = []
    for name, beta2 in dict.fromkeys(key[:2] for key in losses):
        own = [losses[name, beta2, seed] for seed in seeds]
        gaps = [losses[name, beta2, seed] - losses[BASE, beta2, seed] for seed in seeds]
        row = {"weights": name, "beta2": beta2, "loss": f"{statistics.mean(own):.4f}"}
        row |= {"mean_gap": f"{statistics.mean(gaps):+.4f}", "largest_gap": f"{max(gaps):+.4f}"}
        rows.append(row | {f"seed_{seed}": f"{loss:.4f}" for seed, loss in zip(seeds, own, strict=True)})
    return rows


def check(rows: list[dict[str, Any]]) -> int:
    """Print a verdict a scheme; 1 if one fails."""
    missed = False
    for row in rows:
        scheme = SCHEMES.get(row["weights"])
        if scheme is None or scheme.master is not None:
            continue
        mean, largest = float(row["mean_gap"]), float(row["largest_gap"])
        ok = mean > GAP if scheme.nearest else largest <= LIMIT
        aim = f"more than {GAP} on average" if scheme.nearest else f"at most {LIMIT} in every run"
        missed |= not ok
        print(
            f"{'ok' if ok else 'MISSED'}: {row['weights']}, beta2 {row['beta2']}: {mean:+.4f}, {largest:+.4f} ({aim})"
        )
    return int(missed)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks stored_weights", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--toy", action="store_true", help="three steps; no aim counts")
    parser.add_argument("--output", type=Path, help="another file to write")
    options = parser.parse_args(arguments)
    steps, betas = 3 if options.toy else STEPS, {name: SCHEMES[name].beta2 for name in options.schemes}
    betas = {BASE: tuple(sorted({beta2 for own in betas.values() for beta2 in own}))} | betas
    tasks = [(name, beta2, seed, steps) for name, own in betas.items() for beta2 in own for seed in options.seeds]
    losses = {}
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for task, loss in zip(tasks, pool.map(one_run, tasks), strict=True):
            losses[task[:3]] = loss
            print(f"{task[0]}, beta2 {task[1]}, seed {task[2]}: {loss:.4f}", flush=True)
    rows = rows_of(losses, options.seeds)
    print(table(rows))
    if not options.toy or options.output:
        print(f"written to {write_results('stored_weights', rows, options.output)}")
    return 0 if options.toy else check(rows)


def gaps_table() -> str:
    """Of docs/weights.md: mean and largest gaps from float32's losses, by master and beta2."""
    return gaps_by_beta(read("stored_weights"), "weights")


TABLES = {"stored": gaps_table}
