"""Tables in pages, made of the committed results: what stands between two comments, by ``./dev bench report``."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.subjects import RESULTS

BEGIN, END = "<!-- made by ./dev bench report: {} -->\n", "<!-- until here -->"
Row = dict[str, str]


def read(subject: str) -> list[Row]:
    """The rows of a subject's results, from all devices."""
    rows = []
    for path in sorted({*RESULTS.glob(f"{subject}-*.csv"), *RESULTS.glob(f"{subject}.csv")}):
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return rows


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def listed(subject: str, cells: Mapping[str, Callable[[Row], str]], where: Callable[[Row], bool] = bool) -> str:
    """A table of a subject's rows: each column's header, and what it shows of a row."""
    return markdown(list(cells), ([cell(row) for cell in cells.values()] for row in read(subject) if where(row)))


def gaps_by_beta(rows: Iterable[Row], name: str) -> str:
    """Losses and their mean and largest gaps from the exact run's, a column a beta2."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        text = f"{row['loss']}, {row['mean_gap']}, {row['largest_gap']}".replace("-", "\N{MINUS SIGN}")
        found.setdefault(row[name], {})[row["beta2"]] = text
    betas = sorted({beta2 for own in found.values() for beta2 in own})
    cells = ([scheme, *(own.get(beta2, "") for beta2 in betas)] for scheme, own in found.items())
    return markdown(["", *(f"β2 = {beta2}: loss, mean gap, largest" for beta2 in betas)], cells)


def filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page's text with those of the tables that it has made anew."""
    for name, made in tables.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        if begin:
            text = before + begin + made() + END + rest.partition(END)[2]
    return text
