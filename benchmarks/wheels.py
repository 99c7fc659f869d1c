"""Collect what the tests and benchmarks need on a machine without network, as wheels in a folder.

python -m benchmarks wheels .whl --python 3.12          here
python3 -m pip install --no-index --no-deps --target site .whl/*.whl      there
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

TAKES = "1 minute, and the network"
MEASURES = ("pyproject.toml",)

# what the tests import and what the benchmarks compare with, without torch, Triton, numpy and transformers
NAMES = ("pytest", "pytest-xdist", "execnet", "pluggy", "iniconfig", "hypothesis", "sortedcontainers", "ml_dtypes")
NAMES += ("gfloat", "more-itertools", "array-api-compat", "mmasim", "torchao", "flashoptim", "liger-kernel")
PLATFORMS = *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)), "manylinux2014_x86_64"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the other machine's version (default: 3.12)")
    options = parser.parse_args(arguments)
    target = ["--python-version", options.python, "--implementation", "cp", "--only-binary=:all:"]
    target += [option for platform in (*PLATFORMS, "any") for option in ("--platform", platform)]
    failed = []
    for name in NAMES:
        try:
            wanted = f"{name}=={metadata.version(name)}"
        except metadata.PackageNotFoundError:
            wanted = name
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            *target,
            "-d",
            str(options.folder),
            wanted,
        ]
        if subprocess.run(command, check=False).returncode:
            failed.append(wanted)
    size = sum(path.stat().st_size for path in options.folder.glob("*.whl"))
    print(f"{len(list(options.folder.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB in {options.folder}")
    print(*(f"no wheel of {name}" for name in failed), sep="\n")
    return int(bool(failed))
