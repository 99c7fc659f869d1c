"""Train one run, or several to compare: write a log and checkpoints, resume exactly, read a trained model."""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import octavo
from octavo.distributed.ranks import RankError, Ranks
from octavo.kernels.capability import fast_dtype
from octavo.reading import read_json
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.schedule import Switch
from octavo.train.checkpoint import Content, Identity, RunFolder, StepRow
from octavo.train.config import (
    ALONE,
    BASELINE,
    RECIPES,
    DivergedError,
    ModelConfig,
    RunCheckpointError,
    StateConfig,
    TrainConfig,
    TrainError,
    build,
    check_recipe_name,
    chosen_recipe,
)
from octavo.train.data import Corpus, load_corpus
from octavo.train.model import GPT
from octavo.train.progress import Progress, StepReader, in_words
from octavo.train.shard import device_name, ranks_of, require_even_batches, require_one_process
from octavo.train.trainer import Trainer, build_model, choose_device, recipe_named, require_memory, settle_dtype

FORECAST_AFTER = 4  # steps, as the first ones are slow

RECORD = "inspect"  # the record's folder in a run's folder


@dataclass
class RunResult:
    """The result of a run."""

    name: str  # the recipe's; the baseline's is that of its dtype, bf16 or float32
    steps: int  # in all
    rows: list[StepRow] = field(repr=False)  # of the steps done
    parameters: int  # how many numbers the model has
    tokens_per_step: int  # bytes trained on
    dtype: str  # bfloat16 or float32, of what is not FP8
    folder: Path | None = None  # where its files are
    interrupted: bool = False  # stopped before its end
    switches: list[Switch] = field(default_factory=list, repr=False)  # where its phases began

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
    """Callbacks of `run`."""

    on_model: Callable[[GPT], object] = lambda model: None  # with the model, loaded, before the first step
    on_step: Callable[[StepRow], object] = lambda row: None  # with the row of each step, in order
    should_stop: Callable[[], bool] = lambda: False  # before each step; if true, the run saves itself and returns
    progress: Progress = field(default_factory=Progress)  # shows what happens


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
        recipe: a name in `octavo.train.RECIPES`, a Recipe or RecipeMap, or a file of recipes by layer. `baseline` is
            the model as it is built, in the run's dtype; `bf16` and `float32` are the same with that dtype.
        name: the name of the run and of its folder in `config.run.out` (default: the recipe's name, or that of a map's
            default; for the baseline bf16 or float32).
        corpus: text already loaded (default: `load_corpus(config.data.data)`).
        hooks: callbacks of the run, on every rank.
        ranks: the ranks that train together under `config.ranks.shard` (default: those of the default process group).

    Raises:
        ValueError: an unknown recipe.
        TrainError: options, device, data or folder can't be used, or the run diverges.
        RankError: another rank failed or is gone.

    Example:
        >>> from octavo.train import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, run
        >>> tiny = ModelConfig(width=16, layers=1, heads=2, context=16)
        >>> config = TrainConfig(tiny, DataConfig(batch=2, eval_windows=2), OptimizerConfig(steps=3))
        >>> result = run(config, "dynamic")
        >>> len(result.losses), result.final_validation < 6
        (3, True)
    """
    recipe = chosen_recipe(recipe)
    setup = _Setup(config, [recipe], corpus, hooks or Hooks(), ranks or ranks_of(config.ranks))
    name = name or setup.config.called(recipe)
    with setup.run_folders:
        open_run = _OpenRun(setup, name, recipe)
        setup.say_first([name])
        return open_run.train()


def compare(
    config: TrainConfig, recipes: Iterable[str], *, corpus: Corpus | None = None, hooks: Hooks | None = None
) -> list[RunResult]:
    """Train with each recipe in turn: the same initial weights, the same data in the same order.

    Args:
        config: all options; each run has its folder, named after its recipe, in `config.run.out`. A resumed comparison
            reads the finished runs and does not train them again.
        recipes: names in `octavo.train.RECIPES`; a name given twice counts once.
        corpus, hooks: as for `run`; `on_model` is called for each recipe.

    Returns:
        One result for each recipe, in order; after an interruption the last one is the interrupted run's.
    """
    recipes = [check_recipe_name(name) for name in recipes]
    require_one_process(config.ranks)
    setup = _Setup(config, recipes, corpus, hooks or Hooks(), Ranks())
    names = list(dict.fromkeys(setup.config.called(name) for name in recipes))
    for name in names:
        setup.rehearse(name)
    results: list[RunResult] = []
    with setup.run_folders:
        # all folders are opened before the first run, so that the second does not fail after minutes of training
        open_runs = [_OpenRun(setup, name, name) for name in names]
        setup.say_first(names)
        for index, name in enumerate(names):
            setup.progress.message(f"run {index + 1} of {len(names)}: {name}")
            results.append(open_runs.pop(0).train(open_runs))  # nothing else holds the run, so its model is freed
            if results[-1].interrupted:
                break
    return results


class _Setup:
    """The config, text, device, ranks and hooks that all runs of a comparison use. The dtype is never "auto"."""

    def __init__(
        self, config: TrainConfig, recipes: Collection[object], corpus: Corpus | None, hooks: Hooks, ranks: Ranks
    ) -> None:
        """Choose the device, settle the dtype and load the text, together with all ranks.

        TrainError if the options, the device or the text can't be used, or ranks have different texts.
        """
        self.hooks, self.progress, self.ranks = hooks, hooks.progress, ranks
        self.run_folders = contextlib.ExitStack()  # has the runs' folders locked until it is closed
        require_even_batches(config, ranks)
        config.require_phases(recipes)
        with ranks.together():
            self.device = choose_device(device_name(config))
            if self.device.type == "cuda" and config.ranks.shard != ALONE:
                torch.cuda.set_device(self.device)
            require_memory(config, self.device, ranks.size)
        dtype = ranks.from_rank_0(lambda: settle_dtype(config, self.device, recipes).run.dtype)
        self.config = replace(config, run=replace(config.run, dtype=dtype))
        with ranks.together():
            self.corpus = corpus = corpus or load_corpus(config.data.data)
            corpus.require(config.model)
        digest_of_rank_0 = ranks.from_rank_0(lambda: corpus.digest)
        with ranks.together():
            if corpus.digest != digest_of_rank_0:
                raise TrainError(
                    f"{corpus.description} is another text here than on rank 0: give all ranks the same --data"
                )

    def rehearse(self, name: str) -> None:
        """Raise TrainError for options that a recipe can't have, by a tiny model: before minutes of training."""
        tiny = replace(self.config.model, width=2, layers=1, heads=1, context=1)
        model = build_model(tiny, name, 0, self.config.state).to(self.device)
        Trainer(self.config, model, self.corpus, Ranks(), recipe_named(name))

    def say_first(self, names: Collection[str]) -> None:
        """Show which runs are trained, on which device, and in which dtype."""
        dtype = self.config.run.dtype
        reason = "" if fast_dtype(self.device) == torch.bfloat16 else "this CPU has no instructions for bfloat16; "
        other = "float32" if dtype == "bfloat16" else "bfloat16"
        self.progress.message(
            f"{', '.join(names)}: {self.config.optimizer.steps} steps{' each' * (len(names) > 1)} on {self.device}; "
            f"what is not FP8 is {dtype} ({reason}--dtype {other} decides otherwise)"
        )


