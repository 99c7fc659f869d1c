"""Measure which tiles each kernel is fastest with.

For each kind of kernel and each bucket of sizes, octavo's own configuration and its neighbours are timed in turns on
the bucket's shapes. The best few, and octavo's own, are timed again, longer, on all cases of the kind. The best one
whose results equal the reference's is taken.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from octavo.kernels.triton import cases
from octavo.kernels.triton.launch import TileTable
from octavo.tune.timing import Timings, timings

LIBRARY = "library"
LARGE = 64  # log2 of elements: more than any tensor has, so that it is the bucket of all sizes above the others
FINALISTS, PRINTED = 6, 5  # configurations that are timed again, and those that are printed
MOST_WARPS = 16
# rows that a tile of a kind that transposes has at least; of large tensors a sector's, of codes of a byte
LEAST_ROWS, SECTOR_BYTES = 16, 32

Sizes = tuple[int, ...]
TableRows = list[list[Any]]  # of a table
ConfigNumbers = tuple[int, ...]  # (rows, columns, depth, warps) of a tile
Ranking = dict[ConfigNumbers, float]  # {configuration that did not fail: its time over the best one's}, best first
Buckets = Mapping[int, Sequence[Sizes]]  # largest log2 of elements, LARGE for all others -> shapes timed


class Extent(NamedTuple):
    """The extent of a tuning: which shapes are timed, how often, and with how many configurations."""

    sizes: Buckets  # of tensors
    products: Buckets  # of products, of three sizes each
    rounds: int  # of all configurations
    final_rounds: int  # of the finalists
    most_configs: int | None = None  # of a kind and bucket; None: all

    def buckets_of(self, kind: str) -> Buckets:
        """Return the shapes at which a kind is timed, by the bucket that they represent."""
        if kind == LIBRARY or kind.startswith("matmul"):
            return self.products
        # an optimizer's step takes one row for all sizes
        return {LARGE: self.sizes[LARGE]} if kind == "optimizer_step" else self.sizes


SIZES = {20: ((768, 1024),), 22: ((2048, 1408),), 25: ((4096, 4096),), LARGE: ((16384, 8192), (15872, 4096))}
PRODUCTS = {20: ((768, 1024, 4096),), 22: ((2048, 1408, 4096),), LARGE: ((8192, 8192, 8192), (15872, 4096, 4096))}
FULL = Extent(SIZES, PRODUCTS, rounds=4, final_rounds=15)
TOY = Extent({20: ((32, 64),), LARGE: ((64, 64),)}, {LARGE: ((32, 48, 128),)}, 1, final_rounds=1, most_configs=2)


class Tuned(NamedTuple):
    """A kind's rows of the table, and how many times as fast as octavo's own they are; NaN if those failed."""

    rows: TableRows
    gain: float


def grid_of(kind: str, bucket: int, extent: Extent) -> Sequence[ConfigNumbers]:
    """Return octavo's own configuration, and others in which each number is halved, doubled or as it is.

    The elements of a thread are at most halved or doubled, too. Of a product the third number is how many stages are in
    flight, of which there may be one less or more.
    """
    base = TileTable.read(None).config(kind, bucket)
    factors, configs = (1.0, 0.5, 2.0), [base]
    is_product = kind.startswith("matmul")
    least_rows = (SECTOR_BYTES if bucket == LARGE else LEAST_ROWS) if "transpose" in kind else 1
    for row_factor, col_factor, warp_factor, depth_factor in itertools.product(factors, repeat=4):
        rows, cols = int(base.tile_r * row_factor), int(base.tile_c * col_factor)
        depth = base.depth + round(math.log2(depth_factor)) if is_product else max(1, int(base.depth * depth_factor))
        warps = min(MOST_WARPS, int(base.num_warps * warp_factor))
        if row_factor * col_factor / warp_factor in factors and rows >= least_rows and warps > 0:
            configs.append(type(base)(rows, cols, depth, warps))
    return list(dict.fromkeys(configs))[: extent.most_configs]


@functools.lru_cache(maxsize=4)
def call_of(kind: str, name: str, shape: Sizes) -> Callable[[], Any]:
    """Return a case's call; the arguments of four are in memory at a time."""
    return cases.CASES_OF_KIND[kind][name].call_of(shape)


def _calling(kind: str, config: ConfigNumbers, name: str, shape: Sizes) -> Callable[[], Any]:
    """Return a call of a case with one configuration for all sizes of a kind."""
    call = call_of(kind, name, shape)

    def run() -> Any:
        with TileTable.using({kind: [[LARGE, *config]]}):
            return call()

    return run


def tasks(kinds: Sequence[str], extent: Extent) -> list[tuple[Any, ...]]:
    """Return the arguments of ``compile_one`` for all that will be timed."""
    buckets = ((kind, *each) for kind in kinds if kind != LIBRARY for each in extent.buckets_of(kind).items())
    return [(kind, shapes, config) for kind, bucket, shapes in buckets for config in grid_of(kind, bucket, extent)]


