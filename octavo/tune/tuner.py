"""Measure which tiles each kernel is fastest with, and write them to octavo/kernels/triton/configs.json.

For each kind of kernel and each bucket of sizes, all configurations of a grid are compiled ahead in parallel, timed in
turns on the bucket's shapes, and the best few again, longer, on all the cases that share the kind. The best one whose
results equal the reference's is taken; neighbouring buckets share a configuration where that costs less than 2 %.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import benchmarks.common.interpreter  # noqa: F401
from benchmarks.common.measure import provenance
from benchmarks.kernels import cases, products
from octavo.kernels.triton.launch import Config
from octavo.tune.kinds import KINDS, PRODUCTS, TOY_PRODUCTS, Shape
from octavo.tune.timing import ON_GPU, Deadline, Timings, describe, input_sets, timings
from octavo.tune.workers import precompile

TAKES = "a GPU; 10 minutes"
MEASURES = ("octavo/kernels/triton",)

launch = importlib.import_module("octavo.kernels.triton.launch")
TABLE_FILE = Path(launch.__file__).with_name("configs.json")
FINALISTS = 6
SHARED = 1.02  # a neighbouring bucket's configuration is taken when it costs less than this


def _toy(kind: str) -> dict[int, tuple[Shape, ...]]:
    if KINDS[kind].cases[0] in products.PRODUCTS:
        return {20: TOY_PRODUCTS}
    return {20: ((32, 48),), 64: ((48, 64),)} if kind == "cast" else {64: ((32, 48),)}


@contextmanager
def _tables(rows: dict[str, list[list[int]]]) -> Iterator[None]:
    """The table with these kinds' rows."""
    before = dict(launch.TABLE)
    launch.TABLE.update(rows)
    launch.config.cache_clear()
    try:
        yield
    finally:
        launch.TABLE.clear()  # a kind may have had no row
        launch.TABLE.update(before)
        launch.config.cache_clear()


def _table(kind: str, config: Config) -> AbstractContextManager[None]:
    """The table with one configuration for all sizes of a kind."""
    return _tables({kind: [[64, *config]]})


class _Watched(list[list[int]]):
    """A kind's rows, which know whether they were looked at."""

    looked_at = False

    def __iter__(self) -> Iterator[list[int]]:
        self.looked_at = True
        return super().__iter__()


def _unaffected(kind: str, shape: Shape) -> str:
    """A case of the kind that its row of the table makes no difference to, "" for none."""
    for name in KINDS[kind].cases:
        rows = _Watched([[64, *KINDS[kind].grid()[0]]])
        with _tables({kind: rows}):
            _bound(name, shape, 1)[0]()
        if not rows.looked_at:
            return name
    return ""


@functools.lru_cache(maxsize=4)
def _bound(name: str, shape: Shape, sets: int) -> list[Callable[[], Any]]:
    """A case's calls on inputs of a shape."""
    if name in products.PRODUCTS:
        return products.calls(name, shape, sets)
    return cases.calls(name, _inputs(shape, sets))


@functools.lru_cache(maxsize=2)
def _inputs(shape: Shape, sets: int) -> list[Tensor]:
    return cases.inputs(*shape, sets)  # type: ignore[arg-type]


def _sets(shape: Shape) -> int:
    return input_sets(2 * shape[0] * shape[1])


def compile_one(kind: str, config: Config, buckets: dict[int, tuple[Shape, ...]]) -> None:
    """Run all of a kind's cases once with a configuration; what a worker does."""
    with _table(kind, Config(*config)):
        for shape in dict.fromkeys(shape for shapes in buckets.values() for shape in shapes):
            for name in KINDS[kind].cases:
                _bound(name, shape, 1)[0]()


