"""The tables and figures of docs/study/training-quality.md, made of the results that are committed."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.subjects import RESULTS, ROOT
from benchmarks.training.quality_experiments import BASELINES, EXPERIMENTS, SIZES, STEPS

PAGE = ROOT / "docs/study/training-quality.md"
IMAGES = ROOT / "docs/images"
BEGIN, END = "<!-- made by ./dev bench quality --study: {} -->\n", "<!-- until here -->"
OWN, LEARNED, AVERAGE, TRAIN = "val_loss", "val_loss_bf16", "val_loss_average", "train_loss"
FORWARD = "forward"  # val_loss above val_loss_bf16, of the same weights
Row = dict[str, str]


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

    A gap is that from the mean of a seed's runs in bf16. All experiments of a size are taken to scatter alike, each has
    too few seeds to tell: their standard deviation is pooled.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [row for row in rows if math.isfinite(float(row[OWN]))]

    def gaps(self, experiment: str, size: str, measure: str) -> dict[int, float]:
        """By seed, where there is a run in bf16."""
        found = {}
        for row in self.rows:
            if (row["experiment"], row["size"]) != (experiment, size):
                continue
            base = self._base(row, LEARNED if measure == FORWARD else measure, experiment)
            if measure == FORWARD:
                found[int(row["seed"])] = 100 * (float(row[OWN]) / float(row[LEARNED]) - 1)
            elif base:
                found[int(row["seed"])] = 100 * (float(row[measure]) / statistics.mean(base) - 1)
        return found

    def _base(self, row: Row, measure: str, experiment: str) -> list[float]:
        """The losses of this seed's runs in bf16, but for the experiment itself."""
        alike = ("size", "seed", "steps", "device")
        return [
            float(own[measure])
            for own in self.rows
            if own["experiment"] in BASELINES
            and own["experiment"] != experiment
            and all(own[key] == row[key] for key in alike)
        ]

    def deviation(self, size: str, measure: str) -> tuple[float, int]:
        """The standard deviation of gaps about their experiment's mean, pooled, and its degrees of freedom."""
        squares, freedom = 0.0, 0
        for experiment in EXPERIMENTS:
            gaps = [*self.gaps(experiment, size, measure).values()]
            if experiment not in BASELINES and len(gaps) > 1:
                squares += statistics.variance(gaps) * (len(gaps) - 1)
                freedom += len(gaps) - 1
        return (math.sqrt(squares / freedom) if freedom else math.nan), freedom

    def gap(self, experiment: str, size: str, measure: str) -> Gap | None:
        """An experiment's, None where there is no run of it."""
        gaps = self.gaps(experiment, size, measure)
        return Gap(gaps, self.deviation(size, measure)[0] / math.sqrt(len(gaps))) if gaps else None


