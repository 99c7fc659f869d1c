"""How a run shows that it is alive: a bar on a terminal (with rich), else a line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from importlib.util import find_spec
from typing import TextIO

from octavo.train.checkpoint import Row

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Is told how runs go on; this one shows nothing of it."""

    def begin(self, name: str, step: int, steps: int) -> None:
        """A run starts, or goes on after `step` of `steps`."""

    def update(self, row: Row, seconds_left: float) -> None:
        """A step is done; what is left of all runs takes so long."""

    def message(self, text: str) -> None:
        """Something worth a line."""

    def end(self) -> None:
        """The run ended, well or not."""


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


def _facts(row: Row, validation: str, seconds_left: float) -> str:
    return f"loss {row.loss:.4f}{validation}  {row.tokens_per_s:,.0f} tokens/s  {clock(seconds_left)} left"


class Lines(Progress):
    """A line to ``stream`` every ``interval`` seconds, and one for each validation."""

    def __init__(self, stream: TextIO, interval: float = SECONDS_BETWEEN_LINES) -> None:
        self.stream = stream
        self.interval = interval

    def begin(self, name: str, step: int, steps: int) -> None:
        self._name, self._steps, self._last = name, steps, time.monotonic()

    def update(self, row: Row, seconds_left: float) -> None:
        """Writes a line when it is time, or when the step has a validation."""
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

    def update(self, row: Row, seconds_left: float) -> None:
        if not math.isnan(row.val_loss):
            self._validation = f"  validation {row.val_loss:.4f}"
        self._bar.update(self._task, completed=row.step, facts=_facts(row, self._validation, seconds_left))

    def message(self, text: str) -> None:
        """Writes a line above the bar."""
        self._console.print(text, markup=False)

    def end(self) -> None:
        self._bar.stop()


def choose_progress() -> Progress:
    """A bar where a terminal and rich are there, else lines."""
    return Bar() if sys.stderr.isatty() and find_spec("rich") is not None else Lines(sys.stderr)
