"""Tables as text: rows become aligned columns, and a table that is too wide goes on below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GIB = 1 << 30
WIDTH = 100  # characters of a line of a table


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of text as columns, right-aligned except the first."""
    rows = list(rows)
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip() for row in rows)


def folded(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns, or as several tables of at most WIDTH that repeat the first column."""

    def between(begin: int, end: int) -> str:
        return columns([row[0], *row[begin:end]] for row in rows)

    tables = []
    begin = 1
    count = len(rows[0])
    while begin < count:
        wide = (end for end in range(begin + 2, count + 1) if max(map(len, between(begin, end).splitlines())) > WIDTH)
        end = next(wide, count + 1) - 1
        tables.append(between(begin, end))
        begin = end
    return "\n\n".join(tables)
