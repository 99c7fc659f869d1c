"""C++ that a CPU runs in place of many small torch operations, compiled at its first use by the machine's compiler.

Without a compiler, or where compiling fails, nothing is lost but time: the reference runs instead, and a warning says
so once. The library is kept in ``$XDG_CACHE_HOME/octavo``, by default ``~/.cache/octavo``, under a name made of its
source, the compiler, the CPU's instruction set and the library's own bytes. A file whose bytes are not those of its
name was damaged, and is compiled anew; from a folder that others may write to nothing is loaded. ``CXX`` names the
compiler, else it is ``c++``; an empty ``CXX`` turns it off, without a warning.

Many arguments go to C++ as a structure, which the C++ declares and Python reads and packs: Structure. A library whose
structure has another size is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.cache import cache_folder, why_not_private
from octavo.kernels.capability import warn_once

_FOLDER = Path(__file__).parent
# One rounding an operation, as torch's own; -fno-trapping-math lets loops with conditions become vector instructions.
_FLAGS = "-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared -pthread".split()
_INSTRUCTIONS = {"AVX2": ("-march=x86-64-v3",), "AVX512": ("-march=x86-64-v4",)}
_LETTERS = {"int64_t": "q", "int32_t": "i", "uint32_t": "I", "float": "f", "double": "d"}  # of the module struct
_logger = logging.getLogger("octavo")


class Structure:
    """A structure that C++ reads and Python packs, by the fields that the C++ declares.

    Attributes:
        name: in the C++.
        letters: {field: its type in Python's module ``struct``}, in their order.
        layout: makes bytes of the fields' values in that order.
    """

    def __init__(self, source: str, name: str, **parts: Structure) -> None:
        """Read the declaration in ``source``.cpp: lines of a type and names. ``parts``: structures among the types."""
        letters_of = _LETTERS | {of_type: f"{part.layout.size}s" for of_type, part in parts.items()}
        text = (_FOLDER / f"{source}.cpp").read_text(encoding="utf-8")
        body = text.partition(f"\nstruct {name} {{\n")[2].partition("\n};")[0]
        self.name, self.letters = name, dict[str, str]()
        for of_type, names in re.findall(r"^    (?:const )?(\w+) ([*\w, ]+);", body, re.MULTILINE):
            for field in names.split(", "):
                self.letters[field.removeprefix("*")] = "P" if field.startswith("*") else letters_of[of_type]
        padding = "0P" if "P" in self.letters.values() else ""  # at the end, as in C++
        self.layout: struct.Struct = struct.Struct("".join(self.letters.values()) + padding)

    def pack(self, **values: float | bytes) -> bytes:
        """Return the structure's bytes. A field that is missing raises KeyError, so that a misspelt one does too."""
        return self.layout.pack(*map(values.__getitem__, self.letters))

    def check(self, functions: ctypes.CDLL) -> None:
        """Raise RuntimeError where a library has another size for it, by ``SIZE_OF(name)`` in its source."""
        if (size := functions[f"octavo_size_of_{self.name}"]()) != self.layout.size:
            raise RuntimeError(f"{self.name} has {size} bytes in C++, {self.layout.size} by its {list(self.letters)}")


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """Return ``name``.cpp, compiled; None where there is no compiler, or it can't compile the file."""
    wanted = os.environ.get("CXX", "c++")
    if (compiler := shutil.which(wanted)) is None:
        if wanted:
            _warn(f"there is no C++ compiler {wanted} (install one, such as g++, or name another by CXX)")
        return None
    source, shared = _FOLDER / f"{name}.cpp", _FOLDER / "float_bits.h"
    flags = *_FLAGS, *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        key = _digest(b"".join([version, *map(str.encode, flags), source.read_bytes(), shared.read_bytes()]))
        if why := why_not_private(folder := cache_folder(make=True)):
            warn_once(
                f"{folder}: {why}", f"octavo loads no compiled code from {folder}, so a CPU computes slowly: {why}"
            )
            return None
        return ctypes.CDLL(str(_from_cache(folder, key) or _compile([compiler, *flags, str(source)], folder, key)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: there is no home folder
        output = getattr(error, "stderr", None) or b""
        _warn(f"{compiler} could not compile {name}.cpp ({error}{output.decode(errors='replace')[:200]})")
        return None


def _warn(why: str) -> None:
    """Log, once, why a CPU casts and steps by torch's operations."""
    warn_once(
        "compiler", f"torch computes casts and optimizer steps on this CPU, more slowly than compiled code: {why}"
    )


def describe() -> str:
    """Return whether casts on this CPU are compiled, which the first call does, and in which folder that is kept."""
    if library("cast") is not None:
        return f"compiled C++, kept in {cache_folder()}"
    wanted = os.environ.get("CXX", "c++")
    why = "CXX is empty" if not wanted else f"no C++ compiler {wanted}" if shutil.which(wanted) is None else "see above"
    return f"PyTorch's operations, which are slower ({why}); compiled code would be kept in {cache_folder()}"


def _from_cache(folder: Path, key: str) -> Path | None:
    """Return the library that an earlier process has compiled; None if there is none, or its file is damaged."""
    for path in folder.glob(f"{key}-*.so"):
        with contextlib.suppress(OSError):
            if path.name == _file_name(key, path.read_bytes()):
                return path
    return None


def _compile(command: Sequence[str], folder: Path, key: str) -> Path:
    """Compile a library, write it to the disk whole, and give it its name; another process may do so as well."""
    compiler, source = command[0], Path(command[-1]).name
    _logger.warning("%s compiles %s for this CPU, once, in up to half a minute, into %s", compiler, source, folder)
    with tempfile.TemporaryDirectory(dir=folder) as building:
        built = Path(building) / "library.so"
        subprocess.run([*command, "-o", str(built)], capture_output=True, check=True)
        with built.open("rb") as file:
            os.fsync(file.fileno())
            path = folder / _file_name(key, file.read())
        built.replace(path)
    return path


def _file_name(key: str, content: bytes) -> str:
    """Return the name of a library's file, by which its bytes are checked: loading a part of one kills the process."""
    return f"{key}-{_digest(content)}.so"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
