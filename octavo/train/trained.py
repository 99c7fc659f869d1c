"""A run's model, read back from its checkpoint, to export it or to look at it."""

from __future__ import annotations

from pathlib import Path

from octavo.inspect.command import Subject
from octavo.train.checkpoint import CHECKPOINT, SHARDED, RunFolder, ShardedFolder
from octavo.train.config import RECIPES, ModelConfig, StateConfig
from octavo.train.data import Batches, load_corpus
from octavo.train.errors import CheckpointError
from octavo.train.model import GPT, next_byte_loss
from octavo.train.trainer import build_model


def run_in(path: Path) -> Path:
    """The folder of the only run in a folder, as `octavo train` leaves one there; else the path itself."""
    runs = [] if RunFolder(path).holds_run() else _runs_in(path)
    return runs[0] if len(runs) == 1 else path


def _runs_in(path: Path) -> list[Path]:
    return sorted(found.parent for name in (CHECKPOINT, SHARDED) for found in path.glob(f"*/{name}"))


def trained_model(path: Path) -> GPT:
    """The model that a run trained, in evaluation mode, with its recipe and delayed state.

    Args:
        path: the run's folder, that of this run alone, or its checkpoint.pt; of a run on many ranks a folder.

    Raises:
        CheckpointError: there is no checkpoint, or none that can be read.
    """
    path = run_in(path)
    folder = path.parent if path.name == CHECKPOINT else path
    sharded = (folder / SHARDED).is_dir() and not (folder / CHECKPOINT).exists()
    kept = ShardedFolder(folder) if sharded else RunFolder(folder)
    content = kept.load(None) if sharded or kept.checkpoint.is_file() else None
    if content is None and not path.exists():
        raise CheckpointError(f"{path} does not exist: give a run's folder or its {CHECKPOINT}")
    if content is None:
        runs = _runs_in(folder)
        held = f"holds {len(runs)} runs: choose one of {', '.join(map(str, runs))}"
        none = f"is no run of octavo: give a run's folder or its {CHECKPOINT}"
        raise CheckpointError(f"{path} {held if runs else none}")
    identity = content["identity"]
    recipe = identity.get("recipe")
    if recipe not in RECIPES:
        raise CheckpointError(f"{folder} was trained with a recipe of its own, {recipe}: build its model in Python")
    # a checkpoint of many ranks has the names of the weights' storage; one of one process is read by plain weights too
    names = [name for name in StateConfig.__dataclass_fields__ if sharded and name in identity]
    try:
        # an older checkpoint has no experts
        sizes = ModelConfig(**{name: identity[name] for name in ModelConfig.__dataclass_fields__ if name in identity})
        model = build_model(sizes, recipe, 0, StateConfig(**{name: identity[name] for name in names}))
        kept.fill(model, None)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{kept.checkpoint} does not hold this octavo's model: {error}") from error
    return model.eval()


def trained_subject(path: Path, data: Path | None = None, batches: int = 2) -> Subject:
    """A run's model with batches to look at it by: ``octavo inspect``.

    Args:
        path: as for trained_model.
        data: text; Python's own standard library by default.
        batches: how many, of 16 windows.
    """
    model, corpus = trained_model(path), load_corpus(data)
    corpus.require(model.config)
    windows = Batches(corpus, model.config.context, 16, 0)
    return Subject(
        model,
        lambda model, batch: next_byte_loss(model(batch[0]), batch[1]),
        [windows.training(step) for step in range(batches)],
    )