def _time(kind: str, configs: Sequence[Config], name: str, shape: Shape, rounds: int) -> Timings:
    """Each configuration's time of a case, by the configuration's text."""

    def with_config(config: Config, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with _table(kind, config):
                return call()

        return run

    bound = _bound(name, shape, _sets(shape))
    variants = {str(tuple(config)): [with_config(config, call) for call in bound] for config in configs}
    return timings(variants, rounds)


def _wrong(kind: str, config: Config, shape: Shape) -> str:
    with _table(kind, config):
        for name in KINDS[kind].cases:
            if name in products.PRODUCTS:
                found = products.wrong(name, shape)
            else:
                found = cases.wrong(name, _inputs(shape, 1)[0])
            if found:
                return f"{name}: {found}"
    return ""


class Ranking(NamedTuple):
    """Configurations of one bucket by their time relative to the best, all shapes and cases together."""

    by_cost: dict[Config, float]
    lines: list[dict[str, Any]]  # for the log


def _rank(kind: str, bucket: int, shapes: Sequence[Shape], grid: Sequence[Config], quick: bool) -> Ranking:
    lines: list[dict[str, Any]] = []

    def costs(configs: Sequence[Config], names: Sequence[str], rounds: int) -> dict[Config, float]:
        """Geometric mean over cases and shapes of the time by the best's."""
        total = dict.fromkeys(configs, 0.0)
        for name, shape in itertools.product(names, shapes):
            found = _time(kind, configs, name, shape, rounds)
            times = {config: found.median(str(tuple(config))) for config in configs}
            fastest = min((time for time in times.values() if not math.isnan(time)), default=math.nan)
            for config, time in times.items():
                total[config] += math.log(time / fastest) if not math.isnan(time) else math.inf
                lines.append(
                    {
                        "kind": kind,
                        "bucket": bucket,
                        "case": name,
                        "shape": "x".join(map(str, shape)),
                        **config._asdict(),
                        "us": f"{time * 1e6:.2f}",
                        "by_fastest": f"{time / fastest:.3f}",
                        "rounds": rounds,
                        "error": found.errors.get(str(tuple(config)), ""),
                    }
                )
        scores = {config: math.exp(value / (len(names) * len(shapes))) for config, value in total.items()}
        return dict(sorted(scores.items(), key=lambda item: item[1]))

    names = KINDS[kind].cases
    first = costs(grid, names[:1], 1 if quick else 4)
    finalists = [config for config, cost in first.items() if cost < math.inf][:FINALISTS]
    return Ranking(costs(finalists, names, 1 if quick else 15), lines)


def _choose(kind: str, shapes: Sequence[Shape], ranking: Ranking, neighbour: Config | None) -> Config | None:
    """The neighbouring bucket's configuration if it is as good, else the best whose results are right."""
    order = list(ranking.by_cost)
    if neighbour in ranking.by_cost and ranking.by_cost[neighbour] < SHARED * ranking.by_cost[order[0]]:
        order.insert(0, neighbour)
    for config in order:
        problem = _wrong(kind, config, shapes[0])
        if not problem:
            return config
        print(f"  FAILED {tuple(config)}: {problem}", flush=True)
    return None


def _tune(kind: str, buckets: dict[int, tuple[Shape, ...]], quick: bool, log: list[dict[str, Any]]) -> list[list[int]]:
    """The kind's rows of the table, largest bucket last; a bucket that can't be tuned is left out."""
    rows: list[list[int]] = []
    neighbour = None
    if name := _unaffected(kind, next(iter(buckets.values()))[0]):
        raise ValueError(f"{name} is not of this kind")
    for bucket, shapes in sorted(buckets.items(), reverse=True):
        grid = KINDS[kind].grid()
        if quick:
            grid = grid[:2]
        if neighbour is not None and neighbour not in grid:
            grid.append(neighbour)
        ranking = _rank(kind, bucket, shapes, grid, quick)
        log += ranking.lines
        _print_ranking(kind, bucket, shapes, ranking)
        chosen = _choose(kind, shapes, ranking, neighbour)
        if chosen is not None and chosen != neighbour:
            rows.insert(0, [bucket, *chosen])
        neighbour = chosen or neighbour
    if rows:
        rows[-1][0] = 64
    return rows


def _print_ranking(kind: str, bucket: int, shapes: Sequence[Shape], ranking: Ranking) -> None:
    name = KINDS[kind].cases[0]
    times = {
        (row["block_r"], row["block_c"], row["tiles"], row["num_warps"]): float(row["us"])
        for row in ranking.lines
        if row["case"] == name and row["shape"] == "x".join(map(str, shapes[0]))
    }
    failed = {row["error"] for row in ranking.lines if row["error"]}
    result = _bound(name, shapes[0], _sets(shapes[0]))[0]()
    if name in products.PRODUCTS:
        amount, unit = products.flop(shapes[0]) / 1e6, "TF/s"
    else:
        amount, unit = cases.moved_bytes(name, _inputs(shapes[0], _sets(shapes[0]))[0], result) / 1e3, "GB/s"
    tops = [
        f"{','.join(map(str, config))} {cost:.3f} {amount / times[tuple(config)]:.0f}"
        for config, cost in list(ranking.by_cost.items())[:5]
    ]
    print(f"{kind} <=2^{bucket} {shapes[0]} (config, by best, {unit}): {'; '.join(tops)}", flush=True)
    for error in sorted(failed)[:2]:
        print(f"  some failed: {error}", flush=True)


def _tune_library(shapes: Sequence[Shape], quick: bool, log: list[dict[str, Any]]) -> list[list[Any]]:
    """The products that torch's own function makes: those where it is right, and as fast as Triton's kernel."""
    found: list[list[Any]] = []
    for name, fast in itertools.product(products.TORCH, (True, False)):
        costs = {"torch": 0.0, "Triton": 0.0}
        problem = products.wrong(f"{name}, torch", shapes[0], fast)
        for shape in () if problem else shapes:
            variants = {who: products.calls(f"{name}, {who}", shape, 1, fast) for who in costs}
            times = timings(variants, 1 if quick else 15)
            for who in costs:
                costs[who] += math.log(times.median(who))
                us, size = f"{times.median(who) * 1e6:.2f}", "x".join(map(str, shape))
                log.append({"kind": "library", "case": f"{name}, {who}", "shape": size, "us": us, "fast_accum": fast})
        taken = not problem and costs["torch"] <= costs["Triton"]
        ratio = math.exp((costs["torch"] - costs["Triton"]) / len(shapes))
        print(f"{name}, fast_accum={fast}: torch by Triton {problem or f'{ratio:.3f}'}{', taken' * taken}", flush=True)
        if taken:
            found.append([*map(list, products.TILES[name]), fast])
    return found


def _write(path: Path, found: dict[str, list[list[Any]]]) -> None:
    """The table with the kinds found replaced, a line a kind."""
    old = json.loads(TABLE_FILE.read_text())
    library = found.get("library", old["library"])
    configs = {**old["configs"], **{kind: rows for kind, rows in found.items() if kind != "library"}}
    origin = provenance()
    versions = (f"{name} {origin[name]}" for name in ("torch", "triton", "commit"))
    measured_on = ", ".join([origin["device"], *versions])
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(rows)}" for kind, rows in configs.items())
    head = f'{{"measured_on": {json.dumps(measured_on)},\n"library": {json.dumps(library)},\n'
    path.write_text(f'{head}"configs": {{\n{lines}\n}}}}\n')


