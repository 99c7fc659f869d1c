"""Runs, one or several to compare: train, write a log and checkpoints, resume exactly, read a trained model."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import octavo
from octavo.distributed.ranks import RankError, Ranks, lost_ranks
from octavo.kernels.capability import fast_dtype
from octavo.scaling.recipe import Recipe
from octavo.scaling.recipe_map import RecipeMap
from octavo.schedule import Switch
from octavo.train.checkpoint import CHECKPOINT, SHARDED, Content, Identity, RunFolder, ShardedFolder, StepRow
from octavo.train.config import (
    ALONE,
    BASELINE,
    RECIPES,
    DivergedError,
    InspectConfig,
    ModelConfig,
    RunCheckpointError,
    StateConfig,
    TrainConfig,
    TrainError,
    check_recipe,
    train_errors,
)
from octavo.train.data import Corpus, load_corpus
from octavo.train.model import GPT
from octavo.train.progress import Progress, RunRecorder, in_words
from octavo.train.shard import device_name, ranks_of, require_even_batches, require_one_process
from octavo.train.trainer import Trainer, build_model, choose_device, recipe_named, require_memory, settle_dtype

FORECAST_AFTER = 4  # steps, as the first ones are slow

RECORD = "inspect"  # the record's folder in a run's folder


class Inspection:
    """What `--inspect` adds to a run: a record in its folder, and where a fault came from.

    Args:
        trainer: of a model with FP8 layers, loaded.
        folder: the run's; without one there is no record.
        config: how often to record.
        step: steps done before; a run that begins anew deletes the record that a killed one left.
    """

    def __init__(self, trainer: Trainer, folder: Path | None, config: InspectConfig, step: int) -> None:
        ranks, group = trainer.ranks, trainer.ranks.group
        self._recorder = None
        if folder is not None:
            with ranks.together():
                if step == 0 and ranks.rank == 0:
                    shutil.rmtree(folder / RECORD, ignore_errors=True)
            self._recorder = octavo.inspect.Recorder(
                trainer.model,
                folder / RECORD,
                config.inspect_every,
                optimizer=trainer.optimizer,
                schedule=trainer.schedule,
                step=step,
                group=group,
            )
        self._trace = octavo.inspect.trace_faults(trainer.model, raises=False, step=step, group=group)

    def step(self, loss: Tensor, norm: Tensor, lr: float) -> None:
        """Record a step that was launched."""
        self._trace.step(loss, norm)
        if self._recorder is not None:
            self._recorder.step(loss, norm, lr=lr)

    def close(self) -> str:
        """Write what is left, and leave the model as it was; return where the first fault was, or ""."""
        self._trace.close()
        fault = self._trace.fault
        if self._recorder is not None:
            if fault is not None:
                self._recorder.event("fault", str(fault))
            self._recorder.close()
        return "" if fault is None else fault.where


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        name: the recipe's name; the baseline's is that of its dtype, bf16 or float32.
        steps: how many steps the run has in all.
        rows: one for each step done.
        parameters: the model's parameters.
        tokens_per_step: bytes trained on in a step.
        dtype: bfloat16 or float32, of what is not FP8.
        folder: where its files are, or None.
        interrupted: whether it was stopped before its end.
        switches: where its phases began; empty without a schedule.
    """

    name: str
    steps: int
    rows: list[StepRow] = field(repr=False)
    parameters: int
    tokens_per_step: int
    dtype: str
    folder: Path | None = None
    interrupted: bool = False
    switches: list[Switch] = field(default_factory=list, repr=False)

    @property
    def losses(self) -> list[float]:
        """Training loss of each step, nats a byte."""
        return [row.loss for row in self.rows]

    @property
    def validations(self) -> list[tuple[int, float]]:
        """(step, validation loss) for each validation."""
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


