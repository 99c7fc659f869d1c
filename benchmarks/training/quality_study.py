"""The tables of docs/study/training-quality.md, made of the results that are committed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from benchmarks.common.pages import Row, markdown, read, signed
from benchmarks.training.quality_experiments import BASELINES, BATCH, EXPERIMENTS, RECIPES, SIZES, STEPS

OWN, LEARNED, AVERAGE, TRAIN = "val_loss", "val_loss_bf16", "val_loss_average", "train_loss"
FORWARD = "forward"  # val_loss above val_loss_bf16, of the same weights


class Gap(NamedTuple):
    """Differences from bf16 in percent, a seed each, and the standard error of their mean."""

    gaps: dict[int, float]
    error: float

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.gaps.values())


class Runs:
    """The rows of quality, and what they come to.

    A gap is that from the mean of a seed's runs in bf16. All runs of a size are taken to scatter alike about what their
    experiment and their seed make of a loss, as each experiment has too few seeds to tell.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [row for row in rows if math.isfinite(float(row[OWN]))]

    def gaps(self, experiment: str, size: str, measure: str) -> dict[int, float]:
        """By seed, where there is a run in bf16."""
        found = {}
        for row in self.of(size, experiment):
            base = [100.0] if measure == FORWARD else [value(own, measure) for own in self._base(row)]
            if base:
                found[int(row["seed"])] = 100 * (value(row, measure) / statistics.mean(base) - 1)
        return found

    def of(self, size: str, experiment: str = "") -> list[Row]:
        """The rows of a size, and of an experiment alone."""
        return [row for row in self.rows if row["size"] == size and experiment in ("", row["experiment"])]

    def _base(self, row: Row) -> list[Row]:
        """This seed's runs in bf16, but for the experiment itself."""
        alike = ("size", "seed", "steps", "device")
        return [
            own
            for own in self.rows
            if own["experiment"] in BASELINES
            and own["experiment"] != row["experiment"]
            and all(own[key] == row[key] for key in alike)
        ]

    def deviation(self, size: str, measure: str) -> tuple[float, int]:
        """A run's standard deviation, percent, about effects of experiment and seed that add; degrees of freedom."""
        rows = self.of(size)
        effects = [{"bf16" if row["experiment"] in BASELINES else row["experiment"], row["seed"]} for row in rows]
        names = sorted(set[str]().union(*effects))
        design = torch.tensor([[float(name in own) for name in names] for own in effects], dtype=torch.float64)
        logarithms = torch.tensor([math.log(value(row, measure)) for row in rows], dtype=torch.float64)
        if not rows or (freedom := len(rows) - int(torch.linalg.matrix_rank(design))) == 0:
            return math.nan, 0
        rest = logarithms - design @ torch.linalg.pinv(design) @ logarithms
        return 100 * float(rest.square().sum() / freedom) ** 0.5, freedom

    def gap(self, experiment: str, size: str, measure: str) -> Gap | None:
        """An experiment's, None where there is no run of it."""
        gaps = self.gaps(experiment, size, measure)
        if not gaps:
            return None
        bases = [len(self._base(row)) for row in self.of(size, experiment) if int(row["seed"]) in gaps]
        variances = [1.0 if measure == FORWARD else 1 + 1 / base for base in bases]
        return Gap(gaps, self.deviation(size, measure)[0] * math.sqrt(sum(variances)) / len(gaps))


def value(row: Row, measure: str) -> float:
    """What a measure reads; FORWARD in percent, 100 for a forward that changes nothing."""
    return 100 * float(row[OWN]) / float(row[LEARNED]) if measure == FORWARD else float(row[measure])


def _cell(found: Gap | None, digits: int = 2) -> str:
    if found is None:
        return ""
    return _with_error(found.mean, found.error, digits)


