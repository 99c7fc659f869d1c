"""What a cell of the table may say, each once; and how a verdict is told from what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exact:
    """Bit-equal to the twin that keeps nothing."""

    why: str = ""
    word = "exact"


@dataclass(frozen=True)
class Sound:
    """Outputs and inputs' gradients within ``db`` of float64's, and why not exact."""

    db: float
    why: str

    @property
    def word(self) -> str:
        """In the table."""
        return f"{self.db:g} dB"


@dataclass(frozen=True)
class Refused:
    """The error, a part of its text that names the remedy, and why it is refused."""

    error: type[Exception]
    remedy: str
    why: str
    word = "refused"


@dataclass(frozen=True)
class Documented:
    """A link into docs/, and what it says there."""

    link: str
    why: str
    word = "see"


Verdict = Exact | Sound | Refused | Documented
EXACT: Any = Exact()
