"""The tables of docs/study/training-quality.md, made of the committed results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from benchmarks.common.pages import Row, markdown, read, signed
from benchmarks.training.quality_experiments import BASELINES, EXPERIMENTS, RECIPES, SIZES

OWN, LEARNED, AVERAGE, TRAIN = "val_loss", "val_loss_bf16", "val_loss_average", "train_loss"
FORWARD = "forward"  # val_loss above val_loss_bf16, of the same weights


class Gap(NamedTuple):
    """Differences from bf16 in percent, one for each seed, and the standard error of their mean."""

    gaps: dict[int, float]
    error: float

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.gaps.values())


class Runs:
    """The rows of quality, and the gaps and deviations computed from them.

    All runs of a size are taken to scatter alike about what their experiment and their seed make of a loss, as each
    experiment has too few seeds to tell. A run on another machine differs from its twin in last bits, as one in
    micro-batches does: they count alike. Runs in NVFP4 scatter more, and have a table of their own.
    """

    def __init__(self, rows: Iterable[Row], with_nvfp4: bool = False) -> None:
        finite = [row for row in rows if math.isfinite(float(row[OWN]))]
        self.rows = [row for row in finite if with_nvfp4 or not row["experiment"].startswith("nvfp4")]

    def of(self, size: str, *experiments: str) -> list[Row]:
        """Return the rows of a size; with experiments, of these alone."""
        return [
            row for row in self.rows if row["size"] == size and (not experiments or row["experiment"] in experiments)
        ]

    def several(self, experiments: Collection[str], size: str) -> bool:
        """Whether there are runs of more than one of these experiments."""
        return len({row["experiment"] for row in self.of(size, *experiments)}) > 1

    def by_seed(self, experiments: Collection[str], size: str, measure: str) -> dict[int, list[float]]:
        """Return a measure of all runs of these experiments, by seed."""
        values: dict[int, list[float]] = {}
        for row in self.of(size, *experiments):
            values.setdefault(int(row["seed"]), []).append(value(row, measure))
        return values

    def deviation(self, size: str, measure: str) -> tuple[float, int]:
        """Return a run's standard deviation, percent, about effects of experiment and seed; degrees of freedom."""
        rows = self.of(size)
        effects = [{"bf16" if row["experiment"] in BASELINES else row["experiment"], row["seed"]} for row in rows]
        names = sorted(set[str]().union(*effects))
        design = torch.tensor(
            [[float(name in run_effects) for name in names] for run_effects in effects], dtype=torch.float64
        )
        logarithms = torch.tensor([math.log(value(row, measure)) for row in rows], dtype=torch.float64)
        if not rows or (freedom := len(rows) - int(torch.linalg.matrix_rank(design))) == 0:
            return math.nan, 0
        residuals = logarithms - design @ torch.linalg.pinv(design) @ logarithms
        return 100 * float(residuals.square().sum() / freedom) ** 0.5, freedom

    def gap(
        self, experiments: Collection[str], size: str, measure: str, beside: Collection[str] = BASELINES
    ) -> Gap | None:
        """Return the gap of experiments, together, from others, by default bf16; None if no seed has runs of both."""
        values = self.by_seed(experiments, size, measure)
        base = self.by_seed([name for name in beside if name not in experiments], size, measure)
        if measure == FORWARD:
            base = {seed: [100.0] for seed in values}
        seeds = sorted(values.keys() & base.keys())
        if not seeds:
            return None
        gaps = {seed: 100 * (statistics.mean(values[seed]) / statistics.mean(base[seed]) - 1) for seed in seeds}
        parts = [1 / len(values[seed]) + (measure != FORWARD) / len(base[seed]) for seed in seeds]
        return Gap(gaps, self.deviation(size, measure)[0] * math.sqrt(sum(parts)) / len(seeds))


def value(row: Row, measure: str) -> float:
    """Return a row's measure; FORWARD in percent, 100 for a forward that changes nothing; a number: of that step."""
    if measure == FORWARD:
        return 100 * float(row[OWN]) / float(row[LEARNED])
    return curve_of(row)[int(measure)] if measure.isdigit() else float(row[measure])


