"""Each command of `octavo`: its options, what it does, examples; and how a command line is run.

The flags of `octavo train` are made from the dataclasses of `octavo.train.config`. A fault is printed in one line, and
ends the command with 2, Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import platform
import re
import shlex
import signal
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch

import octavo
from octavo.errors import MissingExtraError, OctavoError, require
from octavo.kernels.capability import runs_natively
from octavo.nn.machine import described_on
from octavo.recipes import NAMED
from octavo.train import (
    GPT,
    Batches,
    Hooks,
    ModelConfig,
    RunResult,
    checkpoint,
    compare,
    load_corpus,
    next_byte_loss,
    progress,
    report,
    run,
    shard,
    trainer,
)
from octavo.train.config import (
    BASELINE,
    RECIPES,
    RULES,
    SECTIONS,
    UNCONVERTED,
    StateConfig,
    TrainConfig,
    TrainError,
    build,
    choices,
    chosen_recipe,
    config_of,
    load_options,
    or_none,
)
from octavo.train.loop import RECORD, run_in, trained_model
from octavo_command import COMMANDS, FAULT, INTERRUPTED, Formatter, fault, interrupted
from octavo_command import parser as top_parser

EXTRAS = {
    "cli": ("matplotlib",),
    "inspect": ("numpy", "vl_convert"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "safetensors": ("safetensors", "huggingface_hub"),
}
NATIVE = "native FP8"
EMULATED = "emulated FP8 (the reference)"
# flags of other trainers, and what they are called here
SYNONYMS = {"--learning-rate": "--lr", "--epochs": "--steps", "--max-steps": "--steps", "--batch-size": "--batch",
            "--gradient-accumulation-steps": "--micro-batches", "--max-grad-norm": "--clip", "--output-dir": "--out",
            "--sequence-length": "--context", "--seq-length": "--context", "--seq-len": "--context",
            "--hidden-size": "--width", "--num-layers": "--layers", "--num-heads": "--heads"}  # fmt: skip
RUNS = Path("runs")  # the folder of runs without --out
RECIPE = "dynamic"
COMPARED = (BASELINE, "dynamic", "delayed")


def add_options(parser: argparse.ArgumentParser, config: type, names: Sequence[str] = ()) -> None:
    """Add a flag for each field of a dataclass, or for the named fields; its help is the field's, with the default.

    Only flags on the command line become attributes of the parser's result, so that they override a file's options.
    """
    group = parser.add_argument_group((config.__doc__ or config.__name__).splitlines()[0].rstrip("."))
    for field in (field for field in dataclasses.fields(config) if field.name in names or not names):
        flag, default, text = flag_of(field.name), field.default, field.metadata["help"].replace("%", "%%")
        if default is not None and "(default: " not in text:
            text += f" (default: {'no' if default == '' or default is False else default})"
        words, common = choices(field), {"default": argparse.SUPPRESS, "help": text}
        if isinstance(default, bool) and words:  # --resume, --resume auto, --no-resume
            group.add_argument(flag, nargs="?", const=True, choices=words, **common)
            group.add_argument(f"--no-{flag[2:]}", dest=field.name, action="store_false", default=argparse.SUPPRESS)
        elif isinstance(default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif words:
            group.add_argument(flag, choices=words, **common)
        else:
            # Path("") would be the current folder, which nobody asked for
            kind = type(default) if default is not None else lambda text: Path(text) if text else text
            group.add_argument(flag, type=kind, metavar=field.metadata["metavar"], **common)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Raise a ValueError of the options as a TrainError that names flags instead of fields (`--top-k`, not `top_k`)."""
    try:
        yield
    except ValueError as error:
        names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
        options = rf"^({'|'.join(names)})(?= is )|\b({'|'.join(name for name in names if '_' in name)})\b"
        raise TrainError(re.sub(options, lambda match: flag_of(match[0]), str(error))) from error


