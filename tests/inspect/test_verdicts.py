"""The first sentences: whether FP8 is the cause, by the twin; and what changed first."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.inspect import diagnose, verdict
from octavo.inspect.record import Record
from octavo.inspect.verdicts import answer_of_twin

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy, put  # noqa: E402
from tests.inspect.test_training import AT, LASTING, LAYER, RECORDS, measure, weights  # noqa: E402

LAST_GRADIENT = 11  # the row of the last layer's grad_output


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
    assert verdict(record, diagnose(record)).split(". ") == [answer_of_twin(record), nothing]
    assert "not measured: a twin runs before an optimizer's update" in answer_of_twin(record)
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
    assert answer_of_twin(record).startswith(
        "FP8 changes little: in high precision the same batch has nearly the same loss ("
    )
    assert "cosine 0.995" in answer_of_twin(record)
    (finding,) = diagnose(put(healthy(4, RECORDS), 3, assumed=6.0, clipped=0.53))
    assert answer_of_twin(record, finding).startswith("FP8 changes little")
    record.weights["twin_cosine"][AT : AT + 2, 1] = 0.1  # two steps may be an accident
    assert answer_of_twin(record).startswith("FP8 changes little")
    record.weights["twin_cosine"][AT + 3, 1] = 0.2  # three of five are none
    begins = f"from step {record.steps[AT]} the gradient of {record.layers[1]} has a cosine of 0.10"
    assert answer_of_twin(record, finding) == f"FP8 is the cause: {begins} with that in high precision"
    harm = "FP8 harms gradients, though not the loss so far"
    assert answer_of_twin(record) == f"{harm}: {begins} with that in high precision"
    record.weights["twin_cosine"][AT : AT + 4, 1] = 0.93
    assert answer_of_twin(record).startswith("FP8 changes gradients, though not the loss so far: ")
    apart = with_twin(healthy(4, RECORDS))
    steps, losses = apart.scalars["twin_loss"]
    losses[AT:] = [0.9 * loss for loss in losses[AT:]]
    assert f"FP8 is the cause: from step {steps[AT]} the loss is " in answer_of_twin(apart)
    at = apart.scalars["loss"][0].index(steps[AT - 1])
    apart.scalars["loss"][1][at] = np.nan
    assert answer_of_twin(apart).startswith(f"FP8 is the cause: at step {steps[AT - 1]} the loss is nan, and ")


def test_the_twin_clears_casts_and_what_the_loss_has_in_fp8_alone() -> None:
    record = with_twin(put(healthy(4, RECORDS), 3, assumed=6.0, clipped=0.53))
    assert [(finding.kind, finding.level) for finding in diagnose(record)] == [("stale", "note")]
    record.weights["twin_cosine"][AT:] = 0.5
    assert diagnose(record)[0].level == "critical"
    steps, losses = record.scalars["loss"]
    begins = steps.index(record.steps[AT])
    record.scalars["loss"] = steps, [*losses[:begins], *(3 * loss for loss in losses[begins:])]
    assert "batch" not in {finding.kind for finding in diagnose(record)}
    record.scalars["twin_loss"] = record.steps, record.scalar("loss").tolist()
    assert "batch" in {finding.kind for finding in diagnose(record)}


LOSES: dict[str, Callable[[Record], None]] = {
    "gradients": weights("gradient", 1e-3, 1e-5, records=LASTING),
    "frozen": weights("gradient", 1e-3, 0.0, 1, records=LASTING),
    "labels": measure("zeros", 0.9, LAST_GRADIENT),
}


@pytest.mark.parametrize("kind", LOSES)
def test_gradients_that_fp8_alone_loses_are_its_effect(kind: str) -> None:
    record = with_twin(healthy(4, RECORDS))
    record.weights["twin_norm"] = np.full_like(record.weights["twin_cosine"], 0.1)
    LOSES[kind](record)
    first = diagnose(record)[0]
    assert (first.kind, first.level) == (kind, "warning")  # something else stops them: the twin has as few
    assert answer_of_twin(record, first).startswith("FP8 is not the cause: ")
    record.weights["twin_cosine"][AT:] = 0.0  # the twin has as many as before
    assert diagnose(record) == []
    assert answer_of_twin(record).startswith("FP8 harms gradients, though not the loss so far: ")
    record.weights["twin_norm"][AT:] = 1e-12  # the twin has fewer, and FP8 flushes these
    first = diagnose(record)[0]
    assert first.kind == kind and answer_of_twin(record, first).startswith("FP8 takes part, though not first: ")


def test_a_layer_whose_gradient_fp8_loses_is_not_frozen_by_the_program() -> None:
    """Also where the loss differs at the same step, and not by more than it varies."""
    record = with_twin(healthy(4, RECORDS))
    record.weights["twin_norm"] = np.full_like(record.weights["twin_cosine"], 0.1)
    weights("gradient", 1e-3, 0.0, 1, records=LASTING)(record)
    assert diagnose(record)[0].kind == "frozen"
    record.weights["twin_cosine"][AT:, 2] = 0.5  # of another layer, whose gradient FP8 changes
    assert diagnose(record)[0].kind == "frozen"
    record.weights["twin_cosine"][AT:, 1] = 0.0
    record.scalars["twin_loss"][1][AT:] = [loss / 1.02 for loss in record.scalars["twin_loss"][1][AT:]]
    assert diagnose(record) == [] and answer_of_twin(record).startswith("FP8 is the cause")


def test_of_one_cast_the_worse_finding_comes_first() -> None:
    record = put(healthy(4, RECORDS), 3, assumed=6.0, clipped=0.02, flushed=0.95)
    first = diagnose(record)[0]
    assert (first.kind, first.level, [each.kind for each in first.consequences]) == ("flushed", "critical", ["stale"])


def test_what_layers_do_after_fp8_raised_the_loss_is_its_effect() -> None:
    record = with_twin(healthy(4, RECORDS))
    weights("gradient", 1e-3, 8e-3)(record)
    assert "gradients" in {finding.kind for finding in diagnose(record)}
    steps, losses = record.scalars["loss"]
    record.scalars["loss"] = (
        steps,
        [1.2 * x if s >= record.steps[AT] else x for s, x in zip(steps, losses, strict=True)],
    )
    assert diagnose(record) == []


def test_a_loss_that_is_multiplied_is_not_apart_from_its_twins() -> None:
    """Its change is known by the gradients of the outputs, which have that factor too."""
    record = with_twin(healthy(4, RECORDS), of_loss=1.001)
    record.scalars["twin_loss"][1][AT:] = [1.02 * loss for loss in record.scalars["twin_loss"][1][AT:]]
    assert answer_of_twin(record).startswith("FP8 is the cause")
    record.measures["rms"][AT:, 11] *= 30
    assert answer_of_twin(record).startswith("FP8 changes little")


def test_a_sum_whose_mean_is_recorded_is_not_apart_from_its_twins() -> None:
    """Some steps are further away than a loss can be while all gradients agree: so no step's loss is compared."""
    record = with_twin(healthy(4, RECORDS))
    record.scalars["twin_loss"][1][:] = [
        loss * (1.4, 1.1, 1.1)[at % 3] for at, loss in enumerate(record.scalars["loss"][1][: len(record.steps)])
    ]
    assert answer_of_twin(record).startswith(
        "FP8 changes little: in high precision the same batch has nearly the same gradients"
    )
    record.weights["twin_cosine"][:] = 0.9
    assert answer_of_twin(record).startswith("FP8 is the cause")