class _OpenRun:
    """One run, with its folder locked; if it is resumed, its checkpoint is read.

    ``train`` sets the attributes of a run that trains: trainer, reader, inspection, and those of the forecast.
    """

    def __init__(self, setup: _Setup, name: str, recipe: str | Recipe | RecipeMap) -> None:
        config = setup.config
        self.setup, self.recipe, self.progress = setup, recipe, setup.progress
        recipe_text = config.called(recipe) if isinstance(recipe, str) else octavo.recipes.to_json(recipe)
        self.identity: Identity = config.identity() | {"recipe": recipe_text, "text": setup.corpus.digest}
        self.folder: RunFolder | None = None
        self.saved: Content = {}
        if config.run.out is not None:
            self.folder = RunFolder(config.run.out / name, setup.ranks, config)
            setup.run_folders.enter_context(self.folder.open(bool(config.run.resume)))
            self.saved = (self.folder.load(self.identity) if config.run.resume else None) or {}
        self.rows: list[StepRow] = self.saved.get("rows", [])
        tokens = config.data.batch * config.model.context
        facts: Any = {"parameters": config.model.parameters, "tokens_per_step": tokens, "dtype": config.run.dtype}
        facts["folder"] = None if self.folder is None else self.folder.path
        facts["switches"] = [Switch(**values) for values in self.saved.get("schedule", {}).get("switches", ())]
        self.result = RunResult(name, config.optimizer.steps, self.rows, **facts)

    @property
    def steps_ahead(self) -> range:
        """The steps that are not done yet; a run's first step is 0."""
        return range(len(self.rows), self.result.steps)

    def train(self, later_runs: Sequence[_OpenRun] = ()) -> RunResult:
        """Train to the end, or until the run is stopped; `later_runs`: the runs after it."""
        if not self.steps_ahead:
            return self.result
        config, ranks, device = self.setup.config, self.setup.ranks, self.setup.device
        with ranks.together():
            model = build_model(config.model, self.recipe, config.run.seed, config.state).to(device)
            if self.saved.get("separate_splits"):
                octavo.nn.separate_splits(model)
        with Ranks.as_rank_errors():
            self.trainer = Trainer(config, model, self.setup.corpus, ranks, recipe_named(self.recipe))
        if self.folder is not None and self.saved:
            self.trainer.load(self.folder, self.saved)
        self.later_steps = [len(run.steps_ahead) for run in later_runs if run.steps_ahead]
        self.forecast_at = len(self.rows) + FORECAST_AFTER
        self.reader = StepReader(config, self.rows, device.type != "cpu")
        self.setup.hooks.on_model(model)
        if self.folder is not None:
            self.folder.write_options(config, str(self.identity["recipe"]))
            self.folder.start_log(self.rows)
        self.inspection = _Inspection(self)
        self.progress.begin(self.result.name, self.result.steps)
        try:
            with Ranks.as_rank_errors():
                self._steps()
            if self.folder is not None:
                self.folder.finish()
        except DivergedError as error:
            reason = f"{error}{self.inspection.close()}{self._checkpoint_note()}; try a lower --lr"
            raise DivergedError(f"{self.result.name} diverged: {reason}{self.inspection.command}") from error
        except RankError as error:
            note = self._checkpoint_note()
            raise RankError(f"{error}{note}{'; add --resume to go on' if note else ''}") from error
        finally:
            self.inspection.close()
        return self.result

    def _checkpoint_note(self) -> str:
        if self.folder is None:
            return ""
        try:
            self.folder.finish()
        except RunCheckpointError as error:
            return f"; {error}"
        step, path = self.folder.saved_step, self.folder.path
        return "" if step is None else f"; the checkpoint of step {step} is kept in {path}"

    def _steps(self) -> None:
        intervals, steps = self.setup.config.run, self.result.steps
        self.reader.restart_clock()
        for step in self.steps_ahead:
            if self.setup.ranks.any(self.setup.hooks.should_stop()):
                self.result.interrupted = True
                self._read(validate=False, save=True)
                return
            done = step + 1
            numbers = self.trainer.step(step)
            self.reader.add(done, *numbers)
            self.inspection.step(*numbers)
            self._note_switches()
            validate = done == steps or _due(done, intervals.eval_every)
            save = done == steps or _due(done, intervals.checkpoint_every)
            if validate or save or _due(done, self.reader.every):
                self._read(validate, save)

    def _note_switches(self) -> None:
        """Show the phases that have begun since the last call, all but the run's first."""
        if self.trainer.schedule is None:
            return
        switches_shown = len(self.result.switches)
        self.result.switches = list(self.trainer.schedule.switches)
        for switch in self.result.switches[max(switches_shown, 1) :]:
            self.progress.message(f"{self.result.name}  step {switch.step}: {switch.name}, since {switch.reason}")

    def _read(self, validate: bool, save: bool) -> None:
        """Wait for the steps launched since the last call, write and show their rows; validate and save if told to."""
        new = self.reader.read()
        if validate:
            new[-1] = self.reader.validated(self.trainer.validate())
        if self.folder is not None:
            self.folder.append(new)
        for row in new:
            self.setup.hooks.on_step(row)
        if new:
            seconds_left = self.reader.seconds_left(len(self.steps_ahead) + sum(self.later_steps))
            if len(self.rows) - len(new) < self.forecast_at <= len(self.rows):
                runs = f"{1 + len(self.later_steps)} runs" if self.later_steps else "this run"
                self.progress.message(f"about {in_words(seconds_left)} for {runs}")
            self.progress.update(new[-1], seconds_left)
        if save and self.folder is not None:
            self.trainer.save(self.folder, self.identity, self.rows)
        self.reader.restart_clock()


