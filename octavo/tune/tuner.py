"""Measure which tiles each kernel is fastest with.

For each kind of kernel and each bucket of sizes, all configurations of a grid are timed in turns on the bucket's
shapes. The best few, and octavo's own, are timed again, longer, on all cases of the kind. The best one whose results
equal the reference's is taken; neighbouring buckets share a configuration if that costs less than 2 %.

KINDS has an entry for each row of configs.json: its cases, the configurations tried, and at which sizes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.triton.launch import SHIPPED, Config
from octavo.tune import cases, products
from octavo.tune.timing import ON_GPU, Timings, input_sets, timings

Dimensions = tuple[int, ...]
Buckets = Mapping[int, Sequence[Dimensions]]  # largest log2 of elements -> shapes timed


class Kind(NamedTuple):
    """A row of the table: its cases (the first decides which configurations are timed again), its grid, its buckets."""

    cases: tuple[str, ...]
    grid: list[Config]
    buckets: Buckets


def _tiles(
    rows: Sequence[int],
    cols: Sequence[int],
    tiles: Sequence[int],
    smallest: int,
    largest: int,
    per_thread: tuple[int, int] = (16, 64),
) -> list[Config]:
    """Tiles of ``smallest`` to ``largest`` elements; a thread has ``per_thread`` (least, most; from 2^14 on twice)."""
    found = []
    for r, c, t, warps in itertools.product(rows, cols, tiles, (2, 4, 8, 16)):
        least, most = per_thread[0], per_thread[1] * (2 if r * c >= 1 << 14 else 1)
        if smallest <= r * c <= largest and least <= r * c / (32 * warps) <= most:
            found.append(Config(r, c, t, warps))
    return found


def _products(stages: Sequence[int], warps: Sequence[int] = (4, 8), square: bool = False) -> list[Config]:
    found = []
    for m, n, s, w in itertools.product((64, 128, 256), (64, 128, 256), stages, warps):
        fits = (m + n) * 128 * s <= 220 << 10 and 64 <= m * n / (32 * w) <= 256 and (m == n or not square)
        if fits:
            found.append(Config(m, n, s, w))
    return found


SIZES = {20: ((768, 1024),), 22: ((2048, 1408),), 25: ((4096, 4096),), 64: ((16384, 8192), (15872, 4096))}
WIDE = {**SIZES, 64: ((16384, 8192), (15872, 4096), (15872, 16384))}
# for kinds whose best tiles follow those of plain casts
FEW = {22: ((2048, 1408),), 64: ((16384, 8192), (15872, 4096))}
TOY_PRODUCTS: tuple[Dimensions, ...] = ((32, 48, 128),)
PRODUCTS = {20: ((768, 1024, 4096),), 22: ((2048, 1408, 4096),), 64: ((8192, 8192, 8192), (15872, 4096, 4096))}

AS_IT_LIES = _tiles((8, 16, 32, 64), (128, 256, 512, 1024), (1, 2, 4, 8), 2048, 16384)
# the kernel reads two tiles, so that a thread has half the elements
GRADIENTS = _tiles((8, 16, 32), (128, 256, 512), (1, 4, 8), 2048, 8192, (8, 32))
TRANSPOSED_GRADIENTS = _tiles((32, 64, 128), (32, 64, 128), (1, 4, 8), 2048, 8192, (8, 32))

KINDS = {
    "cast_transpose": Kind(
        ("cast+transpose delayed", "cast+transpose+sum+commit"),
        _tiles((32, 64, 128, 256), (32, 64, 128, 256), (1, 2, 4, 8), 4096, 16384),
        SIZES,
    ),
    "cast": Kind(("cast delayed",), AS_IT_LIES, SIZES),
    "amax": Kind(("amax",), AS_IT_LIES, SIZES),
    "cast_rows": Kind(("cast rows",), _tiles((1, 2, 4), (1024, 2048, 4096, 8192, 16384), (1,), 1024, 16384), WIDE),
    "amax_lines": Kind(
        ("cast columns", "cast rows + columns"),
        _tiles((16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8), 2048, 16384),
        SIZES,
    ),
    "cast_lines": Kind(
        ("cast rows + columns", "cast columns"), _tiles((32, 64, 128), (32, 64, 128), (1, 2, 4, 8), 2048, 16384), SIZES
    ),
    "cast_blocks": Kind(("cast 1x128",), _tiles((1, 4, 8, 16, 32, 64), (128, 256, 512), (1,), 512, 16384), SIZES),
    "cast_blocks_transpose": Kind(
        ("cast 1x128 + 128x1", "cast+transpose 128x128"), _tiles((32, 64, 128), (32, 64, 128), (1,), 1024, 16384), SIZES
    ),
    "amax_gated_gradient": Kind(("swiglu gradient + cast+transpose+sum dynamic",), GRADIENTS, FEW),
    "cast_gated_gradient": Kind(("swiglu gradient + cast+sum delayed",), GRADIENTS, FEW),
    "cast_transpose_gated_gradient": Kind(("swiglu gradient + cast+transpose+sum+commit",), TRANSPOSED_GRADIENTS, FEW),
    "cast_transpose_gated_gradient_of_codes": Kind(
        ("swiglu gradient of codes + cast+transpose+sum+commit",), TRANSPOSED_GRADIENTS, FEW
    ),
    "cast_rows_gated_gradient": Kind(
        ("swiglu gradient + rows",), _tiles((1, 2), (1024, 2048, 4096, 8192), (1,), 1024, 8192, (4, 32)), FEW
    ),
    "norm_cast": Kind(
        ("rmsnorm + cast delayed", "rmsnorm + rows"),
        _tiles((1, 2, 4), (2048, 4096, 8192, 16384), (1, 4), 4096, 16384),
        FEW,
    ),
    "norm_cast_transpose": Kind(
        ("rmsnorm + cast+transpose delayed", "layernorm + cast+transpose delayed"),
        _tiles((8, 16, 32, 64), (64, 128, 256, 512, 1024), (1,), 4096, 16384),
        FEW,
    ),
    "norm_cast_blocks": Kind(("rmsnorm + 1x128",), _tiles((1, 2, 4), (1024, 2048, 4096, 8192), (1,), 2048, 8192), FEW),
    "norm_cast_blocks_transpose": Kind(
        ("rmsnorm + 1x32 + 32x1",), _tiles((32, 64), (32, 64, 128, 256), (1,), 1024, 8192), FEW
    ),
    "norm_backward": Kind(  # tiles: how many programs a multiprocessor has
        ("rmsnorm gradient + residual", "layernorm gradient + residual"),
        _tiles((1,), (2048, 4096, 8192), (1, 2, 4), 2048, 8192, (4, 32)),
        FEW,
    ),
    "optimizer_step": Kind(
        ("AdamW fp8, split32", "AdamW fp8, E4M3 weight in blocks, split16"),
        _tiles((4, 8, 16, 32), (128,), (4, 16, 64), 512, 4096, (8, 16)),
        {64: ((16384, 8192), (2048, 1408))},
    ),
    "matmul_blocks": Kind(("1x128 . 1x128, Triton",), _products((3, 4, 5), square=True), PRODUCTS),
    "matmul_square_blocks": Kind(
        ("1x128 . 128x128, Triton",), [c for c in _products((3, 4, 5), (4, 8, 16)) if c.block_c <= 128], PRODUCTS
    ),
    "matmul": Kind(("rows . rows, Triton",), _products((3, 4, 5)), PRODUCTS),
}


# by its path: the function of the same name hides the module
launch = importlib.import_module("octavo.kernels.triton.launch")
LIBRARY = "library"
FINALISTS = 6
SHARED = 1.02  # a neighbouring bucket's configuration is taken if its time over the best's is less than this

Log = list[dict[str, Any]]
Ranking = dict[Config, float]  # time over the best's


class Tuned(NamedTuple):
    """A kind's rows of the table, and how many times as fast as octavo's own they are; NaN if those failed."""

    rows: list[list[Any]]
    gain: float


def buckets_of(kind: str, toy: bool) -> Buckets:
    """The shapes at which a kind is timed, by the bucket (the largest log2 of elements) that they represent."""
    if not toy:
        return KINDS[kind].buckets
    if KINDS[kind].cases[0] in products.PRODUCTS:
        return {64: TOY_PRODUCTS}
    return {20: ((32, 64),), 64: ((64, 64),)} if kind == "cast" else {64: ((32, 64),)}


def shipped(kind: str) -> list[tuple[int, Config]]:
    """Octavo's own configurations of a kind, each with the bucket up to which it serves."""
    rows: list[list[int]] = json.loads(SHIPPED.read_text())["configs"][kind]
    return [(bucket, Config(*config)) for bucket, *config in rows]


