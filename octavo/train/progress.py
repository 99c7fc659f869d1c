"""The steps of a run as rows, with losses and pace; whether they diverge; the display of a run's progress."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from statistics import fmean
from typing import TextIO

from torch import Tensor

from octavo.train.checkpoint import StepRow
from octavo.train.config import VOCABULARY, DivergedError, TrainConfig

SECONDS_BETWEEN_LINES = 5.0

RUNAWAY_LOSS = 2 * math.log(VOCABULARY)  # guessing uniformly costs log(256) = 5.5 nats a byte
RUNAWAY_STEPS = 20
STEPS_BETWEEN_READS = 10  # on an accelerator: reading the loss waits for the device
STEPS_OF_PACE = 20


class RunRecorder:
    """Turns steps into rows, appends these to the run's, and checks whether the run diverges.

    On an accelerator losses are read every few steps only, as reading waits for the device.
    """

    def __init__(self, config: TrainConfig, rows: list[StepRow], on_accelerator: bool) -> None:
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
        """Leave the time until now, such as that of a validation, out of the steps' time."""
        self._since = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, lr: float) -> None:
        """Add a step that was launched."""
        self._pending.append((step, loss, norm, lr))

    def read(self) -> list[StepRow]:
        """Wait for the steps launched since the last time, and return their rows.

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
            self.rows.append(StepRow(step, loss, lr, speed))
            recent = [row.loss for row in self.rows[-RUNAWAY_STEPS:]]
            finite = [loss for loss in recent if math.isfinite(loss)]
            mean = fmean(finite) if finite else math.nan
            if len(recent) == RUNAWAY_STEPS and not mean <= RUNAWAY_LOSS:
                raise DivergedError(f"the loss ran away, to {mean:.1f} nats a byte at step {step}")
        return self.rows[len(self.rows) - len(values) :]

    def validated(self, loss: float, seconds: float) -> StepRow:
        """Put the validation loss, which took so many seconds, into the last row, and return the row."""
        self._validation = seconds
        if not math.isfinite(loss):
            raise DivergedError(f"the validation loss became {loss} after step {self.rows[-1].step}")
        self.rows[-1] = replace(self.rows[-1], val_loss=loss)
        return self.rows[-1]

    def seconds_left(self, steps: int) -> float:
        """The seconds that so many more steps will take, at the mean pace of the last ones, without the first.

        Their validations are counted, each with the time of the last one; before there is one, a batch of a validation
        counts as a third of a step.
        """
        recent = self.rows[max(self._begun + 1, len(self.rows) - STEPS_OF_PACE) :] or self.rows[-1:]
        pace = fmean(self._tokens / row.tokens_per_s for row in recent)
        validation = self._batches * pace / 3 if self._validation is None else self._validation
        return steps * (pace + validation / self._eval_every)


class Progress:
    """Shows how runs go on; this base class shows nothing."""

    def begin(self, name: str, step: int, steps: int) -> None:
        """Show that a run starts, or goes on after `step` of `steps`."""

    def update(self, row: StepRow, seconds_left: float) -> None:
        """Show a step that is done; ``seconds_left``: of all runs."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def end(self) -> None:
        """Show that the run ended, well or not."""


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def in_words(seconds: float) -> str:
    """Seconds as people say them: 40 s, 3 min, 2.5 h."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _facts(row: StepRow, validation: str, seconds_left: float) -> str:
    return f"loss {row.loss:.4f}{validation}  {row.tokens_per_s:,.0f} tokens/s  {clock(seconds_left)} left"


class Lines(Progress):
    """A line to ``stream`` every ``interval`` seconds, and one for each validation."""

    def __init__(self, stream: TextIO, interval: float = SECONDS_BETWEEN_LINES) -> None:
        self.stream = stream
        self.interval = interval

    def begin(self, name: str, step: int, steps: int) -> None:
        self._name, self._steps, self._last = name, steps, time.monotonic()

    def update(self, row: StepRow, seconds_left: float) -> None:
        """Write a line if ``interval`` has passed, or if the step has a validation."""
        validated = not math.isnan(row.val_loss)
        if not validated and row.step != self._steps and time.monotonic() - self._last < self.interval:
            return
        self._last = time.monotonic()
        validation = f"  validation {row.val_loss:.4f}" if validated else ""
        self.message(f"{self._name}  step {row.step}/{self._steps}  {_facts(row, validation, seconds_left)}")

    def message(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Bar(Progress):
    """A live bar with loss, last validation, speed and time left; needs rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)

    def begin(self, name: str, step: int, steps: int) -> None:
        from rich import progress

        self._validation = ""
        self._bar = progress.Progress(
            progress.TextColumn("[bold]{task.description:>14}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            console=self._console,
        )
        self._task = self._bar.add_task(name, total=steps, completed=step, facts="")
        self._bar.start()

    def update(self, row: StepRow, seconds_left: float) -> None:
        if not math.isnan(row.val_loss):
            self._validation = f"  validation {row.val_loss:.4f}"
        self._bar.update(self._task, completed=row.step, facts=_facts(row, self._validation, seconds_left))

    def message(self, text: str) -> None:
        """Write a line above the bar."""
        self._console.print(text, markup=False)

    def end(self) -> None:
        self._bar.stop()


def choose_progress() -> Progress:
    """A bar if there are a terminal and rich, else lines."""
    return Bar() if sys.stderr.isatty() and find_spec("rich") is not None else Lines(sys.stderr)
