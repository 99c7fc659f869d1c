"""``octavo inspect`` of a record or of a model.

For a record it prints the findings, and writes them as HTML and JSON; once, or again as a training goes on. For a model
it prints which layers can't stand FP8, and finds the recipes by layer that keep to a budget.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from octavo import recipes
from octavo.cost.rates import rates_of
from octavo.cost.text import columns
from octavo.cost.work import COMPARED
from octavo.distributed.files import replacing
from octavo.errors import first_line
from octavo.inspect.findings import diagnose
from octavo.inspect.record import RecordError, files_of, load, reading
from octavo.inspect.remedies import RECIPES_FILE, own_recipes, with_remedies
from octavo.inspect.report import Against, table, to_html, to_json
from octavo.inspect.what_if import RUNS, Effect, WhatIf, WhatIfError, check, compare
from octavo.nn.candidates import large_enough
from octavo.nn.recipe_module import RecipeModule
from octavo.reading import read_json
from octavo.recipes import to_json as to_rules
from octavo.scaling.recipe import Recipe, RecipeMap

WHAT_IF = "what_if.json"  # a file in a record's folder
OWN = "its own"  # what a model's own recipes are called beside those of --rules
EVERY = 3.0  # seconds between two reads of a record that grows
_CLEAR = "\x1b[2J\x1b[H"  # what empties a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo inspect`` to a parser."""
    help = "a folder of octavo.inspect.record, or a run with one; or a model: module:function, a run"
    parser.add_argument("folder", type=Path, metavar="RECORD_OR_MODEL", help=help)
    parser.add_argument("--html", type=file_to_write, metavar="FILE", help="write a page with all findings and plots")
    help = "write the same as JSON; of a model what was found"
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help=help)
    help = f"what was found of the model by --json, to draw beside (default: the record's own {WHAT_IF}, if any)"
    parser.add_argument("--what-if", type=Path, metavar="FILE", help=help)
    help = "another record or run, to compare with: which findings are new, worse or gone, and both on one page"
    parser.add_argument("--against", type=Path, metavar="FOLDER", help=help)
    help = "write recipes by layer for octavo.recipes.load: what mends a record's casts, or a model's by its budget"
    written = parser.add_mutually_exclusive_group()
    written.add_argument("--write", type=file_to_write, metavar="FILE", help=help)
    help = "write that to rules.json of a run of octavo train, as the recipe of the next octavo train --config RUN"
    written.add_argument("--apply", action="store_true", help=help)
    parser.add_argument("--top", type=at_least(0), default=10, metavar="N", help="findings to print (default: 10)")
    parser.add_argument("--live", action="store_true", help="print anew as the record grows, until interrupted")
    group = parser.add_argument_group("which layers can't stand FP8, of a model")
    help = f"recipes to compare, with commas (default: {','.join(COMPARED)})"
    group.add_argument("--recipes", type=_recipes, metavar="NAMES", help=help)
    budget = group.add_mutually_exclusive_group()
    help = "say what the recipes by layer in this file would bring, beside the model's own"
    budget.add_argument("--rules", type=Path, metavar="FILE", help=help)
    help = "find a RecipeMap with N layers in high precision"
    budget.add_argument("--keep", type=at_least(0), metavar="N", help=help)
    help = "find the cheapest RecipeMap that raises the predicted loss by at most this share, such as 0.1%%"
    budget.add_argument("--loss", type=_share, metavar="SHARE", help=help)
    help = "of the smallest layers to look at, in and out (default: as octavo.convert)"
    group.add_argument("--min-features", type=at_least(1), metavar="N", help=help)
    help = f"most passes with one layer in FP8; effects of other layers are estimated (default: {RUNS})"
    group.add_argument("--runs", type=at_least(1), metavar="N", help=help)
    help = "text for batches of a run of octavo train (default: Python's own standard library)"
    group.add_argument("--data", type=Path, metavar="PATH", help=help)
    help = "H100, H200 or B200, for costs by published rates (default: this device's, or else an H100's)"
    group.add_argument("--device", metavar="NAME", help=help)


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least ``least`` from the command line."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"invalid value: {text!r} (choose a whole number from {least} on)")
        return int(text)

    return read


def inspect_command(options: argparse.Namespace) -> int:
    """Run ``octavo inspect`` of a record; return the exit code."""
    if not options.live:
        print(_report(options))
        return 0
    records_shown = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if (records := len(files_of(options.folder, "counts"))) != records_shown:
                records_shown = records
                print((_CLEAR if sys.stdout.isatty() else "") + _report(options), flush=True)
            time.sleep(EVERY)
    return 0


