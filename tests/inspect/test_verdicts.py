"""The first sentences: whether FP8 is the cause, by the twin; and what changed first."""

from typing import Any

import pytest

from octavo.inspect import diagnose, verdict
from octavo.inspect.record import Record
from octavo.inspect.verdicts import departures, of_fp8, of_run

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy, put  # noqa: E402
from tests.inspect.test_training import AT, LAYER, RECORDS  # noqa: E402


def with_twin(record: Record, cosine: float = 0.995, of_loss: float = 1.001) -> Record:
    """Give a record the numbers of twins: a cosine for all layers, and losses so many times the step's."""
    steps, losses = record.scalars["loss"]
    record.scalars["twin_loss"] = (
        record.steps,
        [dict(zip(steps, losses, strict=True))[s] * of_loss for s in record.steps],
    )
    record.weights["twin_cosine"] = np.full((len(record.steps), len(record.layers)), cosine)
    return record


def test_verdicts_are_sentences() -> None:
    record = healthy(4, RECORDS)
    nothing = f"Nothing exceeds its limit in {RECORDS} recorded steps"
    assert verdict(record, diagnose(record)).split(". ") == [of_fp8(record), nothing]
    assert "not measured: a twin runs before an optimizer's update" in of_fp8(record)
    put(record, 3, assumed=6.0, clipped=0.53)
    clips = f"{LAYER} clips 53 % of its input since step 50: give it a margin of 3"
    assert verdict(record, diagnose(record)).split(". ")[1] == clips


def test_a_note_is_no_verdict() -> None:
    record = with_twin(healthy(4, RECORDS))
    record.measures["flushed"][AT:, 0] = 0.015
    findings = diagnose(record)
    assert [finding.level for finding in findings] == ["note"]
    assert findings[0].sentence not in verdict(record, findings)


def test_the_twin_answers_whether_fp8_is_the_cause() -> None:
    record = with_twin(healthy(4, RECORDS))
    assert of_fp8(record).startswith("FP8 changes little: in high precision the same batch has nearly the same loss (")
    assert "cosine 0.995" in of_fp8(record)
    (finding,) = diagnose(put(healthy(4, RECORDS), 3, assumed=6.0, clipped=0.53))
    assert of_fp8(record, finding).startswith("FP8 changes little")
    record.weights["twin_cosine"][AT : AT + 2, 1] = 0.1  # two steps may be an accident
    assert of_fp8(record).startswith("FP8 changes little")
    record.weights["twin_cosine"][AT + 2, 1] = 0.2
    begins = (
        f"from step {record.steps[AT]} {record.layers[1]}'s gradient has a cosine of 0.10 with that in high precision"
    )
    assert of_fp8(record) == f"FP8 is the cause: {begins}"
    apart = with_twin(healthy(4, RECORDS))
    steps, losses = apart.scalars["twin_loss"]
    losses[AT:] = [0.9 * loss for loss in losses[AT:]]
    assert f"FP8 is the cause: from step {steps[AT]} the loss is " in of_fp8(apart)
    at = apart.scalars["loss"][0].index(steps[AT - 1])
    apart.scalars["loss"][1][at] = np.nan
    assert of_fp8(apart).startswith(f"FP8 is the cause: at step {steps[AT - 1]} the loss is nan, and in high precision")


def test_fp8_takes_part_in_what_another_fault_began() -> None:
    record = with_twin(healthy(4, RECORDS))
    record.scalars["lr"] = record.steps, [1e-3] * AT + [1e-2] * (RECORDS - AT)
    first = diagnose(record)[0]
    assert of_fp8(record, first).startswith("FP8 is not the cause: ")
    record.weights["twin_cosine"][AT:, 2] = 0.5  # the rate rose before the step's first cast
    assert of_fp8(record, first).startswith("FP8 takes part, though not first: ")


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
        assert departures(record) == [] and "changed first" not in of_run(record)
        changed(record)
        first = departures(record)[0]
        assert what in first.name and first.step == record.steps[AT]
        assert first.times == pytest.approx(times, rel=0.5)
        assert f"What changed first: the {first.name.removeprefix('the ')}" in of_run(record)


def test_the_step_that_is_compared_may_differ_alone_or_have_a_loss_alone() -> None:
    record = with_twin(healthy(4, RECORDS))
    record.weights["twin_cosine"][:] = np.nan  # as of adapters over frozen layers
    assert of_fp8(record).startswith("FP8 changes little: in high precision the same batch has nearly the same loss (")
    record.scalars["twin_loss"][1][-1] *= 1.2
    assert of_fp8(record).startswith("FP8 changes single steps: in high precision the same batch has another loss (")
    (finding,) = diagnose(put(healthy(4, RECORDS), 3, assumed=6.0, clipped=0.53))
    for name in ("loss", "twin_loss"):
        record.scalars[name] = tuple(values[:1] for values in record.scalars[name])
    assert of_fp8(record, finding).endswith("at step 0; later steps were not compared")
