import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from octavo.cli.options import add_options, option_errors
from octavo.train.config import option
from octavo.train.errors import TrainError


@dataclass(frozen=True)
class Options:
    """One of each kind."""

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
    add_options(parser, Options)
    return parser


def test_flags_have_the_kinds_names_and_defaults_of_fields(parser):
    given = "--how-many 4 --share 0.25 --kind b --note x --where runs --no-fast".split()
    wanted = {"how_many": 4, "share": 0.25, "kind": "b", "note": "x", "where": Path("runs"), "fast": False}
    assert vars(parser.parse_args(given)) == wanted
    assert vars(parser.parse_args([])) == {}
    shown = " ".join(parser.format_help().split())
    for line in (
        "One of each kind:",
        "--how-many N a number, 100 % of it (default: 3)",
        "--every N none (default: 0)",
        "--share SHARE another (default: 0.5)",
        "--kind {a,b} one of two (default: a)",
        "--note TEXT a text (default: no) --where FOLDER a place (default: here)",
        "--fast, --no-fast or not (default: no)",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--how-many", "0"], "--how-many: invalid value: '0' (choose a whole number from 1 to 2147483647)"),
        (["--how-many", "2.5"], "--how-many: invalid value: '2.5'"),
        (["--share", "nan"], "--share: invalid value: 'nan' (choose a number from 0 up to 1)"),
        (["--kind", "c"], "--kind: invalid choice: 'c'"),
    ],
)
def test_a_wrong_value_names_the_flag_and_the_choice(parser, given, says):
    with pytest.raises(argparse.ArgumentError) as fault:
        parser.parse_args(given)
    assert says in str(fault.value)


def test_options_in_messages_are_flags():
    with pytest.raises(TrainError, match=r"^batch 3: 2 --micro-batches of_micro_batches, --lr$"), option_errors():
        raise ValueError("batch 3: 2 micro_batches of_micro_batches, --lr")