@dataclass(frozen=True)
class Hooks:
    """Callbacks of `run`.

    Attributes:
        on_model: called once with the model, converted and loaded, before the first step.
        on_step: called with the row of each step, in order.
        should_stop: called before each step; if it returns true, the run saves itself and returns.
        progress: shows what happens.
    """

    on_model: Callable[[GPT], object] = lambda model: None
    on_step: Callable[[StepRow], object] = lambda row: None
    should_stop: Callable[[], bool] = lambda: False
    progress: Progress = field(default_factory=Progress)


def run(
    config: TrainConfig,
    recipe: str | Recipe | RecipeMap = BASELINE,
    *,
    name: str | None = None,
    corpus: Corpus | None = None,
    hooks: Hooks | None = None,
    ranks: Ranks | None = None,
) -> RunResult:
    """Train the byte-level GPT with one recipe.

    On a CPU the same config gives the same losses bit for bit, in one piece or resumed; recipes share the initial
    weights and the data order of a seed.

    Args:
        config: all options. With `config.run.out` None nothing is written.
        recipe: a name in `octavo.train.RECIPES`, or a Recipe or RecipeMap of your own. `baseline` is the model as it is
            built, in the run's dtype; `bf16` and `float32` are the same with that dtype.
        name: the name of the run and of its folder in `config.run.out` (default: the recipe's name, or that of a map's
            default; for the baseline bf16 or float32).
        corpus: text already loaded (default: `load_corpus(config.data.data)`).
        hooks: callbacks of the run, on every rank.
        ranks: the ranks that train together under `config.ranks.shard` (default: those of the default process group).

    Returns:
        The run's result.

    Raises:
        ValueError: an unknown recipe.
        TrainError: a recipe and a dtype that contradict each other, no such device or data, an unusable folder or
            checkpoint, divergence.
        RankError: another rank failed or is gone.

    Example:
        >>> from octavo.train import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, run
        >>> tiny = ModelConfig(width=16, layers=1, heads=2, context=16)
        >>> config = TrainConfig(tiny, DataConfig(batch=2, eval_windows=2), OptimizerConfig(steps=3))
        >>> result = run(config, "dynamic")
        >>> len(result.losses), result.final_validation < 6
        (3, True)
    """
    if isinstance(recipe, str):
        check_recipe(recipe)
    shared = _Shared(config, [recipe], corpus, hooks or Hooks(), ranks or ranks_of(config.ranks))
    if name is None:
        one = recipe.default if isinstance(recipe, RecipeMap) else recipe
        name = shared.config.called(one) if isinstance(one, str) else one.name
    with shared.opened:
        opened = _Run(shared, name, recipe)
        shared.say_first([name])
        return opened.train()


def compare(
    config: TrainConfig,
    recipes: Iterable[str],
    *,
    corpus: Corpus | None = None,
    hooks: Hooks | None = None,
) -> list[RunResult]:
    """Train with each recipe in turn: the same initial weights, the same data in the same order.

    Args:
        config: all options; each run has its folder, named after its recipe, in `config.run.out`. A resumed comparison
            reads the finished runs and does not train them again.
        recipes: names in `octavo.train.RECIPES`; a name given twice counts once.
        corpus: as for `run`.
        hooks: as for `run`; `on_model` is called for each recipe.

    Returns:
        One result for each recipe, in order; after an interruption the last one is the interrupted run's.
    """
    recipes = [check_recipe(name) for name in recipes]
    require_one_process(config.ranks)
    shared = _Shared(config, recipes, corpus, hooks or Hooks(), Ranks())
    names = list(dict.fromkeys(shared.config.called(name) for name in recipes))
    for name in names:
        shared.rehearse(name)
    results = []
    with shared.opened:
        # all folders are opened before the first run, so that the second does not fail after minutes of training
        ahead = [len(_Run(shared, name, name).steps_ahead) for name in names]
        shared.say_first(names)
        for index, name in enumerate(names):
            shared.progress.message(f"run {index + 1} of {len(names)}: {name}")
            later = [steps for steps in ahead[index + 1 :] if steps]
            results.append(_Run(shared, name, name).train(later))
            if results[-1].interrupted:
                break
    return results