def _with_error(mean: float, error: float, digits: int = 2) -> str:
    """A percentage, with its standard error where that is known."""
    return signed(mean, digits) + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def gaps_table() -> str:
    """Every experiment's gap from bf16."""
    runs = Runs(read("quality"))
    rows = []
    for size in SIZES:
        for experiment in EXPERIMENTS:
            own, learned, forward, train = (runs.gap(experiment, size, m) for m in (OWN, LEARNED, FORWARD, TRAIN))
            if own is not None and experiment not in BASELINES:
                seeds = str(len(own.gaps))
                rows.append([size, experiment, seeds, _cell(own), _cell(learned), _cell(forward, 3), _cell(train)])
    header = ["size", "experiment", "seeds", "validation, %", "weights alone, %", "forward alone, %", "training, %"]
    return markdown(header, rows)


def kinds_table() -> str:
    """The mean gap of experiments of a kind: what single ones scatter about."""
    runs, rows = Runs(read("quality")), []
    for size in SIZES:
        for kind, experiments in KINDS.items():
            found = [(name, seed) for name in experiments for seed in runs.gaps(name, size, OWN)]
            seeds = {seed for _, seed in found}
            if not found:
                continue
            bases = {
                s: sum(row["experiment"] in BASELINES and row["seed"] == str(s) for row in runs.of(size)) for s in seeds
            }
            parts = [1 / sum(s == seed for _, s in found) + 1 / bases[seed] for seed in seeds]
            cells = []
            for measure in (OWN, LEARNED, TRAIN):
                gaps = {seed: [runs.gaps(name, size, measure)[s] for name, s in found if s == seed] for seed in seeds}
                mean = statistics.mean(statistics.mean(own) for own in gaps.values())
                error = runs.deviation(size, measure)[0] * math.sqrt(sum(parts)) / len(seeds)
                cells.append(_with_error(mean, error))
            rows.append([size, kind, str(len(found)), str(len(seeds)), *cells])
    return markdown(["size", "experiments", "runs", "seeds", "validation, %", "weights alone, %", "training, %"], rows)


def pairs_table() -> str:
    """Experiments beside others of the same seeds: the chance of runs in bf16 has no part in it."""
    runs, rows = Runs(read("quality")), []
    for size in SIZES:
        for experiment, other in PAIRS:
            cells = []
            for measure in (OWN, LEARNED, TRAIN):
                own, base = ({r["seed"]: value(r, measure) for r in runs.of(size, e)} for e in (experiment, other))
                seeds = sorted(own.keys() & base.keys())
                if seeds:
                    mean = statistics.mean(100 * (own[seed] / base[seed] - 1) for seed in seeds)
                    cells.append(_with_error(mean, runs.deviation(size, measure)[0] * math.sqrt(2 / len(seeds))))
            if cells:
                rows.append([size, experiment, other, str(len(seeds)), *cells])
    return markdown(["size", "experiment", "beside", "seeds", "validation, %", "weights alone, %", "training, %"], rows)


def chance_table() -> str:
    """How much of a loss is chance, by measure."""
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
            found = [runs.of(size, base) for base in BASELINES]
            again = [
                100 * math.log(value(row, measure) / value(first, measure))
                for first in found[0]
                for row in (*found[1], *found[2])
                if row["seed"] == first["seed"]
            ]
            repeated = f"{math.sqrt(statistics.mean(gap**2 for gap in again)):.2f} ({len(again)})" if again else ""
            needed = math.ceil((2 * deviation / 0.1) ** 2 * (1 + 1 / len(BASELINES)))
            rows.append([size, name, f"{deviation:.2f} ({freedom})", repeated, str(needed)])
    header = ["size", "measure", "σ of a run, % (degrees of freedom)", "between runs in bf16, rms, % (pairs)"]
    return markdown([*header, "seeds for ± 0.1 % at 2 σ"], rows)


