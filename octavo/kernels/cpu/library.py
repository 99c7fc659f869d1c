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
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

_SOURCES = ("optimizer_step.cpp",)
# One rounding an operation, as torch's own; -fno-trapping-math lets loops with conditions become vector instructions.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_INSTRUCTIONS = {"AVX2": ("-march=x86-64-v3",), "AVX512": ("-march=x86-64-v4",)}
_SHARE = 1 << 16  # elements that are worth a thread
_logger = logging.getLogger("octavo")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where there is no compiler, or none that takes it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    here = Path(__file__).parent
    capability = torch.backends.cpu.get_cpu_capability()
    command = [compiler, *_FLAGS, *_INSTRUCTIONS.get(capability, ()), *(str(here / name) for name in _SOURCES)]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        key = hashlib.sha256(b"".join([version, *(word.encode() for word in command[1 : -len(_SOURCES)])]))
        for name in _SOURCES:
            key.update((here / name).read_bytes())
        kept = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / f"{key.hexdigest()[:32]}.so"
        )
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # another process may compile it as well
                made = Path(folder) / kept.name
                subprocess.run([*command, "-o", str(made)], capture_output=True, check=True)
                made.replace(kept)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.CalledProcessError) as error:
        _logger.debug("%s could not compile octavo's CPU library, so the reference runs: %s", compiler, error)
        return None


def in_threads(work: Callable[[int, int], None], units: int, elements: int) -> None:
    """Call ``work(from, to)`` on shares of ``units``, in as many threads as torch has and ``elements`` are worth."""
    threads = max(min(torch.get_num_threads(), elements // _SHARE, units), 1)
    ends = [units * number // threads for number in range(threads + 1)]
    others = [threading.Thread(target=work, args=share) for share in pairwise(ends[1:])]
    for other in others:
        other.start()
    work(ends[0], ends[1])
    for other in others:
        other.join()
