"""One run, or several to compare: train, leave a log and a checkpoint, and be able to go on from there exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from octavo.distributed.errors import RankError
from octavo.distributed.ranks import Ranks, lost_ranks
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap
from octavo.schedule import Switch
from octavo.train.checkpoint import Identity, Row, RunFolder, State
from octavo.train.config import ALONE, BASELINE, VOCABULARY, TrainConfig, check_recipe
from octavo.train.data import Batches, Corpus, load_corpus
from octavo.train.errors import DivergedError, TrainError
from octavo.train.model import GPT
from octavo.train.progress import Progress, Silent
from octavo.train.shard import device_name, ranks_of, require_one_process, require_parts
from octavo.train.sharded_folder import ShardedFolder
from octavo.train.trainer import Trainer, build_model, choose_device, recipe_named, require_memory

RUNAWAY_LOSS = 2 * math.log(VOCABULARY)  # guessing uniformly costs log(256) = 5.5 nats a byte
RUNAWAY_STEPS = 20
STEPS_BETWEEN_READS = 10  # on an accelerator: reading the loss waits for the device


@dataclass
class RunResult:
    """What a run came to.

    Attributes:
        name: the recipe's name.
        steps: steps that the run has in all.
        rows: one for each step done.
        parameters: the model's parameters.
        tokens_per_step: bytes trained on in a step.
        folder: where its files are, or None.
        interrupted: whether it was stopped before its end.
        switches: where its phases began; empty without a schedule.
    """

    name: str
    steps: int
    rows: list[Row] = field(repr=False)
    parameters: int
    tokens_per_step: int
    folder: Path | None = None
    interrupted: bool = False
    switches: list[Switch] = field(default_factory=list, repr=False)

    @property
    def losses(self) -> list[float]:
        """Training loss of each step, nats a byte."""
        return [row.loss for row in self.rows]

    @property
    def validations(self) -> list[tuple[int, float]]:
        """(step, validation loss) wherever one was taken."""
        return [(row.step, row.val_loss) for row in self.rows if not math.isnan(row.val_loss)]

    @property
    def final_validation(self) -> float:
        """Validation loss after the last step; nan for a run that was stopped."""
        return self.rows[-1].val_loss if self.rows and not self.interrupted else math.nan

    @property
    def tokens_per_s(self) -> float:
        """Bytes trained on a second: the median over steps, so neither warming up nor a pause counts."""
        return median(row.tokens_per_s for row in self.rows) if self.rows else math.nan

    @property
    def seconds_per_step(self) -> float:
        """Time of a step, validation not counted."""
        return self.tokens_per_step / self.tokens_per_s


class Recorder:
    """Turns steps into rows: reads their losses from the device now and then, and looks whether they diverge."""

    def __init__(self, tokens_per_step: int, rows: list[Row], on_accelerator: bool) -> None:
        self.rows = rows
        self.every = STEPS_BETWEEN_READS if on_accelerator else 1
        self._tokens = tokens_per_step
        self._pending: list[tuple[int, Tensor, Tensor, float]] = []
        self._since = 0.0

    def restart_clock(self) -> None:
        """What happened until now was not training."""
        self._since = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, lr: float) -> None:
        """A step was launched."""
        self._pending.append((step, loss, norm, lr))

    def read(self) -> list[Row]:
        """Waits for the steps launched since the last time, and returns their rows.

        Raises:
            DivergedError: a loss or the gradients' norm is not finite, or the loss has run away.
        """
        values = [(step, float(loss), float(norm), lr) for step, loss, norm, lr in self._pending]
        speed = self._tokens * len(values) / max(time.perf_counter() - self._since, 1e-9)
        self._pending.clear()
        for step, loss, norm, lr in values:
            for what, value in (("loss", loss), ("norm of the gradients", norm)):
                if not math.isfinite(value):
                    raise DivergedError(f"the {what} became {value} in step {step}")
            self.rows.append(Row(step, loss, lr, speed))
            recent = [row.loss for row in self.rows[-RUNAWAY_STEPS:]]
            if len(recent) == RUNAWAY_STEPS and fmean(recent) > RUNAWAY_LOSS:
                raise DivergedError(f"the loss ran away, to {fmean(recent):.1f} nats a byte at step {step}")
        return self.rows[len(self.rows) - len(values) :]

    def validated(self, loss: float) -> Row:
        """Writes the validation loss into the last row, and returns it."""
        if not math.isfinite(loss):
            raise DivergedError(f"the validation loss became {loss} after step {self.rows[-1].step}")
        self.rows[-1] = replace(self.rows[-1], val_loss=loss)
        return self.rows[-1]

    def seconds_left(self, steps: int) -> float:
        """What the remaining steps will take at the mean pace of the last ones, slow ones and all."""
        pace = fmean(self._tokens / row.tokens_per_s for row in self.rows[-20:])
        return (steps - len(self.rows)) * pace


@dataclass(frozen=True)
class Hooks:
    """What a caller of `run` may hang in.

    Attributes:
        on_model: called once with the model, converted and loaded, before the first step.
        on_step: called with the row of each step, in order.
        should_stop: asked before each step; when true the run saves itself and returns.
        progress: shown what happens.
    """

    on_model: Callable[[GPT], object] = lambda model: None
    on_step: Callable[[Row], object] = lambda row: None
    should_stop: Callable[[], bool] = lambda: False
    progress: Progress = field(default_factory=Silent)


def run(
    config: TrainConfig,
    recipe: str | Recipe | RecipeMap = BASELINE,
    *,
    name: str | None = None,
    corpus: Corpus | None = None,
    hooks: Hooks | None = None,
    ranks: Ranks | None = None,
) -> RunResult:
    """Trains the byte-level GPT with one recipe.

    The same config gives the same losses bit for bit on a CPU, in one piece or resumed; recipes share the initial
    weights and the data order of a seed.

    Args:
        config: all options. With `config.run.out` None nothing is written.
        recipe: a name in `octavo.train.RECIPES` (bf16: the model as it is built), or a Recipe or RecipeMap of your own.
        name: what the run is called, and its folder in `config.run.out` (default: the recipe's, or that of a map's
            default).
        corpus: text already loaded (default: `load_corpus(config.data.data)`).
        hooks: what is called while it runs, on every rank.
        ranks: who trains together under `config.ranks.shard` (default: the ranks of the default process group).

    Returns:
        The run's rows and what they come to.

    Raises:
        ValueError: an unknown recipe.
        TrainError: no such device or data, an unusable folder or checkpoint, divergence.
        RankError: another rank failed or is gone.

    Example:
        >>> from octavo.train import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, run
        >>> tiny = ModelConfig(width=16, layers=1, heads=2, context=16)
        >>> config = TrainConfig(tiny, DataConfig(batch=2, eval_windows=2), OptimizerConfig(steps=3))
        >>> result = run(config, "dynamic")
        >>> len(result.losses), result.final_validation < 6
        (3, True)
    """
    name = name or _name_of(recipe)
    hooks = hooks or Hooks()
    ranks = ranks or ranks_of(config.ranks)
    require_parts(config, ranks)
    with ranks.together():
        corpus = corpus or load_corpus(config.data.data)
        device = _check(config, corpus, ranks)
    _require_same_text(corpus, ranks)
    identity = config.identity() | {"recipe": str(recipe), "text": corpus.digest}
    folder, state = _open(config, name, identity, ranks)
    rows = state.rows if state else []
    tokens = config.data.batch * config.model.context
    path = folder.path if folder is not None else None
    result = RunResult(name, config.optimizer.steps, rows, config.model.parameters, tokens, path)
    if state is not None and state.schedule:
        result.switches = [Switch(**found) for found in state.schedule["switches"]]
    if len(rows) < result.steps:
        batches = Batches(corpus, config.model.context, config.data.batch, config.run.seed)
        with ranks.together():
            model = build_model(config.model, recipe, config.run.seed, config.state).to(device)
        with lost_ranks():
            trainer = Trainer(config, model, batches, ranks, recipe_named(recipe))
        if isinstance(folder, ShardedFolder) and state is not None:
            trainer.load_parts(state)
            folder.load_parts(trainer.called, trainer.optimizer)
        elif state is not None:
            trainer.load(state)
        _Session(trainer, result, folder, identity, hooks).run()
    return result


def _name_of(recipe: str | Recipe | RecipeMap) -> str:
    if isinstance(recipe, str):
        return check_recipe(recipe)
    return recipe.default.name if isinstance(recipe, RecipeMap) else recipe.name


def _check(config: TrainConfig, corpus: Corpus, ranks: Ranks) -> torch.device:
    """The device, when the model and its windows fit it and the text."""
    device = choose_device(device_name(config))
    if device.type == "cuda" and config.ranks.shard != ALONE:
        torch.cuda.set_device(device)
    require_memory(config, device, ranks.size)
    corpus.require(config.model)
    return device


def _require_same_text(corpus: Corpus, ranks: Ranks) -> None:
    first = ranks.first(lambda: corpus.digest)
    with ranks.together():
        if corpus.digest != first:
            raise TrainError(
                f"{corpus.description} is another text here than on rank 0: give all ranks the same --data"
            )


def _open(config: TrainConfig, name: str, identity: Identity, ranks: Ranks) -> tuple[RunFolder | None, State | None]:
    """The run's folder, and the checkpoint to go on from."""
    if config.run.out is None:
        return None, None
    path = config.run.out / name
    folder = RunFolder(path) if config.ranks.shard == ALONE else ShardedFolder(path, ranks)
    folder.open(config.run.resume)
    return folder, folder.load(identity) if config.run.resume else None


