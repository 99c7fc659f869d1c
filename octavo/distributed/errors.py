"""What can go wrong between ranks, as one line that says what to do."""

from __future__ import annotations

from octavo.errors import OctavoError


class RankError(OctavoError):
    """Another rank failed, or is gone."""


class CheckpointError(OctavoError):
    """A checkpoint cannot be written or read; on all ranks alike."""
