"""The table of tests with other libraries has the first sentences of those tests' docstrings.

``python -m tests.integration.test_tested`` writes it into docs/integrations.md.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re

from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "integrations.md"
HEADER = "| library | version | what is tested |\n|---|---|---|\n"
TABLE = re.compile(re.escape(HEADER) + r"((?:\|.*\n)*)")


def rows() -> list[list[str]]:
    """Library, version here, and the first sentence of its tests' docstring."""
    table_rows = []
    for room in ("integrations", "compat"):
        for path in sorted((ROOT / "tests" / room).rglob("test_*.py")):
            library = path.relative_to(ROOT / "tests" / room).with_suffix("").parts[0].removeprefix("test_")
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            said = " ".join(docstring.split("\n\n")[0].split()).rstrip(".").removeprefix(f"octavo.{room}.{library}: ")
            table_rows.append([f"`{library}`", version(library), f"[{said}](../{path.relative_to(ROOT).as_posix()})"])
    return table_rows


def version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def table(table_rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in table_rows)


def written() -> list[list[str]]:
    """The rows that the page has."""
    match = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None, f"{PAGE} has no line {HEADER!r}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in match[1].splitlines()]


def test_the_table_is_true() -> None:
    def without_version(table_rows: list[list[str]]) -> list[list[str]]:
        return [[row[0], row[2]] for row in table_rows]

    assert without_version(written()) == without_version(rows()), "python -m tests.integration.test_tested writes it"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: HEADER + table(rows()), text), encoding="utf-8")
