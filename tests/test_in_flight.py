"""Tensors in flight to the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.in_flight import InFlight
from tests.support.streams import notes_of_streams, tensor_on_gpu


def test_tensors_on_the_host_are_there() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    flight = InFlight(one, two)
    assert flight.has_arrived and flight.wait()[0] is one and flight.wait()[1] is two
    assert InFlight().wait() == []


@pytest.mark.parametrize("is_there", [False, True])
def test_those_of_a_gpu_arrive_at_an_event_after_their_copies(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = notes_of_streams(monkeypatch)
    event = SimpleNamespace(query=lambda: is_there, synchronize=lambda: notes.append("the host waits for the event"))
    torch.cuda.current_stream().record_event = lambda: notes.append("an event") or event  # type: ignore[attr-defined]
    on_host = torch.tensor([1.0, 2.0])

    def to(place: str, non_blocking: bool) -> torch.Tensor:
        assert place == "cpu" and non_blocking
        notes.append("a copy")
        return on_host

    flight = InFlight(tensor_on_gpu("one", notes, to=to), tensor_on_gpu("other", notes, to=to))
    assert notes == ["a copy", "a copy", "an event"] and flight.has_arrived is is_there
    assert flight.wait() == [on_host, on_host] and notes[3:] == ["the host waits for the event"]
