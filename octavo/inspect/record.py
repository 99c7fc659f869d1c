"""A record: the folder that is written while a training runs, and what it says when read: shares and decibels.

A killed run, too, leaves a readable record:

    record.json         the form of the record, and who wrote it
    rows-<step>.json    which casts the rows of counts are of, from this step on: a new file where recipes change
    counts-<step>.npz   NumPy arrays, a file for each recorded step: sums [rows, 7], extremes [rows, 3], exponents
                        [rows, 64] (kernels/reference/cast_statistics.py), moved [weights, 10] (weights.py); for experts
                        also what recorder.kept lists
    steps.jsonl         a line of JSON for each step, {"step": 12, "loss": 1.9, ...}, and for each event,
                        {"step": 12, "event": "switch", "text": "fp8: 20 % of the steps"}

A file is replaced as a whole, or a line added to its end; if a run was killed, the last line may be torn.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from octavo.distributed.files import PARTIAL, replacing
from octavo.errors import MissingExtraError, OctavoError, first_line
from octavo.inspect.rows import Row
from octavo.inspect.weights import MOVED
from octavo.kernels.arguments import EXPONENTS, EXTREMES, LOWEST, SUMS

FORMAT = 2
_STEPS = "steps.jsonl"


def numpy() -> Any:
    """NumPy, which records are made of.

    Raises:
        MissingExtraError: if it is not installed.
    """
    try:
        import numpy
    except ImportError as error:
        raise MissingExtraError("numpy is not installed: pip install octavo[inspect]") from error
    return numpy


class RecordWriter:
    """Writes one record.

    Args:
        folder: made if absent.
        step: how many steps are done; the record of later ones is deleted.

    Raises:
        ValueError: if the folder holds a record and ``step`` is 0.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.numpy, self.folder = numpy(), folder
        folder.mkdir(parents=True, exist_ok=True)
        old = [path for kind in ("rows", "counts") for path in files_of(folder, kind).values()]
        if step == 0 and (old or (folder / _STEPS).exists()):
            raise ValueError(f"{folder} holds a record: name another folder, or the step to go on from (step=...)")
        later = [path for kind in ("rows", "counts") for at, path in files_of(folder, kind).items() if at >= step]
        for path in (*later, *folder.glob(f"*.{PARTIAL}")):  # the latter are files that a killed run was writing
            path.unlink()
        self._write_json(folder / "record.json", {"format": FORMAT})
        kept = [line for line in read_lines(folder) if line["step"] < step]
        with replacing(folder / _STEPS) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode())

    def add_rows(self, step: int, rows: Sequence[Row]) -> None:
        """Write which casts the rows of counts are of, from a step on."""
        self._write_json(self.folder / f"rows-{step:08d}.json", [row.as_dict() for row in rows])

    def add_counts(self, step: int, counts: Mapping[str, Any]) -> None:
        """Write what was counted in a step: arrays by their names."""
        with replacing(self.folder / f"counts-{step:08d}.npz") as file:
            self.numpy.savez_compressed(file, **counts)

    def add_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Write steps' numbers by name."""
        self._add_lines([{"step": step, **values} for step, values in rows.items()])

    def add_event(self, step: int, kind: str, text: str) -> None:
        """Write what happened in a step."""
        self._add_lines([{"step": step, "event": kind, "text": text}])

    def _add_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with open(self.folder / _STEPS, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _write_json(self, path: Path, content: Any) -> None:
        with replacing(path) as file:
            file.write(json.dumps(content, indent=1).encode())


def files_of(folder: Path, kind: str) -> dict[int, Path]:
    """The files of a kind, "rows" or "counts", by their step, in order."""
    found = {}
    for path in folder.glob(f"{kind}-*"):
        if match := re.fullmatch(rf"{kind}-(\d+)\.(?:json|npz)", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps.jsonl, without one that is torn."""
    path, found = folder / _STEPS, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and isinstance(line.get("step"), int)]


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
    """A folder without a record, or with one that this release can't read."""


class WorstExpert(NamedTuple):
    """A row's worst expert: its number, its tokens, and how many experts have a measure beyond its limit."""

    expert: int
    tokens: int
    experts_beyond: int


class OfExperts(NamedTuple):
    """What a record has of layers of experts besides the sums over all experts.

    Attributes:
        measures, exponents: as a Record's, but a row of experts has those of its worst expert alone: the one with the
            measure that exceeds its limit by the largest factor.
        worst: [steps, rows], the worst expert's number; -1 in other rows.
        beyond: [steps, rows], how many experts have a measure beyond its limit.
        tokens: by layer [steps, experts], float64: how many each got in a recorded step; nan where nothing was counted.
    """

    measures: dict[str, Any]
    exponents: Any
    worst: Any
    beyond: Any
    tokens: dict[str, Any]

    def at(self, step: int, place: int, layer: str) -> WorstExpert:
        """The worst expert of a row of this layer; ``step`` and ``place``: indices of the step and the row."""
        number = int(self.worst[step, place])
        return WorstExpert(number, int(self.tokens[layer][step, number]), int(self.beyond[step, place]))


@dataclass(frozen=True)
class Record:
    """A record as it was read.

    Attributes:
        rows: casts of layers' roles; where a recipe changed, the new casts are further rows.
        steps: the recorded ones.
        measures: MEASURES by name, each [steps, rows], float64; nan where nothing was counted.
        exponents: [steps, rows, 64]: how many numbers have each binary exponent; the first bin's is ``lowest``.
        layers: those whose weights were recorded.
        weights: OF_WEIGHTS by name, each [steps, layers], float64.
        scalars: by name, a pair of the steps and their numbers.
        events: (step, kind, text).
        experts: None if no layer is of experts.
        lowest: -48.

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
    layers: list[str]
    weights: dict[str, Any]
    scalars: dict[str, tuple[list[int], list[float]]]
    events: list[tuple[int, str, str]]
    experts: OfExperts | None = None
    lowest: ClassVar[int] = LOWEST

    @property
    def of_worst(self) -> Record:
        """The same record, but a row of experts is that of its worst expert."""
        found = self.experts
        return self if found is None else replace(self, measures=found.measures, exponents=found.exponents)


def load(folder: str | Path) -> Record:
    """Read a record; one that is still being written, or that a killed run left, as far as it goes.

    Args:
        folder: the one that was given to a Recorder.

    Returns:
        the record, as NumPy arrays.

    Raises:
        RecordError: for a folder without a record, or with one that this release can't read.

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
    tables: dict[int, list[Row]] = {}
    for step, path in files_of(folder, "rows").items():
        with _reading(path):
            tables[step] = [Row.of(found) for found in json.loads(path.read_text())]
    places: dict[Row, int] = {}
    for rows in tables.values():
        for row in rows:
            places.setdefault(row, len(places))
    layers = list(dict.fromkeys(row.layer for row in places))
    counts = files_of(folder, "counts")
    sums = np.zeros((len(counts), len(places), len(SUMS)))
    extremes = np.zeros((len(counts), len(places), len(EXTREMES)))
    exponents = np.zeros((len(counts), len(places), EXPONENTS), dtype="float32")
    experts = _ExpertSteps(list(places), len(counts))
    moved = np.zeros((len(counts), len(layers), len(MOVED)))
    for at, (step, path) in enumerate(counts.items()):
        begun = max((begun for begun in tables if begun <= step), default=None)
        if begun is None:
            raise RecordError(f"{folder} has no rows-*.json that says what {path.name} counts: copy it whole")
        rows = tables[begun]
        with _reading(path), open(path, "rb") as file, np.load(file) as arrays:
            where = [places[row] for row in rows]
            for all_steps, name in ((sums, "sums"), (extremes, "extremes"), (exponents, "exponents")):
                all_steps[at, where] = arrays[name]
            experts.add(at, rows, where, arrays)
            moved[at, [layers.index(layer) for layer in dict.fromkeys(row.layer for row in rows)]] = arrays["moved"]
    limits = np.array([row.largest for row in places])
    scalars, events = _steps(folder)
    measures = measures_of(np, sums, extremes, limits)
    steps, of_experts = list(counts), experts.found(sums, extremes, exponents, limits)
    weights = of_weights(np, moved)
    return Record(list(places), steps, measures, exponents, layers, weights, scalars, events, of_experts)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise RecordError in place of whatever Python or NumPy raise at a file that was cut, or is not octavo's."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise RecordError(f"{path} is damaged ({why}): copy it again, or take it away") from error


class _ExpertSteps:
    """Reads a record's experts step by step."""

    def __init__(self, rows: Sequence[Row], steps: int) -> None:
        np = self.np = numpy()
        self.rows, self.steps = rows, steps
        shape = steps, len(rows)
        self.numbers = np.stack([np.full(shape, -1), np.zeros(shape, dtype="int64")], -1)
        self.tokens = {row.layer: np.full((steps, row.experts), np.nan) for row in rows if row.experts}
        self.worst: list[
            tuple[int, list[int], dict[str, Any]]
        ] = []  # (step, rows of experts, their worst one's counts)

    def add(self, at: int, rows: Sequence[Row], where: Sequence[int], arrays: Any) -> None:
        """Read the arrays of a step's file, which has these rows; ``where``: their indices among the record's rows."""
        if "worst" not in arrays:
            return
        of_experts = [place for place, row in zip(where, rows, strict=True) if row.experts]
        self.numbers[at, of_experts] = arrays["worst"]
        for layer, tokens in by_layer(rows, arrays["tokens"]).items():
            self.tokens[layer][at] = tokens
        counts = {name: arrays[f"worst_{name}"] for name in ("sums", "extremes", "exponents")}
        self.worst.append((at, of_experts, counts))

    def found(self, sums: Any, extremes: Any, exponents: Any, limits: Any) -> OfExperts | None:
        """What was read; the arguments are the record's, in which all experts are summed."""
        if not self.tokens:
            return None
        whole = {"sums": sums.copy(), "extremes": extremes.copy(), "exponents": exponents.copy()}
        for at, of_experts, counts in self.worst:
            for name, values in counts.items():
                whole[name][at, of_experts] = values
        measures = measures_of(self.np, whole["sums"], whole["extremes"], limits)
        worst, beyond = self.np.moveaxis(self.numbers, -1, 0)
        return OfExperts(measures, whole["exponents"], worst, beyond, self.tokens)


def by_layer(rows: Sequence[Row], tokens: Any) -> dict[str, Any]:
    """The experts' numbers of each layer, from an array that has them one layer after the other."""
    experts = {row.layer: row.experts for row in rows if row.experts}
    return dict(zip(experts, numpy().split(tokens, numpy().cumsum(list(experts.values()))[:-1]), strict=True))


def measures_of(np: Any, sums: Any, extremes: Any, limits: Any) -> dict[str, Any]:
    """MEASURES from counts [..., rows, 7] and [..., rows, 3]; ``limits`` [rows]: Row.largest of each row."""
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
    """OF_WEIGHTS from counts [..., layers, 10]."""
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
        step = line.pop("step")
        if "event" in line:
            events.append((step, str(line["event"]), str(line.get("text", ""))))
            continue
        for name, value in line.items():
            if isinstance(value, int | float):
                steps, values = scalars.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return scalars, events
