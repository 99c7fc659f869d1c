"""``octavo inspect``: what a record says, printed, and written as HTML and JSON; once, or as a training goes on."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from octavo.distributed.files import replacing
from octavo.inspect.files import files_of
from octavo.inspect.findings import diagnose
from octavo.inspect.record import load
from octavo.inspect.report import table, to_html, to_json

EVERY = 3.0  # seconds between two looks at a record that grows
_CLEAR = "\x1b[2J\x1b[H"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``octavo inspect``."""
    help = "a folder of octavo.inspect.record; a model: module:function, or a run of octavo train, or its checkpoint.pt"
    parser.add_argument("folder", type=Path, metavar="RECORD_OR_MODEL", help=help)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with all findings and plots")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="findings to print (default: 10)")
    parser.add_argument("--live", action="store_true", help="print anew as the record grows, until interrupted")


def inspect_command(options: argparse.Namespace) -> int:
    """Carries it out, and returns the exit code."""
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


def _report(options: argparse.Namespace) -> str:
    record = load(options.folder)
    findings = diagnose(record)
    written = []
    for path, text in ((options.json, to_json), (options.html, partial(to_html, title=str(options.folder)))):
        if path is not None:
            with replacing(path) as file:
                file.write(text(record, findings).encode())
            written.append(f"wrote {path}")
    return "\n\n".join([table(record, findings, options.top), *written])
