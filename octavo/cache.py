"""The folder in which octavo keeps its measurements and compiled code on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder(make: bool = False) -> Path:
    """Return octavo/ in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache).

    ``make``: make it where there is none, for this user alone.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def why_not_private(folder: Path) -> str:
    """Return why somebody else may write to a folder, so that no code in it must be run; "" where nobody else may."""
    if not hasattr(os, "geteuid"):  # Windows, where a mode says nothing of others
        return ""
    status, user = folder.stat(), os.geteuid()
    if status.st_uid != user:
        return f"it belongs to user {status.st_uid}, not to {user}, who runs this: set XDG_CACHE_HOME to another"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}): empty it, and chmod 700 {folder}"
    return ""