def test_fp8_takes_part_in_what_another_fault_began() -> None:
    record = with_twin(healthy(4, RECORDS))
    record.scalars["lr"] = record.steps, [1e-3] * AT + [1e-2] * (RECORDS - AT)
    first = diagnose(record)[0]
    assert answer_of_twin(record, first).startswith("FP8 is not the cause: ")
    record.weights["twin_cosine"][AT:, 2] = 0.5  # the rate rose before the step's first cast
    assert answer_of_twin(record, first).startswith("FP8 is not the cause, though it suffers: from step ")
    batch = replace(first, kind="batch")  # which is over after its step
    assert answer_of_twin(record, batch).startswith("FP8 takes part, though not first: ")
    cast = replace(first, products=("output",))
    assert answer_of_twin(record, cast).startswith("FP8 is the cause: ")


def test_fp8_is_the_cause_of_its_part_of_the_damage() -> None:
    """By the loss of the same weights in high precision, whatever was found before."""
    record = with_twin(healthy(4, RECORDS))
    record.scalars["lr"] = record.steps, [1e-3] * AT + [1e-2] * (RECORDS - AT)
    first = diagnose(record)[0]
    record.weights["twin_cosine"][AT:] = 0.9
    losses = dict(zip(*record.scalars["loss"], strict=True))
    later = record.steps[AT:]

    def of_losses(in_fp8: float, in_high_precision: float) -> str:
        raised = {step: loss * (in_fp8 if step in later else 1) for step, loss in losses.items()}
        record.scalars["loss"] = [*losses], [*raised.values()]
        record.scalars["twin_loss"] = (
            record.steps,
            [losses[s] * (in_high_precision if s in later else 1) for s in record.steps],
        )
        return answer_of_twin(record, first)

    assert of_losses(2.0, 1.2).startswith("FP8 is the cause: from step ")
    assert of_losses(2.0, 1.8).startswith("FP8 is not the cause, though it suffers: from step ")