def curve_of(row: Row) -> dict[int, float]:
    """Return the validation losses during the run, by step."""
    return {int(step): float(loss) for step, loss in (point.split(":") for point in row["curve"].split())}


def _cell(gap: Gap | None, digits: int = 2) -> str:
    if gap is None:
        return ""
    return _with_error(gap.mean, gap.error, digits)


def _with_error(mean: float, error: float, digits: int = 2) -> str:
    """Return a percentage as text, with its standard error where that is known."""
    return signed(mean, digits) + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def gaps_table() -> str:
    """Return a table of every experiment's gap from bf16."""
    runs = Runs(read("quality"))
    rows = []
    for size in SIZES:
        for experiment in EXPERIMENTS:
            as_trained, learned, forward, train = (
                runs.gap([experiment], size, m) for m in (OWN, LEARNED, FORWARD, TRAIN)
            )
            if as_trained is not None and experiment not in BASELINES:
                seeds = str(len(as_trained.gaps))
                rows.append(
                    [size, experiment, seeds, _cell(as_trained), _cell(learned), _cell(forward, 3), _cell(train)]
                )
    header = ["size", "experiment", "seeds", "validation, %", "weights alone, %", "forward alone, %", "training, %"]
    return markdown(header, rows)


def nvfp4_table() -> str:
    """Return a table of the gaps of MX and NVFP4 from bf16, seed by seed; errors are those of these seeds' mean."""
    runs, rows = Runs(read("quality"), with_nvfp4=True), []
    seeds = range(5)

    def mean(gap: Gap) -> str:
        gaps = [gap.gaps[seed] for seed in seeds if seed in gap.gaps]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        return _with_error(statistics.mean(gaps), error)

    for experiment in ("mx", *(name for name in EXPERIMENTS if name.startswith("nvfp4"))):
        as_trained, learned = (runs.gap([experiment], "0.5M", measure) for measure in (OWN, LEARNED))
        if as_trained is not None and learned is not None:
            of_seeds = [signed(as_trained.gaps[seed], 2) if seed in as_trained.gaps else "" for seed in seeds]
            rows.append([experiment, mean(as_trained), mean(learned), *of_seeds])
    return markdown(["recipe", "validation, %", "weights alone, %", *(f"seed {seed}" for seed in seeds)], rows)


def kinds_table() -> str:
    """Return a table of the mean gap of experiments of a kind, about which single ones scatter."""
    runs, rows = Runs(read("quality")), []
    for size in SIZES:
        for kind, experiments in KINDS.items():
            as_trained = runs.gap(experiments, size, OWN)
            if as_trained is not None and runs.several(experiments, size):
                cells = [_cell(runs.gap(experiments, size, measure)) for measure in (OWN, LEARNED, TRAIN)]
                count = sum(int(row["seed"]) in as_trained.gaps for row in runs.of(size, *experiments))
                rows.append([size, kind, str(count), str(len(as_trained.gaps)), *cells])
    return markdown(["size", "experiments", "runs", "seeds", "validation, %", "weights alone, %", "training, %"], rows)


def pairs_table() -> str:
    """Return a table of experiments beside others of the same seeds: chance in runs of bf16 has no part in it."""
    runs, rows = Runs(read("quality")), []
    for size in SIZES:
        for experiment, other in PAIRS:
            as_trained, learned, train = (runs.gap([experiment], size, m, [other]) for m in (OWN, LEARNED, TRAIN))
            if as_trained is not None:
                seeds = str(len(as_trained.gaps))
                rows.append([size, experiment, other, seeds, _cell(as_trained), _cell(learned), _cell(train)])
    return markdown(["size", "experiment", "beside", "seeds", "validation, %", "weights alone, %", "training, %"], rows)


def along_table() -> str:
    """Return a table of the recipes' gap along the runs."""
    runs, rows = Runs(read("quality")), []
    steps = [str(step) for step in curve_of(runs.rows[0])]
    for size in SIZES:
        for name, experiments in (("all recipes", RECIPES), ("dynamic", ("dynamic",))):
            gaps = [runs.gap(experiments, size, step) for step in steps]
            if gaps[0] is not None and (len(experiments) == 1 or runs.several(experiments, size)):
                rows.append([size, name, str(len(gaps[0].gaps)), *map(_cell, gaps)])
    return markdown(["size", "recipe", "seeds", *(f"step {step}, %" for step in steps)], rows)


