"""The results of runs: a table, the same as CSV, and a plot of the loss curves and their gap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from octavo.cost.text import columns
from octavo.distributed.files import replacing
from octavo.errors import require
from octavo.train.config import UNCONVERTED
from octavo.train.loop import RunResult

# Okabe and Ito's palette, which any kind of colour vision can distinguish; the baseline is black.
BASELINE_COLOUR = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SMOOTHING = 0.03  # width of the smoothing window, as a share of the run


def gap(result: RunResult, baseline: RunResult) -> float:
    """Return by how many % a run's final validation loss is higher than the baseline's."""
    return 100 * (result.final_validation / baseline.final_validation - 1)


def find_baseline(results: Sequence[RunResult]) -> RunResult | None:
    """Return the run without FP8, which is bf16 or float32, or None."""
    return next((result for result in results if result.name in UNCONVERTED), None)


def table(results: Sequence[RunResult]) -> str:
    """Return the results as text: validation loss, gap to the baseline, time of a step, speed; then the dtype."""
    baseline = find_baseline(results)
    head = ["recipe", "validation loss", "time/step", "tokens/s"]
    if baseline is not None:
        head[2:] = [f"gap to {baseline.name}", "time/step", f"vs {baseline.name}", "tokens/s"]
    lines = [head]
    for result in results:
        seconds = result.seconds_per_step
        line = [result.name, f"{result.final_validation:.4f} nats/byte", f"{1000 * seconds:.1f} ms"]
        if baseline is not None:
            line.insert(2, f"{gap(result, baseline):+.2f} %")
            line.append(f"{seconds / baseline.seconds_per_step:.2f}x")
        lines.append([*line, f"{result.tokens_per_s:,.0f}"])
    rule = ["-" * max(map(len, column)) for column in zip(*lines, strict=True)]
    return f"{columns([head, rule, *lines[1:]])}\nWhat is not FP8 was computed in {results[0].dtype}."


def write_csv(results: Sequence[RunResult], path: Path) -> None:
    """Write the table's numbers as CSV, with all digits."""
    baseline = find_baseline(results)
    text = "recipe,validation_loss,gap_percent,seconds_per_step,tokens_per_s,steps,parameters,dtype\n"
    for result in results:
        percent = "" if baseline is None else gap(result, baseline)
        text += (
            f"{result.name},{result.final_validation!r},{percent},{result.seconds_per_step:.6f},"
            f"{result.tokens_per_s:.1f},{result.steps},{result.parameters},{result.dtype}\n"
        )
    with replacing(path) as file:
        file.write(text.encode())


def smooth(losses: Sequence[float], width: float) -> list[float]:
    """Return the Gaussian mean of a curve, with a standard deviation of ``width`` steps.

    At the start, where the curve falls fast, the window is as short before a step as after; at the end it is cut off.
    """
    reach = math.ceil(3 * width)
    weights = [math.exp(-0.5 * (offset / max(width, 1e-9)) ** 2) for offset in range(reach + 1)]
    means = []
    for step in range(len(losses)):
        side = min(reach, step)
        window = range(step - side, min(step + side + 1, len(losses)))
        means.append(fmean([losses[i] for i in window], [weights[abs(i - step)] for i in window]))
    return means


def plot(results: Sequence[RunResult], path: Path) -> None:
    """Write a PNG: training and validation loss above, the gap to the baseline, if there is one, below.

    Raises:
        MissingExtraError: without matplotlib.
    """
    require("cli", "matplotlib")
    from matplotlib.figure import Figure

    baseline = find_baseline(results)
    ordered = sorted(results, key=lambda result: result is not baseline)
    has_gap = baseline is not None and len(results) > 1
    figure = Figure(figsize=(8.5, 7.2 if has_gap else 4.6), dpi=160, layout="constrained")
    figure.subplots(1 + has_gap, 1, sharex=True, height_ratios=(3, 2)[: 1 + has_gap])
    styles = _styles(ordered, baseline)
    _draw_losses(figure.axes[0], ordered, styles)
    for axes in figure.axes:
        _shade_phases(axes, results, styles, named=axes is figure.axes[0])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
    if has_gap and baseline is not None:
        _draw_gaps(figure.axes[1], ordered[1:], baseline, styles)
    figure.axes[-1].set_xlabel("step")
    figure.align_ylabels()
    with replacing(path) as file:
        figure.savefig(file, format="png")