class _Inspection:
    """The recorder and fault trace of a run with `--inspect` and layers in FP8; a record needs a folder."""

    def __init__(self, run: _OpenRun) -> None:
        """Begin to record a run whose model is loaded; do nothing without the option or without layers in FP8."""
        self._recorder: octavo.inspect.Recorder | None = None
        self._trace: octavo.inspect.FaultTrace | None = None
        self.command = ""  # "; " and the command that reads the record, if there is one
        config, recipe, folder = run.setup.config, recipe_named(run.recipe), run.result.folder
        if not config.inspect.inspect:
            return
        if recipe is None or (getattr(recipe, "is_high_precision", False) and not config.state.schedule):
            run.progress.message(f"{run.result.name} has no layers in FP8: nothing of it is recorded")
            return
        trainer, ranks = run.trainer, run.trainer.ranks
        common: dict[str, Any] = {"step": len(run.rows), "group": ranks.group}
        if folder is not None:
            self.command = f"; octavo inspect {shlex.quote(str(folder))} says what the record shows"
            run.progress.message(f"{run.result.name} is recorded{self.command}")
            with ranks.together():
                if not run.rows and ranks.rank == 0:  # a run that was killed before its first checkpoint left a record
                    shutil.rmtree(folder / RECORD, ignore_errors=True)
            interval = config.inspect.inspect_every
            watched = {"optimizer": trainer.optimizer, "schedule": trainer.schedule}
            self._recorder = octavo.inspect.Recorder(trainer.model, folder / RECORD, interval, **watched, **common)
        self._trace = octavo.inspect.trace_faults(trainer.model, raises=False, **common)

    def step(self, loss: Tensor, norm: Tensor, lr: float) -> None:
        """Record a step; loss and norm may still be on their way from the device."""
        if self._trace is not None:
            self._trace.step(loss, norm)
        if self._recorder is not None:
            self._recorder.step(loss, norm, lr=lr)

    def close(self) -> str:
        """Finish the record and remove the hooks; return "; " and where the first fault was, or ""."""
        trace, self._trace = self._trace, None
        if trace is None:
            return ""
        trace.close()
        if self._recorder is not None:
            if trace.fault is not None:
                self._recorder.event("fault", str(trace.fault))
            self._recorder.close()
        return "" if trace.fault is None else f"; {trace.fault.where}"


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def run_in(path: Path) -> Path:
    """Return the run's folder in a folder with just one run, as `octavo train` makes it; else the path itself."""
    folders = [] if RunFolder(path).holds_run() else _folders_of_runs(path)
    return folders[0] if len(folders) == 1 else path


