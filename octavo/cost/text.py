"""Tables as text: rows become aligned columns, and a table that is too wide goes on below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

GIB = 1 << 30
WIDTH = 100  # characters of a line of a table


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of text as columns, right-aligned except the first."""
    rows = list(rows)
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows)


def folded(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns, or as several tables of at most WIDTH that repeat the first column."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    tables = []
    begin = 1
    while begin <= len(widths):
        line_widths = accumulate((2 + width for width in widths[begin - 1 :]), initial=first)
        end = begin + max(1, sum(width <= WIDTH for width in line_widths) - 1)
        tables.append(columns([row[0], *row[begin:end]] for row in rows))
        begin = end
    return "\n\n".join(tables)
