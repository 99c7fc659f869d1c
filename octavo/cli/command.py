"""What `octavo` does with a command line: runs it, and says faults in one line. They end with 2, Ctrl-C with 130."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Sequence
from typing import NoReturn

from octavo.cli.commands import parser
from octavo.cli.training import signals_to
from octavo_command import FAULT, fault, interrupted


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
