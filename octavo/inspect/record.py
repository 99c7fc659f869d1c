"""A record: a folder that a training writes while it runs, read as shares and decibels.

A killed run leaves a readable record, too. Rank 0's Recorder writes it by a RecordWriter, but for two files:

    record.json         the form of the record
    rows-<step>.json    the casts that the rows of counts belong to, from this step on: a new file where recipes change
    recipes.json        the model's recipes by layer, as octavo.recipes.load reads them: written with rows
    counts-<step>.npz   NumPy arrays, a file for each recorded step: sums [rows, 7], extremes [rows, 3], exponents
                        [rows, 64] (kernels/reference/cast_statistics.py), moved [weights, 18] (weight_updates.py),
                        others (names), others_moved [others, 18]; where a twin ran, twin [weights, 3] (products.py),
                        and outputs [modules, 4] and gradients [parameters, 2], by name (module_outputs.py); for experts
                        also the arrays of recorder.arrays_of
    steps.jsonl         a line of JSON for each step, {"step": 12, "loss": 1.9, ...}, and for each event,
                        {"step": 12, "event": "switch", "text": "fp8: 20 % of the steps"}
    outputs.npz         samples of what modules compute of the first recorded batch, for a run that goes on
    batch-<rank>.npz    that batch: each rank's FirstBatch writes and reads its own (first_batch.py)
    what_if.json        a WhatIf of the run's model: `octavo inspect RUN` writes and reads it (command.py)

A file is replaced as a whole, or a line added to its end; if a run was killed, the last line may be torn.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from octavo.distributed.files import PARTIAL, replacing
from octavo.errors import OctavoError, first_line, require
from octavo.inspect.rows import Row
from octavo.inspect.weight_updates import RESOLUTIONS, WEIGHT_STATISTICS
from octavo.kernels.arguments import Counted
from octavo.reading import read_json

FORMAT = 3
UNWATCHED = "unwatched"  # the kind of an event: an optimizer's step runs no hooks
_STEPS = "steps.jsonl"
Scalars = dict[str, tuple[list[int], list[float]]]  # each number's steps and values, by its name
LEAST_INPUT_CHANGE = 1e-3  # of an input's size: one that changes by less counts as one that changes by this


class _LazyNumPy:
    """NumPy, imported when an attribute is first read; MissingExtraError if it is not installed."""

    def __getattr__(self, name: str) -> Any:
        require("inspect", "numpy")
        setattr(self, name, value := getattr(importlib.import_module("numpy"), name))
        return value


np: Any = _LazyNumPy()


class RecordWriter:
    """Writes a record to a folder; a run that resumes after ``step`` steps first deletes the record of later ones."""

    def __init__(self, folder: Path, step: int) -> None:
        require("inspect", "numpy")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        old = [pair for kind in ("rows", "counts") for pair in files_of(folder, kind).items()]
        if step == 0 and (old or (folder / _STEPS).exists()):
            raise ValueError(f"{folder} holds a record: name another folder, or the step to go on from (step=...)")
        for path in folder.glob(f"*.{PARTIAL}"):  # left by a run that was killed while it wrote them
            path.unlink()
        for at, path in old:
            if at >= step:
                path.unlink()
        self.write("record.json", json.dumps({"format": FORMAT}))
        self.write(_STEPS, _as_lines(line for line in read_lines(folder) if line["step"] < step))

    def write_arrays(self, name: str, arrays: Mapping[str, Any], save: Any) -> None:
        """Write arrays by name to a file, by NumPy's ``savez`` or ``savez_compressed``, in place of those it has."""
        with replacing(self.folder / name) as file:
            save(file, **arrays)

    def add_lines(self, *lines: Mapping[str, Any]) -> None:
        """Add lines to steps.jsonl: a step's numbers by name, or an event with its text."""
        with open(self.folder / _STEPS, "a", encoding="utf-8") as file:
            file.write(_as_lines(lines))

    def write(self, name: str, text: str) -> None:
        """Write a text file, in place of the one that is there."""
        with replacing(self.folder / name) as file:
            file.write(text.encode())


