"""`octavo tune`: measure which tiles kernels are fastest with on this GPU, or forget what was measured."""

from __future__ import annotations

import argparse

from octavo.tune import command

EXAMPLES = ("octavo tune", "octavo tune cast amax --minutes 3", "octavo tune --forget")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo tune``."""
    command.add_options(parser)
    parser.add_argument("--forget", action="store_true", help="go back to octavo's own")


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Measure the fastest tiles, or forget them with --forget."""
    return command.tune_here(options)
