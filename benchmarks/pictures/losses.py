"""Validation losses along the runs of the study of quality, and each recipe's gap from bf16's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common.pages import read
from benchmarks.pictures.svg import SMALL, WIDTH, Axes, Picture, ticks
from benchmarks.training.quality_experiments import BASELINES, RECIPES
from benchmarks.training.quality_study import EXPERIMENTS, LEARNED, OWN, Runs, curve_of, signed

SIZE = "0.5M"  # of most runs
LEFT, RIGHT = 52, WIDTH - 30
Curve = dict[int, float]


def curves(runs: Runs, names: Sequence[str]) -> dict[str, Curve]:
    """Return, by seed, the mean of these experiments' validation losses by step."""
    curves_by_seed: dict[str, list[Curve]] = {}
    for row in runs.of(SIZE, *names):
        curves_by_seed.setdefault(row["seed"], []).append(curve_of(row))
    return {
        seed: {step: statistics.mean(curve[step] for curve in every) for step in every[0]}
        for seed, every in curves_by_seed.items()
    }


def mean(every: dict[str, Curve]) -> Curve:
    """Return the mean curve over seeds."""
    first = next(iter(every.values()))
    return {step: statistics.mean(curve[step] for curve in every.values()) for step in first}


def losses() -> str:
    """Draw losses above, gaps below, of every recipe over the seeds that bf16 has runs of too."""
    runs = Runs(read("quality"))
    base = curves(runs, BASELINES)
    by_recipe = {name: {seed: c for seed, c in curves(runs, [name]).items() if seed in base} for name in RECIPES}
    by_recipe = {name: every for name, every in by_recipe.items() if every}
    gaps = {
        name: mean({seed: {s: 100 * (loss / base[seed][s] - 1) for s, loss in c.items()} for seed, c in every.items()})
        for name, every in by_recipe.items()
    }
    shown = {"bf16": mean(base)} | {name: mean(every) for name, every in by_recipe.items()}
    steps = sorted(shown["bf16"])
    picture = Picture(572, "Validation losses of bf16 and of octavo's recipes, and their gaps")
    picture.text(16, 28, "Validation loss by step, nats a byte", font_weight="700")
    low, high = (pick(loss for curve in shown.values() for loss in curve.values()) for pick in (min, max))
    axes = Axes(picture, (LEFT, 44, RIGHT, 216), (steps[0], steps[-1]), (low - 0.02, high + 0.02))
    axes.grid(ticks(*axes.x), ticks(*axes.y, 6))
    for place, curve in enumerate(shown.values()):
        picture.path([axes.at(step, curve[step]) for step in steps], colors(place), 2 if place else 5)

    sigma, _ = runs.deviation(SIZE, OWN)
    picture.text(16, 268, "Above bf16, %", font_weight="700")
    bound = 1.08 * max(sigma, *(abs(gap) for curve in gaps.values() for gap in curve.values()))
    axes = Axes(picture, (LEFT, 284, RIGHT, 456), (steps[0], steps[-1]), (-bound, bound))
    (left, top), (right, bottom) = axes.at(steps[0], sigma), axes.at(steps[-1], -sigma)
    picture.rect(left, top, right - left, bottom - top, "band")
    axes.grid(ticks(*axes.x), ticks(*axes.y, 6))
    for place, curve in enumerate(gaps.values(), 1):
        picture.path([axes.at(step, curve[step]) for step in steps], colors(place), 2)
        for step in steps:
            picture.dot(*axes.at(step, curve[step]), colors(place), 2.5)
    legend(picture, 504, [*shown])
    seeds = {name: len(every) for name, every in by_recipe.items()}
    few, many = min(seeds.values()), max(seeds.values())
    about = f"{few} seeds" if few == many else f"{few} to {many} seeds"
    picture.text(16, 556, f"Means of {about}; grey: ±σ of one run ({sigma:.2f} %)", "soft", SMALL)
    return str(picture)


def colors(place: int) -> str:
    """Return the color of bf16 (place 0), or of a recipe."""
    return "soft" if place == 0 else f"series{place - 1}"


def legend(picture: Picture, y: float, names: Sequence[str]) -> None:
    """Draw names in rows of three."""
    for place, name in enumerate(names):
        x, line = 16 + 140 * (place % 3), y + 22 * (place // 3)
        picture.path([(x, line - 4), (x + 24, line - 4)], colors(place), 5 if place == 0 else 3)
        picture.text(x + 32, line, name, size=SMALL)


def final_gaps() -> str:
    """Draw each experiment's final gap, of its weights read in bf16, with two standard errors and each seed's."""
    runs = Runs(read("quality"))
    gaps = {name: gap for name in EXPERIMENTS if (gap := runs.gap([name], SIZE, LEARNED)) is not None}
    names = [name.replace("high precision", "bf16") for name in gaps]
    pitch, left = 25.0, 16 + 7.3 * max(map(len, names))
    picture = Picture(66 + pitch * len(gaps) + 62, "Final validation losses above bf16's, by experiment")
    picture.text(16, 28, "Final validation loss above bf16's, %", font_weight="700")
    values = [value for gap in gaps.values() for value in (gap.mean + 2 * gap.error, gap.mean - 2 * gap.error)]
    values += [value for gap in gaps.values() for value in gap.gaps.values()]
    bottom = 50 + pitch * len(gaps)
    axes = Axes(picture, (left, 44, RIGHT + 10, bottom), (min(values) - 0.02, max(values) + 0.02), (0, len(gaps)))
    (start, top), (end, _) = axes.at(-0.1, len(gaps)), axes.at(0.1, 0)
    picture.rect(start, top, end - start, bottom - top, "band")
    axes.grid(ticks(*axes.x, 6), [], x_words="{:.1f}")
    for place, (name, gap) in enumerate(gaps.items()):
        _, y = axes.at(0, len(gaps) - place - 0.5)
        picture.text(left - 8, y + 4.5, names[place], size=SMALL, text_anchor="end")
        for value in gap.gaps.values():
            x, _ = axes.at(value, 0)
            picture.path([(x, y - 6), (x, y + 6)], "series5", 1.2)
        (low, _), (middle, _), (high, _) = (axes.at(gap.mean + k * gap.error, 0) for k in (-2, 0, 2))
        picture.path([(low, y), (high, y)], "series0", 2)
        picture.dot(middle, y, "series0", 4.5)
        if (forward := runs.gap([name], SIZE, OWN)) is not None:
            x, _ = axes.at(forward.mean, 0)
            for up in (-4, 4):
                picture.path([(x - 4, y - up), (x + 4, y + up)], "series1", 1.8)
    worst = max(gaps, key=lambda name: gaps[name].mean)
    picture.text(16, bottom + 44, f"grey band: ±0.1 %; largest: {worst}, {signed(gaps[worst].mean)} %", "soft", SMALL)
    return str(picture)
