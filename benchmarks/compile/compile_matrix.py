"""torch.compile beside eager: every kind of model and step in every recipe, and what compiling takes.

Each cell of compile_cells.py is trained for four steps with aot_eager, where it must equal eager bit for bit, and with
inductor, which computes floats in another order, for bf16 too. Then the trainer's model is compiled by inductor without
its caches: the seconds until the first step is done, and a step after that. Written to
results/compile_matrix-<device>.csv and results/compile_time-<device>.csv.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import octavo
from benchmarks.common.measure import interleaved, ratio, table, write_results
from octavo import recipes
from octavo.train.config import VOCABULARY, ModelConfig
from octavo.train.model import GPT, next_byte_loss
from tests.support.compile_cells import RECIPES, WHATS, measure

TAKES = "20 minutes"
MEASURES = ("octavo/nn", "octavo/autograd")

TIMED = ("dynamic", "delayed", "rowwise", "blockwise", "mx")
TIME_AIM, STEP_AIM = 1.5, 1.5  # of the same model's in bf16
SIZES = ModelConfig(width=256, layers=4, heads=4, context=256)
BATCH = 8


def matrix(backends: list[str]) -> list[dict[str, str]]:
    rows = []
    for backend in backends:
        for what in WHATS:
            for recipe in RECIPES:
                row = {"what": what, "recipe": recipe, "backend": backend}
                try:
                    found = measure(what, recipe, backend, layers=2)
                except Exception as error:  # a cell that can't be compiled is a row too
                    row |= {"graphs": "", "breaks": "", "recompiles": "", "difference": type(error).__name__}
                else:
                    counts = {"graphs": found.graphs, "breaks": found.breaks, "recompiles": found.recompiles}
                    row |= {name: str(count) for name, count in counts.items()}
                    row["difference"] = f"{found.difference:.3g}"
                rows.append(row)
                print(" ".join(row.values()), flush=True)
    return rows


def compiled_step(recipe: str | None) -> Callable[[], None]:
    """A training step of the trainer's model whose loss is compiled, forward and backward."""
    torch.manual_seed(0)
    model = GPT(SIZES).bfloat16()
    if recipe is not None:
        octavo.convert(model, getattr(recipes, recipe)(), select=lambda module, name: True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = torch.randint(0, VOCABULARY, (2, BATCH, SIZES.context))
    loss_of = torch.compile(lambda tokens, targets: next_byte_loss(model(tokens), targets), fullgraph=True)

    def step() -> None:
        loss_of(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def first_step_seconds(recipe: str | None) -> float:
    """Until the first compiled step is done."""
    torch.compiler.reset()
    step = compiled_step(recipe)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def times(repeats: int, rounds: int) -> list[dict[str, str]]:
    names: list[str | None] = [None, *TIMED]
    seconds: dict[str | None, list[float]] = {name: [] for name in names}
    with torch._inductor.config.patch(force_disable_caches=True):
        first_step_seconds(None)  # what a process's first compilation loads
        for _ in range(repeats):
            for name in names:
                seconds[name].append(first_step_seconds(name))
                print(name or "bf16", f"{seconds[name][-1]:.1f} s", flush=True)
    base = statistics.median(seconds[None])
    rows = [
        {
            "recipe": name or "bf16",
            "first_step_s": f"{statistics.median(seconds[name]):.1f}",
            "first_step_by_bf16": f"{statistics.median(seconds[name]) / base:.3f}",
        }
        for name in names
    ]
    for threads in sorted({1, torch.get_num_threads()}):
        per_step = step_times(names, rounds, threads)
        for name, row in zip(names, rows, strict=True):
            row[f"step_ms_{threads}_threads"] = f"{statistics.median(per_step[name or 'bf16']) * 1e3:.1f}"
            row[f"step_by_bf16_{threads}_threads"] = f"{ratio(per_step, name or 'bf16', 'bf16'):.3f}"
    return rows


def step_times(names: list[str | None], rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of compiled steps side by side; inductor writes other code for another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.compiler.reset()
        steps = {name or "bf16": compiled_step(name) for name in names}
        for step in steps.values():
            step()
        return interleaved(steps, rounds, 3)
    finally:
        torch.set_num_threads(before)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compile_matrix", description=__doc__)
    parser.add_argument("--backends", nargs="*", default=["aot_eager", "inductor"])
    parser.add_argument("--repeats", type=int, default=3, help="of compiling, each recipe in turn (0: don't time)")
    parser.add_argument("--rounds", type=int, default=8, help="of three steps each")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    rows = matrix(options.backends)
    missed = [
        row
        for row in rows
        if (row["graphs"], row["breaks"], row["recompiles"]) != ("1", "0", "0")
        or (row["backend"] == "aot_eager" and row["difference"] != "0")
    ]
    timed = times(options.repeats, options.rounds) if options.repeats else []
    if timed:
        print(table(timed))
    if not options.no_write:
        print(f"written to {write_results('compile_matrix', rows)}")
        if timed:
            print(f"written to {write_results('compile_time', timed)}")
    for row in timed[1:]:
        steps = [value for name, value in row.items() if name.startswith("step_by_bf16")]
        slow = float(row["first_step_by_bf16"]) > TIME_AIM or any(float(step) > STEP_AIM for step in steps)
        print(f"{'MISSED' if slow else 'ok'}: {row['recipe']} {row['first_step_by_bf16']}, {', '.join(steps)} of bf16")
        missed += [row] if slow else []
    print(f"{len(rows)} cells, {len(missed)} missed")
    return int(bool(missed))
