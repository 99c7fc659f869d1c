"""Parses and runs a command line of `octavo`, and prints a fault in one line. A fault ends it with 2, Ctrl-C with 130.

This file has each command's options and examples; actions.py does what they say.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import octavo
from octavo.cli import actions
from octavo.cli.actions import add_options, signals_to
from octavo.train.config import RECIPES, SECTIONS, UNCONVERTED, ModelConfig, StateConfig
from octavo_command import COMMANDS, FAULT, fault, interrupted
from octavo_command import parser as top_parser


def parser(arguments: Collection[str] | None = None) -> argparse.ArgumentParser:
    """The parser of `octavo`, with the options of each command.

    Args:
        arguments: a command line; commands that it doesn't name get no options, as some take time to import (default:
            all commands get them, so that `shtab` can write completions).

    Example:
        >>> parser().parse_args(["plan", "--device", "H100", "--tokens", "4096"]).tokens
        4096
    """
    top, commands = top_parser(octavo.__version__)
    for name, help in COMMANDS.items():
        run, add, examples = _COMMANDS[name]
        sub = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(command=run)
        if arguments is None or name in arguments:
            add(sub)
    return top


def _train(parser: argparse.ArgumentParser) -> None:
    what = f"how FP8 is used: one of {', '.join(RECIPES)}; or a file of recipes by layer, such as rules.json"
    _run_options(parser, "--recipe", what, actions.RECIPE, type=actions.recipe_given)


def _compare(parser: argparse.ArgumentParser) -> None:
    what, default = f"some of {', '.join(RECIPES)}", " ".join(actions.COMPARED)
    _run_options(parser, "--recipes", what, default, nargs="+", choices=RECIPES)


def _run_options(parser: argparse.ArgumentParser, flag: str, what: str, default: str, **how: Any) -> None:
    parser.usage = f"{parser.prog} [OPTIONS]"
    without = f"the first {len(UNCONVERTED)} without FP8: in --dtype, in bfloat16, in float32"
    help = f"{what}; {without} (default: {default})"
    parser.add_argument(flag, metavar="RECIPE", default=argparse.SUPPRESS, help=help, **how)
    help = "JSON or TOML with options, or a run's folder to take those of; flags win over it"
    parser.add_argument("--config", type=Path, metavar="FILE", help=help)
    for config in SECTIONS.values():
        add_options(parser, config)


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN", help="a run's folder")
    written = parser.add_mutually_exclusive_group(required=True)
    written.add_argument("--onnx", type=Path, metavar="FILE", help="the file to write")
    help = "a new folder for FP8 weights and their config.json, as servers read them"
    written.add_argument("--safetensors", type=Path, metavar="FOLDER", help=help)
    layouts = ("compressed-tensors", "fine-grained", "mxfp8")
    help = "of FP8 weights; the first holds those of every recipe (default: compressed-tensors)"
    parser.add_argument("--layout", default=layouts[0], choices=layouts, help=help)
    parser.add_argument("--opset", type=int, default=21, metavar="N", help="of ONNX, 21 to 24 (default: 21)")
    dtypes = ("bfloat16", "float32")
    help = "of other weights than FP8 (default: bfloat16)"
    parser.add_argument("--weights", default="bfloat16", choices=dtypes, help=help)
    help = "text to check it on (default: Python's own standard library)"
    parser.add_argument("--data", type=Path, metavar="PATH", help=help)


def _plan(parser: argparse.ArgumentParser) -> None:
    help = "a Hugging Face config.json, or its folder (default: a GPT by the sizes below; CONFIG takes --context)"
    parser.add_argument("model", nargs="?", type=Path, metavar="CONFIG", help=help)
    help = "of a step on one device, or for each GPU (default: the sequences in 16384, or one if it is longer)"
    parser.add_argument("--tokens", type=int, metavar="N", help=help)
    help = "H100, H200 or B200, by published rates (default: this one, by what `octavo info --measure` found)"
    parser.add_argument("--device", metavar="NAME", help=help)
    help = "predict memory as octavo.convert(..., fuse=True) converts"
    parser.add_argument("--fuse", action="store_true", help=help)
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
    parser.add_argument("--json", action="store_true", help="print JSON: seconds and bytes")
    add_options(parser, ModelConfig)
    add_options(parser, StateConfig, ("algorithm", "moments", "master"))


def _inspect(parser: argparse.ArgumentParser) -> None:
    from octavo.inspect import command

    command.add_arguments(parser)


def _tune(parser: argparse.ArgumentParser) -> None:
    from octavo.tune import command

    command.add_options(parser)
    parser.add_argument("--forget", action="store_true", help="go back to octavo's own")


def _info(parser: argparse.ArgumentParser) -> None:
    help = "measure what this device does: products, casts, copies; keep it for `octavo plan`, and say where FP8 pays"
    parser.add_argument("--measure", action="store_true", help=help)


# by name: its function, what adds its options, and examples of its use
_COMMANDS: dict[str, tuple[Callable[..., int], Callable[[argparse.ArgumentParser], None], tuple[str, ...]]] = {
    "train": (
        actions.train,
        _train,
        (
            "octavo train --data corpus/ --recipe delayed --steps 1000",
            "octavo train --config runs/train-001/delayed --lr 3e-4",
            "torchrun --nproc-per-node 2 -m octavo train --shard fsdp",
        ),
    ),
    "compare": (
        actions.train,
        _compare,
        (
            "octavo compare --data corpus/ --recipes baseline dynamic mx --out runs/mine",
            "octavo compare --recipes baseline dynamic mx --out runs/mine --resume",
        ),
    ),
    "export": (
        actions.export,
        _export,
        (
            "octavo export runs/train-001/delayed --onnx model.onnx",
            "octavo export runs/train-001/mx --safetensors served/",
        ),
    ),
    "plan": (
        actions.plan,
        _plan,
        (
            "octavo plan path/to/config.json --tokens 16384 --context 8192 --device H100",
            "octavo plan --width 4096 --layers 32 --heads 32 --context 4096 --device B200",
            "octavo plan path/to/config.json --device H100 --algorithm muon --moments fp8 --master split24",
            "octavo plan path/to/config.json --device H100 --gpus 64 --mesh fsdp=8,tensor=8",
        ),
    ),
    "inspect": (
        actions.inspect,
        _inspect,
        (
            "octavo inspect runs/train-001/dynamic --html report.html",
            "octavo inspect runs/train-001/dynamic --live",
            "octavo inspect job:training --recipes dynamic,blockwise --loss 0.1% --write map.json",
        ),
    ),
    "tune": (actions.tune, _tune, ("octavo tune", "octavo tune cast amax --minutes 3", "octavo tune --forget")),
    "info": (actions.info, _info, ("octavo info", "octavo info --measure")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: what follows `octavo` on the command line (default: sys.argv).
    """
    if arguments is not None or "WORLD_SIZE" not in os.environ:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    code = _run(sys.argv[1:])  # a process of torchrun's
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # in an ordinary exit, threads of a process group that is gone may abort the process


def _run(arguments: list[str]) -> int:
    def interrupt(number: int, frame: types.FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # which alone can set a signal's handler
    try:
        # SIGTERM ends the command as Ctrl-C does, also while torch is imported and data loads
        with signals_to(interrupt, signal.SIGTERM) if is_main else contextlib.nullcontext():
            options, unknown = parser(arguments).parse_known_args(arguments)
            if unknown:
                return fault(f"unrecognized arguments: {' '.join(unknown)} (see octavo {options.name} --help)")
            return options.command(options, arguments)
    except SystemExit as stop:  # argparse, after --help, --version or a wrong argument
        return stop.code if isinstance(stop.code, int) else FAULT
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:  # the reader of our output is gone, and flushing at exit must not complain again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except Exception as error:
        if (message := _expected(error)) is None:
            raise
        return fault(message)


def _expected(error: Exception) -> str | None:
    """The line for an error that the user can do something about; None for a bug of octavo's."""
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
