"""The `octavo` command. A fault is one line on stderr and exit code 2; Ctrl-C is 130."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import shlex
import signal
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from octavo.train import Hooks, RunResult, TrainConfig

RUNS = Path("runs")  # where runs go that give no --out
FAULT = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_fault(f"{message} (see {self.prog} --help)"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        arguments: what follows `octavo` on the command line (default: sys.argv).
    """
    if arguments is not None or "WORLD_SIZE" not in os.environ:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    code = _run(sys.argv[1:])  # one of torchrun's
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # threads of a process group that is gone may abort a process that ends in order


def _run(arguments: list[str]) -> int:
    def interrupt(number: int, frame: types.FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # which alone can set a signal's handler
    try:
        # SIGTERM ends the command as Ctrl-C does, also while torch is imported and data loads
        with _signals_to(interrupt, signal.SIGTERM) if is_main else contextlib.nullcontext():
            options = _parser().parse_args(arguments)
            return options.command(options, arguments)
    except SystemExit as stop:  # argparse, after --help, --version or a wrong argument
        return stop.code if isinstance(stop.code, int) else FAULT
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, and flushing at exit must not complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except Exception as error:
        if (message := _expected(error)) is None:
            raise
        return _fault(message)


@contextlib.contextmanager
def _signals_to(handler: Callable[..., object], *numbers: int) -> Iterator[None]:
    """Sets a handler for these signals, and puts back the ones before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _fault(message: str) -> int:
    ranked = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets both
    rank = f"rank {os.environ.get('RANK')}: " if ranked else ""
    print(f"octavo: error: {rank}{' '.join(message.split())}", file=sys.stderr)
    return FAULT


def _expected(error: Exception) -> str | None:
    """The line for an error that the user can do something about, or None for a bug of ours."""
    import torch

    from octavo.errors import OctavoError

    if isinstance(error, OctavoError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return "out of memory: lower --width, --layers, --context or --batch, or raise --micro-batches"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"--compile failed ({text.splitlines()[0]}): leave it out, or see what torch.compile needs here"
    return None


# --- flags from dataclasses -------------------------------------------------------------------------------------------


def _configs() -> tuple[type, ...]:
    from octavo.train import TrainConfig

    return tuple(typing.get_type_hints(TrainConfig).values())


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Adds a flag for each field of a dataclass; its help is the field's, with the default."""
    group = parser.add_argument_group((config.__doc__ or config.__name__).splitlines()[0].rstrip("."))
    for field in dataclasses.fields(config):
        flag, text, default = "--" + field.name.replace("_", "-"), field.metadata["help"], field.default
        if default is False:
            group.add_argument(flag, action="store_true", help=text)
        elif default is None:
            group.add_argument(flag, type=Path, help=text, metavar="PATH")
        else:
            kind, text = type(default), f"{text} (default: {default})"
            group.add_argument(flag, type=kind, default=default, help=text, metavar=kind.__name__.upper())


def _parser() -> argparse.ArgumentParser:
    import octavo
    from octavo.inspect import command, what_if_command
    from octavo.train.config import BASELINE, RECIPES, UNCONVERTED, ModelConfig
    from octavo.tune.command import add_options

    parser = _Parser(prog="octavo", description="Train PyTorch models in FP8.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="name")

    def add(name: str, command: Callable[..., int], help: str) -> argparse.ArgumentParser:
        description = None if name == "info" else f"{help[0].upper()}{help[1:]}."
        sub = commands.add_parser(name, help=help, description=description, allow_abbrev=False)
        sub.set_defaults(command=command)
        return sub

    known = f"{', '.join(RECIPES)}; the first {len(UNCONVERTED)} without FP8: in --dtype, in bfloat16, in float32"
    train = add("train", _train, "train a byte-level GPT with one recipe")
    train.add_argument("--recipe", default="dynamic", help=f"one of {known} (default: dynamic)")
    compare = add("compare", _train, "train it in high precision and in FP8, and compare")
    chosen = [BASELINE, "dynamic", "delayed"]
    help = f"some of {known} (default: {' '.join(chosen)})"
    compare.add_argument("--recipes", nargs="+", default=chosen, metavar="RECIPE", help=help)
    for config in _configs():
        add_flags(train, config)
        add_flags(compare, config)
    export = add("export", _export, "write a trained model as ONNX, and check it in onnxruntime")
    export.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run's folder, or its checkpoint.pt")
    export.add_argument("--onnx", type=Path, required=True, metavar="FILE", help="the file to write")
    export.add_argument("--opset", type=int, default=21, metavar="INT", help="19 to 24 (default: 21)")
    dtypes = ("bfloat16", "float32")
    export.add_argument("--weights", default="bfloat16", choices=dtypes, help="of other weights than FP8")
    help = "text to check it on (default: Python's own standard library)"
    export.add_argument("--data", type=Path, metavar="PATH", help=help)
    plan = add("plan", _plan, "predict a training step's time and memory in each recipe, and say whether FP8 pays")
    help = "a Hugging Face config.json, or its folder (default: the GPT of the options below)"
    plan.add_argument("model", nargs="?", type=Path, metavar="CONFIG", help=help)
    plan.add_argument(
        "--tokens", type=int, default=16384, metavar="INT", help="of a step on one device (default: 16384)"
    )
    help = "H100, H200 or B200, by published rates (default: this one, by what `octavo info --measure` found)"
    plan.add_argument("--device", metavar="NAME", help=help)
    add_flags(plan, ModelConfig)
    inspect = add(
        "inspect", _inspect, "say what FP8 does to a recorded training, or would to a model: what, why, what to change"
    )
    command.add_arguments(inspect)
    what_if_command.add_arguments(inspect)
    tune = add("tune", _tune, "measure which tiles kernels are fastest with on this GPU, for all later processes")
    add_options(tune)
    tune.add_argument("--forget", action="store_true", help="go back to octavo's own")
    info = add("info", _info, "versions, devices, and where FP8 is native")
    help = "measure what this device does: products, casts, copies; keep it for `octavo plan`, and say where FP8 pays"
    info.add_argument("--measure", action="store_true", help=help)
    return parser


# --- train and compare ------------------------------------------------------------------------------------------------


def _config(options: argparse.Namespace, recipes: Sequence[str]) -> TrainConfig:
    """All options."""
    from octavo.train import TrainConfig
    from octavo.train.config import check_recipe
    from octavo.train.errors import train_errors

    with train_errors():
        for recipe in recipes:
            check_recipe(recipe)
        names = {part: [field.name for field in dataclasses.fields(part)] for part in _configs()}
        config = TrainConfig(*(part(**{name: getattr(options, name) for name in own}) for part, own in names.items()))
        config.require_phases(recipes)
        return config


def _settled(config: TrainConfig, options: argparse.Namespace, recipes: Sequence[str]) -> TrainConfig:
    """The options with the dtype that --dtype auto means, and the folder that a missing --out does."""
    from octavo.train import TrainError, checkpoint, shard, trainer

    config = trainer.settle_dtype(config, trainer.choose_device(shard.device_name(config)), recipes)
    names = [config.called(recipe) for recipe in recipes]
    out = config.run.out or _default_folder(options.name, config.run.resume)
    if config.run.resume and not any(checkpoint.RunFolder(out / name).holds_run() for name in names):
        raise TrainError(f"nothing to resume: {out} holds no run of {', '.join(names)}; give the right --out")
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=out))