def _as_lines(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a line of JSON for each mapping."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def files_of(folder: Path, kind: str) -> dict[int, Path]:
    """Return {step: file} of the files of a kind, "rows" or "counts", in order."""
    paths = folder.glob(f"{kind}-*.{'json' if kind == 'rows' else 'npz'}")
    steps = ((path.stem.removeprefix(f"{kind}-"), path) for path in paths)
    return dict(sorted((int(step), path) for step, path in steps if step.isdecimal()))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of steps.jsonl, without a torn one."""
    path, lines = folder / _STEPS, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(read_json(line))
    return [x for x in lines if isinstance(x, dict) and type(x.get("step")) is int and x["step"] in range(2**63)]


class RecordError(OctavoError, ValueError):
    """A folder without a record, or with one that this release can't read."""


class OfExperts(NamedTuple):
    """The part of a record that is about single experts.

    Attributes:
        measures, exponents: as a Record's, but a row of experts has those of its worst expert alone, whose
            measure exceeds its limit by the largest factor.
        worst_expert: [records, rows], its index; -1 in other rows.
        beyond: [records, rows], how many experts have a measure beyond its limit.
        tokens: {layer: [records, experts]}, float64: tokens of each expert in a recorded step; nan where not counted.
    """

    measures: dict[str, Any]
    exponents: Any
    worst_expert: Any
    beyond: Any
    tokens: dict[str, Any]


@dataclass(frozen=True)
class ExpertLoad:
    """The tokens of each expert of a layer in the last recorded step, and since which recorded step some got none."""

    name: str
    layer: str
    tokens: list[int]
    idle: dict[int, int]  # {expert: the recorded step since which it got none}

    @property
    def largest_over_mean(self) -> float:
        """The tokens of the expert with the most tokens, divided by the mean."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens))

    def __str__(self) -> str:
        number, most = len(self.tokens), max(self.tokens)
        load = f"{self.name}: {number} experts, {min(self.tokens)} to {most}"
        load += f", expert {self.tokens.index(most)} {self.largest_over_mean:.2g} times the mean"
        return load + "".join(f"; {expert} none from step {step}" for expert, step in self.idle.items())


@dataclass(frozen=True)
class Record:
    """A record, as ``load`` read it.

    Attributes:
        rows: casts of layers' roles; where a recipe changed, the new casts are further rows.
        steps: the recorded steps.
        measures: measures_of's by name, each [records, rows], float64; nan where nothing was counted.
        exponents: [records, rows, 64]: how many numbers have each binary exponent, from Counted.lowest on.
        layers: the layers whose weights were recorded.
        weights: weight_measures' and twin_measures' by name, each [records, layers], float64; nan where no twin ran.
        scalars: {name: (steps, their numbers)}.
        events: (step, kind, text).
        experts: None if no layer has experts.
        others: names of all other parameters: biases, norms' weights, embeddings.
        of_others: as ``weights``, each [records, others].
        modules: names of modules whose inputs and outputs of the first recorded batch were compared; "" is the model.
        of_modules: output_changes' by name, each [records, modules], float64; nan where no twin ran, and at first.
        parameters: names of those whose gradients of the first recorded batch were compared.
        of_parameters: "change", of these gradients, over their sizes: [records, parameters], nan as in ``of_modules``.

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
    scalars: Scalars
    events: list[tuple[int, str, str]]
    experts: OfExperts | None = None
    others: list[str] = field(default_factory=list)
    of_others: dict[str, Any] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    of_modules: dict[str, Any] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    of_parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def of_worst(self) -> Record:
        """The same record, but a row of experts has the numbers of its worst expert."""
        experts = self.experts
        return self if experts is None else replace(self, measures=experts.measures, exponents=experts.exponents)

    def scalar(self, name: str) -> Any:
        """Return a number at each recorded step, float64; nan where it was not written."""
        values = dict(zip(*self.scalars.get(name, ([], [])), strict=True))
        return np.array([values.get(step, math.nan) for step in self.steps], dtype="float64")

    def last(self, name: str) -> Any:
        """Return a number at each recorded step, as it was last written; nan before that, or where it never was."""
        steps, values = self.scalars.get(name, ([], []))
        return np.array([math.nan, *values], dtype="float64")[np.searchsorted(steps, self.steps, side="right")]

    def is_written(self, name: str) -> Any:
        """Return whether a number had been written at each recorded step; else ``last`` is nan without a number."""
        steps, _ = self.scalars.get(name, ([], []))
        return np.array(self.steps) >= min(steps, default=math.inf)

    @cached_property
    def places(self) -> dict[tuple[str, str], int]:
        """The first row of each role of a layer, by (layer, role)."""
        return {(row.layer, row.role): at for at, row in reversed([*enumerate(self.rows)])}

    def measure(self, name: str, layer: str, role: str) -> Any:
        """Return a measure of a layer's role by recorded step; nan where there is none."""
        place = self.places.get((layer, role))
        return np.full(len(self.steps), np.nan) if place is None else self.measures[name][:, place]

    def at(self, indices: Sequence[int]) -> Record:
        """Return the record with only the recorded steps at these indices; scalars and events stay."""

        def chosen(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: chosen(each) for name, each in values.items()}
            return OfExperts(*map(chosen, values)) if isinstance(values, OfExperts) else values[indices]

        names = "measures", "exponents", "weights", "experts", "of_others", "of_modules", "of_parameters"
        fields = {name: chosen(values) for name in names if (values := getattr(self, name)) is not None}
        return replace(self, steps=[self.steps[at] for at in indices], **fields)

    def expert_loads(self) -> list[ExpertLoad]:
        """Return each layer's load; layers of a fused module, which get the same tokens, share the first one's."""
        loads: dict[str, ExpertLoad] = {}
        for layer, tokens in self.experts.tokens.items() if self.experts is not None else ():
            counted = np.flatnonzero(~np.isnan(tokens).any(axis=1))
            if not len(counted):
                continue
            by_step, idle = tokens[counted].astype(int), {}
            for expert in np.flatnonzero(by_step[-1] == 0):
                busy = np.flatnonzero(by_step[:, expert])
                idle[int(expert)] = self.steps[counted[busy[-1] + 1 if len(busy) else 0]]
            name, last = layer.rpartition(".")[0] or layer, by_step[-1].tolist()
            if loads.setdefault(name, ExpertLoad(name, layer, last, idle)).tokens != last:
                loads[layer] = ExpertLoad(layer, layer, last, idle)
        return list(loads.values())


def load(folder: str | Path) -> Record:
    """Read a record; one that is still being written, or that a killed run left, as far as it goes.

    Args:
        folder: the folder that a Recorder wrote to.

    Returns:
        the record, as NumPy arrays.

    Raises:
        RecordError: for a folder without a record, or with one that this release can't read.

    Example:
        >>> load("nowhere")
        Traceback (most recent call last):
        octavo.inspect.record.RecordError: nowhere holds no record: give the folder that octavo.inspect.record wrote to
    """
    folder = Path(folder)
    try:
        form = read_json(folder / "record.json")["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        records = [*sorted(folder.glob("*/record.json")), *sorted(folder.glob("*/*/record.json"))]
        subfolders = ", ".join(str(path.parent) for path in records)
        remedy = f"give the folder that octavo.inspect.record wrote to{subfolders and f', such as {subfolders}'}"
        raise RecordError(f"{folder} holds no record: {remedy}") from error
    if form != FORMAT:
        raise RecordError(f"{folder} holds a record of form {form}, which this octavo does not read: form {FORMAT}")
    tables: dict[int, list[Row]] = {}
    with reading(folder):
        for step, path in files_of(folder, "rows").items():
            with reading(path):
                tables[step] = [Row.of(row) for row in read_json(path)]
        files = files_of(folder, "counts")
        counts = _RecordedCounts(list(dict.fromkeys(itertools.chain(*tables.values()))), len(files))
        for at, (step, path) in enumerate(files.items()):
            first_step = max((first_step for first_step in tables if first_step <= step), default=None)
            if first_step is None:
                raise RecordError(f"{folder} has no rows-*.json that says what {path.name} counts: copy it whole")
            with reading(path), open(path, "rb") as file, np.load(file) as arrays:
                counts.read(at, tables[first_step], arrays)
        return counts.record(list(files), *_steps(folder))


# {array of names: array with a row for each name}
SUMS_OF_NAMES = {"others": "others_moved", "modules": "outputs", "parameters": "gradients"}


class _RecordedCounts:
    """The counts of all recorded steps in arrays [records, ...], into which files are read; zeros where nothing was."""

    def __init__(self, rows: list[Row], steps: int) -> None:
        self.rows, self.layers = rows, list(dict.fromkeys(row.layer for row in rows))
        self.index_of_row = {row: at for at, row in enumerate(rows)}
        self.steps, shape = steps, (steps, len(rows))
        self.of_rows = {
            "sums": np.zeros((*shape, len(Counted.sums))),
            "extremes": np.zeros((*shape, len(Counted.extremes))),
            "exponents": np.zeros((*shape, Counted.exponents), dtype="float32"),
        }
        self.tokens = {row.layer: np.full((steps, row.experts), np.nan) for row in rows if row.experts}
        self.of_worst = {name: values.copy() for name, values in self.of_rows.items()} if self.tokens else self.of_rows
        self.worst_expert, self.beyond = np.full(shape, -1), np.zeros(shape, dtype="int64")
        self.weight_statistics = np.zeros((steps, len(self.layers), len(WEIGHT_STATISTICS)))
        self.twins = np.zeros((steps, len(self.layers), 3))
        self.by_name = {names: dict[str, Any]() for names in SUMS_OF_NAMES}

    def read(self, at: int, rows: Sequence[Row], arrays: Mapping[str, Any]) -> None:
        """Read the arrays of a recorded step that counts these rows."""
        counted = [self.index_of_row[row] for row in rows]
        of_experts = [self.index_of_row[row] for row in rows if row.experts]
        for name, values in self.of_rows.items():
            values[at, counted] = self.of_worst[name][at, counted] = arrays[name]
            if of_experts:
                self.of_worst[name][at, of_experts] = arrays[f"worst_{name}"]
        if of_experts:
            self.worst_expert[at, of_experts], self.beyond[at, of_experts] = arrays["worst"].T
            for layer, tokens in by_layer(rows, arrays["tokens"]).items():
                self.tokens[layer][at] = tokens
        columns = [self.layers.index(layer) for layer in dict.fromkeys(row.layer for row in rows)]
        self.weight_statistics[at, columns] = arrays["moved"]
        if "twin" in arrays:
            self.twins[at, columns] = arrays["twin"]
        for names, sums in SUMS_OF_NAMES.items():
            for name, values in zip(arrays[names], arrays[sums], strict=True) if sums in arrays else ():
                self.by_name[names].setdefault(str(name), np.zeros((self.steps, len(values))))[at] = values

    def record(self, steps: list[int], scalars: Scalars, events: list[tuple[int, str, str]]) -> Record:
        """Return the record of these steps."""
        counts, of_worst, experts = self.of_rows, self.of_worst, None
        if self.tokens:
            measures = measures_of(self.rows, of_worst["sums"], of_worst["extremes"])
            experts = OfExperts(measures, of_worst["exponents"], self.worst_expert, self.beyond, self.tokens)
        return Record(
            rows=self.rows,
            steps=steps,
            measures=measures_of(self.rows, counts["sums"], counts["extremes"]),
            exponents=counts["exponents"],
            layers=self.layers,
            weights=weight_measures(self.weight_statistics) | twin_measures(self.twins),
            scalars=scalars,
            events=events,
            experts=experts,
            of_others=self._measured("others", weight_measures),
            of_modules=self._measured("modules", output_changes),
            of_parameters=self._measured("parameters", lambda sums: {"change": relative_change(sums)}),
            **{names: [*sums] for names, sums in self.by_name.items()},
        )

    def _measured(self, names: str, measures: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return measures by name, [records, names], of what counts files name; none where they name nothing."""
        return measures(np.stack([*sums.values()], 1)) if (sums := self.by_name[names]) else {}


def output_changes(sums: Any) -> dict[str, Any]:
    """Return by how much modules' outputs of one batch changed, [records, modules], from counts [records, modules, 4].

    "output": the change over the output's size; "output_over_input": that over the
    change of the input, where it has one.
    """
    input_change, output_change = relative_change(sums[..., :2]), relative_change(sums[..., 2:])
    least = np.fmax(np.nan_to_num(input_change, nan=1.0), LEAST_INPUT_CHANGE)
    return {"output": output_change, "output_over_input": output_change / least}


def relative_change(squares: Any) -> Any:
    """Return changes over sizes from their squares [..., 2]; nan where a size is 0."""
    change, size = squares[..., 0], squares[..., 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(size > 0, np.sqrt(change / size), np.nan)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise RecordError in place of errors of Python and NumPy at a file that was cut, or is not octavo's."""
    try:
        yield
    except RecordError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise RecordError(f"{path} is damaged ({why}): copy it again, or take it away") from error


def by_layer(rows: Sequence[Row], tokens: Any) -> dict[str, Any]:
    """Return {layer: its experts' numbers}, from an array that has one layer's after the other's."""
    experts = {row.layer: row.experts for row in rows if row.experts}
    return dict(zip(experts, np.split(tokens, np.cumsum(list(experts.values()))[:-1]), strict=True))


def measures_of(rows: Sequence[Row], sums: Any, extremes: Any) -> dict[str, Any]:
    """Return rows' measures by name, from counts [..., rows, 7] and [..., rows, 3]; nan where nothing was counted."""
    elements, zeros, flushed, clipped, nonfinite, power, error = np.moveaxis(sums, -1, 0)
    amax, scale_inv, _ = np.moveaxis(extremes, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        finite = elements - nonfinite
        return {
            # share of the numbers that are not 0 whose codes are 0
            "flushed": np.where(finite > zeros, flushed / (finite - zeros), np.where(elements > 0, 0.0, np.nan)),
            "clipped": clipped / finite,  # share of the finite numbers beyond the format's largest, their code
            "nonfinite": nonfinite / elements,  # share of infs and NaNs
            # twice as many, if a compiled backward computes forward again
            "elements": np.where(elements > 0, elements, np.nan),
            "zeros": zeros / elements,  # share of the numbers that are 0 before they are cast
            "rms": np.sqrt(power / finite),  # root mean square of the finite numbers
            "sqnr": 10 * np.log10(power / error),  # decibels: the numbers' power over that of what rounding changed
            "amax": np.where(elements > 0, amax, np.nan),
            "scale_inv": np.where(elements > 0, scale_inv, np.nan),  # the largest
            # amax over the largest number that the scale has room for: above 1 a delayed scale is stale; nan where all
            # scales of four-bit blocks are rounded to 0, which reads 0 and clips nothing
            "assumed": np.where(scale_inv > 0, amax / (scale_inv * [row.largest for row in rows]), np.nan),
        }


def weight_measures(statistics: Any) -> dict[str, Any]:
    """Return WEIGHT_STATISTICS' measures by name, from its columns [..., layers, 18]; nan where nothing was sampled."""
    sums = dict(zip(WEIGHT_STATISTICS, np.moveaxis(statistics, -1, 0), strict=True))

    def measure(name: str, divisor: str, is_of_squares: bool) -> Any:
        least = np.minimum(sums[divisor], sums["masters"]) if name.startswith("master") else sums[divisor]
        ratio = np.where(least > 0, sums[name] / sums[divisor], np.nan)
        return np.sqrt(ratio) if is_of_squares else ratio

    with np.errstate(divide="ignore", invalid="ignore"):
        measures = {name: measure(name, *each) for name, each in WEIGHT_STATISTICS.items() if each.divisor}
        measures |= {resolution: measure(name, "grid", True) for resolution, name in RESOLUTIONS.items()}
    is_faulty = (sums["gradients"] > 0) & np.isnan(sums["gradient"])
    return measures | {"gradient": np.where(is_faulty, np.inf, measures["gradient"])}


def twin_measures(products: Any) -> dict[str, Any]:
    """Return the cosines of weights' gradients with the twin's, and the norms of the twin's, [..., layers].

    ``products``: of steps and their twins, [..., layers, 3]; see products.py.
    """
    product, of_step, of_twin = np.moveaxis(products, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where(of_step == 0, 0.0, product / np.sqrt(of_step * of_twin))  # 0 where FP8 leaves no gradient
        return {
            "twin_cosine": np.where(of_twin > 0, cosine, np.nan),
            "twin_norm": np.where(of_twin > 0, np.sqrt(of_twin), np.nan),
        }


def _steps(folder: Path) -> tuple[Scalars, list[tuple[int, str, str]]]:
    """Return the scalars of all steps by name, and the events as (step, kind, text)."""
    scalars, events = Scalars(), list[tuple[int, str, str]]()
    for line in read_lines(folder):
        step = line.pop("step")
        if "event" in line:
            events.append((step, str(line["event"]), str(line.get("text", ""))))
            continue
        for name, value in line.items():
            if isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max):
                steps, values = scalars.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return scalars, events