def grid_of(kind: str, toy: bool) -> list[Config]:
    """The configurations that are tried, octavo's own among them; none for LIBRARY."""
    if kind == LIBRARY:
        return []
    grid = KINDS[kind].grid[: 1 if toy else None]
    return list(dict.fromkeys([*grid, *(config for _, config in shipped(kind))]))


@contextmanager
def _tables(rows: Mapping[str, list[list[Any]]]) -> Iterator[None]:
    """Use the table with these kinds' rows."""
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
    """Use the table with one configuration for all sizes of a kind."""
    return _tables({kind: [[64, *config]]})


class _Watched(list[list[int]]):
    """A kind's rows, which note whether they were read."""

    was_read = False

    def __iter__(self) -> Iterator[list[int]]:
        self.was_read = True
        return super().__iter__()


def unaffected(kind: str, shape: Dimensions) -> str:
    """A case of the kind whose kernel does not read its row of the table; "" if there is none."""
    for name in KINDS[kind].cases:
        rows = _Watched([[64, *shipped(kind)[-1][1]]])
        with _tables({kind: rows}):
            _bound(name, shape, 1)[0]()
        if not rows.was_read:
            return name
    return ""


@functools.lru_cache(maxsize=4)
def _bound(name: str, shape: Dimensions, sets: int) -> list[Callable[[], Any]]:
    """A case's calls on inputs of a shape."""
    if name in products.PRODUCTS:
        return products.calls(name, shape)
    return cases.calls(name, _inputs(shape, sets))


