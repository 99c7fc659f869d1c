"""Runs of octavo.train on ranks of the pool, and their curves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from octavo.distributed.ranks import Ranks
from octavo.train import Hooks, TrainConfig, run


def changed(config: TrainConfig, **parts: Any) -> TrainConfig:
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in parts.items()})


def curve(result: Any) -> list[tuple[float, float | None]]:
    """Losses and validation losses, where there are some; comparable with ==."""
    return [(row.loss, None if math.isnan(row.val_loss) else row.val_loss) for row in result.rows]


def train_on(
    mesh: Any, config: TrainConfig, recipe: str = "dynamic", stop_after: int | None = None, poisoned: int | None = None
) -> tuple[Any, ...]:
    """A run's curve and the model's norm of gradients as it says; or the error's type and text."""
    ranks = Ranks(mesh.get_group())
    seen: list[Any] = []
    modules: list[int] = []

    def on_model(model: Any) -> None:
        modules.append(sum(isinstance(module, FSDPModule) for module in model.modules()))
        if poisoned == ranks.rank:
            model.head.register_forward_hook(lambda module, args, out: out * math.nan if len(seen) == 3 else out)

    def should_stop() -> bool:
        return ranks.rank == 1 and stop_after is not None and len(seen) >= stop_after

    hooks = Hooks(on_model=on_model, on_step=seen.append, should_stop=should_stop)
    try:
        result = run(config, recipe, hooks=hooks, ranks=ranks)
    except Exception as error:
        return type(error).__name__, str(error)
    return curve(result), result.interrupted, modules


def nearly(first: Any, second: Any, rel: float) -> bool:
    numbers = [value for pair in first for value in pair if value is not None]
    others = [value for pair in second for value in pair if value is not None]
    return numbers == pytest.approx(others, rel=rel)
