"""`octavo train`: train a byte-level GPT with one recipe. `compare.py` does it with several."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.cli.options import add_flags, option_errors
from octavo.errors import MissingExtraError
from octavo.train import Hooks, RunResult, TrainConfig, checkpoint, loop, progress, report, shard, trainer
from octavo.train.config import RECIPES, SECTIONS, UNCONVERTED, chosen_recipe, config_of, load_options, train_errors
from octavo_command import INTERRUPTED, signals_to

EXAMPLES = (
    "octavo train --data corpus/ --recipe delayed --steps 1000",
    "octavo train --config runs/train-001/delayed --lr 3e-4",
    "torchrun --nproc-per-node 2 -m octavo train --shard fsdp",
)
RUNS = Path("runs")  # the folder of runs without --out
RECIPE = "dynamic"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo train``."""
    text = f"how FP8 is used: one of {', '.join(RECIPES)}; or a file of recipes by layer, such as rules.json"
    add_run(parser, "--recipe", text, RECIPE)


def add_run(parser: argparse.ArgumentParser, flag: str, text: str, default: str, **options: Any) -> None:
    """Add the flag of a run's recipe or recipes, --config, and a flag for each field of a TrainConfig."""
    parser.usage = f"{parser.prog} [OPTIONS]"
    baselines_note = f"the first {len(UNCONVERTED)} without FP8: in --dtype, in bfloat16, in float32"
    help = f"{text}; {baselines_note} (default: {default})"
    parser.add_argument(flag, metavar="RECIPE", default=argparse.SUPPRESS, help=help, **options)
    help = "JSON or TOML with options, or a run's folder to take those of; flags win over it"
    parser.add_argument("--config", type=Path, metavar="FILE", help=help)
    for config in SECTIONS.values():
        add_flags(parser, config)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run ``octavo train``."""
    values = values_of(options)
    with train_errors("--recipe: "):
        recipe = chosen_recipe(values.get("recipe", RECIPE))
    return train(values, [recipe], arguments)


def values_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return all options by name: from the command line, or else from the file of --config."""
    return ({} if options.config is None else load_options(options.config)) | vars(options)


def train(values: Mapping[str, Any], recipes: Sequence[Any], arguments: list[str]) -> int:
    """Train by these options with one recipe, or several if the command is compare, and print and write the results."""
    compares = values["name"] == "compare"
    with option_errors():
        config = config_of(values)
    if compares:
        shard.require_one_process(config.ranks)
    with shard.joined(config) as ranks:
        config = ranks.from_rank_0(lambda: _settled(config, values["name"], recipes))
        with _hooks(ranks.rank) as hooks:
            one = recipes[0]
            results = loop.compare(config, recipes, hooks=hooks) if compares else [loop.run(config, one, hooks=hooks)]
    if results[-1].interrupted:
        return INTERRUPTED if ranks.rank > 0 else _stopped(results[-1], config, arguments)
    return 0 if ranks.rank > 0 else _report(results, config)


def _settled(config: TrainConfig, name: str, recipes: Sequence[Any]) -> TrainConfig:
    """Return the options with a dtype instead of `auto`, and with a folder where --out is not set."""
    config = trainer.settle_dtype(config, trainer.choose_device(shard.device_name(config)), recipes)
    runs = [config.called(recipe) for recipe in recipes]
    out = config.run.out or _default_folder(name, bool(config.run.resume))
    if config.run.resume and not any(checkpoint.RunFolder(out / run).holds_run() for run in runs):
        none = f"octavo: nothing to resume: {out} holds no run of {', '.join(runs)}"
        out = config.run.out or _default_folder(name, False)
        print(f"{none}; it begins anew in {out}", file=sys.stderr)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=out))


def _default_folder(command: str, resume: bool) -> Path:
    """Return runs/COMMAND-001, or the folder with the number after the last; to resume, the last one itself."""
    numbers = [path.name.removeprefix(f"{command}-") for path in RUNS.glob(f"{command}-*")]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return RUNS / f"{command}-{last + (last == 0 or not resume):03}"


@contextlib.contextmanager
def _hooks(rank: int) -> Iterator[Hooks]:
    """Show progress. Ctrl-C and SIGTERM stop after the step; before the first step, or a second time, at once."""
    reached: set[str] = set()  # "steps" once steps have begun, "stop" once a signal has come
    from_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun passes on a Ctrl-C that its ranks also get directly

    def note(number: int, frame: types.FrameType | None) -> None:
        if "steps" not in reached or ("stop" in reached and number == signal.SIGINT and not from_torchrun):
            raise KeyboardInterrupt
        if rank == 0 and "stop" not in reached:
            # not through sys.stderr, as the signal may come while a line is written to it
            os.write(2, f"octavo: stopping after this step{os.linesep}".encode())
        reached.add("stop")

    with signals_to(note, signal.SIGINT, signal.SIGTERM):
        shown = progress.Progress(sys.stderr if rank == 0 else None)
        yield Hooks(lambda model: reached.add("steps"), should_stop=lambda: "stop" in reached, progress=shown)


def _stopped(result: RunResult, config: TrainConfig, arguments: list[str]) -> int:
    again = list(arguments)
    for flag, value in (("--out", str(config.run.out)), ("--dtype", config.run.dtype)):
        if not any(argument == flag or argument.startswith(f"{flag}=") for argument in again):
            again += [flag, value]
    ranks = os.environ.get("WORLD_SIZE", "1")
    program = ["octavo"] if config.ranks.shard == "none" else f"torchrun --nproc-per-node {ranks} -m octavo".split()
    command = shlex.join([*program, *again, *([] if config.run.resume else ["--resume"])])
    at = f"at step {len(result.rows)} of {result.steps}"
    print(f"octavo: stopped {result.name} {at}, saved; go on with: {command}", file=sys.stderr)
    return INTERRUPTED


def _report(results: list[RunResult], config: TrainConfig) -> int:
    out = config.run.out
    assert out is not None  # _settled chose one
    written = [out / "results.csv"]
    report.write_csv(results, written[0])
    try:
        report.plot(results, out / "loss.png")
        written.append(out / "loss.png")
    except MissingExtraError as error:  # training needs no extra, and its results are shown without the plot
        print(f"octavo: without loss.png: {error}", file=sys.stderr)
    print(report.table(results))
    print(f"wrote {' and '.join(str(path) for path in written)}")
    return 0