Styles = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def _styles(ordered: Sequence[RunResult], baseline: RunResult | None) -> Styles:
    """Return {run's name: (line style, mark style)}; later runs are thinner, as curves may coincide."""
    colours = itertools.cycle(COLOURS)
    styles = {}
    for index, result in enumerate(ordered):
        colour = BASELINE_COLOUR if result is baseline else next(colours)
        above = index / max(len(ordered) - 1, 1)  # from 0 to 1
        line = {"color": colour, "linewidth": 3.6 - 2.2 * above, "solid_capstyle": "round"}
        marks = {"color": colour, "marker": "o", "markersize": 9.0 - 4.5 * above}
        styles[result.name] = line, {**marks, "markerfacecolor": "none", "markeredgewidth": 1.4}
    return styles


def _draw_losses(axes: Any, results: Sequence[RunResult], styles: Styles) -> None:
    for result in results:
        line, marks = styles[result.name]
        steps = [row.step for row in result.rows]
        axes.plot(steps, result.losses, color=line["color"], alpha=0.12, linewidth=0.6)
        axes.plot(steps, smooth(result.losses, SMOOTHING * len(steps) / 2), **line)
        axes.plot(*zip(*result.validations, strict=True), linestyle="none", **marks)
        axes.plot([], [], label=f"{result.name}  {result.final_validation:.4f}", **line | marks)
    title = f"Training loss (lines, smoothed) and validation loss (marks); {results[0].dtype} where not FP8"
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel("loss (nats/byte)")
    axes.legend(title="final validation loss", frameon=False, alignment="left")
    # The first steps fall from log(256) = 5.5, so the axis is scaled for the losses after the first tenth.
    shown_losses = [loss for result in results for loss in result.losses[len(result.losses) // 10 :]]
    shown_losses += [loss for result in results for step, loss in result.validations if step > len(result.losses) // 10]
    low, high = min(shown_losses), max(shown_losses)
    axes.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.15 * (high - low) + 1e-3)
    axes.margins(x=0.03)  # room for a mark at the end


def _shade_phases(axes: Any, results: Sequence[RunResult], styles: Styles, named: bool = True) -> None:
    """Shade each phase of a run in its colour, light and dark in turn, with its recipe's name; runs are stacked."""
    scheduled = [result for result in results if len(result.switches) > 1]
    for index, result in enumerate(scheduled):
        ends = [switch.step for switch in result.switches[1:]] + [result.steps]
        bottom, top = 1 - (index + 1) / len(scheduled), 1 - index / len(scheduled)
        colour = styles[result.name][0]["color"]
        for phase, (switch, end) in enumerate(zip(result.switches, ends, strict=True)):
            axes.axvspan(switch.step, end, bottom, top, color=colour, alpha=0.16 if phase % 2 else 0.06, linewidth=0)
            if named:
                is_narrow = (end - switch.step) / result.steps < 0.0085 * len(switch.name)
                place = {"transform": axes.get_xaxis_transform(), "rotation": 90 if is_narrow else 0}
                look = {"ha": "center", "va": "bottom", "fontsize": 8, "color": colour}
                axes.text((switch.step + end) / 2, bottom + 0.02, switch.name, **place, **look)


def _draw_gaps(axes: Any, others: Sequence[RunResult], baseline: RunResult, styles: Styles) -> None:
    width = SMOOTHING * len(baseline.losses) / 2
    reference = smooth(baseline.losses, width)
    axes.axhline(0, color=BASELINE_COLOUR, linewidth=1.2)
    visible = [0.5]  # the axis shows at least ± this
    for result in others:
        _, marks = styles[result.name]
        smoothed = zip(smooth(result.losses, width), reference, strict=True)
        percent = [100 * (mean / baseline_mean - 1) for mean, baseline_mean in smoothed]
        axes.plot([row.step for row in result.rows], percent, color=marks["color"], linewidth=1.6)
        reference_at = dict(baseline.validations)
        gaps = [(at, 100 * (loss / reference_at[at] - 1)) for at, loss in result.validations if at in reference_at]
        axes.plot(*zip(*gaps, strict=True), linestyle="none", **marks)
        axes.plot([], [], label=f"{result.name}  {gap(result, baseline):+.2f} %", linewidth=1.6, **marks)
        visible += [abs(value) for value in percent[len(percent) // 10 :]] + [abs(value) for _, value in gaps]
    axes.set_title(f"Gap to {baseline.name}: above zero is worse", loc="left", fontsize=11)
    axes.set_ylabel(f"loss over {baseline.name}'s (%)")
    axes.legend(title="final validation gap", frameon=False, alignment="left", ncols=4, loc="upper left")
    limit = 1.15 * max(visible)
    axes.set_ylim(-limit, 1.7 * limit)  # room for the legend
