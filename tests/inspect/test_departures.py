"""What changed first in a run is named, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.inspect import diagnose, verdict
from octavo.inspect.departures import departures
from octavo.inspect.twin import NO_OUTPUT, NO_TWIN

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy  # noqa: E402
from tests.inspect.test_training import AT, LAYER, RECORDS  # noqa: E402


@pytest.mark.parametrize("times", [30.0, 1 / 30, np.inf])
def test_what_changed_first_is_named_whatever_it_is(times: float) -> None:
    def change(values: Any) -> None:
        values[AT:] = values[AT:] * times

    for what, changed in {
        "gradient of": lambda record: change(record.weights["gradient"][:, 2]),
        "update of": lambda record: change(record.weights["update"][:, 2]),
        f"size of {LAYER}'s input": lambda record: change(record.measures["rms"][:, 3]),
    }.items():
        record, noise = healthy(4, RECORDS), np.random.default_rng(0).normal(0, 0.1, (RECORDS, 4))
        record.weights.update(gradient=np.exp(noise), update=1e-4 * np.exp(noise))
        assert departures(record) == [] and "changed first" not in verdict(record, [])
        changed(record)
        first = departures(record)[0]
        assert what in first.name and first.step == record.steps[AT]
        assert first.times == pytest.approx(times, rel=0.5)
        assert f"What changed first: the {first.name.removeprefix('the ')}" in verdict(record, [])


def test_a_loss_that_is_written_later_was_not_lost_before() -> None:
    record = healthy(4, RECORDS)
    steps, losses = record.scalars["loss"]
    record.scalars["loss"] = steps[3:], losses[3:]
    assert departures(record) == []
    record.scalars["loss"] = steps[3:], [*losses[3:-1], float("nan")]
    assert [first.name for first in departures(record)] == ["the loss became inf or NaN"]


def test_gradients_that_come_by_another_way_are_named() -> None:
    """As of a loss that is computed from what a hook noted: the twin, which ends there, is no number of its own."""
    record, noise = healthy(4, RECORDS), np.random.default_rng(0).normal(0, 0.1, (RECORDS, 4))
    record.weights.update(gradient=np.exp(noise), update=1e-4 * np.exp(noise))
    record.events.append((record.steps[0], NO_TWIN, NO_OUTPUT))
    assert departures(record) == []
    record.events.append((record.steps[AT], NO_TWIN, NO_OUTPUT))
    (first,) = departures(record)
    assert first.step == record.steps[AT]
    assert "What changed first: gradients no longer come through the outputs of the recorded model" in verdict(
        record, []
    )


@pytest.mark.parametrize("step", [50 * AT - 1, 50 * RECORDS])
def test_an_event_whose_step_has_no_counts_is_one_of_the_next_recorded_step(step: int) -> None:
    """As of a run that was killed before they arrived."""
    record, noise = healthy(4, RECORDS), np.random.default_rng(0).normal(0, 0.1, (RECORDS, 4))
    record.weights.update(gradient=np.exp(noise), update=1e-4 * np.exp(noise))
    record.events.append((step, NO_TWIN, NO_OUTPUT))
    assert [first.step for first in departures(record)] == record.steps[AT:][:1] * (step < record.steps[-1])
    assert diagnose(record) == []


def test_a_small_change_of_many_numbers_is_named_before_a_larger_one_of_one() -> None:
    record = healthy(8, RECORDS)
    record.measures["rms"][:] = 1.0
    record.weights["gradient"] = np.exp(np.random.default_rng(0).normal(0, 0.1, (RECORDS, 8)))
    record.weights["gradient"][AT:] *= 1.3
    record.weights["gradient"][AT + 5 :, 3] *= 30
    first = departures(record)[0]
    assert "gradient of" in first.name and first.step == record.steps[AT]
