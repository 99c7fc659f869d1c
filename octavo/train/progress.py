"""How a run shows that it is alive: a bar on a terminal (with rich), else a line every few seconds."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any, TextIO

from octavo.train.checkpoint import Row

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """What a run tells while it goes on; this one shows nothing of it."""

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


class Lines(Progress):
    """One line every few seconds, and one for each validation.

    Args:
        stream: where the lines go.
        interval: seconds between two lines.
    """

    def __init__(self, stream: TextIO, interval: float = SECONDS_BETWEEN_LINES) -> None:
        self.stream = stream
        self.interval = interval
        self._name, self._steps, self._last = "", 0, 0.0

    def begin(self, name: str, step: int, steps: int) -> None:
        """Remembers what is shown."""
        self._name, self._steps, self._last = name, steps, time.monotonic()

    def update(self, row: Row, seconds_left: float) -> None:
        """Writes a line when it is time, or when the step has a validation."""
        validated = row.val_loss == row.val_loss  # not nan
        if not validated and row.step != self._steps and time.monotonic() - self._last < self.interval:
            return
        self._last = time.monotonic()
        text = f"{self._name}  step {row.step}/{self._steps}  loss {row.loss:.4f}"
        text += f"  validation {row.val_loss:.4f}" if validated else ""
        self.message(f"{text}  {row.tokens_per_s:,.0f} tokens/s  {clock(seconds_left)} left")

    def message(self, text: str) -> None:
        """Writes a line."""
        print(text, file=self.stream, flush=True)


class Bar(Progress):
    """A live bar with loss, speed and time left; needs rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._bar: Any = None
        self._task: Any = None
        self._validation = ""

    def begin(self, name: str, step: int, steps: int) -> None:
        """Draws the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._validation = ""
        self._bar = RichProgress(
            TextColumn("[bold]{task.description:>14}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self._console,
        )
        self._task = self._bar.add_task(name, total=steps, completed=step, facts="")
        self._bar.start()

    def update(self, row: Row, seconds_left: float) -> None:
        """Moves the bar."""
        if row.val_loss == row.val_loss:  # not nan
            self._validation = f"  validation {row.val_loss:.4f}"
        facts = f"loss {row.loss:.4f}{self._validation}  {row.tokens_per_s:,.0f} tokens/s  {clock(seconds_left)} left"
        self._bar.update(self._task, completed=row.step, facts=facts)

    def message(self, text: str) -> None:
        """Writes a line above the bar."""
        self._console.print(text, markup=False)

    def end(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def choose_progress(stream: TextIO | None = None) -> Progress:
    """A bar where a terminal and rich are there, else lines."""
    stream = sys.stderr if stream is None else stream
    if stream is sys.stderr and stream.isatty() and find_spec("rich") is not None:
        return Bar()
    return Lines(stream)
