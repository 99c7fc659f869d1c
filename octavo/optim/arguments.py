"""Arguments that the optimizers have in common: what is out of range, and what of torch's they have no use for."""

from __future__ import annotations

from typing import Any

_REFUSED = {
    "amsgrad": "octavo keeps no largest second moments; clip_update bounds updates",
    "foreach": "a step is one launch on a GPU already",
    "fused": "a step is one launch on a GPU already, which heeds a GradScaler without waiting",
    "capturable": "every step can be captured in a CUDA graph, once it has run",
    "decoupled_weight_decay": "that is octavo.optim.AdamW",
    "differentiable": "autograd does not go through octavo's steps",
}


def refuse(**torchs: Any) -> None:
    """Raise ValueError, with the reason, for an argument of torch's that is on."""
    for name, value in torchs.items():
        if value:
            raise ValueError(f"{name}={value!r}: {_REFUSED[name]}; leave the argument out")


def check_not_negative(**numbers: float) -> None:
    """Raise ValueError for a number below 0, or NaN."""
    for name, value in numbers.items():
        if not value >= 0.0:
            raise ValueError(f"{name}={value!r} must be at least 0")


def check_storage(gradient_storage: str | None) -> None:
    """Raise ValueError for what ``gradient_storage`` can't be."""
    if gradient_storage not in (None, "fp8"):
        raise ValueError(f"gradient_storage={gradient_storage!r}: use None or 'fp8'")
