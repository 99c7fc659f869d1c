"""A record, read: what was counted in each recorded step of each row, as shares and decibels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.inspect.files import FORMAT, files_of, numpy, read_lines
from octavo.inspect.rows import Row
from octavo.inspect.weights import MOVED
from octavo.kernels.reference.cast_statistics import EXPONENTS, EXTREMES, LOWEST, SUMS

MEASURES = {
    "flushed": "share of the numbers that are not 0 whose codes are 0",
    "clipped": "share of the finite numbers beyond the format's largest, which they are cast to",
    "nonfinite": "share of infs and NaNs",
    "sqnr": "decibels: the numbers' power over that of what rounding changed",
    "amax": "the largest magnitude",
    "scale_inv": "the largest scale_inv",
    "assumed": "amax over the largest number that the scale has room for: above 1 a delayed scale is stale",
}
OF_WEIGHTS = {
    "update": "root mean square of what a step changes",
    "resolution": "that, over the root mean square of the distance between numbers of the weight's dtype",
    "changed": "share of the weight's numbers that the step changes",
    "first_flushed": "share of an optimizer's first moment whose codes are 0 where the second's are not",
    "second_flushed": "the same of the second moment",
    "master_update": "root mean square of what a step changes of a master that the optimizer keeps besides the weight",
    "master_resolution": "that, over the root mean square of the distance between numbers of the weight's dtype",
    "master_changed": "share of that master's numbers that the step changes",
}


class RecordError(OctavoError, ValueError):
    """A folder that holds no record, or one of another form."""


@dataclass(frozen=True)
class Record:
    """What a folder holds.

    Attributes:
        rows: casts of layers' roles; a recipe that changed adds rows.
        steps: the recorded ones.
        measures: of MEASURES, each [steps, rows], float64; nan where nothing was counted.
        exponents: [steps, rows, 64]: how many numbers have each binary exponent; the first bin's is ``lowest``.
        lowest: -48.
        layers: those whose weights were looked at.
        weights: of OF_WEIGHTS, each [steps, layers], float64.
        scalars: by name, a pair of the steps and their numbers.
        events: (step, kind, text).

    Example:
        >>> import tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(layer, folder) as recorder:
        ...         layer(torch.randn(16, 64)).sum().backward()
        ...         recorder.step(loss=0.5)
        ...     found = octavo.inspect.load(folder)
        >>> found.steps, found.scalars["loss"]
        ([0], ([0], [0.5]))
    """

    rows: list[Row]
    steps: list[int]
    measures: dict[str, Any]
    exponents: Any
    lowest: int
    layers: list[str]
    weights: dict[str, Any]
    scalars: dict[str, tuple[list[int], list[float]]]
    events: list[tuple[int, str, str]]


def load(folder: str | Path) -> Record:
    """Read a record; one that is still written, or that a killed run left, as far as it goes.

    Args:
        folder: that was given to a Recorder.

    Returns:
        all of it, as NumPy arrays.

    Raises:
        RecordError: for a folder without a record, or one of another form.

    Example:
        >>> load("nowhere")
        Traceback (most recent call last):
        octavo.inspect.record.RecordError: nowhere holds no record: give the folder that octavo.inspect.record wrote to
    """
    np, folder = numpy(), Path(folder)
    try:
        form = json.loads((folder / "record.json").read_text())["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        below = ", ".join(
            str(path.parent) for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/record.json"))
        )
        why = f"give the folder that octavo.inspect.record wrote to{below and f', such as {below}'}"
        raise RecordError(f"{folder} holds no record: {why}") from error
    if form != FORMAT:
        raise RecordError(f"{folder} holds a record of form {form}, which this octavo does not read: form {FORMAT}")
    tables = {
        step: [Row.of(found) for found in json.loads(path.read_text())]
        for step, path in files_of(folder, "rows").items()
    }
    places: dict[Row, int] = {}
    for rows in tables.values():
        for row in rows:
            places.setdefault(row, len(places))
    layers = list(dict.fromkeys(row.layer for row in places))
    counts = files_of(folder, "counts")
    sums = np.zeros((len(counts), len(places), len(SUMS)))
    extremes = np.zeros((len(counts), len(places), len(EXTREMES)))
    exponents = np.zeros((len(counts), len(places), EXPONENTS), dtype="float32")
    moved = np.zeros((len(counts), len(layers), len(MOVED)))
    for at, (step, path) in enumerate(counts.items()):
        rows = tables[max(begun for begun in tables if begun <= step)]
        with np.load(path) as part:
            where = [places[row] for row in rows]
            sums[at, where], extremes[at, where], exponents[at, where] = (
                part["sums"],
                part["extremes"],
                part["exponents"],
            )
            own = list(dict.fromkeys(row.layer for row in rows))
            moved[at, [layers.index(layer) for layer in own]] = part["moved"]
    limits = np.array([row.largest for row in places])
    scalars, events = _steps(folder)
    measures = measures_of(np, sums, extremes, limits)
    return Record(
        list(places), list(counts), measures, exponents, LOWEST, layers, of_weights(np, moved), scalars, events
    )


def measures_of(np: Any, sums: Any, extremes: Any, limits: Any) -> dict[str, Any]:
    """MEASURES of counts [..., rows, 7] and [..., rows, 3] whose rows' largest numbers are ``limits`` [rows]."""
    elements, zeros, flushed, clipped, nonfinite, power, error = np.moveaxis(sums, -1, 0)
    amax, scale_inv, _ = np.moveaxis(extremes, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = elements - nonfinite
        return {
            "flushed": np.where(finite > zeros, flushed / (finite - zeros), np.where(elements > 0, 0.0, np.nan)),
            "clipped": clipped / finite,
            "nonfinite": nonfinite / elements,
            "sqnr": 10 * np.log10(power / error),
            "amax": np.where(elements > 0, amax, np.nan),
            "scale_inv": np.where(elements > 0, scale_inv, np.nan),
            "assumed": amax / (scale_inv * limits),
        }


def of_weights(np: Any, moved: Any) -> dict[str, Any]:
    """OF_WEIGHTS of counts [..., layers, 10]."""
    sums = dict(zip(MOVED, np.moveaxis(moved, -1, 0), strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        masters = np.where(sums["masters"] > 0, sums["masters"], np.nan)
        found = (
            np.sqrt(sums["update"] / sums["elements"]),
            np.sqrt(sums["update"] / sums["grid"]),
            sums["changed"] / sums["elements"],
            sums["first_flushed"] / sums["moments"],
            sums["second_flushed"] / sums["moments"],
            np.sqrt(sums["master_update"] / masters),
            np.sqrt(np.where(sums["masters"] > 0, sums["master_update"] / sums["grid"], np.nan)),
            sums["master_changed"] / masters,
        )
    return dict(zip(OF_WEIGHTS, found, strict=True))


def _steps(folder: Path) -> tuple[dict[str, tuple[list[int], list[float]]], list[tuple[int, str, str]]]:
    scalars: dict[str, tuple[list[int], list[float]]] = {}
    events = []
    for line in read_lines(folder):
        if "event" in line:
            events.append((line["step"], line["event"], line["text"]))
            continue
        for name, value in line.items():
            if name != "step":
                steps, values = scalars.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(value)
    return scalars, events