def read(subject: str) -> list[Row]:
    """The rows of a subject's results, from all devices."""
    rows = []
    for path in sorted(RESULTS.glob(f"{subject}-*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return rows


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(found: Gap | None, digits: int = 2) -> str:
    if found is None:
        return ""
    error = "" if math.isnan(found.error) else f" ± {found.error:.{digits}f}"
    return f"{signed(found.mean, digits)}{error}"


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


def chance_table() -> str:
    """How much of a gap is chance, by measure."""
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
            repeated = [gap for base in BASELINES[1:] for gap in runs.gaps(base, size, measure).values()]
            if not freedom and not repeated:
                continue
            again = f"{math.sqrt(statistics.mean(gap**2 for gap in repeated)):.2f}" if repeated else ""
            one = "" if math.isnan(deviation) else f"{deviation:.2f}"
            needed = "" if math.isnan(deviation) else str(math.ceil((2 * deviation / 0.1) ** 2))
            rows.append([size, name, one, str(freedom), again, str(len(repeated)), needed])
    header = ["size", "measure", "σ of a gap, %", "degrees of freedom", "bf16 again, rms, %", "pairs"]
    return markdown([*header, "seeds for ± 0.1 % at 2 σ"], rows)


def gradient_table(groups: Sequence[str]) -> Callable[[], str]:
    """Gradient errors of some groups, halfway through the run of the largest model that there are rows of."""

    def made() -> str:
        rows = read("gradient_error")
        size = next(size for size in reversed(SIZES) if any(row["size"] == size for row in rows))
        rows = [row for row in rows if row["size"] == size and row["group"] in groups]
        step = str(STEPS // 2)
        header = [f"{size}, step {step}", "1 − cosine, %", "bias, %", "along, %", "noise, %", "loss, %"]
        lines = [
            [
                row["variant"] if len(groups) == 1 else f"{row['group']}: {row['variant']}",
                f"{100 * (1 - float(row['cosine'])):.3f}",
                f"{float(row['bias']):.1f}",
                _with_error(row, "along"),
                f"{float(row['noise']):.2f}",
                _with_error(row, "loss", 3),
                _with_error(row, "steps"),
                _with_error(row, "predicted", 3),
            ]
            for row in rows
            if row["step"] == step
        ]
        return markdown([*header, "steps lost, %", "predicted, %"], lines)

    return made


def steps_table() -> str:
    """How the gradient errors of the recipe `dynamic` change along the run."""
    lines = []
    for row in read("gradient_error"):
        if row["variant"] in ("dynamic", "output", "grad_input", "grad_weight") and row["group"] in (
            "recipe",
            "product",
        ):
            numbers = [f"{float(row[name]):.2f}" for name in ("bias", "noise")]
            lines.append([row["size"], row["step"], row["variant"], *numbers, _with_error(row, "loss", 3)])
    return markdown(["size", "step", "in FP8", "bias, %", "noise, %", "loss, %"], lines)


def _with_error(row: Row, name: str, digits: int = 2) -> str:
    value, error = float(row[name]), float(row[f"{name}_se"])
    return f"{signed(value, digits)} ± {error:.{digits}f}" if error else "0"


TABLES: dict[str, Callable[[], str]] = {
    "gaps": gaps_table,
    "chance": chance_table,
    **{group: gradient_table([group]) for group in ("recipe", "layers", "gradients", "rounding")},
    "steps": steps_table,
    "operands": gradient_table(["product", "operand"]),
    "forward": gradient_table(["inputs", "weights"]),
}


def filled(text: str) -> str:
    """A page with its tables made anew."""
    for name, made in TABLES.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        if begin:
            text = before + begin + made() + END + rest.partition(END)[2]
    return text


def write() -> list[Path]:
    """Write the page's tables and its figures."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return [PAGE, gaps_figure(), curves_figure()]


def is_current() -> bool:
    """Whether the page says what the results say."""
    text = PAGE.read_text(encoding="utf-8")
    return filled(text) == text


def _figure(width: float, height: float, columns: int) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)


def gaps_figure() -> Path:
    """Each experiment's gap with its standard error, and each seed's."""
    runs = Runs(read("quality"))
    sizes = [size for size in SIZES if runs.deviation(size, OWN)[1]]
    figure, axes = _figure(4 + 3 * len(sizes), 5.5, len(sizes))
    names = [name for name in EXPERIMENTS if any(runs.gaps(name, size, OWN) for size in sizes)]
    for axis, size in zip(axes[0], sizes, strict=True):
        axis.axvspan(-0.1, 0.1, color="0.92")
        for place, name in enumerate(reversed(names)):
            if (found := runs.gap(name, size, LEARNED)) is not None:
                axis.plot([*found.gaps.values()], [place] * len(found.gaps), "|", color="0.6", markersize=8)
                axis.errorbar(found.mean, place, xerr=2 * found.error, fmt="o", color="C0", capsize=3)
            if (own := runs.gap(name, size, OWN)) is not None:
                axis.plot(own.mean, place, "x", color="C1")
        axis.set_yticks(range(len(names)), reversed(names))
        axis.set_title(f"{size} parameters, 3,000 steps")
        axis.set_xlabel("final validation loss above bf16, %")
    return _save(figure, "quality-gaps.png")


def curves_figure() -> Path:
    """Mean gap on the way."""
    runs = Runs(read("quality"))
    sizes = [size for size in SIZES if runs.deviation(size, OWN)[1]]
    figure, axes = _figure(4 + 4 * len(sizes), 4, len(sizes))
    for axis, size in zip(axes[0], sizes, strict=True):
        axis.axhline(0, color="0.6")
        base = _curves(runs, size, BASELINES)
        for name in EXPERIMENTS:
            own = _curves(runs, size, [name])
            seeds = own.keys() & base.keys()
            if name in BASELINES or not seeds:
                continue
            steps = sorted(next(iter(own.values())))
            means = [
                statistics.mean(100 * (own[seed][step] / base[seed][step] - 1) for seed in seeds) for step in steps
            ]
            axis.plot(steps, means, marker=".", label=f"{name} ({len(seeds)})")
        axis.set_title(f"{size} parameters")
        axis.set_xlabel("step")
        axis.set_ylabel("mean validation loss above bf16, %")
        axis.legend(fontsize="x-small")
    return _save(figure, "quality-curves.png")


def _curves(runs: Runs, size: str, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """By seed, the mean of these experiments' validation losses on the way."""
    found: dict[str, list[dict[int, float]]] = {}
    for row in runs.rows:
        if row["experiment"] in names and row["size"] == size:
            points = (point.split(":") for point in row["curve"].split())
            found.setdefault(row["seed"], []).append({int(step): float(loss) for step, loss in points})
    return {
        seed: {step: statistics.mean(own[step] for own in curves) for step in curves[0]}
        for seed, curves in found.items()
    }


def _save(figure: Any, name: str) -> Path:
    import matplotlib.pyplot as plt

    path = IMAGES / name
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path