def test_fp8_suffers_where_the_twins_loss_rose_after_another_departure() -> None:
    record = with_twin(healthy(4, RECORDS))
    (finding,) = diagnose(put(healthy(4, RECORDS), 3, assumed=6.0, clipped=0.53))
    later = AT + 4
    record.weights["twin_cosine"][later:, 2] = 0.5
    assert answer_of_twin(record, finding).startswith("FP8 is the cause: ")
    for numbers in (record.weights["size"], record.weights["gradient"], record.measures["rms"]):
        numbers[AT:] *= 8  # weights grow
    for name in ("loss", "twin_loss"):
        steps, losses = record.scalars[name]
        record.scalars[name] = (
            steps,
            [x * 1.5 if s >= record.steps[later] else x for s, x in zip(steps, losses, strict=True)],
        )
    assert answer_of_twin(record, finding).startswith("FP8 is not the cause, though it suffers: ")


def test_the_step_that_is_compared_may_differ_alone_or_have_a_loss_alone() -> None:
    record = with_twin(healthy(4, RECORDS))
    record.weights["twin_cosine"][:] = np.nan  # as of adapters over frozen layers
    assert answer_of_twin(record).startswith(
        "FP8 changes little: in high precision the same batch has nearly the same loss ("
    )
    record.scalars["twin_loss"][1][-1] *= 1.2
    assert answer_of_twin(record).startswith(
        "FP8 changes little: in high precision the same batch has nearly the same loss ("
    )
    assert answer_of_twin(record).endswith(f", but for {record.steps[-1]}")
    record.scalars["twin_cosine"] = record.steps, [0.9] * RECORDS
    assert ": from step 0 the gradient of all weights that are no layer's has a cosine of 0.90" in answer_of_twin(
        record
    )
    del record.scalars["twin_cosine"]
    (finding,) = diagnose(put(healthy(4, RECORDS), 3, assumed=6.0, clipped=0.53))
    for name in ("loss", "twin_loss"):
        record.scalars[name] = tuple(values[:1] for values in record.scalars[name])
    assert answer_of_twin(record, finding).endswith("at step 0; later steps were not compared")