def _folders_of_runs(path: Path) -> list[Path]:
    return sorted(folder for folder in path.glob("*/") if RunFolder(folder).holds_run())


def trained_model(path: Path) -> GPT:
    """Return the model that a run trained, in evaluation mode, with its recipe and delayed state.

    ``path`` is the run's folder, or a folder with this run alone. Weights that were stored in FP8 are stored so.
    """
    path = run_in(path)
    folder = RunFolder(path)
    if (content := folder.load(None)) is None:
        folders = _folders_of_runs(path)
        why = f"{'is no run of octavo' if path.exists() else 'does not exist'}: give a run's folder"
        if folders:
            why = f"holds {len(folders)} runs: choose one of {', '.join(map(str, folders))}"
        elif folder.holds_run():
            why = "has no checkpoint, as the run ended before its first: train again with a smaller --checkpoint-every"
        raise RunCheckpointError(f"{path} {why}")
    identity = content["identity"]
    recipe = identity.get("recipe")
    try:
        recipe = recipe if recipe in RECIPES else octavo.recipes.as_recipe(read_json(recipe))
    except (TypeError, ValueError) as error:
        reason = f"{path} was trained with a recipe of its own, {recipe}: build its model in Python"
        raise RunCheckpointError(reason) from error
    state = build(StateConfig, identity)
    if not content["weights_in_fp8"]:  # in another phase than that of its options
        state = replace(state, weight_storage="none")
    model = build_model(build(ModelConfig, identity), recipe, 0, state)
    if content.get("separate_splits"):
        octavo.nn.separate_splits(model)
    folder.fill(model, None)
    return model.eval()
