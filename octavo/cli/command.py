"""How a command line is run: each command of `octavo` is a file beside this one, which is imported where it is named.

A fault is printed in one line, and ends the command with 2, Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import NoReturn

import torch

import octavo
from octavo.errors import OctavoError
from octavo_command import COMMANDS, FAULT, Formatter, fault, interrupted, signals_to
from octavo_command import parser as top_parser

# flags of other trainers, and what they are called here
SYNONYMS = {"--learning-rate": "--lr", "--epochs": "--steps", "--max-steps": "--steps", "--batch-size": "--batch",
            "--gradient-accumulation-steps": "--micro-batches", "--max-grad-norm": "--clip", "--output-dir": "--out",
            "--sequence-length": "--context", "--seq-length": "--context", "--seq-len": "--context",
            "--hidden-size": "--width", "--num-layers": "--layers", "--num-heads": "--heads"}  # fmt: skip


def file_of(name: str) -> types.ModuleType:
    """Return a command's file: ``EXAMPLES``, ``add_options(parser)``, and ``run(options, arguments)``, an exit code."""
    return importlib.import_module(f"octavo.cli.{name}")


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
        sub = commands.add_parser(name, help=help, formatter_class=Formatter, allow_abbrev=False)
        sub.description = f"{help[0].upper()}{help[1:]}."
        sub.set_defaults(parser=sub)
        if arguments is None or name in arguments:
            command = file_of(name)
            sub.epilog = "\n  ".join(["examples:", *command.EXAMPLES])
            sub.set_defaults(command=command.run)
            command.add_options(sub)
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
        of_train = "lower --width, --layers, --context or --batch, or raise --micro-batches"
        return f"out of memory: take a smaller model or batch (octavo train: {of_train})"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"--compile failed ({text.splitlines()[0]}): leave it out, or see what torch.compile needs here"
    return None
