"""Octavo's own errors. Wrong arguments raise ValueError or TypeError; these say what those can't."""

from __future__ import annotations

import importlib
import pathlib


class OctavoError(Exception):
    """Base of the errors that only octavo raises."""


class UnsupportedOpError(OctavoError, NotImplementedError):
    """An operation that octavo's tensors or modules have no rule for; nothing was dequantised."""


class HigherOrderGradientError(OctavoError, RuntimeError):
    """An FP8 product was asked for a second or forward-mode derivative, batched gradients or a torch.func transform."""


class MissingExtraError(OctavoError, ImportError):
    """An optional dependency is absent; the message names the extra that installs it."""


class RanksDifferError(OctavoError, ValueError):
    """Ranks that share a model differ in recipes, storage or options; all raise it, and its message names them."""


class UnsupportedOptionError(OctavoError, ValueError):
    """An option of another library that octavo can't honour; the message says what to write instead."""


class ExportError(OctavoError, ValueError):
    """A model, recipe or path that can't be exported; the message says why and what works."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _install_hint(extra: str) -> str:
    """Return the command that installs an extra: of the clone that octavo is imported from, or of the installed one."""
    clone = pathlib.Path(__file__).resolve().parents[1]
    if not (clone / "pyproject.toml").exists():
        return f"pip install 'octavo[{extra}]'"
    return f"pip install '{'.' if clone == pathlib.Path.cwd() else clone}[{extra}]'"


def require(extra: str, *packages: str) -> None:
    """Raise MissingExtraError, with the command that installs the extra, if any of these packages can't be imported."""
    absent: list[str] = []
    last: ImportError | None = None
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            absent, last = [*absent, package], error
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        raise MissingExtraError(f"{', '.join(absent)} {verb} not installed: {_install_hint(extra)}") from last
