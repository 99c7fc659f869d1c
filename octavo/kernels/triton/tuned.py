"""The table of kernels' configurations: the one that octavo ships, or what `octavo tune` measured on this GPU.

A tuned table lies in the user's cache folder, by device, Triton and the shipped table that it was made from: another
GPU, Triton or octavo with other kernels goes back to the shipped one. It is read when octavo's kernels are imported;
nothing is tuned while a model trains.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import triton

from octavo.cache import cache_folder
from octavo.private import is_in_bad_fork

SHIPPED = Path(__file__).with_name("configs.json")


def tuned_file() -> Path | None:
    """Where the current GPU's table is kept, whether there is one or not; None without a GPU."""
    if not torch.cuda.is_available() or is_in_bad_fork():
        return None
    device = re.sub(r"\W+", "-", torch.cuda.get_device_name())
    kernels = hashlib.sha256(SHIPPED.read_bytes()).hexdigest()[:8]
    return cache_folder() / f"kernels-{device}-triton-{triton.__version__}-{kernels}.json"


def table(path: Path | None) -> dict[str, Any]:
    """Shipped kinds of kernels, each with its rows of the table at ``path`` where that has them."""
    shipped: dict[str, Any] = json.loads(SHIPPED.read_text())
    try:
        found = {} if path is None else json.loads(path.read_text())
        configs = {kind: found.get("configs", {}).get(kind, rows) for kind, rows in shipped["configs"].items()}
    except (OSError, ValueError, AttributeError):
        return shipped
    return {**shipped, **found, "configs": configs}
