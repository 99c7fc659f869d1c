"""What a run leaves on the disk: a folder with `log.csv` and `checkpoint.pt`, replaced as a whole or not at all.

A checkpoint holds tensors, numbers and strings only, so that `torch.load(weights_only=True)` reads it. Its log is the
truth: after a resume `log.csv` is written anew from it, and rows past the checkpoint are gone.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.train.config import TrainConfig
from octavo.train.errors import CheckpointError

FORMAT = 1
CHECKPOINT = "checkpoint.pt"
SHARDED = "checkpoint"  # a folder, of a run on many ranks
LOG = "log.csv"

Identity = dict[str, int | float | str]  # the options and the data that decide the loss curve, by name


@dataclass(frozen=True)
class Row:
    """One step of a run.

    Attributes:
        step: steps done after it, so the first row's is 1.
        loss: training loss of its batch, nats a byte.
        lr: learning rate.
        tokens_per_s: bytes trained on a second, validation not counted.
        val_loss: validation loss after it, nats a byte; nan where none was taken.
    """

    step: int
    loss: float
    lr: float
    tokens_per_s: float
    val_loss: float = math.nan

    def csv(self) -> str:
        """The row as a line of `log.csv`; floats in full, an absent validation loss empty."""
        val_loss = "" if math.isnan(self.val_loss) else repr(self.val_loss)
        return f"{self.step},{self.loss!r},{self.lr!r},{self.tokens_per_s:.1f},{val_loss}\n"


HEADER = ",".join(f.name for f in fields(Row)) + "\n"


def rows_to_tensor(rows: list[Row]) -> Tensor:
    """Rows as [n, 5] float64."""
    values = [[r.step, r.loss, r.lr, r.tokens_per_s, r.val_loss] for r in rows]
    return torch.tensor(values, dtype=torch.float64).reshape(len(rows), len(fields(Row)))


def rows_from_tensor(values: Tensor) -> list[Row]:
    """The inverse of rows_to_tensor."""
    return [Row(int(step), *rest) for step, *rest in values.tolist()]


@dataclass
class State:
    """Everything that decides how a run goes on.

    Attributes:
        step: steps done.
        model: the model's state_dict (the same keys, whatever the recipe).
        optimizer: the optimizer's state_dict.
        delayed: scales and amax histories of delayed scaling (empty for other recipes).
        identity: the options and the data that decide the loss curve.
        rows: the log so far.
        schedule: the precision schedule's state; empty without one.
        in_backward: that of updates in backward; empty without them.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    delayed: dict[str, Tensor]
    identity: Identity
    rows: list[Row] = field(default_factory=list)
    schedule: dict[str, Any] = field(default_factory=dict)
    in_backward: dict[str, Any] = field(default_factory=dict)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file so that a reader finds the old contents or the new, also when writing fails halfway."""
    with _replacing(path) as partial, open(partial, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder; made by `open`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved_step: int | None = None
        self._log: Any = None

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint is."""
        return self.path / CHECKPOINT

    @property
    def log(self) -> Path:
        """Where the CSV log is."""
        return self.path / LOG

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.checkpoint.exists() or (self.path / SHARDED).exists() or self.log.exists()

    def open(self, resume: bool) -> None:
        """Makes the folder and proves that it can be written.

        Raises:
            CheckpointError: it can't, or it holds a run and `resume` is not set.
        """
        if not resume and self.holds_run():
            raise CheckpointError(f"{self.path} already holds a run: add --resume to go on, or give another --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_file(self.path / ".writable", b"octavo\n")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self.path}: {error.strerror}; give a folder that can be written with --out"
            ) from error

    def save(self, state: State) -> None:
        """Replaces the checkpoint; when that fails the previous one is still there.

        Raises:
            CheckpointError: the disk is full or gone.
        """
        content = {"octavo_checkpoint": FORMAT} | {f.name: getattr(state, f.name) for f in fields(State)}
        content["rows"] = rows_to_tensor(state.rows)
        try:
            with _replacing(self.checkpoint) as partial, open(partial, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            raise CheckpointError(self._cannot_write(self.checkpoint, error)) from error
        self.saved_step = state.step

    def load(self, identity: Identity | None) -> State | None:
        """Reads the checkpoint of this very run, or None when none was written yet.

        Args:
            identity: what the run to be continued has, which must be equal to the checkpoint's; None: any run's.

        Raises:
            CheckpointError: it is damaged, or belongs to a run with other options or other data.
        """
        if not self.checkpoint.exists():
            if (self.path / SHARDED).exists():
                raise CheckpointError(
                    f"the run in {self.path} was trained on many ranks: resume it with --shard fsdp or ddp"
                )
            return None
        try:
            content = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            if content.pop("octavo_checkpoint") != FORMAT:
                raise ValueError("another format")
            content["rows"] = rows_from_tensor(content["rows"])
            state = State(**content)
        except Exception as error:  # whatever a damaged file makes torch raise
            raise CheckpointError(
                f"{self.checkpoint} is damaged or not a checkpoint of octavo: move it away to start this run again"
            ) from error
        self.require(state, identity)
        self.saved_step = state.step
        return state

    def require(self, state: State, identity: Identity | None) -> None:
        """Raises CheckpointError unless the state is of a run of this identity; what one leaves out is the default."""
        if identity is None:
            return
        defaults = TrainConfig().identity()
        for name in identity | state.identity:
            found, wanted = (own.get(name, defaults.get(name)) for own in (state.identity, identity))
            if found != wanted:
                raise CheckpointError(
                    f"the run in {self.path} has {name} {found}, not {wanted}: resume it with the same options, "
                    "or give another --out"
                )

    def start_log(self, rows: list[Row]) -> None:
        """Writes the log anew with these rows."""
        self.close()
        try:
            replace_file(self.log, (HEADER + "".join(row.csv() for row in rows)).encode())
            self._log = open(self.log, "ab", buffering=0)
        except OSError as error:
            raise CheckpointError(self._cannot_write(self.log, error)) from error

    def append(self, rows: list[Row]) -> None:
        """Appends rows to the log; they are in the file when this returns."""
        try:
            self._log.write("".join(row.csv() for row in rows).encode())
        except OSError as error:
            raise CheckpointError(self._cannot_write(self.log, error)) from error

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _cannot_write(self, path: Path, error: Exception) -> str:
        # torch's zip writer hides the cause behind a RuntimeError about its file position.
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
        kept = "no checkpoint was written yet" if self.saved_step is None else f"step {self.saved_step} is kept"
        return f"cannot write {path}: {reason}; {kept}; make room and add --resume to go on"
