import copy
import math

import pytest
import torch
from torch import nn

from octavo.in_flight import InFlight
from octavo.optim import SGD, AdamW
from octavo.optim.resolution import Resolution, ratio_of
from tests.support.streams import Stream, notes_of_streams, tensor_on_gpu


def step(optimizer: AdamW | SGD) -> None:
    for param in optimizer.all_params():
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_sums_of_a_gpu_are_waited_for_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = notes_of_streams(monkeypatch)
    torch.cuda.current_stream().record_event = lambda: Stream("the event", notes)  # type: ignore[attr-defined]
    on_host = torch.tensor([1.0, 2.0])
    flight = InFlight(tensor_on_gpu("sums", notes, to=lambda place, non_blocking: on_host))
    assert notes == []
    assert flight.wait()[0] is on_host and notes == ["the host waits for the event"]


def test_only_the_weights_that_count_are_summed_and_taking_begins_anew():
    one, two = (nn.Parameter(torch.full((3, 40), 1.5)) for _ in range(2))
    optimizer = AdamW([one, two], lr=0.25, weight_decay=0.0, moments="fp32")
    optimizer.measure([one])
    step(optimizer)
    moved, grid = optimizer.resolution.take().wait()[0].tolist()
    assert moved == pytest.approx(120 * 0.25**2, rel=1e-5) and grid == 120 * 0.125**2
    assert optimizer.resolution.take().wait()[0].tolist() == [0.0, 0.0]
    optimizer.measure(None)
    step(optimizer)
    assert optimizer.resolution is None


def test_the_ratio_is_of_root_mean_squares():
    assert ratio_of(torch.tensor([3.0, 36.0])) == 1.0
    assert math.isnan(ratio_of(torch.zeros(2)))
    assert Resolution([nn.Parameter(torch.ones(2))]).take().wait()[0].tolist() == [0.0, 0.0]


def test_a_skipped_step_and_other_optimizers():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = SGD([weight], lr=0.5)
    optimizer.measure([weight])
    optimizer.skip = torch.ones(())
    step(optimizer)
    assert optimizer.resolution.take().wait()[0].tolist() == [0.0, 0.0] and (weight == 1).all()
    optimizer.skip = None
    step(optimizer)
    assert optimizer.resolution.take().wait()[0].tolist() == [4.0, 16 * 0.125**2]


def test_torchs_step_of_nothing_before_a_state_is_loaded_does_not_count():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = AdamW([weight], moments="fp32")
    optimizer.measure([weight])
    optimizer.resolution.load({"sums": torch.tensor([3.0, 36.0], dtype=torch.float64), "reading": None})
    saved = copy.deepcopy(optimizer.state_dict())
    step(optimizer)
    optimizer.load_state_dict(saved)
    assert ratio_of(*optimizer.resolution.take().wait()) == 1.0
    step(optimizer)
    optimizer.load_state_dict(saved)
    assert ratio_of(*optimizer.resolution.take().wait()) != 1.0