def _write_log(path: Path, log: Sequence[dict[str, Any]]) -> None:
    origin = provenance()
    with path.open("w", newline="") as file:
        columns = dict.fromkeys(key for line in log for key in line)
        writer = csv.DictWriter(file, [*columns, *origin])
        writer.writeheader()
        writer.writerows({**line, **origin} for line in log)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, two configurations; writes no table")
    parser.add_argument("--minutes", type=float, default=9.0, help="kinds not reached by then keep their rows")
    parser.add_argument("--output", type=Path, default=TABLE_FILE, help="the table to write")
    parser.add_argument("--log", type=Path, help="a CSV of all readings")
    options = parser.parse_args(arguments)
    if unknown := set(options.kinds) - {*KINDS, "library"}:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    if not ON_GPU and not options.toy:
        parser.error("tuning needs an NVIDIA GPU; --toy runs the code without one")
    deadline = Deadline(options.minutes)
    kinds = options.kinds or [*KINDS, "library"]  # last: by the products' new configurations
    buckets = {kind: _toy(kind) if options.toy else KINDS[kind].buckets for kind in kinds if kind in KINDS}
    if ON_GPU:
        tasks = [(kind, tuple(c), buckets[kind]) for kind in buckets for c in KINDS[kind].grid()]
        failures = precompile(compile_one, tasks, options.minutes / 2)
        print(f"{len(tasks)} configurations compiled, {deadline.left():.0f} s left; {len(failures)} failed", flush=True)
        for line in failures[:3]:
            print(f"  {line}", flush=True)
    found: dict[str, list[list[int]]] = {}
    log: list[dict[str, Any]] = []
    failed = False
    for kind in kinds:
        if deadline.left() < 15:
            print(f"{kind}: left out, no time", flush=True)
            continue
        try:
            if kind == "library":
                with _tables({kind: rows for kind, rows in found.items() if kind in KINDS}):
                    rows = _tune_library(TOY_PRODUCTS if options.toy else PRODUCTS[64], options.toy, log)
            else:
                rows = _tune(kind, buckets[kind], options.toy, log)
        except Exception as error:
            print(f"{kind}: FAILED, {describe(error)}", file=sys.stderr, flush=True)
            failed = True
            continue
        if not rows:
            failed = True
            continue
        found[kind] = rows
        print(f"{json.dumps(kind)}: {json.dumps(rows)}", flush=True)
        if not options.toy or options.output != TABLE_FILE:
            _write(options.output, found)
        if options.log and log:
            _write_log(options.log, log)
        _bound.cache_clear()
        if ON_GPU:
            torch.cuda.empty_cache()
    return int(failed)
