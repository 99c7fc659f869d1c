"""The steps of a run as rows: their losses, whether they diverge, their pace, and how long the rest will take."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from statistics import fmean

from torch import Tensor

from octavo.train.checkpoint import Row
from octavo.train.config import VOCABULARY, TrainConfig
from octavo.train.errors import DivergedError

RUNAWAY_LOSS = 2 * math.log(VOCABULARY)  # guessing uniformly costs log(256) = 5.5 nats a byte
RUNAWAY_STEPS = 20
STEPS_BETWEEN_READS = 10  # on an accelerator: reading the loss waits for the device
STEPS_OF_PACE = 20


class Recorder:
    """Turns steps into rows, which it appends to those of the steps before, and looks whether they diverge.

    On an accelerator losses are read every few steps only, as that waits for the device.
    """

    def __init__(self, config: TrainConfig, rows: list[Row], on_accelerator: bool) -> None:
        self.rows = rows
        self.every = STEPS_BETWEEN_READS if on_accelerator else 1
        self._tokens = config.data.batch * config.model.context
        self._batches = -(-config.data.eval_windows // config.data.batch)
        self._eval_every = min(config.run.eval_every or config.optimizer.steps, config.optimizer.steps)
        self._validation: float | None = None  # seconds
        self._recovers = bool(config.state.recover)
        self._begun = len(rows)
        self._pending: list[tuple[int, Tensor, Tensor, float]] = []
        self._since = 0.0

    def restart_clock(self) -> None:
        """Leaves what happened until now, such as a validation, out of the steps' time."""
        self._since = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, lr: float) -> None:
        """A step was launched."""
        self._pending.append((step, loss, norm, lr))

    def read(self) -> list[Row]:
        """Waits for the steps launched since the last time, and returns their rows.

        Raises:
            DivergedError: a loss or the gradients' norm is not finite, or the loss has run away.
        """
        values = [(step, float(loss), float(norm), lr) for step, loss, norm, lr in self._pending]
        speed = self._tokens * len(values) / max(time.perf_counter() - self._since, 1e-9)
        self._pending.clear()
        for step, loss, norm, lr in values:
            for what, value in (("loss", loss), ("norm of the gradients", norm)):
                if not math.isfinite(value) and not self._recovers:
                    raise DivergedError(f"the {what} became {value} in step {step}")
            self.rows.append(Row(step, loss, lr, speed))
            recent = [row.loss for row in self.rows[-RUNAWAY_STEPS:]]
            finite = [loss for loss in recent if math.isfinite(loss)]
            mean = fmean(finite) if finite else math.nan
            if len(recent) == RUNAWAY_STEPS and not mean <= RUNAWAY_LOSS:
                raise DivergedError(f"the loss ran away, to {mean:.1f} nats a byte at step {step}")
        return self.rows[len(self.rows) - len(values) :]

    def validated(self, loss: float, seconds: float) -> Row:
        """Writes the validation loss, which took so long, into the last row, and returns it."""
        self._validation = seconds
        if not math.isfinite(loss):
            raise DivergedError(f"the validation loss became {loss} after step {self.rows[-1].step}")
        self.rows[-1] = replace(self.rows[-1], val_loss=loss)
        return self.rows[-1]

    def seconds_left(self, steps: int) -> float:
        """What so many steps more will take, at the mean pace of the last ones, slow ones and all, but not the first.

        Their validations count: as long as the last one took, until there is one a third of a step for each batch.
        """
        recent = self.rows[max(self._begun + 1, len(self.rows) - STEPS_OF_PACE) :] or self.rows[-1:]
        pace = fmean(self._tokens / row.tokens_per_s for row in recent)
        validation = self._batches * pace / 3 if self._validation is None else self._validation
        return steps * (pace + validation / self._eval_every)