def _default_folder(command: str, resume: bool) -> Path:
    """runs/COMMAND-001 or the first free one after it; the last one there to resume."""
    taken = sorted(RUNS.glob(f"{command}-[0-9][0-9][0-9]"))
    if resume and taken:
        return taken[-1]
    return RUNS / f"{command}-{int(taken[-1].name[-3:]) + 1 if taken else 1:03}"


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    """Both `train`, of one recipe, and `compare`, of several."""
    from octavo.train import compare, report, run, shard

    compares = options.name == "compare"
    if compares:
        report.require_plotting()  # before minutes of training
    recipes = options.recipes if compares else [options.recipe]
    config = _config(options, recipes)
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

    with _signals_to(note, signal.SIGINT, signal.SIGTERM):
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


# --- export and info --------------------------------------------------------------------------------------------------


def _export(options: argparse.Namespace, arguments: list[str]) -> int:
    import torch

    from octavo import export
    from octavo.train import Batches, load_corpus, next_byte_loss, trained

    model = trained.trained_model(options.source)
    corpus = load_corpus(options.data)
    corpus.require(model.config)
    tokens, targets = next(Batches(corpus, model.config.context, 16, 0).validation(16))
    written = export.to_onnx(
        model, (tokens.int(),), options.onnx, opset=options.opset, weights=getattr(torch, options.weights)
    )
    sqnr = export.sqnr_in_onnxruntime(model, tokens.int(), written)
    with torch.no_grad():
        ours = float(next_byte_loss(model(tokens), targets))
    theirs = float(next_byte_loss(export.run_onnx(written, tokens.int())[0], targets))
    size, in_bf16 = written.stat().st_size, 2 * sum(parameter.numel() for parameter in model.parameters())
    print(
        f"wrote {written}: {size:,} bytes, {size / in_bf16:.2f} of its weights in bf16\n"
        f"in onnxruntime: SQNR {sqnr:.1f} dB, validation loss {theirs:.4f} nats a byte (octavo {ours:.4f})"
    )
    return 0