class _Shared:
    """What the runs of a comparison have in common. The config's dtype is not "auto" any more."""

    def __init__(
        self, config: TrainConfig, recipes: Collection[object], corpus: Corpus | None, hooks: Hooks, ranks: Ranks
    ) -> None:
        """Load the text, settle the dtype, and check that the model fits the device and the text is long enough."""
        self.hooks, self.progress, self.ranks = hooks, hooks.progress, ranks
        self.opened = contextlib.ExitStack()  # the runs' folders, until this is closed
        self._folders: set[Path] = set()
        require_even_batches(config, ranks)
        with train_errors():
            config.require_phases(recipes)
        with ranks.together():
            self.device = choose_device(device_name(config))
            if self.device.type == "cuda" and config.ranks.shard != ALONE:
                torch.cuda.set_device(self.device)
            require_memory(config, self.device, ranks.size)
        dtype = ranks.first(lambda: settle_dtype(config, self.device, recipes).run.dtype)
        self.config = replace(config, run=replace(config.run, dtype=dtype))
        with ranks.together():
            self.corpus = corpus = corpus or load_corpus(config.data.data)
            corpus.require(config.model)
        first = ranks.first(lambda: corpus.digest)
        with ranks.together():
            if corpus.digest != first:
                raise TrainError(
                    f"{corpus.description} is another text here than on rank 0: give all ranks the same --data"
                )

    def open(self, folder: RunFolder) -> None:
        """Open a run's folder, unless that was done."""
        if folder.path not in self._folders:
            self.opened.enter_context(folder.open(bool(self.config.run.resume)))
            self._folders.add(folder.path)

    def rehearse(self, name: str) -> None:
        """Raise TrainError for options that a recipe can't have; a tiny model finds that before minutes of training."""
        tiny = replace(self.config.model, width=2, layers=1, heads=1, context=1)
        model = build_model(tiny, name, 0, self.config.state).to(self.device)
        Trainer(self.config, model, self.corpus, Ranks(), recipe_named(name))

    def say_first(self, names: Collection[str]) -> None:
        """Say what is trained, where, and in which dtype."""
        dtype, each = self.config.run.dtype, " each" if len(names) > 1 else ""
        if fast_dtype(self.device) == torch.bfloat16:
            why = f"--dtype {'float32' if dtype == 'bfloat16' else 'bfloat16'} decides otherwise"
        elif dtype == "float32":
            why = "this CPU has no instructions for bfloat16; --dtype bfloat16 decides otherwise"
        else:
            why = "this CPU has no instructions for it: --dtype float32 is faster"
        self.progress.message(
            f"{', '.join(names)}: {self.config.optimizer.steps} steps{each} on {self.device}; "
            f"what is not FP8 is {dtype} ({why})"
        )


