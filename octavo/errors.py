"""Octavo's own errors. Wrong arguments raise ValueError or TypeError; these say what those can't."""

from __future__ import annotations

import importlib


class OctavoError(Exception):
    """Base of the errors that only octavo raises."""


class UnsupportedOpError(OctavoError, NotImplementedError):
    """An aten op reached a ScaledTensor that has no rule for it; nothing was dequantised."""


class HigherOrderGradientError(OctavoError, RuntimeError):
    """A second derivative, or a torch.func transform, was asked of an FP8 product."""


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


def require(extra: str, *packages: str) -> None:
    """Raise MissingExtraError, with the extra that installs it, if one of these packages can't be imported."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingExtraError(f"{package} is not installed: pip install octavo[{extra}]") from error