def _plan(options: argparse.Namespace, arguments: list[str]) -> int:
    import torch

    from octavo.cost import command, estimate, rates_of
    from octavo.cost.estimate import work_of
    from octavo.train import GPT, ModelConfig

    logging.getLogger("octavo").setLevel(logging.ERROR)  # nothing runs here, so nothing is emulated
    rates = rates_of(options.device)
    inputs = command.tokens_of(options.tokens, options.context)
    if options.model is not None:
        model = command.from_hugging_face(options.model)
    else:
        fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(ModelConfig)}
        with torch.device("meta"):
            model = GPT(ModelConfig(**fields)).bfloat16()
    recipes = [None, *(make() for make in command.RECIPES.values())]
    print(f"{command.parameters_of(model)}, {options.tokens // options.context} sequences of {options.context} tokens")
    work = work_of(model, inputs)
    print(command.describe_plan([estimate(model, inputs, recipe, rates, work=work) for recipe in recipes], rates))
    return 0


def _inspect(options: argparse.Namespace, arguments: list[str]) -> int:
    from octavo.inspect.command import inspect_command
    from octavo.inspect.effects import WhatIfError
    from octavo.inspect.what_if_command import asked, entry_point, what_if_command
    from octavo.train import checkpoint, inspection, trained

    source = options.folder
    if (source / inspection.FOLDER / "record.json").exists() and not asked(options):
        source = options.folder = source / inspection.FOLDER
    if source.is_file() or (checkpoint.RunFolder(source).holds_run() and not (source / "record.json").exists()):
        own = source / inspection.FOLDER
        subject = trained.trained_subject(source, options.data)
        return what_if_command(options, subject, own if (own / "record.json").exists() else None)
    if source.exists() and (given := asked(options)):
        raise WhatIfError(f"{', '.join(given)}: {source} is a record, and these are for models")
    return inspect_command(options) if source.exists() else what_if_command(options, entry_point(str(source)))


def _tune(options: argparse.Namespace, arguments: list[str]) -> int:
    from octavo.tune.command import tune_here

    return tune_here(options)


def _info(options: argparse.Namespace, arguments: list[str]) -> int:
    from octavo.train import environment

    print(environment.describe())
    if options.measure:
        from octavo.cost import command, measure
        from octavo.cost.rates import keep

        print("\nmeasuring ...", flush=True)
        rates = measure()
        print(command.describe_rates(rates), f"\nkept in {keep(rates)}", sep="\n")
    return 0