def trend_table() -> str:
    """Return a table of gaps' change by a doubling of the parameters: least squares over sizes, weighted by errors."""
    runs, rows = Runs(read("quality")), []
    for experiment in ("dynamic", "rowwise", "full stack"):
        for measure, name in ((OWN, "validation"), (LEARNED, "weights alone"), (FORWARD, "forward alone")):
            gaps = {size: runs.gap([experiment], size, measure) for size in SIZES}
            points = [
                (math.log2(SIZES[size].parameters), gap.mean, gap.error)
                for size, gap in gaps.items()
                if gap is not None and gap.error > 0
            ]
            if len(points) > 1:
                digits = 3 if measure == FORWARD else 2
                slope, error = fitted_slope(points)
                cells = [_cell(gap, digits) for gap in gaps.values()]
                rows.append([experiment, name, *cells, _with_error(slope, error, digits)])
    return markdown(["experiment", "gap, %", *SIZES, "a doubling of the parameters, %"], rows)


def fitted_slope(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the slope of the line through points (x, y, error of y), and its standard error."""
    weights = [1 / error**2 for _, _, error in points]
    center = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / sum(weights)
    spread = sum(w * (x - center) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - center) * y for w, (x, y, _) in zip(weights, points, strict=True)) / spread
    return slope, spread**-0.5


def chance_table() -> str:
    """Return a table of the share of a loss that is chance, by measure."""
    runs, rows = Runs(read("quality")), []
    names = {
        OWN: "loss, as trained",
        LEARNED: "loss in bf16",
        AVERAGE: "loss in bf16 of averaged weights",
        TRAIN: "training loss, last tenth",
    }
    for size in SIZES:
        for measure, name in names.items():
            deviation, freedom = runs.deviation(size, measure)
            if not freedom:
                continue
            alike = runs.by_seed(BASELINES, size, measure).values()
            differences = [100 * math.log(one / other) for losses in alike for one, other in combinations(losses, 2)]
            repeated = (
                f"{math.sqrt(statistics.mean(gap**2 for gap in differences)):.2f} ({len(differences)})"
                if differences
                else ""
            )
            needed = math.ceil((2 * deviation / 0.1) ** 2 * (1 + 1 / len(BASELINES)))
            rows.append([size, name, f"{deviation:.2f} ({freedom})", repeated, str(needed)])
    header = ["size", "measure", "σ of a run, % (degrees of freedom)", "between runs in bf16, rms, % (pairs)"]
    return markdown([*header, "seeds for ± 0.1 % at 2 σ"], rows)


KINDS = {
    "all recipes, blocks alone": RECIPES,
    "E5M2 gradients: dynamic, delayed": ["dynamic", "delayed"],
    "E4M3 gradients: rowwise, blockwise, mx, dynamic": ["rowwise", "blockwise", "mx", "dynamic, E4M3 gradients"],
    "head alone, all kinds": [name for name in EXPERIMENTS if name.startswith("head alone")],
    "full stack, after and in backward": [name for name in EXPERIMENTS if name.startswith("full stack")],
}
PAIRS = (
    *((name, "dynamic") for name in ("blockwise", "mx", "rowwise", "dynamic, E4M3 gradients")),
    *(("dynamic", f"dynamic, {product} alone") for product in ("output", "grad_input", "grad_weight")),
    ("dynamic, head too", "dynamic"),
    ("dynamic, rowwise head", "dynamic"),
    *((f"dynamic, {part} in high precision", "dynamic") for part in ("attention", "first block")),
    ("full stack", "dynamic"),
    ("full stack in backward", "full stack"),
    ("full stack in backward, exact norm", "full stack in backward"),
)
NVFP4 = {"nvfp4": nvfp4_table}
TABLES: dict[str, Callable[[], str]] = {
    "gaps": gaps_table,
    "kinds": kinds_table,
    "pairs": pairs_table,
    "along": along_table,
    "trend": trend_table,
    "chance": chance_table,
}
