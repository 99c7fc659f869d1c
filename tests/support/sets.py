"""The tests that a run takes: of products of parameters a covering array, or all; and of all, one part of several.

The default set leaves out what is marked ``full``. Of a parametrised test it takes so many cells that every pair of
values of every two parameters occurs, or, where the marker ``covering(1)`` says so, every value once.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SEED = 0
SECONDS_FILE = Path(__file__).parents[1] / "seconds.csv"  # what each file takes in the full set, on one worker
UNKNOWN = 0.1  # seconds of a test in a file that is not there


def covering(cells: Sequence[Mapping[str, Hashable]], strength: int = 2) -> list[int]:
    """Return indices of cells that contain every combination of ``strength`` parameters' values that occurs."""
    strength = min(strength, len(cells[0]))
    tuples = [{*itertools.combinations(sorted(cell.items(), key=lambda item: item[0]), strength)} for cell in cells]
    order = [*range(len(cells))]
    random.Random(SEED).shuffle(order)
    uncovered, chosen = set[Any]().union(*tuples), list[int]()
    while uncovered:
        best = max(order, key=lambda index: len(tuples[index] & uncovered))
        uncovered -= tuples[best]
        chosen.append(best)
        order = [index for index in order if tuples[index] & uncovered]
    return sorted(chosen)


def _hashable(value: Any) -> Hashable:
    """Return a hashable key that tells the value from others; True is not 1."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value).__name__, value


def default_set(items: Iterable[Any]) -> set[Any]:
    """Return the items (pytest's) of the default set."""
    chosen, functions = set(), defaultdict[Any, list[Any]](list)
    for item in items:
        if item.get_closest_marker("full") is not None:
            continue
        callspec = getattr(item, "callspec", None)
        if callspec is None or not callspec.params:
            chosen.add(item)
        else:
            functions[item.nodeid.partition("[")[0]].append(item)
    for cells in functions.values():
        marker = cells[0].get_closest_marker("covering")
        values = [{name: _hashable(value) for name, value in cell.callspec.params.items()} for cell in cells]
        chosen.update(cells[index] for index in covering(values, *(marker.args if marker else ())))
    return chosen


def file_of(item: Any) -> str:
    """Return the item's file, from the root."""
    return item.nodeid.partition("::")[0]


def known_seconds() -> dict[str, float]:
    """Return seconds of each file's tests in the full set."""
    rows = SECONDS_FILE.read_text().splitlines() if SECONDS_FILE.exists() else []
    return {row["file"]: float(row["seconds"]) for row in csv.DictReader(rows)}


def write_seconds(measured: Mapping[str, float]) -> None:
    """Put these files' seconds in place of the recorded ones; drop files that no longer exist."""
    rows = sorted((known_seconds() | measured).items())
    lines = [f"{file},{seconds:.1f}\n" for file, seconds in rows if (SECONDS_FILE.parents[1] / file).exists()]
    SECONDS_FILE.write_text("".join(["file,seconds\n", *lines]))


def expected_seconds(items: Sequence[Any]) -> dict[str, float]:
    """Return seconds of each file among these items, on one worker."""
    seconds_of_file = known_seconds()
    return {file: seconds_of_file.get(file, UNKNOWN * count) for file, count in Counter(map(file_of, items)).items()}


def cheapest_first(items: Sequence[Any]) -> list[Any]:
    """Return the items, files with the cheapest tests first: faults show early."""
    seconds, counts = expected_seconds(items), Counter(map(file_of, items))
    return sorted(items, key=lambda item: (seconds[file_of(item)] / counts[file_of(item)], file_of(item)))


def shuffled(items: Sequence[Any], seed: int) -> list[Any]:
    """Return the items with their files, and the tests of each file, in the order that the seed draws."""
    drawn = random.Random(seed)
    files = sorted({*map(file_of, items)})
    drawn.shuffle(files)
    return sorted(drawn.sample(items, len(items)), key=lambda item: files.index(file_of(item)))


def part(items: Sequence[Any], which: str) -> list[Any]:
    """Return the items of part ``K/N``: whole files, such that all parts take equally long."""
    number, parts = parse_part(which)
    loads, members = [0.0] * parts, [set[str]() for _ in range(parts)]
    for file, seconds in sorted(expected_seconds(items).items(), key=lambda pair: (-pair[1], pair[0])):
        least = loads.index(min(loads))
        loads[least] += seconds
        members[least].add(file)
    return [item for item in items if file_of(item) in members[number - 1]]


def seconds_of_part(which: str | None) -> float:
    """Return the recorded seconds of the full set on one worker, or of a part of it."""
    return sum(known_seconds().values()) / (1 if which is None else parse_part(which)[1])


def parse_part(which: str) -> tuple[int, int]:
    """Return K and N of ``K/N``.

    Raises:
        ValueError: K is not 1 to N.
    """
    number, _, parts = which.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"--part is {which!r}: give K/N with K from 1 to N, such as 2/6")
    return int(number), int(parts)


def choose(
    items: list[Any], full: bool, which: str | None, order_seed: int | None, deselect: Callable[[list[Any]], None]
) -> None:
    """Leave in ``items`` the items of the run, in their order or the one ``order_seed`` draws; deselect the others."""
    chosen = {*items} if full else default_set(items)
    if which is not None:
        chosen = {*part([item for item in items if item in chosen], which)}
    if left_out := [item for item in items if item not in chosen]:
        deselect(left_out)
    items[:] = [item for item in items if item in chosen]
    items[:] = cheapest_first(items) if order_seed is None else shuffled(items, order_seed)