def gradient_table(groups: Sequence[str]) -> Callable[[], str]:
    """Gradient errors of some groups, halfway through the run of the size that there are most batches of."""

    def made() -> str:
        rows = as_trained(read("gradient_error"))
        size = max(rows, key=lambda row: int(row["batches"]))["size"]
        rows = [row for row in rows if row["size"] == size and row["group"] in groups]
        step = str(STEPS // 2)
        header = [f"{size}, step {step}", "1 − cosine, %", "bias, %", "along, %", "noise, %", "loss, %"]
        lines = [
            [
                row["variant"] if len(groups) == 1 else f"{row['group']}: {row['variant']}",
                f"{100 * (1 - float(row['cosine'])):.3f}",
                f"{float(row['bias']):.1f}",
                _measured(row, "along"),
                f"{float(row['noise']):.2f}",
                _measured(row, "loss", 3),
                _measured(row, "steps"),
                _measured(row, "predicted", 3),
            ]
            for row in rows
            if row["step"] == step
        ]
        return markdown([*header, "steps lost, %", "predicted, %"], lines)

    return made


def as_trained(rows: Iterable[Row]) -> list[Row]:
    """Those of batches as the runs have them."""
    return [row for row in rows if row["windows"] == str(BATCH)]


def reading_table() -> str:
    """What a recipe's forward costs weights that were trained in bf16, and those that were trained with it."""
    runs, lines = Runs(read("quality")), []
    for row in as_trained(read("gradient_error")):
        if row["step"] != str(STEPS) or row["variant"] in BASELINES:
            continue
        if (trained := runs.gap(row["variant"], row["size"], FORWARD)) is not None:
            seeds = str(len(trained.gaps))
            lines.append([row["size"], row["variant"], _measured(row, "loss", 3), _cell(trained, 3), seeds])
    return markdown(["size", "forward", "weights of bf16, %", "weights trained with it, %", "seeds"], lines)


def windows_table() -> str:
    """How the noise that rounding adds, beside that of the batches, changes with the batch."""
    rows = [row for row in read("gradient_error") if row["step"] == str(STEPS // 2)]
    sizes = [size for size in SIZES if any(row["size"] == size and row["windows"] != str(BATCH) for row in rows)]
    rows = [row for row in rows if row["size"] in sizes]
    batches = sorted({int(row["windows"]) for row in rows})
    found = {(row["size"], row["group"], row["variant"], int(row["windows"])): row["noise"] for row in rows}
    lines = []
    for size, group, variant in dict.fromkeys(key[:3] for key in found):
        numbers = [found.get((size, group, variant, windows)) for windows in batches]
        if all(number is not None for number in numbers):
            lines.append([size, f"{group}: {variant}", *(f"{float(number or 0):.2f}" for number in numbers)])
    return markdown(["size", "in FP8", *(f"noise, %, {windows} windows" for windows in batches)], lines)


def steps_table() -> str:
    """How the gradient errors of the recipe `dynamic` change along the run."""
    lines = []
    for row in as_trained(read("gradient_error")):
        if row["variant"] in ("dynamic", "output", "grad_input", "grad_weight") and row["group"] in (
            "recipe",
            "product",
        ):
            numbers = [f"{float(row[name]):.2f}" for name in ("bias", "noise")]
            lines.append([row["size"], row["step"], row["variant"], *numbers, _measured(row, "loss", 3)])
    return markdown(["size", "step", "in FP8", "bias, %", "noise, %", "loss, %"], lines)


def _measured(row: Row, name: str, digits: int = 2) -> str:
    """A column with its standard error."""
    error = float(row[f"{name}_se"])
    return _with_error(float(row[name]), error, digits) if error else "0"


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
    ("full stack", "dynamic"),
    ("full stack in backward", "full stack"),
    ("full stack in backward, exact norm", "full stack in backward"),
)
TABLES: dict[str, Callable[[], str]] = {
    "gaps": gaps_table,
    "kinds": kinds_table,
    "pairs": pairs_table,
    "chance": chance_table,
    **{group: gradient_table([group]) for group in ("recipe", "layers", "gradients", "rounding")},
    "steps": steps_table,
    "windows": windows_table,
    "reading": reading_table,
    "operands": gradient_table(["product", "operand"]),
    "forward": gradient_table(["inputs", "weights"]),
}