def file_to_write(text: str) -> Path:
    """Return a path from the command line that can become a file, before minutes of work are spent on its content.

    Raises:
        OSError: if it can't, as writing it would. Not argparse's ArgumentTypeError, which argparse would turn into a
            usage error: the command says of an OSError which path is at fault, and why.
    """
    path = Path(text)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    return path


def write(path: Path, text: str) -> str:
    """Write a file; return a line that says so."""
    with replacing(path) as file:
        file.write(text.encode())
    return f"wrote {path}"


def write_rules(options: argparse.Namespace, recipe: RecipeMap) -> str:
    """Write recipes by layer; return a line that says what reads them."""
    path = options.write
    reader = f"octavo train --config {path.parent}" if options.apply else f"octavo.convert(model, {str(path)!r})"
    return f"{write(path, to_rules(recipe))}: {reader}"


def _report(options: argparse.Namespace) -> str:
    """Return the text of a record for the terminal; write the files that the options name."""
    record = load(options.folder)
    findings = diagnose(record)
    what_if = _what_if(options)
    other = None if options.against is None else load(options.against)
    against = None if other is None else Against(str(options.against), other, diagnose(other))
    parts = [table(record, findings, options.top, against)]
    if options.json is not None:
        parts.append(write(options.json, to_json(record, findings, what_if, against)))
    if options.html is not None:
        parts.append(write(options.html, to_html(record, findings, str(options.folder), what_if, against)))
    if options.write is not None:
        with reading(path := options.folder / RECIPES_FILE):
            recipe_map = recipes.load(path)
        mended = with_remedies(recipe_map, (finding.rules for finding in findings))
        parts.append(write_rules(options, mended))
    return "\n\n".join(parts)


def _what_if(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a what-if that lies beside a record, or that the options name; none without one."""
    path = options.what_if or options.folder / WHAT_IF
    if options.what_if is None and not path.exists():
        return []
    try:
        return [row for row in read_json(path)["what_if"] if {"layer", "recipe", "predicted"} <= row.keys()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = "no what-if: write one by octavo inspect MODEL --json FILE"
        raise RecordError(f"{path} holds {why} ({first_line(error)})") from error


class Subject(NamedTuple):
    """A model with its loss and batches, as ``octavo.inspect.compare`` takes them."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Iterable[Any]


def asked(options: argparse.Namespace) -> list[str]:
    """Return the flags that were given and are for a model: by these a run is read as a model, not as its record."""
    names = ("recipes", "rules", "keep", "loss", "min_features", "runs", "data", "device")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]


def _recipes(text: str) -> tuple[str, ...]:
    """Return the names of recipes in an argument, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in COMPARED]:
        raise argparse.ArgumentTypeError(f"no recipe {', '.join(map(repr, unknown))}; there are {', '.join(COMPARED)}")
    return names


def _share(text: str) -> float:
    """Return a share from an argument such as "0.1%" or "0.001"."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: such as 0.1% or 0.001")
    return share


