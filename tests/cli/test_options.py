import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from octavo.cli.options import add_flags, option_errors
from octavo.train.config import TrainError, option


@dataclass(frozen=True)
class Options:
    """An option of each kind."""

    how_many: int = option(3, "a number, 100 % of it", 1)
    every: int = option(0, "none", 0)
    share: float = option(0.5, "another", 0, 1, metavar="SHARE")
    kind: Literal["a", "b"] = option("a", "one of two")
    note: str = option("", "a text", metavar="TEXT")
    where: Path | None = option(None, "a place (default: here)", metavar="FOLDER")  # noqa: RUF009 (it is a field)
    fast: bool = option(False, "or not")


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Options)
    return parser


def test_flags_have_the_kinds_names_and_defaults_of_fields(parser):
    flags = "--how-many 4 --share 0.25 --kind b --note x --where runs --no-fast".split()
    wanted = {"how_many": 4, "share": 0.25, "kind": "b", "note": "x", "where": Path("runs"), "fast": False}
    assert vars(parser.parse_args(flags)) == wanted
    assert vars(parser.parse_args([])) == {}
    shown = " ".join(parser.format_help().split())
    for line in (
        "An option of each kind:",
        "--how-many N a number, 100 % of it (default: 3)",
        "--every N none (default: 0)",
        "--share SHARE another (default: 0.5)",
        "--kind {a,b} one of two (default: a)",
        "--note TEXT a text (default: no) --where FOLDER a place (default: here)",
        "--fast, --no-fast or not (default: no)",
    ):
        assert line in shown


def test_options_in_messages_are_flags():
    for said, shown in (
        ("batch 3: 2 micro_batches of_micro_batches, --lr", "batch 3: 2 --micro-batches of_micro_batches, --lr"),
        ("lr is 0.0: choose lr", "--lr is 0.0: choose lr"),
    ):
        with pytest.raises(TrainError, match=f"^{shown}$"), option_errors():
            raise ValueError(said)
