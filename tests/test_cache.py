"""Where measurements are kept."""

import os
from pathlib import Path

import pytest

from octavo.cache import cache_folder, why_not_private


def test_who_may_write_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert why_not_private(tmp_path) == ""
    tmp_path.chmod(0o770)
    assert "others may write to it (mode 770)" in why_not_private(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        assert "set XDG_CACHE_HOME to another" in why_not_private(tmp_path)
    monkeypatch.delattr(os, "geteuid")  # Windows, where a mode says nothing of others
    assert why_not_private(tmp_path) == ""


def test_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "octavo"
