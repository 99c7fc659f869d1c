"""Measures tiles as ``octavo tune`` does, and writes octavo/kernels/triton/configs.json, which octavo ships."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common.measure import provenance
from benchmarks.common.rehearsal import rehearsed
from octavo.kernels.triton.launch import SHIPPED
from octavo.tune import command
from octavo.tune.timing import ON_GPU

TAKES = "a GPU; 10 minutes"
MEASURES = ("octavo/kernels/triton",)


@rehearsed()
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=__doc__)
    command.add_options(parser)
    parser.add_argument("--output", type=Path, help="the table to write (default: configs.json; of --toy none)")
    options = parser.parse_args(arguments)
    if not ON_GPU and not options.toy:
        parser.error("tuning needs an NVIDIA GPU; --toy runs the code without one")
    output = options.output or (None if options.toy else SHIPPED)
    return command.tune(output, provenance(), options)