def recipe_given(text: str) -> Any:
    """Return the recipe that a command line names, or that the file it names holds."""
    try:
        return chosen_recipe(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def devices() -> list[tuple[str, str, str]]:
    """Return a row for each device: (name for --device, description, native or emulated FP8)."""
    rows = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads", EMULATED)]
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        native = runs_natively(torch.device("cuda", index))
        architecture = "" if torch.version.hip else f", sm_{capability[0]}{capability[1]}"
        rows.append((f"cuda:{index}", name + architecture, NATIVE if native else EMULATED))
    if torch.backends.mps.is_available():
        rows.append(("mps", "Apple GPU", EMULATED))
    if torch.xpu.is_available():
        rows += [(f"xpu:{i}", torch.xpu.get_device_name(i), EMULATED) for i in range(torch.xpu.device_count())]
    return rows


def describe_machine() -> str:
    """Return a text with versions, devices, whether FP8 is native there, and which extras are installed."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "absent"
    versions = {
        "octavo": octavo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__ + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else ""),
        "triton": triton,
    }
    lines = [f"{name:<9}{value}" for name, value in versions.items()]
    lines += ["", "devices"]
    rows = devices()
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines += [f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {fp8}" for name, kind, fp8 in rows]
    lines += [*described_on([torch.device(name) for name, *_ in rows]), "", "extras"]
    for extra, packages in EXTRAS.items():
        state = "installed"
        try:
            require(extra, *(package for package in packages if find_spec(package) is None))
        except MissingExtraError as error:
            state = str(error)
        lines.append(f"  {extra:<11}  {state}")
    return "\n".join(lines)


@contextlib.contextmanager
def signals_to(handler: Callable[..., object], *numbers: int) -> Iterator[None]:
    """Set a handler for these signals within the block, and the previous handlers after it."""
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


def _train_options(parser: argparse.ArgumentParser) -> None:
    text = f"how FP8 is used: one of {', '.join(RECIPES)}; or a file of recipes by layer, such as rules.json"
    _add_run(parser, "--recipe", text, RECIPE, type=recipe_given)


def _compare_options(parser: argparse.ArgumentParser) -> None:
    text, default = f"some of {', '.join(RECIPES)}", " ".join(COMPARED)
    _add_run(parser, "--recipes", text, default, nargs="+", choices=RECIPES)


def _add_run(parser: argparse.ArgumentParser, flag: str, text: str, default: str, **options: Any) -> None:
    parser.usage = f"{parser.prog} [OPTIONS]"
    without = f"the first {len(UNCONVERTED)} without FP8: in --dtype, in bfloat16, in float32"
    help = f"{text}; {without} (default: {default})"
    parser.add_argument(flag, metavar="RECIPE", default=argparse.SUPPRESS, help=help, **options)
    help = "JSON or TOML with options, or a run's folder to take those of; flags win over it"
    parser.add_argument("--config", type=Path, metavar="FILE", help=help)
    for config in SECTIONS.values():
        add_options(parser, config)


def _config(options: argparse.Namespace) -> tuple[TrainConfig, list[Any]]:
    """Return all options, and the recipes: from the command line, or else from the file of --config."""
    file: dict[str, Any] = {} if options.config is None else load_options(options.config)
    values = file | vars(options)
    recipes = values.get("recipes", COMPARED) if options.name == "compare" else [values.get("recipe", RECIPE)]
    if options.name == "compare" and "recipe" in file and "recipes" not in values:
        raise TrainError(f"{options.config} gives a recipe, and octavo compare needs several: add --recipes")
    with option_errors():
        return config_of(values), list(recipes)


def _settled(config: TrainConfig, options: argparse.Namespace, recipes: Sequence[Any]) -> TrainConfig:
    """Return the options with a dtype instead of `auto`, and with a folder where --out is not set."""
    config = trainer.settle_dtype(config, trainer.choose_device(shard.device_name(config)), recipes)
    names = [config.called(recipe) for recipe in recipes]
    out = config.run.out or _default_folder(options.name, bool(config.run.resume))
    if config.run.resume and not any(checkpoint.RunFolder(out / name).holds_run() for name in names):
        none = f"octavo: nothing to resume: {out} holds no run of {', '.join(names)}"
        out = config.run.out or _default_folder(options.name, False)
        print(f"{none}; it begins anew in {out}", file=sys.stderr)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=out))


def _default_folder(command: str, resume: bool) -> Path:
    """Return runs/COMMAND-001, or the folder with the number after the last; to resume, the last one itself."""
    numbers = [path.name.removeprefix(f"{command}-") for path in RUNS.glob(f"{command}-*")]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return RUNS / f"{command}-{last + (last == 0 or not resume):03}"


def train(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `octavo train`, with one recipe, or `octavo compare`, with several."""
    compares = options.name == "compare"
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
    print(
        f"octavo: stopped {result.name} at step {len(result.rows)} of {result.steps}, saved; go on with: {command}",
        file=sys.stderr,
    )
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


def _export_options(parser: argparse.ArgumentParser) -> None:
    from octavo.export.layouts import FileLayout

    parser.usage = f"{parser.prog} [OPTIONS] RUN"
    parser.add_argument("source", type=Path, metavar="RUN", help="a run's folder")
    written = parser.add_mutually_exclusive_group(required=True)
    written.add_argument("--onnx", type=Path, metavar="FILE", help="the file to write")
    help = "a new folder for FP8 weights and their config.json, as servers read them"
    written.add_argument("--safetensors", type=Path, metavar="FOLDER", help=help)
    help = "of FP8 weights (default: compressed-tensors, which holds those of every recipe)"
    parser.add_argument("--layout", default="compressed-tensors", choices=get_args(FileLayout), help=help)
    parser.add_argument("--opset", type=int, default=21, metavar="N", help="of ONNX, 21 to 24 (default: 21)")
    dtypes = ("bfloat16", "float32")
    help = "of other weights than FP8 (default: bfloat16)"
    parser.add_argument("--weights", default="bfloat16", choices=dtypes, help=help)
    help = "text to check it on (default: Python's own standard library)"
    parser.add_argument("--data", type=Path, metavar="PATH", help=help)


def export(options: argparse.Namespace, arguments: list[str]) -> int:
    """Write a run's model as ONNX, and print how near its results in onnxruntime are to octavo's; or as FP8 weights."""
    from octavo import export

    model = trained_model(options.source)
    in_bf16 = 2 * sum(parameter.numel() for parameter in model.parameters())
    if options.safetensors is not None:
        export.to_safetensors(model, options.safetensors, options.layout)
        size = sum(file.stat().st_size for file in options.safetensors.glob("*.safetensors"))
        print(f"wrote {options.safetensors}: {size:,} bytes, {size / in_bf16:.2f} of its weights in bf16")
        return 0
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
    size = written.stat().st_size
    print(
        f"wrote {written}: {size:,} bytes, {size / in_bf16:.2f} of its weights in bf16\n"
        f"in onnxruntime: SQNR {sqnr:.1f} dB, validation loss {theirs:.4f} nats a byte (octavo {ours:.4f})"
    )
    return 0


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [OPTIONS] [CONFIG]"
    help = "a Hugging Face config.json, or its folder, which transformers reads (pip install transformers); it takes "
    help += "--context (default: a GPT by the sizes below)"
    parser.add_argument("model", nargs="?", type=Path, metavar="CONFIG", help=help)
    help = "of a step on one device, or for each GPU (default: the sequences in 16384, or one if it is longer)"
    parser.add_argument("--tokens", type=int, metavar="N", help=help)
    help = "H100, H200 or B200, by their known rates (default: this one, by what `octavo info --measure` found)"
    parser.add_argument("--device", metavar="NAME", help=help)
    help = "predict as octavo.convert(..., fuse=True) converts"
    parser.add_argument("--fuse", action="store_true", help=help)
    help = "recipe of the layer that computes logits, high_precision for bf16 (default: each recipe's own)"
    parser.add_argument("--head", choices=NAMED, metavar="RECIPE", help=help)
    help = "whose attention, by published rates of Hopper (default: flash, FlashAttention-2, which torch takes)"
    parser.add_argument("--attention", choices=("flash", "cudnn"), help=help)
    help = "chunked: logits are computed in chunks with their loss, as octavo.nn.linear_cross_entropy does"
    parser.add_argument("--loss", choices=("chunked",), help=help)
    help = "plan a step on N GPUs in servers of 8; without --mesh, find the fastest mesh that fits"
    parser.add_argument("--gpus", type=int, metavar="N", help=help)
    help = "ranks by kind, such as fsdp=8,tensor=8: fsdp, replicate, tensor, pipeline, context, expert"
    parser.add_argument("--mesh", metavar="KIND=RANKS,...", help=help)
    help = "of a rank of data parallelism in a step on a mesh (default: one for each sequence)"
    parser.add_argument("--micro-batches", type=int, metavar="N", help=help)
    help = "share of layers whose activations are checkpointed on a mesh, 0 to 1 (default: 0)"
    parser.add_argument("--recompute", type=float, default=0.0, metavar="SHARE", help=help)
    help = "these layers keep their input as octavo.checkpoint_in_fp8 does"
    parser.add_argument("--checkpoint-in-fp8", action="store_true", help=help)
    add_options(parser, ModelConfig)
    add_options(parser, StateConfig, ("algorithm", "moments", "master", "weight_storage", "update_in_backward"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log no warnings within the block: nothing is computed, so those about emulation and imports don't matter."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@_quiet()
def plan(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print how long a training step would take, in how much memory, and whether FP8 pays."""
    from octavo.cost import rates_of
    from octavo.cost.from_flags import context_of, from_hugging_face, tokens_of
    from octavo.cost.mesh.plan import plan as plan_on_mesh
    from octavo.cost.rates import PlanError, with_attention

    sizes = vars(options).keys() & ModelConfig.__dataclass_fields__.keys() - {"context"}
    if options.model is not None and sizes:
        flags = ", ".join(sorted(map(flag_of, sizes)))
        raise PlanError(f"{flags}: the model's sizes are those of {options.model}: leave out one or the other")
    with option_errors():
        config, state = build(ModelConfig, vars(options)), build(StateConfig, vars(options))
    rates, context = rates_of(options.device), config.context
    if options.model is not None:
        model = from_hugging_face(options.model)
        context = getattr(options, "context", None) or context_of(model)
    else:
        with torch.device("meta"):
            model = GPT(config).bfloat16()
    if options.gpus is None and any(
        (options.mesh, options.micro_batches, options.recompute, options.checkpoint_in_fp8)
    ):
        flags = "--mesh, --micro-batches, --recompute and --checkpoint-in-fp8"
        raise PlanError(f"{flags} are for a step on several GPUs: add --gpus")
    if options.attention is not None:
        rates = with_attention(rates, options.attention)
    inputs = tokens_of(options.tokens, context)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    head = f"{size:.3g} B parameters, {len(inputs[0]) * (options.gpus or 1)} sequences of {context} tokens"
    head += f", by {state.algorithm}" * (state != StateConfig())
    if options.gpus is None:
        print(f"{head}{_on_one_device(model, inputs, rates, options, state)}")
        return 0
    if state != StateConfig(algorithm=state.algorithm) or options.head or options.attention or options.loss:
        flags = "--moments, --master, --weight-storage, --update-in-backward, --head, --attention and --loss"
        raise PlanError(f"{flags} are for a step on one device; with --gpus it says what FP8 brings")
    names = ("gpus", "mesh", "micro_batches", "recompute", "fuse", "checkpoint_in_fp8")
    settings = {name: getattr(options, name) for name in names} | {"algorithm": state.algorithm}
    settings |= {"context": context, "sequences": len(inputs[0]) * options.gpus}
    print(f"{head}\n{plan_on_mesh(model, rates, **settings).text()}")
    return 0


def _on_one_device(
    model: torch.nn.Module, inputs: tuple[torch.Tensor], rates: Any, options: argparse.Namespace, state: StateConfig
) -> str:
    """Return the rest of a line on the options of a step on one device, the plan, and what to change if none fits."""
    from octavo.cost.from_flags import optimizer_of
    from octavo.cost.steps import estimates
    from octavo.cost.verdict import change_that_fits, describe_plan, fits

    of_optimizer: dict[str, Any] = {"algorithm": state.algorithm, "outstanding": state.outstanding_bytes}
    of_optimizer |= {"moments": state.moments, "master": or_none(state.master)}
    changes = [f"moments {state.moments}, master {state.master}"] * (state != StateConfig())
    changes += ["weights in FP8 under the recipes"] * (state.weight_storage == "fp8")
    changes += [f"updates in backward by {state.update_in_backward}"] * (state.outstanding_bytes is not None)
    changes += [f"head {options.head}"] * bool(options.head) + ["chunked loss"] * bool(options.loss)
    settings: dict[str, Any] = {"head": options.head, "chunked_loss": options.loss == "chunked", "fuse": options.fuse}
    settings["weight_storage"] = or_none(state.weight_storage)
    is_octavos = state != StateConfig()
    settings["optimizer"] = optimizer_of(model, **of_optimizer) if is_octavos else torch.optim.AdamW
    steps = estimates(model, inputs, rates, **settings)
    lines = [", ".join(["", *changes]), describe_plan(steps, rates)]
    if not fits(steps, rates):
        lines.append(change_that_fits(model, inputs, rates, of_optimizer, **settings))
    return "\n".join(lines)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    from octavo.inspect import command

    parser.usage = f"{parser.prog} [OPTIONS] RECORD_OR_MODEL"
    command.add_arguments(parser)


def inspect(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print the findings of a record, or which layers of a model lose too much in FP8."""
    from octavo.inspect.command import Subject, asked, entry_point, inspect_command, what_if_command
    from octavo.inspect.what_if import WhatIfError

    source = options.folder = run_in(options.folder)
    if options.against is not None and ((other := run_in(options.against) / RECORD) / "record.json").exists():
        options.against = other
    if options.apply:
        if not checkpoint.RunFolder(source).holds_run():
            raise WhatIfError(f"--apply: {source} is no run of octavo train: give --write FILE")
        options.write = source / RULES
    if (source / RECORD / "record.json").exists() and not asked(options):
        source = options.folder = source / RECORD
    if checkpoint.RunFolder(source).holds_run() and not (source / "record.json").exists():
        record = source / RECORD
        model, corpus = trained_model(source), load_corpus(options.data)
        corpus.require(model.config)
        windows = Batches(corpus, model.config.context, 16, 0)
        subject = Subject(
            model,
            lambda model, batch: next_byte_loss(model(batch[0]), batch[1]),
            [windows.training(step) for step in range(2)],
        )
        return what_if_command(options, subject, record if (record / "record.json").exists() else None)
    if source.exists() and (flags := asked(options)):
        raise WhatIfError(f"{', '.join(flags)}: {source} is a record, and these are for models")
    return inspect_command(options) if source.exists() else what_if_command(options, entry_point(str(source)))


def _tune_options(parser: argparse.ArgumentParser) -> None:
    from octavo.tune import command

    command.add_options(parser)
    parser.add_argument("--forget", action="store_true", help="go back to octavo's own")


def tune(options: argparse.Namespace, arguments: list[str]) -> int:
    """Measure which tiles of kernels are fastest here."""
    from octavo.tune.command import tune_here

    return tune_here(options)


def _info_options(parser: argparse.ArgumentParser) -> None:
    help = "measure what this device does: products, casts, copies; keep it for `octavo plan`, and say where FP8 pays"
    parser.add_argument("--measure", action="store_true", help=help)


def info(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print versions, devices and extras of this machine; with --measure, also its rates."""
    print(describe_machine())
    if options.measure:
        from octavo.cost import measure
        from octavo.cost.rates import keep
        from octavo.cost.verdict import describe_rates

        print("\nmeasuring ...", flush=True)
        rates = measure()
        print(describe_rates(rates), f"\nkept in {keep(rates)}", sep="\n")
    return 0


# {command: (the function that runs it, the function that adds its options to a parser)}
_COMMANDS: dict[str, tuple[Callable[..., int], Callable[[argparse.ArgumentParser], None]]] = {
    "train": (train, _train_options),
    "compare": (train, _compare_options),
    "export": (export, _export_options),
    "plan": (plan, _plan_options),
    "inspect": (inspect, _inspect_options),
    "tune": (tune, _tune_options),
    "info": (info, _info_options),
}
_EXAMPLES = """\
octavo train --data corpus/ --recipe delayed --steps 1000
octavo train --config runs/train-001/delayed --lr 3e-4
torchrun --nproc-per-node 2 -m octavo train --shard fsdp
octavo compare --data corpus/ --recipes baseline dynamic mx --out runs/mine
octavo compare --recipes baseline dynamic mx --out runs/mine --resume
octavo export runs/train-001/delayed --onnx model.onnx
octavo export runs/train-001/mx --safetensors served/
octavo plan path/to/config.json --tokens 16384 --context 8192 --device H100
octavo plan --width 4096 --layers 32 --heads 32 --context 4096 --device B200
octavo plan path/to/config.json --device H100 --algorithm muon --moments fp8 --master split24
octavo plan path/to/config.json --device H100 --fuse --attention cudnn --loss chunked --head dynamic_with_output_hp
octavo plan path/to/config.json --device H100 --gpus 64 --mesh fsdp=8,tensor=8
octavo inspect runs/train-001/dynamic --html report.html
octavo inspect runs/train-001/dynamic --live
octavo inspect job:training --recipes dynamic,blockwise --loss 0.1% --write map.json
octavo tune
octavo tune cast amax --minutes 3
octavo tune --forget
octavo info
octavo info --measure"""


def examples_of(name: str) -> list[str]:
    """Return the example command lines of a command."""
    return [line for line in _EXAMPLES.splitlines() if f"octavo {name}" in line]


def parser(arguments: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of `octavo`, with the options of each command.

    Args:
        arguments: a command line; commands that it doesn't name get no options, as some take time to import (default:
            all commands get them, so that `shtab` can write completions).

    Example:
        >>> parser().parse_args(["plan", "--device", "H100", "--tokens", "4096"]).tokens
        4096
    """
    top, commands = top_parser(octavo.__version__)
    for name, help in COMMANDS.items():
        run, add = _COMMANDS[name]
        sub = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog="\n  ".join(["examples:", *examples_of(name)]),
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        sub.set_defaults(command=run, parser=sub)
        if arguments is None or name in arguments:
            add(sub)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: what follows `octavo` on the command line (default: sys.argv).
    """
    if arguments is not None or "WORLD_SIZE" not in os.environ:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    code = _run(sys.argv[1:])  # torchrun started this process
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # in an ordinary exit, threads of a destroyed process group may abort the process


def _run(arguments: list[str]) -> int:
    def interrupt(number: int, frame: types.FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread can set signal handlers
    try:
        # SIGTERM ends the command as Ctrl-C does, also while torch is imported and data loads
        with signals_to(interrupt, signal.SIGTERM) if is_main else contextlib.nullcontext():
            options, unknown = parser(arguments).parse_known_args(arguments)
            if unknown:
                hint = f"(see octavo {options.name} --help){meant(unknown, options.parser)}"
                return fault(f"unrecognized arguments: {' '.join(unknown)} {hint}")
            return options.command(options, arguments)
    except SystemExit as stop:  # argparse, after --help, --version or a wrong argument
        return stop.code if isinstance(stop.code, int) else FAULT
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # nobody reads stdout any more; flushing it at exit must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except Exception as error:
        if (message := _expected(error)) is None:
            raise
        return fault(message)


def meant(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return "; did you mean --lr?" for arguments that a command doesn't take, or "" where no flag is like them."""
    flags = set(re.findall(r"--[a-z][a-z-]*", parser.format_help()))
    names = [argument.partition("=")[0].replace("_", "-") for argument in unknown if argument.startswith("--")]
    near = [SYNONYMS.get(name) or next(iter(get_close_matches(name, sorted(flags), 1, 0.75)), "") for name in names]
    likely = [flag for flag in near if flag in flags]
    return f"; did you mean {', '.join(likely)}?" * bool(likely)


def _expected(error: Exception) -> str | None:
    """Return the line to print for an error that the user can remedy; None for a bug of octavo."""
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