class _Run:
    """One run, whose folder is open; if it is resumed, its checkpoint is read."""

    def __init__(self, shared: _Shared, name: str, recipe: str | Recipe | RecipeMap) -> None:
        config = shared.config
        self.shared, self.recipe, self.progress = shared, recipe, shared.progress
        called = config.called(recipe) if isinstance(recipe, str) else str(recipe)
        self.identity: Identity = config.identity() | {"recipe": called, "text": shared.corpus.digest}
        self.folder: RunFolder | None = None
        self.saved: Content | None = None
        if config.run.out is not None:
            path = config.run.out / name
            self.folder = RunFolder(path) if config.ranks.shard == ALONE else ShardedFolder(path, shared.ranks, config)
            shared.open(self.folder)
            self.saved = self.folder.load(self.identity) if config.run.resume else None
        self.rows: list[StepRow] = self.saved["rows"] if self.saved is not None else []
        steps, tokens = config.optimizer.steps, config.data.batch * config.model.context
        self.result = RunResult(name, steps, self.rows, config.model.parameters, tokens, config.run.dtype)
        self.result.folder = self.folder.path if self.folder is not None else None
        if self.saved is not None and self.saved.get("schedule"):
            self.result.switches = [Switch(**found) for found in self.saved["schedule"]["switches"]]

    @property
    def steps_ahead(self) -> range:
        """The steps that are left; a run's first step is 0."""
        return range(len(self.rows), self.result.steps)

    def train(self, later: Collection[int] = ()) -> RunResult:
        """Train to the end, or until the run is stopped; `later`: the steps of each of the runs after it."""
        if not self.steps_ahead:
            return self.result
        config, ranks, device = self.shared.config, self.shared.ranks, self.shared.device
        with ranks.together():
            model = build_model(config.model, self.recipe, config.run.seed, config.state).to(device)
        with lost_ranks():
            self.trainer = Trainer(config, model, self.shared.corpus, ranks, recipe_named(self.recipe))
        if self.folder is not None and self.saved is not None:
            self.trainer.load(self.folder, self.saved)
        self.later, self.forecast_at = later, len(self.rows) + FORECAST_AFTER
        self.recorder = RunRecorder(config, self.rows, device.type != "cpu")
        self.shared.hooks.on_model(model)
        if self.folder is not None:
            self.folder.write_options(config, str(self.identity["recipe"]))
            self.folder.start_log(self.rows)
        self.inspection = self._inspected()
        self.progress.begin(self.result.name, len(self.rows), self.result.steps)
        try:
            with lost_ranks():
                self._steps()
            if self.folder is not None:
                self.folder.finish()
        except DivergedError as error:
            why = f"{error}{self._end_inspection()}{self._kept()}"
            raise DivergedError(f"{self.result.name} diverged: {why}; try a lower --lr") from error
        except RankError as error:
            kept = self._kept()
            raise RankError(f"{error}{kept}{'; add --resume to go on' if kept else ''}") from error
        finally:
            self.progress.end()
            self._end_inspection()
        return self.result

    def _inspected(self) -> Inspection | None:
        """The run's Inspection, if the options ask for one and the model has layers in FP8."""
        config, recipe = self.shared.config, recipe_named(self.recipe)
        if not config.inspect.inspect:
            return None
        if recipe is None or (getattr(recipe, "is_high_precision", False) and not config.state.schedule):
            self.progress.message(f"{self.result.name} has no layers in FP8: nothing of it is recorded")
            return None
        if self.result.folder is not None:
            self.progress.message(
                f"{self.result.name} is recorded: octavo inspect {self.result.folder} says what it shows"
            )
        return Inspection(self.trainer, self.result.folder, config.inspect, len(self.rows))

    def _end_inspection(self) -> str:
        """End the inspection; return where the first fault was, or ""."""
        ended, self.inspection = self.inspection, None
        found = "" if ended is None else ended.close()
        return f"; {found}" if found else ""

    def _kept(self) -> str:
        if self.folder is None:
            return ""
        try:
            self.folder.finish()
        except RunCheckpointError as error:
            return f"; {error}"
        if self.folder.saved_step is None:
            return ""
        return f"; the checkpoint of step {self.folder.saved_step} is kept in {self.folder.path}"

    def _steps(self) -> None:
        intervals, steps = self.shared.config.run, self.result.steps
        self.recorder.restart_clock()
        for step in self.steps_ahead:
            if self.shared.ranks.any(self.shared.hooks.should_stop()):
                self.result.interrupted = True
                self._read(validate=False, save=True)
                return
            done = step + 1
            launched = self.trainer.step(step)
            self.recorder.add(done, *launched)
            if self.inspection is not None:
                self.inspection.step(*launched)
            self._note_switches()
            validate = done == steps or _due(done, intervals.eval_every)
            save = done == steps or _due(done, intervals.checkpoint_every)
            if validate or save or _due(done, self.recorder.every):
                self._read(validate, save)
        if self.trainer.busiest is not None:
            load = f"{float(self.trainer.busiest):.2f} times its block's mean"
            self.progress.message(f"{self.result.name}: in the last step the busiest expert had {load}")

    def _note_switches(self) -> None:
        """Say which phases have begun."""
        if self.trainer.schedule is None:
            return
        before = len(self.result.switches)
        self.result.switches = list(self.trainer.schedule.switches)
        for switch in self.result.switches[max(before, 1) :]:
            self.progress.message(f"{self.result.name}  step {switch.step}: {switch.name}, since {switch.reason}")

    def _read(self, validate: bool, save: bool) -> None:
        """Wait for the steps launched since the last time, and write and show their rows."""
        new = self.recorder.read()
        if validate:
            since = time.perf_counter()
            loss = self.trainer.validate()
            new[-1] = self.recorder.validated(loss, time.perf_counter() - since)
        if self.folder is not None:
            self.folder.append(new)
        for row in new:
            self.shared.hooks.on_step(row)
        if new:
            left = self.recorder.seconds_left(len(self.steps_ahead) + sum(self.later))
            if len(self.rows) - len(new) < self.forecast_at <= len(self.rows):
                runs = f"{1 + len(self.later)} runs" if self.later else "this run"
                self.progress.message(f"about {in_words(left)} for {runs}")
            self.progress.update(new[-1], left)
        if save and self.folder is not None:
            self.trainer.save(self.folder, self.identity, self.rows)
        self.recorder.restart_clock()


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def run_in(path: Path) -> Path:
    """The run's folder in a folder with just one run, as `octavo train` makes it; else the path itself."""
    runs = [] if RunFolder(path).holds_run() else _runs_in(path)
    return runs[0] if len(runs) == 1 else path


