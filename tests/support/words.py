"""A part of ./dev lint: variables are called after what they hold, and docstrings begin with what they speak of.

    python -m tests.support.words FOLDER...

It prints a line for each variable or argument with one of the names below, and for each docstring that begins with one
of the words below, which leave open of what it speaks; and ends with 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

VAGUE = {"found", "given", "own", "rest", "told", "made", "kept"}
WITHOUT_SUBJECT = {"What", "As", "Of"}
OF_FUNCTIONS = {"Where", "How", "When", "Which", "Who", "Whose", "That", "If", "By", "In", "For", "From", "With"}
OF_FUNCTIONS |= {"Without", "To", "None", "Only"}


def bound_names(node: ast.AST) -> list[str]:
    """Return the names that a node of Python's syntax binds: of a variable that is assigned, or an argument."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    return [node.arg] if isinstance(node, ast.arg) else []


def first_word(node: ast.AST) -> str:
    """Return the first word of the docstring of a module, class or function, "" where there is none."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    words = (ast.get_docstring(node) or "").split()
    return words[0].rstrip(",.:;") if words else ""


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each fault of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        line = getattr(node, "lineno", 1)
        for name in VAGUE.intersection(bound_names(node)):
            yield f"{path}:{line}: a variable {name!r}: call it after what it holds"
        banned = WITHOUT_SUBJECT if isinstance(node, ast.Module) else WITHOUT_SUBJECT | OF_FUNCTIONS
        if (word := first_word(node)) in banned:
            yield f"{path}:{line}: a docstring that begins with {word!r}: say what is returned, or done to what"


def main(folders: list[str]) -> int:
    """Print the faults of all Python files of these folders; return 1 if there is one, else 0."""
    lines = [line for folder in folders for path in sorted(Path(folder).rglob("*.py")) for line in faults(path)]
    print("\n".join(lines) or "words: no vague names, no docstring without a subject")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
