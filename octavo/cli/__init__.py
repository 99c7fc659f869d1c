"""The `octavo` command: what is behind `octavo_command`, which is there before torch is."""

from octavo.cli.command import main, parser

__all__ = ["main", "parser"]
