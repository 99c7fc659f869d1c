"""`octavo train` and `octavo compare`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.options import option_errors
from octavo.train import config_file
from octavo.train.config import BASELINE
from octavo.train.errors import TrainError
from octavo_command import INTERRUPTED

if TYPE_CHECKING:
    from octavo.train import Hooks, RunResult, TrainConfig

RUNS = Path("runs")  # where runs go that give no --out
RECIPE = "dynamic"
COMPARED = (BASELINE, "dynamic", "delayed")


@contextlib.contextmanager
def signals_to(handler: Callable[..., object], *numbers: int) -> Iterator[None]:
    """Sets a handler for these signals, and puts back the ones before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _config(options: argparse.Namespace) -> tuple[TrainConfig, list[str]]:
    """All options and the recipes, by the command line, or else by the file of --config."""
    file: dict[str, Any] = {} if options.config is None else config_file.load(options.config)
    given = file | vars(options)
    own, other = ("recipes", "recipe") if options.name == "compare" else ("recipe", "recipes")
    if own not in given and other in given:
        raise TrainError(f"{options.config} gives {other}, and octavo {options.name} needs {own}: add --{own}")
    recipes = [given.get("recipe", RECIPE)] if own == "recipe" else list(given.get("recipes", COMPARED))
    with option_errors():
        config = config_file.config_of(given)
        config.require_phases(recipes)
    return config, recipes


def _settled(config: TrainConfig, options: argparse.Namespace, recipes: Sequence[str]) -> TrainConfig:
    """The options with the dtype that --dtype auto means, and the folder that a missing --out does."""
    from octavo.train import checkpoint, shard, trainer

    config = trainer.settle_dtype(config, trainer.choose_device(shard.device_name(config)), recipes)
    names = [config.called(recipe) for recipe in recipes]
    out = config.run.out or _default_folder(options.name, config.run.resume)
    if config.run.resume and not any(checkpoint.RunFolder(out / name).holds_run() for name in names):
        none = f"octavo: nothing to resume: {out} holds no run of {', '.join(names)}"
        out = config.run.out or _default_folder(options.name, False)
        print(f"{none}; it begins anew in {out}", file=sys.stderr)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=out))


def _default_folder(command: str, resume: bool) -> Path:
    """runs/COMMAND-001 or the one after the last; the last one there to resume."""
    numbers = [path.name.removeprefix(f"{command}-") for path in RUNS.glob(f"{command}-*")]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return RUNS / f"{command}-{last + (last == 0 or not resume):03}"


def train(options: argparse.Namespace, arguments: list[str]) -> int:
    """Both `train`, of one recipe, and `compare`, of several."""
    from octavo.train import compare, report, run, shard

    compares = options.name == "compare"
    if compares:
        report.require_plotting()  # before minutes of training
    config, recipes = _config(options)
    if compares:
        shard.require_one_process(config.ranks)
    with shard.joined(config) as ranks:
        config = ranks.first(lambda: _settled(config, options, recipes))
        with _hooks(ranks.rank) as hooks:
            results = compare(config, recipes, hooks=hooks) if compares else [run(config, recipes[0], hooks=hooks)]
    if results[-1].interrupted:
        return INTERRUPTED if ranks.rank > 0 else _stopped(results[-1], config, arguments)
    return 0 if ranks.rank > 0 else _report(results, config)


@contextlib.contextmanager
def _hooks(rank: int) -> Iterator[Hooks]:
    """Shows progress. Ctrl-C and SIGTERM stop after the step; before there are steps, and a second Ctrl-C, at once."""
    from octavo.train import Hooks, progress

    reached: set[str] = set()  # "steps" once there are some to stop after, "stop" once a signal has asked for it
    from_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # it passes on a Ctrl-C that ranks have seen already

    def note(number: int, frame: types.FrameType | None) -> None:
        if "steps" not in reached or ("stop" in reached and number == signal.SIGINT and not from_torchrun):
            raise KeyboardInterrupt
        if rank == 0 and "stop" not in reached:
            # not by sys.stderr, which the signal may have found in the middle of a line
            os.write(2, f"{os.linesep * os.isatty(2)}octavo: stopping after this step{os.linesep}".encode())
        reached.add("stop")

    with signals_to(note, signal.SIGINT, signal.SIGTERM):
        shown = progress.choose_progress() if rank == 0 else progress.Progress()
        yield Hooks(lambda model: reached.add("steps"), should_stop=lambda: "stop" in reached, progress=shown)


def _stopped(result: RunResult, config: TrainConfig, arguments: list[str]) -> int:
    again = [argument for argument in arguments if argument != "--resume"]
    for flag, value in (("--out", str(config.run.out)), ("--dtype", config.run.dtype)):
        if not any(argument == flag or argument.startswith(f"{flag}=") for argument in again):
            again += [flag, value]
    ranks = os.environ.get("WORLD_SIZE", "1")
    program = ["octavo"] if config.ranks.shard == "none" else f"torchrun --nproc-per-node {ranks} -m octavo".split()
    command = shlex.join([*program, *again, "--resume"])
    print(
        f"octavo: stopped {result.name} at step {len(result.rows)} of {result.steps}, saved; go on with: {command}",
        file=sys.stderr,
    )
    return INTERRUPTED


def _report(results: list[RunResult], config: TrainConfig) -> int:
    from octavo.errors import MissingExtraError
    from octavo.train import report

    out = config.run.out
    assert out is not None  # _settled chose one
    written = [out / "results.csv"]
    report.write_csv(results, written[0])
    try:
        report.plot(results, out / "loss.png")
        written.append(out / "loss.png")
    except MissingExtraError as error:  # training needs no extra, and what it came to is worth showing without
        print(f"octavo: {error}", file=sys.stderr)
    print(report.table(results))
    print(f"wrote {' and '.join(str(path) for path in written)}")
    return 0
