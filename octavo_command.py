"""The `octavo` command while torch, which takes seconds to import, is not there: its help, wrong commands, Ctrl-C.

It lies beside the package, since whatever imports a part of the package imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import NoReturn

FAULT = 2
INTERRUPTED = 130
COMMANDS = {
    "train": "train a byte-level GPT with one recipe",
    "compare": "train the same GPT in high precision and in FP8, and compare",
    "export": "write a trained model as ONNX, and check it in onnxruntime",
    "plan": "predict a training step's time and memory in each recipe, and say whether FP8 pays",
    "inspect": "say what FP8 does to a recorded training, or would to a model: what, why, what to change",
    "tune": "measure which tiles kernels are fastest with on this GPU, for all later processes",
    "info": "show versions, devices, and where FP8 is native",
}
EXAMPLES = (
    "octavo compare --steps 100",
    "octavo train --data corpus/ --recipe delayed",
    "octavo inspect runs/train-001/delayed",
    "octavo train --help",
)


class Formatter(argparse.HelpFormatter):
    """A formatter of help whose lines fit the terminal: an example that is longer goes on after a backslash."""

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else "\n".join(textwrap.wrap(heading, self._width - 1)))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            is_example = line.startswith(" ")
            wrap = textwrap.TextWrapper(width - 2 * is_example, break_long_words=False, break_on_hyphens=False)
            wrap.initial_indent, wrap.subsequent_indent = ("  ", "    ") if is_example else ("", "")
            lines += [(" \\\n" if is_example else "\n").join(wrap.wrap(line.strip()))]
        return "\n".join(lines)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        text, width = super()._format_action_invocation(action), self._width - self._current_indent
        if len(text) <= width:
            return text
        wrapped = textwrap.wrap(text.replace(",", ", "), width - 2, break_on_hyphens=False)
        return f"\n{' ' * (self._current_indent + 2)}".join(wrapped)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(fault(f"{message} (see {self.prog} --help)"))


def fault(message: str) -> int:
    """Print a fault as one line, and return the exit code for it."""
    ranked = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets both
    rank = f"rank {os.environ.get('RANK')}: " if ranked else ""
    print(f"octavo: error: {rank}{' '.join(message.split())}", file=sys.stderr)
    return FAULT


def interrupted() -> int:
    """Say that the command was interrupted, and return the exit code for it."""
    print("octavo: interrupted", file=sys.stderr)
    return INTERRUPTED


@contextlib.contextmanager
def signals_to(handler: Callable[..., object], *numbers: int) -> Iterator[None]:
    """Set a handler for these signals within the block, and the previous handlers after it."""
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


def parser(version: str = "") -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    """Return the command's parser, and the action that sub-commands are added to."""
    top = Parser(
        prog="octavo",
        description="Train PyTorch models in FP8.",
        epilog="\n  ".join(["examples:", *EXAMPLES]),
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"octavo {version}", help="show octavo's version")
    return top, top.add_subparsers(title="commands", metavar="COMMAND", dest="name", required=True)


def main() -> int:
    """Run the command, and return its exit code."""
    try:
        if not {"--version", *COMMANDS}.intersection(sys.argv[1:2]):
            top, commands = parser()
            for name, help in COMMANDS.items():
                commands.add_parser(name, help=help)
            top.parse_args()
        from octavo import cli

        return cli.main()
    except KeyboardInterrupt:
        return interrupted()
