"""What a run leaves on the disk: a folder with `config.json`, `log.csv` and a checkpoint, each replaced as a whole.

The checkpoint of one process is the file `checkpoint.pt`; those of many ranks are in the folder `checkpoint`, which all
of them write and any number of ranks can read. Both have tensors, numbers and strings only, so that
`torch.load(weights_only=True)` reads them: the state of model and optimizer, and the run's

    step, rows      steps done, and their log: a StepRow each, as float64 [step, 5]
    identity        the options and the data that decide the loss curve
    schedule        the state of the precision schedule, if there is one
    in_backward     the state of updates in backward, if there are any

A resumed run writes `log.csv` anew from the checkpoint's rows: rows of later steps are gone.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.distributed.files import PARTIAL, locked, reason_of, replacing
from octavo.distributed.ranks import CheckpointError, Ranks
from octavo.errors import first_line
from octavo.scaling.delayed import delayed_state_dict, load_delayed_state_dict
from octavo.train.config import CONFIG_FILE, RunCheckpointError, TrainConfig, save_options
from octavo.train.shard import ranks_for_saves

FORMAT = 1
CHECKPOINT = "checkpoint.pt"
SHARDED = "checkpoint"  # the folder of a run on many ranks
LOCK = ".lock"  # names the process that trains in the folder

Identity = dict[str, int | float | str]
Content = dict[str, Any]  # what the module's docstring lists; rows that were read are StepRows


@dataclass(frozen=True)
class StepRow:
    """One step of a run; losses are in nats a byte."""

    step: int  # from 1 on
    loss: float  # of the step's batch
    lr: float
    tokens_per_s: float  # bytes trained on a second, validation not counted
    val_loss: float = math.nan  # after the step; nan if none was computed

    def csv(self) -> str:
        """The row as a line of `log.csv`, with floats in full; a missing validation loss is empty."""
        val_loss = "" if math.isnan(self.val_loss) else repr(self.val_loss)
        return f"{self.step},{self.loss!r},{self.lr!r},{self.tokens_per_s:.1f},{val_loss}\n"


HEADER = ",".join(f.name for f in fields(StepRow)) + "\n"


def rows_to_tensor(rows: list[StepRow]) -> Tensor:
    """Rows as [n, 5] float64."""
    return torch.tensor([astuple(row) for row in rows], dtype=torch.float64).reshape(len(rows), len(fields(StepRow)))


def rows_from_tensor(values: Tensor) -> list[StepRow]:
    """The inverse of rows_to_tensor."""
    return [StepRow(int(step), *numbers) for step, *numbers in values.tolist()]


class RunFolder:
    """The folder of a run of one process.

    Of many ranks only rank 0 writes the log; if that fails, all ranks raise its error.

    ``saved_step`` is the checkpoint's step; None if no checkpoint was saved or loaded.
    """

    name = CHECKPOINT

    def __init__(self, path: Path, ranks: Ranks | None = None) -> None:
        self.path = path
        self.ranks = ranks or Ranks()
        self.checkpoint = path / self.name
        self.log = path / "log.csv"
        self.saved_step: int | None = None
        self._states: dict[str, Any] = {}

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return any((self.path / name).exists() for name in (CHECKPOINT, SHARDED, self.log.name))

    def open(self, resume: bool) -> contextlib.ExitStack:
        """Lock the folder for this run, until the returned stack is closed or the process ends.

        Raises:
            RunCheckpointError: it can't be written, another run has it, or it holds a run and `resume` is not set.
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
            for left in self.path.glob(f"*.{PARTIAL}"):  # files that a killed run was writing
                left.unlink(missing_ok=True)
            for left in (self.path / SHARDED).glob(f"*.{PARTIAL}"):
                shutil.rmtree(left)
            return lock.pop_all()
        raise AssertionError  # together() swallows nothing

    def save(self, model: nn.Module, optimizer: Optimizer, content: Content) -> None:
        """Replace the checkpoint; if that fails, the previous one is still there.

        Raises:
            RunCheckpointError: the disk is full or gone, on any rank.
        """
        states = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "delayed": delayed_state_dict(model),
        }
        with self._writing(self.checkpoint), replacing(self.checkpoint) as file:
            torch.save({"octavo_checkpoint": FORMAT, "schedule": {}, "in_backward": {}, **states, **content}, file)
        self.saved_step = content["step"]

    def finish(self) -> None:
        """Wait until what `save` has begun is written; of many ranks all call it.

        Raises:
            RunCheckpointError: it could not be written, on any rank.
        """

    def load(self, identity: Identity | None) -> Content | None:
        """Read the checkpoint of this run, or return None if none was written yet; see `fill`.

        Args:
            identity: this run's, which must equal the checkpoint's; None: any run's checkpoint is read.

        Raises:
            RunCheckpointError: it is damaged, or belongs to a run with other options or other data.
        """

        def read() -> Content | None:
            try:
                if (content := self._read()) is None:
                    return None
                rows, found = rows_from_tensor(content["rows"]), {**content["identity"]}
                content |= {"step": int(content["step"]), "identity": found, "rows": rows}
            except RunCheckpointError:
                raise
            except Exception as error:  # whatever a damaged file makes torch raise
                raise RunCheckpointError(
                    f"{self.checkpoint} is damaged or not a checkpoint of octavo: move it away to start this run again "
                    f"({type(error).__name__}: {first_line(error)})"
                ) from error
            if identity is not None:
                self._require_same(found, identity)
            return content

        content = self.ranks.first(read)
        self.saved_step = None if content is None else content["step"]
        return content

    def _read(self) -> Content | None:
        if not self.checkpoint.exists():
            if (self.path / SHARDED).exists():
                raise RunCheckpointError(
                    f"the run in {self.path} was trained on many ranks: resume it with --shard fsdp or ddp"
                )
            return None
        content: Content = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if content.pop("octavo_checkpoint") != FORMAT:
            raise ValueError("another format")
        self._states = {name: content.pop(name) for name in ("model", "optimizer", "delayed")}
        return content

    def _require_same(self, found: Identity, wanted: Identity) -> None:
        """Raise RunCheckpointError for another run's identity; an option that is missing in one has its default."""
        defaults = TrainConfig().identity()
        for name in wanted | found:
            there, here = (identity.get(name, defaults.get(name)) for identity in (found, wanted))
            if there != here:
                raise RunCheckpointError(
                    f"the run in {self.path} has {name} {there}, not {here}: resume it with the same options, "
                    "or give another --out"
                )

    def fill(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Fill the model and its optimizer from the checkpoint that `load` has read.

        Raises:
            KeyError, RuntimeError, ValueError: the checkpoint of one process is another model's.
            RunCheckpointError: the checkpoint of many ranks is another model's or damaged.
        """
        states, self._states = self._states, {}  # freed here, as they take as much memory as the run
        model.load_state_dict(states["model"])
        if optimizer is not None:
            optimizer.load_state_dict(states["optimizer"])
        load_delayed_state_dict(model, states["delayed"])

    def write_options(self, config: TrainConfig, recipe: str) -> None:
        """Writes the run's options to `config.json`."""
        with self.ranks.together(), self._writing(self.path / CONFIG_FILE):
            if self.ranks.rank == 0:
                save_options(self.path, config, recipe)

    def start_log(self, rows: list[StepRow]) -> None:
        """Writes the log anew with these rows."""
        with self.ranks.together(), self._writing(self.log):
            if self.ranks.rank == 0:
                with replacing(self.log) as file:
                    file.write((HEADER + "".join(row.csv() for row in rows)).encode())

    def append(self, rows: list[StepRow]) -> None:
        """Appends rows to the log; they are in the file when this returns."""
        with self.ranks.together(), self._writing(self.log):
            if self.ranks.rank == 0:
                with open(self.log, "ab") as file:
                    file.write("".join(row.csv() for row in rows).encode())

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            kept = "no checkpoint was written yet" if self.saved_step is None else f"step {self.saved_step} is kept"
            raise RunCheckpointError(
                f"cannot write {path}: {reason_of(error)}; {kept}; make room and add --resume to go on"
            ) from error


class ShardedFolder(RunFolder):
    """The folder of a run on many ranks.

    Args:
        path: the folder.
        ranks: those that train.
        config: how many checkpoints it keeps, and whether `save` writes while training goes on (default: no).
    """

    name = SHARDED

    def __init__(self, path: Path, ranks: Ranks | None = None, config: TrainConfig | None = None) -> None:
        super().__init__(path, ranks)
        self._keep = 1 if config is None else config.ranks.keep
        self._background = None if config is None else ranks_for_saves(config, self.ranks)
        self._saving: tuple[int, Future[None]] | None = None

    def save(self, model: nn.Module, optimizer: Optimizer, content: Content) -> None:
        from octavo.distributed.checkpoint import async_save_checkpoint, save_checkpoint

        self.finish()
        given: Any = self.checkpoint, model, optimizer, content
        with self._reported():
            if self._background is not None:
                saving = async_save_checkpoint(*given, ranks=self._background, keep=self._keep)
                self._saving = content["step"], saving
                return
            save_checkpoint(*given, ranks=self.ranks, keep=self._keep)
        self.saved_step = content["step"]

    def finish(self) -> None:
        if self._saving is not None:
            (step, saving), self._saving = self._saving, None
            with self._reported():
                saving.result()
            self.saved_step = step

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            kept = "nothing yet" if self.saved_step is None else f"step {self.saved_step}"
            raise RunCheckpointError(f"{error} ({kept}); add --resume to go on") from error

    def _read(self) -> Content | None:
        from octavo.distributed.checkpoint import checkpoints_in, load_extra

        if (self.path / CHECKPOINT).exists():
            raise RunCheckpointError(f"the run in {self.path} was trained by one process: resume it without --shard")
        return load_extra(self.checkpoint) if checkpoints_in(self.checkpoint) else None

    def fill(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        from octavo.distributed.checkpoint import load_checkpoint

        try:
            load_checkpoint(self.checkpoint, model, optimizer, ranks=self.ranks)
        except CheckpointError as error:
            raise RunCheckpointError(str(error)) from error
