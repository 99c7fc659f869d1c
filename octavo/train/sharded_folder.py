"""The folder of a run on many ranks: one log, and a checkpoint that all of them write and any number can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from octavo.distributed.errors import CheckpointError as RanksCheckpointError
from octavo.distributed.ranks import Ranks
from octavo.train.checkpoint import (
    CHECKPOINT,
    SHARDED,
    Identity,
    Row,
    RunFolder,
    State,
    rows_from_tensor,
    rows_to_tensor,
)
from octavo.train.errors import CheckpointError


class ShardedFolder(RunFolder):
    """A RunFolder that all ranks have; rank 0 alone writes the log, and what fails there fails on all.

    Args:
        path: the folder; made by `open`.
        ranks: who trains.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        super().__init__(path)
        self.ranks = ranks

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint is: a folder."""
        return self.path / SHARDED

    def open(self, resume: bool) -> None:
        with self.ranks.together():
            if self.ranks.rank == 0:
                super().open(resume)

    def load(self, identity: Identity | None) -> State | None:
        """The step, identity and rows of the checkpoint, or None when none was written yet; see `load_parts`."""
        state = self.ranks.first(lambda: self._read(identity))
        self.saved_step = state.step if state is not None else None
        return state

    def _read(self, identity: Identity | None) -> State | None:
        from octavo.distributed.checkpoint import LATEST, load_extra

        if (self.path / CHECKPOINT).exists():
            raise CheckpointError(f"the run in {self.path} was trained by one process: resume it without --shard")
        if not (self.checkpoint / LATEST).exists():
            return None
        try:
            extra = load_extra(self.checkpoint)
            parts = {name: extra[name] for name in ("schedule", "in_backward") if name in extra}
            state = State(extra["step"], {}, {}, {}, extra["identity"], rows_from_tensor(extra["rows"]), **parts)
        except (RanksCheckpointError, KeyError, TypeError) as error:
            raise CheckpointError(f"{error}: move {self.checkpoint} away to start this run again") from error
        self.require(state, identity)
        return state

    def load_parts(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Fills the model and its optimizer from the checkpoint."""
        from octavo.distributed.checkpoint import load_checkpoint

        try:
            load_checkpoint(self.checkpoint, model, optimizer, ranks=self.ranks)
        except RanksCheckpointError as error:
            raise CheckpointError(str(error)) from error

    def save_parts(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        identity: Identity,
        rows: list[Row],
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        """Replaces the checkpoint; when that fails the previous one is still there.

        Raises:
            CheckpointError: a disk is full or gone, on whatever rank.
        """
        from octavo.distributed.checkpoint import save_checkpoint

        extra = {"step": len(rows), "identity": identity, "rows": rows_to_tensor(rows), **(parts or {})}
        try:
            save_checkpoint(self.checkpoint, model, optimizer, extra, ranks=self.ranks)
        except RanksCheckpointError as error:
            kept = "nothing yet" if self.saved_step is None else f"step {self.saved_step}"
            raise CheckpointError(f"{error} ({kept}); add --resume to go on") from error
        self.saved_step = len(rows)

    def start_log(self, rows: list[Row]) -> None:
        with self.ranks.together():
            if self.ranks.rank == 0:
                super().start_log(rows)

    def append(self, rows: list[Row]) -> None:
        with self.ranks.together():
            if self.ranks.rank == 0:
                super().append(rows)