def compare(
    config: TrainConfig,
    recipes: Iterable[str],
    *,
    corpus: Corpus | None = None,
    hooks: Hooks | None = None,
) -> list[RunResult]:
    """Trains with each recipe in turn: the same initial weights, the same data in the same order.

    Args:
        config: all options; each run has its folder, named like its recipe, in `config.run.out`. When resumed, the runs
            that are finished are read and not trained again.
        recipes: names in `octavo.train.RECIPES`; a name given twice counts once.
        corpus: as for `run`.
        hooks: as for `run`; `on_model` is called for each recipe.

    Returns:
        One result a recipe, in order; after an interruption the last one is the interrupted run's.
    """
    names = [check_recipe(name) for name in dict.fromkeys(recipes)]
    require_one_process(config.ranks)
    corpus = corpus or load_corpus(config.data.data)
    _check(config, corpus, Ranks())
    for name in names:  # before the first run: nothing trains for minutes to fail in the second
        _open(config, name, config.identity() | {"recipe": name, "text": corpus.digest}, Ranks())
    hooks = hooks or Hooks()
    results = []
    for index, name in enumerate(names):
        hooks.progress.message(f"run {index + 1} of {len(names)}: {name}")
        results.append(run(config, name, corpus=corpus, hooks=hooks))
        if results[-1].interrupted:
            break
    return results


