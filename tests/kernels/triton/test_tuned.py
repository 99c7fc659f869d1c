"""The table of configurations: the shipped one, or this GPU's own."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
tuned = importlib.import_module("octavo.kernels.triton.tuned")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the table of a GPU is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = tuned.tuned_file()
    assert path is not None and path.is_relative_to(tmp_path) and "NVIDIA-H200" in path.name
    path.parent.mkdir()
    return Path(path)


def shipped() -> dict[str, Any]:
    return dict(json.loads(tuned.SHIPPED.read_text()))


def test_a_gpus_own_table_is_read(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.table(tuned.tuned_file()) == shipped()
    rows = {"cast": [[64, 8, 128, 1, 4]], "a kind that is gone": [[64, 1, 1, 1, 1]]}
    own.write_text(json.dumps({"measured_on": "here", "library": [], "configs": rows}))
    found = tuned.table(tuned.tuned_file())
    assert found == {"measured_on": "here", "library": [], "configs": {**shipped()["configs"], "cast": rows["cast"]}}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    assert tuned.table(tuned.tuned_file()) == shipped()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"configs": 3}'])
def test_a_spoilt_one_is_not(own: Path, content: str) -> None:
    own.write_text(content)
    assert tuned.table(tuned.tuned_file()) == shipped()


def test_other_kernels_have_another(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "configs.json"
    changed.write_text("{}")
    monkeypatch.setattr(tuned, "SHIPPED", changed)
    assert tuned.tuned_file() != own