def entry_point(name: str) -> Subject:
    """Call a user's function; return its model, loss and batches.

    Args:
        name: ``module:function``, also looked for in the current folder. The function takes nothing and returns (model,
            loss, batches): ``loss(model, batch)`` gives the scalar to call backward of, ``batches`` is a list of a few.

    Raises:
        WhatIfError: if the function can't be called, or returns something else.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise WhatIfError(f"{name} is no folder of a record or a run; of a model give module:function")
    sys.path.insert(0, "")
    try:
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            raise WhatIfError(f"{name}: can't import {module}: {first_line(error)}") from error
        build = getattr(imported, function, None)
        if not callable(build):
            raise WhatIfError(f"{name}: {module} has no function {function}")
        result = build()  # which may import from the current folder too
    finally:
        sys.path.remove("")
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], nn.Module) and callable(result[1]):
        if isinstance(result[2], Iterable):
            return Subject(*result)
    got = f"({', '.join(type(x).__name__ for x in result)})" if isinstance(result, tuple) else type(result).__name__
    raise WhatIfError(f"{name} must return (model, loss, batches) with loss(model, batch), but returned {got}")


def what_if_command(options: argparse.Namespace, subject: Subject, record: Path | None = None) -> int:
    """Run ``octavo inspect`` of a model; return the exit code.

    ``record``: the folder of the model's record, where the result is written too, for the record's page.
    """
    names = ("html", "what-if", "against", "live")
    if for_records := [f"--{name}" for name in names if getattr(options, name.replace("-", "_"))]:
        raise WhatIfError(f"{', '.join(for_records)}: {options.folder} is a model, and these are for records")
    if options.write is not None and options.keep is None and options.loss is None:
        raise WhatIfError("--write needs a budget: --keep N or --loss SHARE")
    batches = list(subject.batches)
    size_limit = [] if options.min_features is None else [options.min_features]  # else that of octavo.convert

    def select(module: nn.Module, name: str) -> bool:
        if isinstance(module, RecipeModule):  # else it has no recipe of its own to compare with
            return True
        return large_enough(module, name, *size_limit) and not (options.rules and own_recipes(subject.model))

    runs = RUNS if options.runs is None else options.runs
    rates = None if options.device is None else rates_of(options.device)
    compared = _compared(options, subject.model)
    what_if = compare(subject.model, subject.loss, batches, compared, select=select, runs=runs, rates=rates)
    print(what_if)
    for path in filter(None, (options.json, record and not options.rules and record / WHAT_IF)):
        print(f"\n{write(path, json.dumps({'what_if': what_if.rows()}))}")
    if options.rules is not None:
        print(f"\n{_rules_beside_own(what_if)}")
    if options.keep is not None or options.loss is not None:
        chosen = what_if.recipe_map(keep=options.keep, loss=options.loss)
        _print_map(what_if, chosen, check(subject.model, subject.loss, batches, chosen, select=select))
        if options.write is not None:
            print(f"\n{write_rules(options, chosen)}")
    return 0


def _print_map(what_if: WhatIf, chosen: RecipeMap, effect: Effect) -> None:
    """Print recipes by layer that keep to a budget: what they cost, and the effect that was measured with them."""
    print(f"\n{_summary(what_if, chosen)}\nmeasured with it: loss {100 * effect.loss:+.4f} %, ", end="")
    print(f"1 - cosine {1 - effect.cosine:.2e}, norm {effect.norm_ratio:.4f}\n")
    if costs := what_if.costs(chosen):
        rows = []
        for cost in costs:
            share = f"{100 * cost.share:.1f} % of FLOP, " if cost.share else ""
            loss = f"predicted loss {-100 * cost.loss:+.4f} %"
            rows.append([cost.layer, cost.recipe, f"{share}{1e6 * cost.seconds:+.1f} us a batch, {loss}"])
        print(columns(rows), end="\n\n")
    print(to_rules(chosen))


def _compared(options: argparse.Namespace, model: nn.Module) -> dict[str, Recipe | RecipeMap]:
    """Return the recipes to compare, by name: those asked for, or the model's own and those of --rules."""
    names = options.recipes or (COMPARED if options.rules is None else ())
    recipes_by_name: dict[str, Recipe | RecipeMap] = {name: recipes.as_recipe(name) for name in names}
    if options.rules is None:
        return recipes_by_name
    try:
        rules, model_recipes = recipes.load(options.rules), own_recipes(model)
    except ValueError as error:
        raise WhatIfError(str(error)) from error
    if unmatched := rules.unmatched(name for name, _ in model.named_modules()):
        raise WhatIfError(f"{options.rules}: no module of the model is called {', '.join(unmatched)}")
    return recipes_by_name | ({} if model_recipes is None else {OWN: model_recipes}) | {options.rules.name: rules}


def _rules_beside_own(what_if: WhatIf) -> str:
    """Return a table of what a file's rules, the model's own and high precision cost and change."""
    rows = [["", "predicted loss", "loss", "1 - cosine", f"ms a batch ({what_if.rates.device})"]]
    for name, recipe in {"high precision": recipes.high_precision(), **what_if.recipes}.items():
        effect = what_if.whole.get(name)
        predicted, loss, lost = (effect.predicted, effect.loss, 1 - effect.cosine) if effect else (0.0, 0.0, 0.0)
        ms = f"{1e3 * what_if.seconds(recipe):.3f}"
        rows.append([name, f"{100 * predicted:.4f} %", f"{100 * loss:+.4f} %", f"{lost:.2e}", ms])
    return columns(rows)


def _summary(what_if: WhatIf, chosen: RecipeMap) -> str:
    """Return two lines on what recipes by layer cost: exceptions and predicted loss, and the time of layers."""
    seconds, high = (1e3 * what_if.seconds(recipe) for recipe in (chosen, recipes.high_precision()))
    share = 100 * sum(cost.share for cost in what_if.costs(chosen))
    exceptions = f"{len(chosen.rules)} exception{'' if len(chosen.rules) == 1 else 's'} from {chosen.default.name}"
    loss = f"predicted loss {100 * what_if.predicted(chosen):.4f} %, {share:.1f} % of the layers' FLOP not in FP8"
    time = f"{seconds:.3f} ms a batch, {high:.3f} ms in high precision ({what_if.rates.device})"
    return f"{exceptions}: {loss}\nlayers take {time}"
