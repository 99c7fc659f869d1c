"""What a CPU's C++ is compiled to, where it is kept, and what happens where it can't be."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.kernels import cpu
from octavo.kernels.cpu.library import library, threads_for
from tests.kernels.conftest import Ops
from tests.kernels.cpu.test_optimizer_step import differences_of
from tests.kernels.test_cast import check_casts


@pytest.fixture
def fresh_library() -> Iterator[None]:
    library.cache_clear()
    yield
    library.cache_clear()


def test_threads_are_as_many_as_the_elements_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert [threads_for(elements) for elements in (0, 100, 1 << 17, 1 << 20)] == [1, 1, 2, 3]


@pytest.mark.parametrize("compiler", ["", "no-such-compiler", "broken"])
def test_without_a_compiler_the_reference_runs(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_library: None
) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken) if compiler == "broken" else compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library("optimizer_step") is library("cast") is None
    assert differences_of(0, 3) == []
    check_casts(Ops(cpu.KERNELS.__getitem__, "cpu"), 10, 0)


def test_the_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_library: None) -> None:
    quick = tmp_path / "quick"  # to optimise takes seconds
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library("optimizer_step") is not None
    (made,) = (tmp_path / "octavo").iterdir()
    first = made.stat().st_mtime_ns
    library.cache_clear()
    assert library("optimizer_step") is not None
    assert [path.stat().st_mtime_ns for path in (tmp_path / "octavo").iterdir()] == [first]
