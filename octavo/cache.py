"""Where octavo keeps what it measured and compiled on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """octavo/ in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
