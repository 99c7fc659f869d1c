"""The command's checks that need no torch."""

import signal
import sys

import pytest

import octavo_command
from octavo import cli
from tests.support.processes import run_python

START = "import sys, octavo_command; sys.argv[0] = 'octavo'; sys.exit(octavo_command.main())"


@pytest.mark.parametrize("arguments", [["--help"], [], ["trian"], ["--verbose", "train"]])
def test_help_and_faults_of_commands_do_not_wait_for_torch(arguments):
    done = run_python("-c", f"import sys; sys.modules['torch'] = None; {START}", *arguments)
    if arguments == ["--help"]:
        assert done.returncode == 0 and all(f"  {name} " in done.stdout for name in octavo_command.COMMANDS)
    else:
        assert done.returncode == 2 and done.stderr.startswith("octavo: error: ") and done.stderr.count("\n") == 1


def test_examples_are_taken():
    for example in octavo_command.EXAMPLES:
        if not example.endswith("--help"):
            assert cli.parser().parse_args(example.split()[1:]).command
    assert octavo_command.parser()[0].format_help().endswith(f"{octavo_command.EXAMPLES[-1]}\n")


def test_ctrl_c_while_torch_is_imported_is_one_line():
    interrupting = f"""if True:
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        class Interrupts:
            def find_spec(self, name, *_):
                if name == "torch":
                    os.kill(os.getpid(), {int(signal.SIGINT)})
        sys.meta_path.insert(0, Interrupts())
        {START}"""
    done = run_python("-c", interrupting, "train")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "octavo: interrupted\n")


def test_other_commands_are_those_of_the_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["octavo", "info", "--nothing"])
    assert octavo_command.main() == 2
    assert "--nothing (see octavo info --help)" in capsys.readouterr().err
