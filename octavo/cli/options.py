"""Flags from the dataclasses of `octavo.train.config`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.train.config import TrainConfig, choices, hints, remedy
from octavo.train.errors import TrainError

_METAVARS = {int: "N", float: "X"}


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add a flag for each field of a dataclass; its help is the field's, with the default.

    Only flags that are given become attributes of what the parser returns, so that they win over a file's.
    """
    group = parser.add_argument_group((config.__doc__ or config.__name__).splitlines()[0].rstrip("."))
    for own in dataclasses.fields(config):
        flag, default, text = flag_of(own.name), own.default, own.metadata["help"].replace("%", "%%")
        if default is not None and "(default: " not in text:
            shown = "no" if default == "" or default is False else default
            text += f" (default: {shown})"
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if isinstance(default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
            continue
        if known := choices(config, own.name):
            group.add_argument(flag, choices=known, **common)
        else:
            metavar = own.metadata["metavar"] or _METAVARS[type(default)]
            group.add_argument(flag, type=_reader(config, own), metavar=metavar, **common)


def flag_of(name: str) -> str:
    """A field's flag."""
    return "--" + name.replace("_", "-")


def _reader(config: type, own: dataclasses.Field[Any]) -> Callable[[str], Any]:
    kind: Callable[[str], Any] = Path if own.default is None else type(own.default)

    def read(text: str) -> Any:
        try:
            value: Any = kind(text) if text else text  # Path("") is the current folder, which nobody asked for
        except ValueError:
            value = text
        if (choice := remedy(config, own, value)) is not None:
            raise argparse.ArgumentTypeError(f"invalid value: {text!r} (choose {choice})")
        return value

    return read


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Makes a ValueError of options a TrainError, in which they are flags where they can be told from other words."""
    try:
        yield
    except ValueError as error:
        names = (own.name for part in hints(TrainConfig).values() for own in dataclasses.fields(part))
        known = "|".join(name for name in names if "_" in name)
        raise TrainError(re.sub(rf"\b({known})\b", lambda found: flag_of(found[0]), str(error))) from error
