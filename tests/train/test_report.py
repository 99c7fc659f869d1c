import csv
import importlib
import math
import struct
from dataclasses import replace

import pytest

from octavo.schedule import Switch
from octavo.train import RunResult, report
from octavo.train.checkpoint import StepRow
from octavo.train.config import RECIPES
from octavo.train.report import gap, plot, smooth, table, write_csv


def make_result(name, final, tokens_per_s=1000.0, steps=20, dtype="bfloat16"):
    rows = [StepRow(i, final + 2 / i, 1e-3, tokens_per_s, math.nan if i % 5 else final) for i in range(1, steps + 1)]
    return RunResult(name, steps, rows, parameters=7, tokens_per_step=100, dtype=dtype)


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


RESULTS = [make_result("bf16", 2.0), make_result("dynamic", 2.01, 500.0), make_result("delayed", 1.99)]


def test_table_says_loss_gap_and_speed():
    *lines, dtype = table(RESULTS).splitlines()
    assert dtype == "What is not FP8 was computed in bfloat16." and len({len(line) for line in lines}) == 1
    assert lines[0].split("  ")[0] == "recipe"
    assert lines[2].split() == ["bf16", "2.0000", "nats/byte", "+0.00", "%", "100.0", "ms", "1.00x", "1,000"]
    assert lines[3].split() == ["dynamic", "2.0100", "nats/byte", "+0.50", "%", "200.0", "ms", "2.00x", "500"]
    assert "-0.50 %" in lines[4]
    without = table(RESULTS[1:])
    assert "gap" not in without and "vs bf16" not in without and "2.0100" in without


def test_the_baseline_is_called_by_its_dtype(tmp_path):
    results = [make_result(name, 2.0, dtype="float32") for name in ("float32", "dynamic")]
    head, *_, dtype = table(results).splitlines()
    assert "gap to float32" in head and "vs float32" in head and "bf16" not in table(results) and "float32" in dtype
    write_csv(results, tmp_path / "results.csv")
    assert [row["dtype"] for row in read_csv(tmp_path / "results.csv")] == ["float32"] * 2


def test_csv_holds_the_numbers_in_full(tmp_path):
    write_csv(RESULTS, tmp_path / "results.csv")
    rows = read_csv(tmp_path / "results.csv")
    assert [row["recipe"] for row in rows] == ["bf16", "dynamic", "delayed"]
    assert float(rows[1]["gap_percent"]) == gap(RESULTS[1], RESULTS[0]) == pytest.approx(0.5)
    assert float(rows[1]["seconds_per_step"]) == pytest.approx(0.2)
    write_csv(RESULTS[1:], tmp_path / "results.csv")
    assert read_csv(tmp_path / "results.csv")[0]["gap_percent"] == ""


def test_smoothing_keeps_a_constant_and_a_slope_and_removes_noise():
    assert smooth([3.0] * 50, 4) == pytest.approx([3.0] * 50)
    slope = [float(i) for i in range(50)]
    assert smooth(slope, 2)[:40] == pytest.approx(slope[:40])
    noisy = smooth([float(i % 2) for i in range(100)], 5)
    assert max(abs(value - 0.5) for value in noisy[20:80]) < 0.01
    assert smooth([1.0, 5.0], 0) == [1.0, 5.0]
    assert smooth([], 3) == []


def test_plot_is_a_png_of_some_size(tmp_path):
    """A plot of the shortest runs of all recipes is a PNG of some size."""
    results = [make_result(name, 2.0, steps=1) for name in RECIPES]
    for result in results:
        result.rows[-1] = StepRow(1, 3.0, 1e-3, 10.0, 3.0)
    plot(results, tmp_path / "loss.png")
    image = (tmp_path / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000
    width, height = struct.unpack(">II", image[16:24])
    assert width > 1000 and height > 700
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_phases_are_shaded_in_the_runs_colour():
    axes = importlib.import_module("matplotlib.figure").Figure().subplots()
    results = [make_result("bf16", 2.0), make_result("dynamic", 2.1), make_result("delayed", 2.2)]
    results[1].switches = [Switch(0, 0, "dynamic", ""), Switch(5, 1, "high_precision", ""), Switch(9, 2, "dynamic", "")]
    results[2].switches = [Switch(0, 0, "delayed", ""), Switch(18, 1, "high_precision", "")]
    report._shade_phases(axes, results, report._styles(results, results[0]))
    spans = [(patch.get_x(), patch.get_width(), patch.get_y()) for patch in axes.patches]
    assert spans == [(0, 5, 0.5), (5, 4, 0.5), (9, 11, 0.5), (0, 18, 0.0), (18, 2, 0.0)]
    names = ["dynamic", "high_precision", "dynamic", "delayed", "high_precision"]
    assert [text.get_text() for text in axes.texts] == names
    assert [text.get_rotation() for text in axes.texts] == [0, 0, 0, 0, 90]  # where it is narrow
    colours = {patch.get_facecolor()[:3] for patch in axes.patches}
    shades = [patch.get_alpha() for patch in axes.patches]
    assert len(colours) == 2 and shades[0] == shades[2] < shades[1] == shades[4]


def test_every_validation_mark_lies_within_the_axes():
    figure = importlib.import_module("matplotlib.figure").Figure()
    axes = figure.subplots()
    result = make_result("bf16", 2.0)
    result.rows[9:] = [replace(row, val_loss=9.0 if row.step % 10 == 0 else math.nan) for row in result.rows[9:]]
    report._draw_losses(axes, [result], report._styles([result], result))
    figure.draw_without_rendering()
    for step, loss in result.validations:
        x, y = axes.transAxes.inverted().transform(axes.transData.transform((step, loss)))
        assert (0.02 < x < 0.98 and 0.02 < y < 0.98) or step <= 2
