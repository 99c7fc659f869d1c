"""The experiment of loss parity: gaps from bf16 in pairs of one seed, and two one-sided tests of their mean.

docs/study/training-quality.md has the design, written before the runs. A gap is 100 × (loss / bf16's - 1), of two runs
of one seed. Seeds are independent, so a mean over them has Student's interval. The one that misses the true gap in 5 %
of experiments on either side lies within ± MARGIN exactly where both one-sided tests at 5 % reject a gap so large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from benchmarks.common.pages import Row, markdown, read, signed
from benchmarks.training.quality_experiments import PARITY, PARITY_ARMS, parity_steps
from benchmarks.training.quality_study import LEARNED, OWN

MARGIN, LEVEL = 0.5, 0.05  # percent of the loss; of each one-sided test
LONGEST, *SHORTER = PARITY_ARMS
BASE, *ARMS = PARITY_ARMS[LONGEST]
RECIPES = PARITY_ARMS[SHORTER[-1]][1:]


def student(t: float, freedom: int) -> float:
    """Return the probability that Student's t is below this one (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd, total = math.atan(t / math.sqrt(freedom)), freedom % 2, 0.0
    term = math.cos(angle) if odd else 1.0
    for factor in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * factor / (factor + 1)
    series = math.sin(angle) * total
    return 0.5 + ((angle + series) / math.pi if odd else series / 2)


def quantile(probability: float, freedom: int) -> float:
    """Return the t that Student's is below with this probability, above one half."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) < probability else (low, middle)
    return high


class Paired(NamedTuple):
    """Percents by seed, whose mean is tested."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def half(self) -> float:
        """Half the length of the mean's interval; infinite for one seed."""
        count = len(self.by_seed)
        if count < 2:
            return math.inf
        return quantile(1 - LEVEL, count - 1) * statistics.stdev(self.by_seed.values()) / math.sqrt(count)

    @property
    def within(self) -> bool:
        """Whether both one-sided tests reject a mean as far from 0 as the margin."""
        return abs(self.mean) + self.half < MARGIN

    @property
    def above(self) -> bool:
        """Whether the one-sided test rejects a mean of 0 or less."""
        return self.mean - self.half > 0

    def __str__(self) -> str:
        return signed(self.mean) + (f" ± {self.half:.2f}" if math.isfinite(self.half) else "")


class Losses:
    """The final losses of the experiment's runs; ``by_run``: by steps and experiment, then by seed."""

    def __init__(self, rows: Iterable[Row], measure: str = OWN) -> None:
        self.by_run: dict[tuple[int, str], dict[int, float]] = {}
        for row in rows:
            if row["size"] == PARITY:
                of_seeds = self.by_run.setdefault((int(row["steps"]), row["experiment"]), {})
                of_seeds[int(row["seed"])] = float(row[measure])

    def gap(self, arm: str, length: int = LONGEST) -> Paired:
        """Return an arm's gaps from bf16 after so many bytes a parameter, of the seeds that have both runs."""
        losses, base = (self.by_run.get((parity_steps(length), name), {}) for name in (arm, BASE))
        return Paired({seed: 100 * (losses[seed] / base[seed] - 1) for seed in sorted(losses.keys() & base.keys())})

    def growth(self, arm: str) -> Paired:
        """Return what a doubling of the length adds to an arm's gap, of the seeds with the shortest and the longest.

        Lengths double, so that the line of least squares through a seed's three gaps has the slope of its ends.
        """
        short, long = (self.gap(arm, length).by_seed for length in (SHORTER[-1], LONGEST))
        doublings = math.log2(LONGEST / SHORTER[-1])
        return Paired({seed: (long[seed] - short[seed]) / doublings for seed in short.keys() & long.keys()})


def verdicts_table() -> str:
    """Return a table of each arm's gap from bf16 after the longest training, and what the tests say of it."""
    trained, learned = (Losses(read("quality"), measure) for measure in (OWN, LEARNED))
    rows = []
    for arm in ARMS:
        gap = trained.gap(arm)
        if gap.by_seed:
            verdicts = ("yes" if gap.within else "not shown", "yes" if gap.above else "not shown")
            rows.append([arm, str(len(gap.by_seed)), str(gap), str(learned.gap(arm)), *verdicts])
    head = ("experiment", "seeds", "validation, %", "weights alone, %", f"within ± {MARGIN} %", "above 0")
    return markdown(head, rows)


def lengths_table() -> str:
    """Return a table of the recipes' gaps by bytes a parameter, and what a doubling of the bytes adds."""
    losses, lengths, rows = Losses(read("quality")), [*reversed(PARITY_ARMS)], []
    for arm in RECIPES:
        changes = (*(losses.gap(arm, length) for length in lengths), losses.growth(arm))
        if all(change.by_seed for change in changes):
            cells = (f"{change} ({len(change.by_seed)})" for change in changes)
            rows.append([arm, *cells, "yes" if changes[-1].above else "not shown"])
    columns = (f"{length} bytes a parameter, % (seeds)" for length in lengths)
    return markdown(("experiment", *columns, "a doubling adds, % (seeds)", "grows"), rows)


def seeds_table() -> str:
    """Return a table of bf16's losses and of all gaps, seed by seed."""
    losses, rows = Losses(read("quality")), []
    arms = [(arm, LONGEST) for arm in ARMS] + [(arm, length) for length in SHORTER for arm in RECIPES]
    gaps = [losses.gap(*arm).by_seed for arm in arms]
    for seed, loss in sorted(losses.by_run.get((parity_steps(LONGEST), BASE), {}).items()):
        cells = (signed(of_seeds[seed]) if seed in of_seeds else "" for of_seeds in gaps)
        rows.append([str(seed), f"{loss:.4f}", *cells])
    return markdown(("seed", f"{BASE}, nats a byte", *(f"{arm}: {length}" for arm, length in arms)), rows)


TABLES: dict[str, Callable[[], str]] = {
    "parity": verdicts_table,
    "parity by length": lengths_table,
    "parity by seed": seeds_table,
}
