"""Validation losses along the runs of the study of quality, and what each recipe's are above bf16's."""

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
    """By seed, the mean of these experiments' validation losses by step."""
    found: dict[str, list[Curve]] = {}
    for row in runs.of(SIZE, *names):
        found.setdefault(row["seed"], []).append(curve_of(row))
    return {
        seed: {step: statistics.mean(own[step] for own in every) for step in every[0]} for seed, every in found.items()
    }


def mean(every: dict[str, Curve]) -> Curve:
    """Over seeds."""
    first = next(iter(every.values()))
    return {step: statistics.mean(own[step] for own in every.values()) for step in first}


def losses() -> str:
    """Losses above, gaps below, of every recipe over the seeds that bf16 has runs of too."""
    runs = Runs(read("quality"))
    base = curves(runs, BASELINES)
    own = {name: {seed: c for seed, c in curves(runs, [name]).items() if seed in base} for name in RECIPES}
    own = {name: every for name, every in own.items() if every}
    gaps = {
        name: mean({seed: {s: 100 * (loss / base[seed][s] - 1) for s, loss in c.items()} for seed, c in every.items()})
        for name, every in own.items()
    }
    shown = {"bf16": mean(base)} | {name: mean(every) for name, every in own.items()}
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
    seeds = {name: len(every) for name, every in own.items()}
    few, many = min(seeds.values()), max(seeds.values())
    about = f"{few} seeds" if few == many else f"{few} to {many} seeds"
    picture.text(16, 556, f"Means of {about}; grey: ±σ of one run ({sigma:.2f} %)", "soft", SMALL)
    return str(picture)


def colors(place: int) -> str:
    """Of bf16, and of a recipe."""
    return "soft" if place == 0 else f"series{place - 1}"


def legend(picture: Picture, y: float, names: Sequence[str]) -> None:
    """Names in rows of three."""
    for place, name in enumerate(names):
        x, line = 16 + 140 * (place % 3), y + 22 * (place // 3)
        picture.path([(x, line - 4), (x + 24, line - 4)], colors(place), 5 if place == 0 else 3)
        picture.text(x + 32, line, name, size=SMALL)


def final_gaps() -> str:
    """Each experiment's gap at the end, of its weights read in bf16, with two standard errors and each seed's."""
    runs = Runs(read("quality"))
    found = {name: gap for name in EXPERIMENTS if (gap := runs.gap([name], SIZE, LEARNED)) is not None}
    names = [name.replace("high precision", "bf16") for name in found]
    pitch, left = 25.0, 16 + 7.3 * max(map(len, names))
    picture = Picture(66 + pitch * len(found) + 62, "Final validation losses above bf16's, by experiment")
    picture.text(16, 28, "Final validation loss above bf16's, %", font_weight="700")
    values = [value for gap in found.values() for value in (gap.mean + 2 * gap.error, gap.mean - 2 * gap.error)]
    values += [value for gap in found.values() for value in gap.gaps.values()]
    bottom = 50 + pitch * len(found)
    axes = Axes(picture, (left, 44, RIGHT + 10, bottom), (min(values) - 0.02, max(values) + 0.02), (0, len(found)))
    (start, top), (end, _) = axes.at(-0.1, len(found)), axes.at(0.1, 0)
    picture.rect(start, top, end - start, bottom - top, "band")
    axes.grid(ticks(*axes.x, 6), [], x_words="{:.1f}")
    for place, (name, gap) in enumerate(found.items()):
        _, y = axes.at(0, len(found) - place - 0.5)
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
    worst = max(found, key=lambda name: found[name].mean)
    picture.text(16, bottom + 44, f"grey band: ±0.1 %; largest: {worst}, {signed(found[worst].mean)} %", "soft", SMALL)
    return str(picture)
