"""The flags of `octavo train`, `compare` and `plan`: one for each field of the dataclasses of `octavo.train.config`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.train.config import SECTIONS, TrainError, choices


def add_flags(parser: argparse.ArgumentParser, config: type, names: Sequence[str] = ()) -> None:
    """Add a flag for each field of a dataclass, or for the named fields; its help is the field's, with the default.

    Only flags on the command line become attributes of the parser's result, so that they override a file's options.
    """
    group = parser.add_argument_group((config.__doc__ or config.__name__).splitlines()[0].rstrip("."))
    for field in (field for field in dataclasses.fields(config) if field.name in names or not names):
        flag = flag_of(field.name)
        default = field.default
        text = field.metadata["help"].replace("%", "%%")
        if default is not None and "(default: " not in text:
            text += f" (default: {'no' if default == '' or default is False else default})"
        words = choices(field)
        common = {"default": argparse.SUPPRESS, "help": text}
        if isinstance(default, bool) and words:  # --resume, --resume auto, --no-resume
            group.add_argument(flag, nargs="?", const=True, choices=words, **common)
            group.add_argument(f"--no-{flag[2:]}", dest=field.name, action="store_false", default=argparse.SUPPRESS)
        elif isinstance(default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif words:
            group.add_argument(flag, choices=words, **common)
        else:
            # Path("") would be the current folder, which nobody asked for
            kind = type(default) if default is not None else lambda text: Path(text) if text else text
            group.add_argument(flag, type=kind, metavar=field.metadata["metavar"], **common)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Raise a ValueError of the options as a TrainError that names flags instead of fields (`--top-k`, not `top_k`)."""
    try:
        yield
    except ValueError as error:
        names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
        options = rf"^({'|'.join(names)})(?= is )|\b({'|'.join(name for name in names if '_' in name)})\b"
        raise TrainError(re.sub(options, lambda match: flag_of(match[0]), str(error))) from error
