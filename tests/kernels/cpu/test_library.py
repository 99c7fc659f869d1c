"""The C++ of CPUs: how it is compiled, where its libraries lie, and what is computed where it can't be compiled."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.kernels import capability, cpu
from octavo.kernels.cpu import codes, optimizer_step
from octavo.kernels.cpu.library import Structure, describe, library
from tests.kernels.conftest import Ops
from tests.kernels.cpu.test_optimizer_step import differences_of
from tests.kernels.test_cast import check_casts


@pytest.fixture
def fresh_library() -> Iterator[None]:
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.mark.parametrize("compiler", ["", "no-such-compiler", "broken"])
@pytest.mark.usefixtures("fresh_library")
def test_without_a_compiler_the_reference_runs_and_a_warning_says_so_once(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capability, "_warned", set())
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken) if compiler == "broken" else compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library("optimizer_step") is library("cast") is None
    said = [message for message in caplog.messages if " compiles " not in message]
    assert len(said) == bool(compiler) and all("more slowly than compiled code: " in line for line in said)
    assert all(f"no C++ compiler {compiler} (install one" in line or "could not compile" in line for line in said)
    assert describe().startswith("PyTorch's operations") and str(tmp_path / "cache/octavo") in describe()
    assert differences_of(0, 3) == []
    check_casts(Ops(cpu.KERNELS.__getitem__, "cpu"), 10, 0)


STEP = [optimizer_step.MOMENT, optimizer_step.MASTER, optimizer_step.STEP, optimizer_step.UPDATE]
STRUCTURES = {"cast": [codes.TARGET], "nvfp4": [codes.PACKED], "optimizer_step": STEP}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_read_as_the_source_declares_them(name: str) -> None:
    source, functions = Path(codes.__file__).with_name(f"{name}.cpp").read_text(encoding="utf-8"), library(name)
    assert functions is not None and re.findall(r"SIZE_OF\((\w+)\)", source) == [s.name for s in STRUCTURES[name]]
    for structure in STRUCTURES[name]:
        structure.check(functions)


def test_a_structure_has_the_fields_of_its_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(itertools.islice(codes.TARGET.letters.items(), 3, 6)) == {
        "amax": "P",
        "delayed_scale": "P",
        "rows": "q",
    }
    (tmp_path / "pairs.cpp").write_text(
        "\nstruct Pair {\n    int32_t first, second;  // a pair; so\n    int size() const { return 2; }\n};\n"
        "\nstruct Two {\n    Pair one, other;\n    const float *place;\n    uint32_t count;\n};\n"
    )
    monkeypatch.setattr("octavo.kernels.cpu.library._FOLDER", tmp_path)
    pair = Structure("pairs", "Pair")
    two = Structure("pairs", "Two", Pair=pair)
    assert pair.letters == {"first": "i", "second": "i"}
    assert two.letters == {"one": "8s", "other": "8s", "place": "P", "count": "I"} and two.layout.size == 32
    assert pair.pack(second=1, first=2) == b"\2\0\0\0\1\0\0\0"
    with pytest.raises(KeyError, match="first"):
        pair.pack(second=1, third=2)


def test_a_library_whose_structure_has_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = codes.compiled(torch.ones(1))
    assert functions is not None
    monkeypatch.setattr(codes.TARGET, "layout", codes.PACKED.layout)
    with pytest.raises(RuntimeError, match=r"Target has 152 bytes in C\+\+, 144 by its \['codes', 'transp"):
        codes.TARGET.check(functions)


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_library: None) -> Path:
    """Have any library compiled in no time, as it has one function; return the folder of its file."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        """#!/bin/sh
        [ "$1" = --version ] && exit 0
        for output; do :; done
        echo 'extern "C" int octavo_answer() { return 42; }' | c++ -shared -fPIC -x c++ - -o "$output"
        """
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo"


def answer_of_a_new_process() -> int:
    """Return the answer of the library that a process loads or compiles, its first time."""
    library.cache_clear()
    loaded = library("cast")
    assert loaded is not None
    return int(loaded.octavo_answer())


def test_a_library_is_compiled_once_and_the_log_says_so(quick_compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert answer_of_a_new_process() == 42
    (message,) = caplog.messages
    assert " compiles cast.cpp for this CPU, once, " in message and message.endswith(str(quick_compiler))
    (library_file,) = quick_compiler.iterdir()
    first = library_file.stat().st_mtime_ns
    assert answer_of_a_new_process() == 42
    assert [path.stat().st_mtime_ns for path in quick_compiler.iterdir()] == [first] and len(caplog.messages) == 1
    assert describe() == f"compiled C++, kept in {quick_compiler}"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_library_that_lost_its_end_is_compiled_again(share: float, quick_compiler: Path) -> None:
    """A process that loads a library without its end is killed at its first call, or computes slowly for ever."""
    assert answer_of_a_new_process() == 42
    (path,) = quick_compiler.iterdir()
    whole, damaged = path.read_bytes(), path.with_name("damaged")
    damaged.write_bytes(whole[: int(share * len(whole))])
    damaged.replace(path)  # another file: this process has the first one in its memory
    assert answer_of_a_new_process() == 42
    assert [library_file.read_bytes() for library_file in quick_compiler.glob("*.so")] == [whole]


def test_a_library_is_kept_for_this_user_alone(
    quick_compiler: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask = os.umask(0)
    try:
        assert answer_of_a_new_process() == 42
    finally:
        os.umask(umask)
    assert quick_compiler.stat().st_mode & 0o777 == 0o700
    caplog.clear()
    for mode, user, reason in ((0o770, 0, "others may write to it .mode 770."), (0o700, 1, "it belongs to user")):
        quick_compiler.chmod(mode)
        library.cache_clear()
        monkeypatch.setattr(os, "geteuid", lambda: quick_compiler.stat().st_uid + user)  # noqa: B023
        assert library("cast") is library("optimizer_step") is None
        (record,) = caplog.records  # of both libraries
        assert record.levelname == "WARNING" and re.search(rf"loads no compiled code .*: {reason}", record.message)
        caplog.clear()
