"""A state_dict's keys: Transformer Engine's when it is saved, either library's when it is loaded.

A module says how keys begin (``parts``: pairs of octavo's beginning and Transformer Engine's) and which parameters its
matrix is there (``rows``: their names and rows, or None).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


def to_theirs(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Rename what a module has just saved; torch's state_dict hook."""
    parts, rows = _names(module)
    for ours, theirs in parts:
        for key in [key for key in state if key.startswith(prefix + ours)]:
            state[prefix + theirs + key.removeprefix(prefix + ours)] = state.pop(key)
    for kind in ("weight", "bias") if rows else ():
        if (value := state.pop(prefix + kind, None)) is not None:
            for name, part in zip(rows, value.split([*rows.values()]), strict=True):
                state[f"{prefix}{name}_{kind}"] = part


def to_ours(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Rename what a module is about to load, and leave octavo's keys; torch's load_state_dict hook."""
    parts, rows = _names(module)
    extra = state.pop(f"{prefix}_extra_state", None)
    if extra is not None and (not isinstance(extra, Tensor) or extra.numel()):
        warnings.warn(f"{prefix}_extra_state is not read: scales begin with each tensor's own amax", stacklevel=2)
    for kind in ("weight", "bias") if rows else ():
        keys = [f"{prefix}{name}_{kind}" for name in rows]
        if all(key in state for key in keys):
            state[prefix + kind] = torch.cat([state.pop(key) for key in keys])
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        found = [pair for pair in parts if name.startswith(pair[1])]
        if found and not any(name.startswith(ours) for ours, _ in parts):
            ours, theirs = found[0]
            state[prefix + ours + name.removeprefix(theirs)] = state.pop(key)


def _names(module: Any) -> tuple[tuple[tuple[str, str], ...], dict[str, int]]:
    """A module's parts and rows; those of one that octavo.restore has made torch's."""
    return getattr(module, "parts", ()), getattr(module, "rows", None) or {}
