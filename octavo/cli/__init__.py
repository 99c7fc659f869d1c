"""The `octavo` command, as far as it needs torch; `octavo_command` is the command until torch is imported."""

from octavo.cli.command import main, parser

__all__ = ["main", "parser"]
