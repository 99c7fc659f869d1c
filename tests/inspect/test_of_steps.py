"""The first finding in a healthy record with a fault of a step's numbers in it is that fault."""

from __future__ import annotations

import pytest

from octavo.inspect import Record, diagnose

np = pytest.importorskip("numpy")

from octavo.inspect.weight_updates import GROUP  # noqa: E402
from tests.inspect.test_findings import healthy  # noqa: E402
from tests.inspect.test_training import (  # noqa: E402
    AT,
    INPUT,
    RECORDS,
    Fault,
    assert_first,
    both,
    loss,
    measure,
    option,
    scalar,
    weights,
)


def grows(record: Record) -> None:
    record.scalars["lr"] = record.steps, [1e-3] * AT + [1e-3 * 1.5**k for k in range(1, RECORDS - AT + 1)]


def repeats(record: Record) -> None:
    record.scalars["loss"][1][AT:] = [4.2 * 0.98**place for place in range(RECORDS - AT)]


FAULTS: dict[str, Fault] = {
    "a rate that rises": ("learning rate", "", scalar("lr", 1e-3, 1e-2)),
    "a rate below 0": ("learning rate", "", scalar("lr", 1e-3, -1e-4)),
    "a rate that grows": ("learning rate", "", grows),
    "a rate that collapses": ("learning rate", "", scalar("lr", 1e-3, 1e-6)),
    "a rate of 0": ("learning rate", "", scalar("learning_rate", 1e-3, 0.0)),
    "a coefficient that leaps": ("options", "", option("betas 1", 0.95, 0.5)),
    "an optimizer that turns round": ("options", "", option("maximize", False, True)),
    "a decay that leaps": ("decay", "", option("weight_decay", 0.1, 30.0)),
    "shifted labels": ("batch", "", loss(5)),
    "an ascent": ("drift", "", loss(*(1.5 * at for at in range(1, RECORDS)))),
    "a norm that is left out": ("batch", "", both(loss(5), measure("rms", 40.0, INPUT))),
    "a loader that repeats": ("repeats", "", repeats),
    "gradients that are not set to zero": ("gradients", "", scalar("left_gradient", 0.0, 0.3)),
    "gradients that something changed": ("gradients", "", scalar("twin_control", 1.0, 0.3)),
    "a backward that changes": ("backward", "", scalar("twin_slope", 1.0, 0.9)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_said_first(name: str) -> None:
    assert_first(name, *FAULTS[name])


@pytest.mark.parametrize(("rate", "kind"), [(1e-3, ""), (1e-2, "learning rate")])
def test_a_group_that_is_added_has_the_options_of_its_own_steps(rate: float, kind: str) -> None:
    record = healthy(4, RECORDS)
    steps = record.steps[AT:]
    record.scalars[f"lr{GROUP}1"] = steps, [1e-3] * 2 + [rate] * (len(steps) - 2)
    record.scalars[f"weight_decay{GROUP}1"] = steps[:1], [0.1]
    assert [finding.kind for finding in diagnose(record)][:1] == [kind] * bool(kind)


def test_a_loss_may_be_0_or_below() -> None:
    """As an ELBO or the loss of a policy: the same rise has the same severity around 0 on either side."""
    severities = []
    for level in (5.0, -5.0, 0.0):
        record = healthy(4, RECORDS)
        record.scalars["loss"] = record.steps, [level + 20.0 * (at >= AT) for at in range(RECORDS)]
        (finding,) = diagnose(record)
        assert (finding.kind, finding.begins) == ("batch", 50 * AT)
        severities.append(finding.severity)
    assert severities[0] == severities[1] < severities[2] == 10


def test_a_slope_that_never_was_1_is_a_note() -> None:
    """It may be meant, as with a straight-through estimator."""
    record = healthy(4, RECORDS)
    scalar("twin_slope", 0.7, 0.72)(record)
    (finding,) = diagnose(record)
    assert (finding.kind, finding.level, finding.begins) == ("backward", "note", 0) and "0.71" in finding.sentence


@pytest.mark.parametrize("falls", [True, False])
def test_a_schedule_that_ends_at_zero_is_a_note(falls: bool) -> None:
    """What stands still then is not frozen; a rate that is suddenly 0 is a fault."""
    record = healthy(4, RECORDS)
    rates = [max(0.0, 1 - at / 12) if falls else float(at < 12) for at in range(RECORDS)]
    record.scalars["lr"] = record.steps, rates
    weights("gradient", 1e-3, 1e-3)(record)
    for name in ("update", "changed"):
        record.weights[name][12:] = 0
    (finding,) = diagnose(record)
    assert (finding.kind, finding.begins) == ("learning rate", 600)
    assert finding.level == ("note" if falls else "warning")


def test_a_loss_begins_to_rise_where_most_of_it_happens() -> None:
    """Also where a noisy step or two before it are higher than those before them."""
    record = healthy(4, RECORDS)
    past, higher = [2.2, 2.3, 2.2, 2.3, 2.9, 2.4, 2.4, 2.5], [3.0, 3.0, 3.2, 3.3, 3.1, 3.0, 3.1, 3.3]
    for later, kind in (([3.9, 4.0] * 4, "batch"), (higher, "batch"), ([2.7 + at / 3 for at in range(8)], "drift")):
        record.scalars["loss"] = record.steps, past + later
        first = diagnose(record)[0]
        assert (first.kind, first.begins) == (kind, 50 * AT)


def test_batches_in_turn_repeat() -> None:
    record = healthy(4, 24)
    record.scalars["loss"][1][AT - 1 :] = [9.3, *(9.9 - 0.1 * (at % 3) - 0.01 * at for at in range(24 - AT))]
    first = diagnose(record)[0]
    assert (first.kind, first.begins) == ("repeats", 50 * AT) and "the same 3 in turn" in first.cause


def test_gradients_of_several_steps_may_be_summed_for_one_update() -> None:
    """A loop that calls recorder.step for each batch, and the optimizer for every fourth."""
    record = healthy(4, RECORDS)
    scalar("left_gradient", 0.3, 0.3)(record)
    assert diagnose(record)[0].kind == "gradients"
    record.weights["update"][[at for at in range(RECORDS) if at % 4 != 3]] = 0.0
    assert not {"gradients"} & {finding.kind for finding in diagnose(record)}
