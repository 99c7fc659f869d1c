"""Training on many ranks: what they decide together, and checkpoints that any number of them can read."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.distributed import checkpoint

__all__ = ["checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "checkpoint":  # torch.distributed.checkpoint takes a second to import
        return importlib.import_module("octavo.distributed.checkpoint")
    raise AttributeError(f"module 'octavo.distributed' has no attribute {name!r}")