def _runs_in(path: Path) -> list[Path]:
    return sorted(found.parent for name in (CHECKPOINT, SHARDED) for found in path.glob(f"*/{name}"))


def trained_model(path: Path) -> GPT:
    """The model that a run trained, in evaluation mode, with its recipe and delayed state.

    Args:
        path: the run's folder, a folder with this run alone, or its checkpoint.pt (not for a run on many ranks).

    Raises:
        RunCheckpointError: there is no checkpoint that can be read.
    """
    path = run_in(path)
    folder = path.parent if path.name == CHECKPOINT else path
    sharded = (folder / SHARDED).is_dir() and not (folder / CHECKPOINT).exists()
    kept = ShardedFolder(folder) if sharded else RunFolder(folder)
    content = kept.load(None) if sharded or kept.checkpoint.is_file() else None
    if content is None and not path.exists():
        raise RunCheckpointError(f"{path} does not exist: give a run's folder or its {CHECKPOINT}")
    if content is None:
        runs = _runs_in(folder)
        several = f"holds {len(runs)} runs: choose one of {', '.join(map(str, runs))}"
        none = f"is no run of octavo: give a run's folder or its {CHECKPOINT}"
        raise RunCheckpointError(f"{path} {several if runs else none}")
    identity = content["identity"]
    recipe = identity.get("recipe")
    if recipe not in RECIPES:
        raise RunCheckpointError(f"{folder} was trained with a recipe of its own, {recipe}: build its model in Python")
    # a checkpoint of many ranks can only be read by a model with the same storage of weights
    names = [name for name in StateConfig.__dataclass_fields__ if sharded and name in identity]
    try:
        # an older checkpoint has no experts
        sizes = ModelConfig(**{name: identity[name] for name in ModelConfig.__dataclass_fields__ if name in identity})
        model = build_model(sizes, recipe, 0, StateConfig(**{name: identity[name] for name in names}))
        kept.fill(model, None)
    except (KeyError, RuntimeError, ValueError) as error:
        raise RunCheckpointError(f"{kept.checkpoint} does not hold this octavo's model: {error}") from error
    return model.eval()
