import shlex

import pytest

from octavo import cli
from octavo.cli.commands import _COMMANDS
from octavo.cli.options import flag_of
from octavo.train.config import TrainConfig, hints
from octavo_command import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_and_shows_examples_that_it_takes(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"{COMMANDS[command][1:15]}" in text
    for example in _COMMANDS[command].examples:
        assert f"  {example}\n" in text
        _, _, arguments = example.partition("octavo ")
        assert cli.parser().parse_args(shlex.split(arguments)).command is _COMMANDS[command].run


def test_each_command_has_a_description_and_its_options_only_where_it_is_named():
    assert _COMMANDS.keys() == COMMANDS.keys()
    assert cli.parser(["info", "--measure"]).parse_args(["info", "--measure"]).measure
    with pytest.raises(SystemExit):
        cli.parser(["info"]).parse_args(["train", "--steps", "3"])


@pytest.mark.parametrize("command", ["train", "compare"])
def test_each_option_of_a_run_has_a_flag_with_its_choices_and_default(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for config in hints(TrainConfig).values():
        assert all(f"  {flag_of(name)}" in text for name in config.__dataclass_fields__)
    shown = " ".join(text.split())
    assert "--moments {fp32,bf16,fp8}" in shown and "--timeout SECONDS" in shown and "(default: 0.0015)" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shtab_writes_completions(shell):
    shtab = pytest.importorskip("shtab")
    written = shtab.complete(cli.parser(), shell)
    assert "--weight-storage" in written and "split24" in written
