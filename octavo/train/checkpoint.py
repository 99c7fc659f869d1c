"""The folder that a run writes: `config.json`, `log.csv` and checkpoints, each replaced as a whole.

Checkpoints are those of octavo.distributed.checkpoint, in the folder `checkpoint`: any number of ranks reads what
another number, or one process, has written. Besides the state of model and optimizer they have the run's

    step, rows      steps done, and their log: the numbers of a StepRow each
    identity        the options and the data that decide the loss curve
    weights_in_fp8  whether weights are stored in FP8, which a phase of the schedule may change
    separate_splits whether named splits are Linears of their own, as tensor parallelism makes them
    schedule        the state of the precision schedule, if there is one
    in_backward     the state of updates in backward, if there are any

A resumed run writes `log.csv` anew from the checkpoint's rows: rows of later steps are gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from octavo.distributed.files import PARTIAL, reason_of, replacing
from octavo.distributed.ranks import CheckpointError, Ranks
from octavo.errors import first_line
from octavo.train.config import CONFIG_FILE, RunCheckpointError, TrainConfig, options_text
from octavo.train.shard import ranks_for_saves

CHECKPOINT = "checkpoint"
LOG = "log.csv"
LOCK = ".lock"  # names the process that trains in the folder, or the last one that did

Identity = dict[str, int | float | str]
Content = dict[str, Any]  # the entries in the module's docstring; rows read from a file are StepRows


@dataclass(frozen=True)
class StepRow:
    """One step of a run; losses are in nats a byte."""

    step: int  # from 1 on
    loss: float  # of the step's batch
    lr: float
    tokens_per_s: float  # bytes trained on a second, validation not counted
    val_loss: float = math.nan  # after the step; nan if none was computed

    def csv(self) -> str:
        """Return the row as a line of `log.csv`, with floats in full; a missing validation loss is empty."""
        val_loss = "" if math.isnan(self.val_loss) else repr(self.val_loss)
        return f"{self.step},{self.loss!r},{self.lr!r},{self.tokens_per_s:.1f},{val_loss}\n"


HEADER = ",".join(f.name for f in fields(StepRow)) + "\n"


class RunFolder:
    """The folder of a run on these ranks (default: this process alone); only rank 0 writes the log.

    All ranks call its methods; if one fails on any rank, all raise a RunCheckpointError. ``saved_step`` is the last
    checkpoint's step; None if no checkpoint was saved or loaded.
    """

    def __init__(self, path: Path, ranks: Ranks | None = None, config: TrainConfig | None = None) -> None:
        config = config or TrainConfig()
        self.path, self.checkpoint, self.log = path, path / CHECKPOINT, path / LOG
        self.ranks = ranks or Ranks()
        self.saved_step: int | None = None
        self._keep = config.ranks.keep
        self._background = ranks_for_saves(config, self.ranks)
        self._saving: tuple[int, Future[None]] | None = None

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.checkpoint.exists() or self.log.exists()

    def open(self, resume: bool) -> contextlib.ExitStack:
        """Lock the folder for this run, until the returned stack is closed or the process ends.

        It fails if another run has the folder, or if it holds a run and `resume` is not set.
        """
        with self.ranks.together(), contextlib.ExitStack() as lock:
            if self.ranks.rank > 0:
                return lock
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(self.path / LOCK))
            except BlockingIOError as error:
                raise RunCheckpointError(
                    f"another run trains in {self.path} ({error.strerror}): wait for its end, or give another --out"
                ) from error
            except OSError as error:
                raise RunCheckpointError(
                    f"cannot write to {self.path}: {error.strerror}; give a folder that can be written with --out"
                ) from error
            if not resume and self.holds_run():
                raise RunCheckpointError(
                    f"{self.path} already holds a run: add --resume to go on, or give another --out"
                )
            for partial_file in self.path.glob(f"*.{PARTIAL}"):  # files that a killed run was writing
                partial_file.unlink(missing_ok=True)
            return lock.pop_all()
        raise AssertionError  # together() swallows nothing

    def save(self, model: nn.Module, optimizer: Optimizer, content: Content) -> None:
        """Write a checkpoint, or begin to; if this write or the one begun earlier fails, the previous file stays."""
        from octavo.distributed.checkpoint import async_save_checkpoint, save_checkpoint

        self.finish()
        arguments: Any = self.checkpoint, model, optimizer, content
        with self._writing(self.checkpoint):
            if self._background is not None:
                saving = async_save_checkpoint(*arguments, ranks=self._background, keep=self._keep)
                self._saving = content["step"], saving
                return
            save_checkpoint(*arguments, ranks=self.ranks, keep=self._keep)
        self.saved_step = content["step"]

    def finish(self) -> None:
        """Wait until the checkpoint that `save` began is written."""
        if self._saving is not None:
            (step, saving), self._saving = self._saving, None
            with self._writing(self.checkpoint):
                saving.result()
            self.saved_step = step

    def load(self, identity: Identity | None) -> Content | None:
        """Read the checkpoint of this run, or return None if none was written yet; see `fill`.

        It fails for a checkpoint of another identity than this; None: any run's is read.
        """
        from octavo.distributed.checkpoint import checkpoints_in, load_extra

        def read() -> Content | None:
            if not checkpoints_in(self.checkpoint):
                return None
            try:
                content = {**load_extra(self.checkpoint)}
                content |= {"step": int(content["step"]), "rows": [StepRow(*row) for row in content["rows"]]}
                saved_identity = {**content["identity"]}
            except Exception as error:  # torch raises errors of many types for a damaged file
                raise RunCheckpointError(
                    f"{self.checkpoint} is damaged or not a checkpoint of octavo: move it away to start this run again "
                    f"({type(error).__name__}: {first_line(error)})"
                ) from error
            if identity is not None:
                self._require_same(saved_identity, identity)
            return content

        content = self.ranks.from_rank_0(read)
        self.saved_step = None if content is None else content["step"]
        return content

    def _require_same(self, saved: Identity, wanted: Identity) -> None:
        """Raise RunCheckpointError if the saved identity is another run's; missing options have their defaults."""
        defaults = TrainConfig().identity()
        for name in wanted | saved:
            saved_value, value = (identity.get(name, defaults.get(name)) for identity in (saved, wanted))
            if saved_value != value:
                raise RunCheckpointError(
                    f"the run in {self.path} has {name} {saved_value}, not {value}: resume it with the same options, "
                    "or give another --out"
                )

    def fill(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Fill the model and its optimizer from the last checkpoint."""
        from octavo.distributed.checkpoint import load_checkpoint

        try:
            load_checkpoint(self.checkpoint, model, optimizer, ranks=self.ranks)
        except CheckpointError as error:
            raise RunCheckpointError(str(error)) from error

    def write_options(self, config: TrainConfig, recipe: str) -> None:
        """Write the run's options to `config.json`."""
        self._write(self.path / CONFIG_FILE, [options_text(config, recipe)])

    def start_log(self, rows: list[StepRow]) -> None:
        """Write the log anew with these rows."""
        self._write(self.log, [HEADER, *(row.csv() for row in rows)])

    def append(self, rows: list[StepRow]) -> None:
        """Append rows to the log; they are in the file when this returns."""
        self._write(self.log, (row.csv() for row in rows), lambda path: open(path, "ab"))

    def _write(self, path: Path, lines: Iterable[str], opened: Callable[[Path], Any] = replacing) -> None:
        with self.ranks.together(), self._writing(path):
            if self.ranks.rank == 0:
                with opened(path) as file:
                    file.write("".join(lines).encode())

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            full = f"cannot write {path}: {reason_of(error)}; make room; what was saved before is kept"
            reason = error if isinstance(error, CheckpointError) else full
            last_checkpoint = "nothing yet" if self.saved_step is None else f"step {self.saved_step}"
            raise RunCheckpointError(f"{reason} ({last_checkpoint}); add --resume to go on") from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that a process loses however it ends: on a file that names the process.

    The file stays: a lock on one that is removed would be seen by nobody who opens the path later. BlockingIOError if
    another process has the lock, which ``strerror`` names.
    """
    with open(path, "a+") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise BlockingIOError(error.errno, file.read(), str(path)) from error
        except (ImportError, OSError) as error:  # a system, or a file system, without locks
            warnings.warn(f"{path}: {reason_of(error)}: make sure that nothing else writes to its folder", stacklevel=3)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
