"""The kinds of situations and of verdicts that a cell of the table may have; alone.py and on_ranks.py have all
situations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.support.seams.training_run import TrainingRun


class Exact(NamedTuple):
    """Bit-equal to the twin that keeps nothing."""

    why: str = ""
    word = "exact"


class Sound(NamedTuple):
    """Outputs and inputs' gradients within ``db`` of float64's, and why not exact.

    ``exact_with_vectors``: it is exact where torch's kernels use vector instructions.
    """

    db: float
    why: str
    exact_with_vectors: bool = False

    @property
    def word(self) -> str:
        return f"{self.db:g} dB"


class Refused(NamedTuple):
    """The error, a part of its text that names the remedy, and why it is refused."""

    error: type[Exception]
    remedy: str
    why: str
    word = "refused"


class Documented(NamedTuple):
    """A link into docs/, and the reason that is given there."""

    link: str
    why: str
    word = "see"


Verdict = Exact | Sound | Refused | Documented
EXACT: Any = Exact()
Program = Callable[[TrainingRun], None]
SITUATIONS: dict[str, Situation] = {}


class Situation(NamedTuple):
    """A program that trains a feature's model, and the verdicts on it."""

    name: str  # in tests, and the row in the page
    program: Program  # see training_run.py; run on the library and on a twin
    ranks: tuple[int, ...]  # the shape of the mesh, () for one process
    verdict: Verdict  # of every feature but ``exceptions``
    exceptions: Mapping[str, Verdict]  # by features' names
    group: str  # the heading in the page
    slow: bool  # whether no cell of it is in the default sample
    grows: tuple[str, ...]  # beginnings of names in the trace: tensors that grow by more than a history can know


def situation(
    name: str,
    group: str,
    ranks: tuple[int, ...] = (),
    verdict: Verdict = EXACT,
    exceptions: Mapping[str | tuple[str, ...], Verdict] | None = None,
    slow: bool = False,
    grows: tuple[str, ...] = (),
) -> Callable[[Program], Program]:
    """Return a decorator that adds a program as a row to the table; ``exceptions``: by a feature's name, or by
    several.
    """
    by_feature: dict[str, Verdict] = {}
    for features, exception in (exceptions or {}).items():
        by_feature |= dict.fromkeys([features] if isinstance(features, str) else features, exception)

    def add(program: Program) -> Program:
        assert name not in SITUATIONS, name
        SITUATIONS[name] = Situation(name, program, ranks, verdict, by_feature, group, slow, grows)
        return program

    return add
