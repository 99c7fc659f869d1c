"""``octavo tune``: choose the kinds of kernels to tune and the time for them, and write the result."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.cache import cache_folder
from octavo.distributed.files import replacing
from octavo.errors import OctavoError
from octavo.kernels.capability import runs_natively

if TYPE_CHECKING:
    from octavo.tune.tuner import Tuned

LEAST_SECONDS = 15  # seconds: no kind takes less


class TuneError(OctavoError, RuntimeError):
    """There is nothing to tune here, or nothing of this name; the message says why."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both ``octavo tune`` and ``python -m benchmarks tune``."""
    help = "kinds of kernels by their names in configs.json, and library, the products that are torch's (default: all)"
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=help)
    help = "kinds not reached by then keep their rows (default: 9.0)"
    parser.add_argument("--minutes", type=minutes, default=9.0, metavar="MINUTES", help=help)
    parser.add_argument("--toy", action="store_true", help="tiny shapes and two configurations; nothing is kept")


def minutes(text: str) -> float:
    """Return a number of minutes from the command line."""
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r} (choose a number of minutes from 0 on)")
    return number


def tune_here(options: argparse.Namespace) -> int:
    """Run ``octavo tune``; return 0, or 1 if something failed or there was no time.

    Raises:
        TuneError: without Triton or a GPU with native FP8.
    """
    if not torch.cuda.is_available() or not runs_natively(torch.device("cuda", torch.cuda.current_device())):
        raise TuneError("there is nothing to tune here: octavo's kernels run on NVIDIA GPUs with native FP8 (sm_89 on)")
    try:
        import triton

        from octavo.kernels.triton.launch import TileTable
    except ImportError as error:
        raise TuneError("there is nothing to tune: Triton can't be imported, so GPUs run what CPUs do") from error
    path = TileTable.tuned_file()
    assert path is not None  # there is a GPU
    if options.forget:
        print(f"forgotten: {path}" if path.exists() else f"nothing was tuned here: there is no {path}")
        path.unlink(missing_ok=True)
        return 0
    if not options.toy:
        cache_folder(make=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    return tune(None if options.toy else path, {"device": torch.cuda.get_device_name(), **versions}, options)


def tune(output: Path | None, origin: Mapping[str, str], options: argparse.Namespace) -> int:
    """Tune kinds one after the other, and write the table after each.

    Args:
        output: the table to write, whose other rows stay; None to keep nothing.
        origin: device and versions, for the table.
        options: see ``add_options``.

    Returns:
        0, or 1 if something failed or nothing was found.

    Raises:
        TuneError: for an unknown kind.
    """
    from octavo.kernels.triton.cases import CASES_OF_KIND
    from octavo.tune import timing, tuner

    deadline = timing.Deadline(options.minutes)
    extent = tuner.TOY if options.toy else tuner.FULL
    tuned_by_kind: dict[str, Tuned] = {}
    kinds = options.kinds or [*CASES_OF_KIND]
    failed = False
    if unknown := set(kinds) - CASES_OF_KIND.keys():
        raise TuneError(f"no such kind: {', '.join(sorted(unknown))}; known: {', '.join(CASES_OF_KIND)}")
    if timing.ON_GPU and (tasks := tuner.tasks(kinds, extent)):
        failures = timing.precompile(tuner.compile_one, tasks, options.minutes / 2)
        print(f"{len(tasks)} configurations compiled ahead; failed: {failures[:3] or 'none'}", flush=True)
    try:
        for kind in kinds:
            if deadline.left() < LEAST_SECONDS:
                print(f"{kind}: left out, no time", flush=True)
                continue
            try:
                tuned = tuner.tune(kind, extent, {other: each.rows for other, each in tuned_by_kind.items()})
            except Exception as error:
                print(f"{kind}: FAILED, {timing.describe(error)}", file=sys.stderr, flush=True)
                failed = True
                continue
            if tuned.rows or kind == tuner.LIBRARY:  # torch's product may be the slower one everywhere
                tuned_by_kind[kind] = tuned
                print(f"{json.dumps(kind)}: {json.dumps(tuned.rows)}", flush=True)
                if output is not None:
                    _write(output, origin, tuned_by_kind)
            else:
                failed = True
    finally:  # also when interrupted
        print(_summary(output, tuned_by_kind), flush=True)
    return int(failed or not tuned_by_kind)


def _write(path: Path, origin: Mapping[str, str], tuned_by_kind: Mapping[str, Tuned]) -> None:
    """Write the table with the rows of these kinds replaced, one line for each kind."""
    from octavo.kernels.triton.launch import TileTable

    old_table, rows = TileTable.read(path), {kind: tuned.rows for kind, tuned in tuned_by_kind.items()}
    library = rows.pop("library", [*map(list, sorted(old_table.library))])
    versions = (f"{name} {value}" for name, value in origin.items() if name != "device")
    measured_on = ", ".join([origin["device"], *versions])
    rows = old_table.configs | rows
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(rows_of_kind)}" for kind, rows_of_kind in rows.items())
    head = f'{{"measured_on": {json.dumps(measured_on)},\n"library": {json.dumps(library)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(f'{head}"configs": {{\n{lines}\n}}}}\n'.encode())


def _summary(output: Path | None, tuned_by_kind: Mapping[str, Tuned]) -> str:
    """Return lines that say where the rows were written, and how many times as fast as octavo's own they are."""
    from octavo.kernels.triton.launch import TileTable

    if not tuned_by_kind:
        return "nothing was found, nothing is written"
    gains = {kind: tuned.gain for kind, tuned in tuned_by_kind.items() if not math.isnan(tuned.gain)}
    lines = []
    if gains:
        mean = math.exp(sum(map(math.log, gains.values())) / len(gains))
        gain_by_kind = ", ".join(f"{kind} {gain:.2f}" for kind, gain in gains.items())
        lines = [f"times as fast as by octavo's own rows: {mean:.2f} ({gain_by_kind})"]
    written = "nothing is kept" if output is None else f"wrote {output}"
    if output is not None and output == TileTable.tuned_file():
        written += ": new processes use it"
    return "\n".join([*lines, f"{len(tuned_by_kind)} kinds tuned; {written}"])
