"""A run's model, read back from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import octavo
from octavo.train.checkpoint import CHECKPOINT, RunFolder
from octavo.train.config import RECIPES, ModelConfig
from octavo.train.errors import CheckpointError
from octavo.train.model import GPT
from octavo.train.trainer import build_model


def trained_model(path: Path) -> GPT:
    """The model that a run trained, in evaluation mode, with its recipe and delayed state.

    Args:
        path: the run's folder, or its checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or none that can be read.
    """
    folder = path.parent if path.name == CHECKPOINT else path
    if not (folder / CHECKPOINT).is_file():
        raise CheckpointError(_no_checkpoint(path, folder))
    state = RunFolder(folder).load({})
    assert state is not None
    identity: dict[str, Any] = state.identity
    recipe = identity.get("recipe")
    if recipe not in RECIPES:
        raise CheckpointError(f"{folder} was trained with a recipe of its own, {recipe}: build its model in Python")
    try:
        sizes = ModelConfig(**{name: identity[name] for name in ModelConfig.__dataclass_fields__})
        model = build_model(sizes, recipe, 0)
        model.load_state_dict(state.model)
        octavo.load_delayed_state_dict(model, state.delayed)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder / CHECKPOINT} does not hold this octavo's model: {error}") from error
    return model.eval()


def _no_checkpoint(path: Path, folder: Path) -> str:
    if not path.exists():
        return f"{path} does not exist: give a run's folder or its {CHECKPOINT}"
    runs = sorted(found.parent for found in folder.glob(f"*/{CHECKPOINT}")) if folder.is_dir() else []
    if runs:
        return f"{path} holds {len(runs)} runs: choose one of {', '.join(str(run) for run in runs)}"
    return f"{path} is no run of octavo: give a run's folder or its {CHECKPOINT}"
