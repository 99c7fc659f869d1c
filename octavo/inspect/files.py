"""A record's folder: what is written while a training runs, so that a run that is killed leaves a record to read.

    record.json         the form of the record, and who wrote it
    rows-<step>.json    the rows of the counts from this step on: another file begins where recipes change
    counts-<step>.npz   NumPy arrays, a file a recorded step: sums [rows, 7], extremes [rows, 3], exponents [rows, 64]
                        (kernels/reference/cast_statistics.py), moved [weights, 10] (weights.py); of experts what
                        recorder.kept says
    steps.jsonl         a line of JSON a step: {"step": 12, "loss": 1.9, ...}, or what happened in it:
                        {"step": 12, "event": "switch", "text": "fp8: 20 % of the steps"}

A file is replaced as a whole, or a line added to its end; the last line may be torn where a run was killed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.distributed.files import PARTIAL, replacing
from octavo.errors import MissingExtraError
from octavo.inspect.rows import Row

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
        step: how many steps are done; what the folder has of later ones is dropped.

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
        for path in (*later, *folder.glob(f"*.{PARTIAL}")):  # and what a killed run was writing
            path.unlink()
        self._write_json(folder / "record.json", {"format": FORMAT})
        kept = [line for line in read_lines(folder) if line["step"] < step]
        with replacing(folder / _STEPS) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode())

    def add_rows(self, step: int, rows: Sequence[Row]) -> None:
        """The rows of counts from a step on."""
        self._write_json(self.folder / f"rows-{step:08d}.json", [row.as_dict() for row in rows])

    def add_counts(self, step: int, counts: Mapping[str, Any]) -> None:
        """What was counted in a step: arrays by their names."""
        with replacing(self.folder / f"counts-{step:08d}.npz") as file:
            self.numpy.savez_compressed(file, **counts)

    def add_scalars(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Numbers of steps."""
        self._add_lines([{"step": step, **values} for step, values in rows.items()])

    def add_event(self, step: int, kind: str, text: str) -> None:
        """What happened in a step."""
        self._add_lines([{"step": step, "event": kind, "text": text}])

    def _add_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        with open(self.folder / _STEPS, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _write_json(self, path: Path, content: Any) -> None:
        with replacing(path) as file:
            file.write(json.dumps(content, indent=1).encode())


def files_of(folder: Path, kind: str) -> dict[int, Path]:
    """The files of a kind by their step, in order."""
    found = {}
    for path in folder.glob(f"{kind}-*"):
        if match := re.fullmatch(rf"{kind}-(\d+)\.(?:json|npz)", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps, but for one that was torn."""
    path, found = folder / _STEPS, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and isinstance(line.get("step"), int)]
