"""C++ that a CPU runs in place of many small torch operations, compiled at its first use by the machine's compiler.

Without a compiler, or where compiling fails, nothing is lost but time: the reference runs instead. The library is kept
in ``$XDG_CACHE_HOME/octavo``, by default ``~/.cache/octavo``, under a name made of its source, the compiler and the
CPU's instruction set. ``CXX`` names the compiler, else it is ``c++``; an empty ``CXX`` turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from octavo.cache import cache_folder

_FOLDER = Path(__file__).parent
# One rounding an operation, as torch's own; -fno-trapping-math lets loops with conditions become vector instructions.
_FLAGS = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared -pthread".split()
_INSTRUCTIONS = {"AVX2": ("-march=x86-64-v3",), "AVX512": ("-march=x86-64-v4",)}
_SHARE = 1 << 16  # elements that are worth a thread
_logger = logging.getLogger("octavo")


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """``name``.cpp, compiled; None where there is no compiler, or none that takes it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    source, shared = _FOLDER / f"{name}.cpp", _FOLDER / "float_bits.h"
    flags = *_FLAGS, *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        key = hashlib.sha256(b"".join([version, *map(str.encode, flags), source.read_bytes(), shared.read_bytes()]))
        kept = cache_folder() / f"{key.hexdigest()[:32]}.so"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # another process may compile it as well
                made = Path(folder) / kept.name
                subprocess.run([compiler, *flags, str(source), "-o", str(made)], capture_output=True, check=True)
                made.replace(kept)
        return ctypes.CDLL(str(kept))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: there is no home folder
        _logger.debug("%s could not compile octavo's %s.cpp, so the reference runs: %s", compiler, name, error)
        return None


def threads_for(elements: int) -> int:
    """As many threads as torch has and so many elements are worth."""
    return min(torch.get_num_threads(), elements // _SHARE) if elements >= 2 * _SHARE else 1
