"""``octavo inspect``: what a record says, printed, and written as HTML and JSON; once, or as a training goes on."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from octavo.distributed.files import replacing, require_place
from octavo.errors import first_line
from octavo.inspect.files import files_of
from octavo.inspect.findings import diagnose
from octavo.inspect.record import RecordError, load
from octavo.inspect.remedies import together
from octavo.inspect.report import table, to_html, to_json
from octavo.recipes import to_json as to_rules

WHAT_IF = "what_if.json"  # in a record's folder
EVERY = 3.0  # seconds between two looks at a record that grows
_CLEAR = "\x1b[2J\x1b[H"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``octavo inspect``."""
    help = "a folder of octavo.inspect.record, or a run with one; or a model: module:function, a run, a checkpoint.pt"
    parser.add_argument("folder", type=Path, metavar="RECORD_OR_MODEL", help=help)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with all findings and plots")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON; of a model what was found")
    help = (
        f"what was found of the model by --json, to draw beside (default: the record's own {WHAT_IF}, if there is one)"
    )
    parser.add_argument("--what-if", type=Path, metavar="FILE", help=help)
    help = "write recipes by layer for octavo.recipes.load: what mends a record's casts, or a model's by its budget"
    parser.add_argument("--write", type=Path, metavar="FILE", help=help)
    parser.add_argument("--top", type=at_least(0), default=10, metavar="N", help="findings to print (default: 10)")
    parser.add_argument("--live", action="store_true", help="print anew as the record grows, until interrupted")


def at_least(least: int) -> Callable[[str], int]:
    """A whole number on the command line, from ``least`` on."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"invalid value: {text!r} (choose a whole number from {least} on)")
        return int(text)

    return read


def inspect_command(options: argparse.Namespace) -> int:
    """Carries it out, and returns the exit code."""
    for path in filter(None, (options.json, options.html, options.write)):
        require_place(path)
    if not options.live:
        print(_report(options))
        return 0
    seen = None
    try:
        while True:
            if (records := len(files_of(options.folder, "counts"))) != seen:
                seen = records
                print(_CLEAR * sys.stdout.isatty() + _report(options), flush=True)
            time.sleep(EVERY)
    except KeyboardInterrupt:
        return 0


def write(path: Path, text: str) -> str:
    """Write a file; returns that it was."""
    with replacing(path) as file:
        file.write(text.encode())
    return f"wrote {path}"


def write_rules(path: Path, text: str, *more: str) -> str:
    """Write recipes by layer; returns how to use them, ``more`` being further arguments."""
    return f"{write(path, text)}: octavo.convert(model, octavo.recipes.load({', '.join((repr(str(path)), *more))}))"


def _report(options: argparse.Namespace) -> str:
    record = load(options.folder)
    findings = diagnose(record)
    what_if = _what_if(options)
    written = []
    for path, text in ((options.json, to_json), (options.html, partial(to_html, title=str(options.folder)))):
        if path is not None:
            written.append(write(path, text(record, findings, what_if=what_if)))
    if options.write is not None:
        written.append(write_rules(options.write, to_rules(together(found.rules for found in findings)), "DEFAULT"))
    return "\n\n".join([table(record, findings, options.top), *written])


def _what_if(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a WhatIf, from the file that was given or that the record's folder has.

    Raises:
        RecordError: for a file that holds none.
    """
    path = options.what_if or options.folder / WHAT_IF
    if options.what_if is None and not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["what_if"]
        return [row for row in found if {"layer", "recipe", "predicted"} <= row.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = "no what-if: write one by octavo inspect MODEL --json FILE"
        raise RecordError(f"{path} holds {why} ({first_line(error)})") from error
