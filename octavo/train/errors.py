"""What can go wrong in a training run, as one line that says what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from octavo.errors import OctavoError


class TrainError(OctavoError):
    """A run cannot start or go on; the message names the values and the remedy."""


class CheckpointError(TrainError):
    """A checkpoint cannot be written, read or continued."""


class DivergedError(TrainError):
    """The loss or the gradients stopped being finite, or the loss ran away."""


@contextlib.contextmanager
def train_errors(before: str = "") -> Iterator[None]:
    """Makes a ValueError in the block a TrainError of the same words, ``before`` them."""
    try:
        yield
    except ValueError as error:
        raise TrainError(f"{before}{error}") from error
