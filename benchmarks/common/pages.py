"""Tables in pages, made of the committed results: ``./dev bench report`` writes them between two comments."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.subjects import RESULTS

BEGIN, END = "<!-- made by ./dev bench report: {} -->\n", "<!-- until here -->"
Row = dict[str, str]


def read(subject: str) -> list[Row]:
    """Return the rows of a subject's results, from all devices."""
    rows = []
    for path in sorted({*RESULTS.glob(f"{subject}-*.csv"), *RESULTS.glob(f"{subject}.csv")}):
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return rows


def signed(value: float, digits: int = 2) -> str:
    """Return a number with its sign."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def listed(subject: str, cells: Mapping[str, Callable[[Row], str]], where: Callable[[Row], bool] = bool) -> str:
    """Return a table of a subject's rows: each column's header, and the function that makes its cell of a row."""
    return markdown(list(cells), ([cell(row) for cell in cells.values()] for row in read(subject) if where(row)))


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return a page's text with its tables made anew."""
    for name, make_table in tables.items():
        before, begin, remainder = text.partition(BEGIN.format(name))
        if begin:
            text = before + begin + make_table() + END + remainder.partition(END)[2]
    return text
