"""The steps of a run as rows, with losses and pace; whether they diverge; the display of a run's progress."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from statistics import fmean
from typing import TextIO

from torch import Tensor

from octavo.train.checkpoint import StepRow
from octavo.train.config import VOCABULARY, DivergedError, TrainConfig

SECONDS_BETWEEN_LINES = 5.0

RUNAWAY_LOSS = 2 * math.log(VOCABULARY)  # guessing uniformly costs log(256) = 5.5 nats a byte
RUNAWAY_STEPS = 20
STEPS_BETWEEN_READS = 10  # on an accelerator: reading the loss waits for the device


class StepReader:
    """Reads the losses of steps from the device, appends rows to the run's, and checks whether the run diverges.

    Attributes:
        rows: the run's.
        every: read after so many steps; on an accelerator several, as reading waits for the device.
    """

    def __init__(self, config: TrainConfig, rows: list[StepRow], on_accelerator: bool) -> None:
        self.rows = rows
        self.every = STEPS_BETWEEN_READS if on_accelerator else 1
        self._tokens = config.data.batch * config.model.context
        self._pending: list[tuple[int, Tensor, Tensor, float]] = []
        self._pace_since: tuple[int, float] | None = None  # (how many rows the first read left, when it was)
        self._since = 0.0

    def restart_clock(self) -> None:
        """Leave the time until now, such as a validation's, out of the steps' time."""
        self._since = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, lr: float) -> None:
        """Add a step that was launched."""
        self._pending.append((step, loss, norm, lr))

    def read(self) -> list[StepRow]:
        """Wait for the steps launched since the last call, and return their rows, or raise DivergedError."""
        values = [(step, float(loss), float(norm), lr) for step, loss, norm, lr in self._pending]
        now = time.perf_counter()
        speed = self._tokens * len(values) / max(now - self._since, 1e-9)
        self._pending.clear()
        for step, loss, norm, lr in values:
            for quantity, value in (("loss", loss), ("norm of the gradients", norm)):
                if not math.isfinite(value):
                    raise DivergedError(f"the {quantity} became {value} in step {step}")
            self.rows.append(StepRow(step, loss, lr, speed))
            recent = [row.loss for row in self.rows[-RUNAWAY_STEPS:]]
            if len(recent) == RUNAWAY_STEPS and (mean := fmean(recent)) > RUNAWAY_LOSS:
                raise DivergedError(f"the loss ran away, to {mean:.1f} nats a byte at step {step}")
        self._pace_since = self._pace_since or (len(self.rows), now)
        return self.rows[len(self.rows) - len(values) :]

    def validated(self, loss: float) -> StepRow:
        """Put the validation loss into the last row, and return the row."""
        if not math.isfinite(loss):
            raise DivergedError(f"the validation loss became {loss} after step {self.rows[-1].step}")
        self.rows[-1] = replace(self.rows[-1], val_loss=loss)
        return self.rows[-1]

    def seconds_left(self, steps: int) -> float:
        """Return the seconds that ``steps`` more steps will take, by the pace after the first read, which was slow."""
        assert self._pace_since is not None  # there are rows
        count, since = self._pace_since
        done = len(self.rows) - count
        return steps * ((time.perf_counter() - since) / done if done else self._tokens / self.rows[-1].tokens_per_s)


def in_words(seconds: float) -> str:
    """Return a duration in a unit that is easy to read: 40 s, 3 min, 2.5 h."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """Shows the progress of runs: a line to ``stream`` every ``interval`` seconds, and one for each validation.

    Without a stream nothing is shown.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = SECONDS_BETWEEN_LINES) -> None:
        self.stream = stream
        self.interval = interval

    def begin(self, name: str, steps: int) -> None:
        """Note that a run of so many steps starts or continues."""
        self._name, self._steps, self._last = name, steps, time.monotonic()

    def update(self, row: StepRow, seconds_left: float) -> None:
        """Show a step that is done, if it is time to; ``seconds_left``: of all runs, 0 after the last step."""
        validated = not math.isnan(row.val_loss)
        if not validated and row.step < self._steps and time.monotonic() - self._last < self.interval:
            return
        self._last = time.monotonic()
        facts = f"loss {row.loss:.4f}{f'  validation {row.val_loss:.4f}' * validated}  {row.tokens_per_s:,.0f} tokens/s"
        left = f"  {in_words(seconds_left)} left" if seconds_left else ""
        self.message(f"{self._name}  step {row.step}/{self._steps}  {facts}{left}")

    def message(self, text: str) -> None:
        """Show a line of text."""
        if self.stream is not None:
            print(text, file=self.stream, flush=True)