class _Session:
    """A run under way."""

    def __init__(
        self,
        trainer: Trainer,
        result: RunResult,
        folder: RunFolder | None,
        identity: Identity,
        hooks: Hooks,
    ) -> None:
        self.trainer = trainer
        self.result = result
        self.folder = folder
        self.identity = identity
        self.hooks = hooks
        self.recorder = Recorder(result.tokens_per_step, result.rows, trainer.device.type != "cpu")

    def run(self) -> None:
        """From the last row to the end, or until it is stopped."""
        self.hooks.on_model(self.trainer.model)
        if self.folder is not None:
            self.folder.start_log(self.result.rows)
        self.hooks.progress.begin(self.result.name, len(self.result.rows), self.result.steps)
        try:
            with lost_ranks():
                self._steps()
        except DivergedError as error:
            raise DivergedError(f"{self.result.name} diverged: {error}{self._kept()}; try a lower --lr") from error
        except RankError as error:
            kept = self._kept()
            raise RankError(f"{error}{kept}{'; add --resume to go on' if kept else ''}") from error
        finally:
            self.hooks.progress.end()
            if self.folder is not None:
                self.folder.close()

    def _kept(self) -> str:
        if self.folder is None or self.folder.saved_step is None:
            return ""
        return f"; the checkpoint of step {self.folder.saved_step} is kept in {self.folder.path}"

    def _steps(self) -> None:
        intervals, steps = self.trainer.config.run, self.result.steps
        self.recorder.restart_clock()
        for step in range(len(self.result.rows), steps):
            if self.trainer.ranks.any(self.hooks.should_stop()):
                self.result.interrupted = True
                self._read(validate=False, save=True)
                return
            self.recorder.add(step + 1, *self.trainer.step(step))
            self._note_switches()
            done = step + 1
            validate = done == steps or _due(done, intervals.eval_every)
            save = done == steps or _due(done, intervals.checkpoint_every)
            if validate or save or _due(done, self.recorder.every):
                self._read(validate, save)

    def _note_switches(self) -> None:
        """Says which phases have begun."""
        if self.trainer.schedule is None:
            return
        known = len(self.result.switches)
        self.result.switches = list(self.trainer.schedule.switches)
        for switch in self.result.switches[max(known, 1) :]:
            self.hooks.progress.message(f"{self.result.name}  step {switch.step}: {switch.name}, since {switch.reason}")

    def _read(self, validate: bool, save: bool) -> None:
        """Makes rows of the steps launched since the last time, and writes and shows them."""
        new = self.recorder.read()
        if validate:
            new[-1] = self.recorder.validated(self.trainer.validate())
        if self.folder is not None:
            self.folder.append(new)
        for row in new:
            self.hooks.on_step(row)
        if new:
            self.hooks.progress.update(new[-1], self.recorder.seconds_left(self.result.steps))
        rows = self.result.rows
        if save and isinstance(self.folder, ShardedFolder):
            trainer = self.trainer
            self.folder.save_parts(trainer.called, trainer.optimizer, self.identity, rows, trainer.parts())
        elif save and self.folder is not None:
            self.folder.save(self.trainer.state(len(rows), self.identity, rows))
        self.recorder.restart_clock()


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