def compile_one(kind: str, shapes: Sequence[Sizes], config: ConfigNumbers) -> None:
    """Run all of a kind's cases once at each shape with a configuration, in a worker."""
    for shape, name in itertools.product(shapes, cases.CASES_OF_KIND[kind]):
        _calling(kind, config, name, shape)()


def _wrong(kind: str, config: ConfigNumbers, shape: Sizes) -> str:
    """Return how a configuration's results differ from the reference's, "" if they don't."""
    with TileTable.using({kind: [[LARGE, *config]]}):
        wrong = ((name, case.wrong(shape)) for name, case in cases.CASES_OF_KIND[kind].items())
        return next((f"{name}: {problem}" for name, problem in wrong if problem), "")


def _rank(kind: str, bucket: int, extent: Extent) -> Ranking:
    """Return the best configurations of one bucket, and octavo's own, by their time relative to the best."""
    first_case, *other_cases = cases.CASES_OF_KIND[kind]
    base, *others = grid_of(kind, bucket, extent)
    relative_times = functools.partial(_relative_times, kind, extent.buckets_of(kind)[bucket])
    finalists = list(relative_times([base, *others], [first_case], extent.rounds))[:FINALISTS]
    return relative_times(list(dict.fromkeys([*finalists, base])), [first_case, *other_cases], extent.final_rounds)


def _relative_times(
    kind: str, shapes: Sequence[Sizes], configs: Sequence[ConfigNumbers], names: Sequence[str], rounds: int
) -> Ranking:
    """Return the geometric mean over cases and shapes of each configuration's time over the best's."""
    log_sums = dict.fromkeys(configs, 0.0)
    for name, shape in itertools.product(names, shapes):
        measured = timings({str(config): _calling(kind, config, name, shape) for config in configs}, rounds)
        for error in dict.fromkeys(measured.errors.values()):
            print(f"  some failed: {error}", flush=True)
        fastest = min(map(measured.median, measured.seconds), default=math.nan)
        for config in configs:
            failed = str(config) in measured.errors
            log_sums[config] += math.inf if failed else math.log(measured.median(str(config)) / fastest)
    times = len(names) * len(shapes)
    means = {config: math.exp(log_sum / times) for config, log_sum in log_sums.items() if log_sum < math.inf}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def tune(kind: str, extent: Extent, rows: Mapping[str, TableRows]) -> Tuned:
    """Tune one kind, or LIBRARY, while other kinds have these rows."""
    try:
        with TileTable.using(rows):
            return _tune_library(extent) if kind == LIBRARY else _tune_kind(kind, extent)
    finally:  # memory for the next kind
        call_of.cache_clear()
        torch.cuda.empty_cache()


def _tune_kind(kind: str, extent: Extent) -> Tuned:
    """Tune a kind; its rows leave out a bucket of which no configuration is right."""
    rows: TableRows = []
    log_gains: list[float] = []
    for bucket, shapes in sorted(extent.buckets_of(kind).items()):
        ranking = _rank(kind, bucket, extent)
        base, *_ = grid_of(kind, bucket, extent)  # octavo's own
        best = [f"{','.join(map(str, config))} {ranking[config]:.3f}" for config in [*ranking][:PRINTED]]
        print(f"{kind} <=2^{bucket} (config, time by the best's): {'; '.join(best)}", flush=True)
        for config in ranking:
            if not (problem := _wrong(kind, config, shapes[0])):
                rows.append([bucket, *config])
                log_gains += [math.log(ranking[base] / ranking[config])] if base in ranking else []
                break
            print(f"  FAILED {tuple(config)}: {problem}", flush=True)
    if rows:
        rows[-1][0] = LARGE  # the last row that was measured serves all larger sizes
    return Tuned(rows, math.exp(sum(log_gains) / len(log_gains)) if log_gains else math.nan)


def _log_median(times: Timings, name: str) -> float:
    """Return the logarithm of a variant's median; infinity if the variant failed."""
    median = times.median(name)
    return math.inf if math.isnan(median) else math.log(median)


def _tune_library(extent: Extent) -> Tuned:
    """Return the products that torch's function is to compute: where it is right, and as fast as Triton's kernel."""
    rows: TableRows = []
    shapes = extent.buckets_of(LIBRARY)[LARGE]
    for name, case in cases.CASES_OF_KIND[LIBRARY].items():
        problem = case.wrong(shapes[0])
        log_ratio = 0.0
        for shape in () if problem else shapes:
            calls = {"torch": case.call_of(shape), "Triton": case.by_triton().call_of(shape)}
            times = timings(calls, extent.final_rounds)
            log_ratio += _log_median(times, "torch") - _log_median(times, "Triton")
        taken = not problem and log_ratio <= 0
        ratio = f"{math.exp(log_ratio / len(shapes)):.3f}"
        print(f"{name}, time by Triton's: {problem or ratio}{', taken' * taken}", flush=True)
        if taken:
            rows.append([*map(list, case.product[:2]), case.product[2]])
    return Tuned(rows, math.nan)
