"""What `octavo train --inspect` adds to a run: a record in its folder, and where a fault came from."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

import octavo
from octavo.train.config import InspectConfig
from octavo.train.trainer import Trainer

FOLDER = "inspect"  # in a run's


class Inspection:
    """Records a run and watches it for faults.

    Args:
        trainer: of a model with FP8 layers, loaded.
        folder: the run's; without one, faults are watched for alone.
        config: how often.
        step: steps done before; a run that begins anew drops the record that a killed one left.
    """

    def __init__(self, trainer: Trainer, folder: Path | None, config: InspectConfig, step: int) -> None:
        ranks, group = trainer.ranks, trainer.ranks.group
        self._recorder = None
        if folder is not None:
            with ranks.together():
                if step == 0 and ranks.rank == 0:
                    shutil.rmtree(folder / FOLDER, ignore_errors=True)
            self._recorder = octavo.inspect.Recorder(
                trainer.model,
                folder / FOLDER,
                config.inspect_every,
                optimizer=trainer.optimizer,
                schedule=trainer.schedule,
                step=step,
                group=group,
            )
        self._trace = octavo.inspect.trace_faults(trainer.model, raises=False, step=step, group=group)

    def step(self, loss: Tensor, norm: Tensor, lr: float) -> None:
        """A step was launched."""
        self._trace.step(loss, norm)
        if self._recorder is not None:
            self._recorder.step(loss, norm, lr=lr)

    def close(self) -> str:
        """Write what is under way, and leave the model as it was; where the first fault was, if there was one."""
        self._trace.close()
        fault = self._trace.fault
        if self._recorder is not None:
            if fault is not None:
                self._recorder.event("fault", str(fault))
            self._recorder.close()
        return "" if fault is None else fault.where
