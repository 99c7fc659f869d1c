"""Stand-ins for CUDA's streams, which note what waits for what: tests of their order need no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

GPU = torch.device("cuda", 0)


class Stream:
    """A stream, or an event on one; each call is a line of ``notes``."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Stream) -> None:
        self.notes.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.notes.append(f"the host waits for {self.name}")

    def __enter__(self) -> Stream:
        self.notes.append(f"begin on {self.name}")
        return self

    def __exit__(self, *_: object) -> None:
        self.notes.append(f"end on {self.name}")


def notes_of_streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have torch give out streams, a current one and others, that note what happens on them; return the notes."""
    notes: list[str] = []
    current = Stream("the current stream", notes)

    def new(device: torch.device) -> Stream:
        notes.append("another stream is made")
        return Stream("another stream", notes)

    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch, "Stream", new)
    monkeypatch.setattr(torch.cuda, "Stream", new)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return notes


def tensor_on_gpu(name: str, notes: list[str], **attributes: Any) -> Any:
    """Return a stand-in for a tensor on a GPU, which notes the streams that it is to outlive."""

    def record_stream(stream: Stream) -> None:
        notes.append(f"{name} outlives {stream.name}")

    return SimpleNamespace(device=GPU, is_cuda=True, record_stream=record_stream, **attributes)