@functools.lru_cache(maxsize=2)
def _inputs(shape: Dimensions, sets: int) -> list[Tensor]:
    rows, cols = shape
    return cases.inputs(rows, cols, sets)


def compile_one(kind: str, config: Config, toy: bool) -> None:
    """Run all of a kind's cases once with a configuration, in a worker."""
    with _table(kind, config):
        for shape in dict.fromkeys(itertools.chain(*buckets_of(kind, toy).values())):
            for name in KINDS[kind].cases:
                _bound(name, shape, 1)[0]()


def _time(kind: str, configs: Sequence[Config], name: str, shape: Dimensions, rounds: int) -> Timings:
    """Each configuration's time of a case, by the configuration's text."""

    def with_config(config: Config, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with _table(kind, config):
                return call()

        return run

    bound = _bound(name, shape, input_sets(2 * shape[0] * shape[1]))
    variants = {str(tuple(config)): [with_config(config, call) for call in bound] for config in configs}
    return timings(variants, rounds)


def _wrong(kind: str, config: Config, shape: Dimensions) -> str:
    """What is wrong with a configuration's results, "" for nothing."""
    with _table(kind, config):
        for name in KINDS[kind].cases:
            product = name in products.PRODUCTS
            if found := products.wrong(name, shape) if product else cases.wrong(name, _inputs(shape, 1)[0]):
                return f"{name}: {found}"
    return ""


def _rank(kind: str, bucket: int, shapes: Sequence[Dimensions], grid: Sequence[Config], toy: bool, log: Log) -> Ranking:
    """The best configurations of one bucket, and octavo's own, by their time relative to the best."""

    def costs(configs: Sequence[Config], names: Sequence[str], rounds: int) -> Ranking:
        """The geometric mean over cases and shapes of the time over the best's."""
        total = dict.fromkeys(configs, 0.0)
        for name, shape in itertools.product(names, shapes):
            found = _time(kind, configs, name, shape, rounds)
            times = {config: found.median(str(tuple(config))) for config in configs}
            fastest = min((time for time in times.values() if not math.isnan(time)), default=math.nan)
            for config, time in times.items():
                total[config] += math.log(time / fastest) if not math.isnan(time) else math.inf
                log.append(
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
    first = costs(grid, names[:1], 1 if toy else 4)
    best = [config for config, cost in first.items() if cost < math.inf][:FINALISTS]
    return costs(list(dict.fromkeys([*best, _shipped_for(kind, bucket)])), names, 1 if toy else 15)


def _shipped_for(kind: str, bucket: int) -> Config:
    """Octavo's own configuration of a bucket."""
    rows = shipped(kind)
    return next((config for largest, config in rows if bucket <= largest), rows[-1][1])


def _choose(kind: str, shapes: Sequence[Dimensions], ranking: Ranking, neighbour: Config | None) -> Config | None:
    """The neighbouring bucket's configuration if it is as good, else the best whose results are right."""
    order = [config for config, cost in ranking.items() if cost < math.inf]
    if neighbour in order and ranking[neighbour] < SHARED * ranking[order[0]]:
        order.insert(0, neighbour)
    for config in order:
        problem = _wrong(kind, config, shapes[0])
        if not problem:
            return config
        print(f"  FAILED {tuple(config)}: {problem}", flush=True)
    return None


def tune(kind: str, toy: bool, log: Log, rows: Mapping[str, list[list[Any]]]) -> Tuned:
    """Tune one kind, or LIBRARY, while other kinds have these rows; readings are added to the log."""
    try:
        with _tables(rows):
            return _tune_library(toy, log) if kind == LIBRARY else _tune_kind(kind, toy, log)
    finally:  # memory for the next kind
        _bound.cache_clear()
        _inputs.cache_clear()
        if ON_GPU:
            torch.cuda.empty_cache()


def _tune_kind(kind: str, toy: bool, log: Log) -> Tuned:
    """Tune a kind; its rows have the largest bucket last, and leave out a bucket that can't be tuned."""
    rows: list[list[Any]] = []
    gains: list[float] = []
    neighbour, grid, buckets = None, grid_of(kind, toy), buckets_of(kind, toy)
    if name := unaffected(kind, next(iter(buckets.values()))[0]):
        raise ValueError(f"{name} is not of this kind")
    for bucket, shapes in sorted(buckets.items(), reverse=True):
        began = len(log)
        ranking = _rank(kind, bucket, shapes, grid, toy, log)
        tops = [f"{','.join(map(str, config))} {cost:.3f}" for config, cost in list(ranking.items())[:5]]
        print(f"{kind} <=2^{bucket} (config, time by the best's): {'; '.join(tops)}", flush=True)
        for error in sorted({row["error"] for row in log[began:]} - {""})[:2]:
            print(f"  some failed: {error}", flush=True)
        chosen = _choose(kind, shapes, ranking, neighbour)
        if chosen is not None:
            gains.append(math.log(ranking[_shipped_for(kind, bucket)] / ranking[chosen]))
            if chosen != neighbour:
                rows.insert(0, [bucket, *chosen])
        neighbour = chosen or neighbour
    if rows:
        rows[-1][0] = 64
    finite = [gain for gain in gains if gain < math.inf]
    return Tuned(rows, math.exp(sum(finite) / len(finite)) if finite else math.nan)


def _tune_library(toy: bool, log: Log) -> Tuned:
    """The products that torch's function is to compute: those where it is right, and as fast as Triton's kernel."""
    found: list[list[Any]] = []
    shapes = TOY_PRODUCTS if toy else PRODUCTS[64]
    for name, fast in itertools.product(products.TORCH, (True, False)):
        costs = {"torch": 0.0, "Triton": 0.0}
        problem = products.wrong(f"{name}, torch", shapes[0], fast)
        for shape in () if problem else shapes:
            variants = {who: products.calls(f"{name}, {who}", shape, fast) for who in costs}
            times = timings(variants, 1 if toy else 15)
            for who in costs:
                costs[who] += math.log(times.median(who))
                us, size = f"{times.median(who) * 1e6:.2f}", "x".join(map(str, shape))
                log.append({"kind": "library", "case": f"{name}, {who}", "shape": size, "us": us, "fast_accum": fast})
        taken = not problem and costs["torch"] <= costs["Triton"]
        ratio = math.exp((costs["torch"] - costs["Triton"]) / len(shapes))
        print(f"{name}, fast_accum={fast}: torch by Triton {problem or f'{ratio:.3f}'}{', taken' * taken}", flush=True)
        if taken:
            found.append([*map(list, products.TILES[name]), fast])
    return Tuned(found, math.nan)
