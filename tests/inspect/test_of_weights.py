"""The first finding in a healthy record with a fault of weights, gradients or moments in it is that fault."""

from __future__ import annotations

import pytest

from octavo.inspect import Record, diagnose

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy  # noqa: E402
from tests.inspect.test_training import (  # noqa: E402
    AT,
    LASTING,
    LAYER,
    RECORDS,
    WEIGHT,
    Fault,
    assert_first,
    both,
    frozen,
    gradients_of_outputs,
    measure,
    option,
    scalar,
    update,
    weights,
)


def same_norms(record: Record) -> None:
    record.measures["rms"][:, 1::3] = 0.25


def swapped(record: Record) -> None:
    same_norms(record)
    weights("outside", 0.0, 0.35)(record)


def between(record: Record) -> None:
    record.weights["between"][AT, 1] = 0.1  # of a weight whose root mean square is 0.25, in 49 steps of 1e-4 each


def early(record: Record) -> None:
    record.scalars.update(state_age=(record.steps, [*range(1, RECORDS + 1)]), lr=(record.steps, [1.0] * RECORDS))
    record.weights["update"][0] = 0.1  # of weights whose root mean square is 0.25


def untied(record: Record) -> None:
    record.events.append((50 * AT, "untied", f"embedding.weight and {LAYER}.weight"))


def of_copies(record: Record) -> None:
    """An optimizer that changes nothing."""
    record.scalars["lr"] = record.steps, [1e-3] * RECORDS
    weights("gradient", 1e-3, 1e-3)(record)
    weights("update", 1e-4, 0.0, records=LASTING)(record)


def skips(record: Record) -> None:
    """A GradScaler that skips every step from AT on, as gradients have inf: the optimizer's step is not seen."""
    record.scalars["lr"] = record.steps, [1e-3] * RECORDS
    record.scalars["loss_scale"] = record.steps, [1024.0] * AT + [2.0 ** (9 - at) for at in range(RECORDS - AT)]
    weights("gradient", 1e-3, np.nan, records=LASTING)(record)
    for name in ("update", "changed"):
        record.weights[name][AT:] = 0


FAULTS: dict[str, Fault] = {
    "lost moments": ("state", "", both(option("betas 1", 0.999, 0.999), weights("second_moment", 1e-6, 1e-9))),
    "a write before the update": ("overwritten", LAYER, weights("outside", 0.0, 0.1, 1)),
    "gradients that are added up": ("gradients", "", weights("gradient", 1e-3, 8e-3)),
    "gradients that fall": ("gradients", "", weights("gradient", 1e-3, 1e-5, records=LASTING)),
    "clipped before unscaled": (
        *("gradients", ""),
        both(scalar("grad_norm", 1.0, 1e3), weights("gradient", 1e-3, 1e-6, records=LASTING)),
    ),
    "a fall that clipping makes up for": (
        *("gradients", ""),
        both(scalar("grad_norm", 1.0, 0.05), gradients_of_outputs(0.05), weights("gradient", 1e-3, 9e-4)),
    ),
    "steps that are all skipped": ("frozen", "", skips),
    "weights that are replaced by their average": (
        *("overwritten", ""),
        both(same_norms, weights("outside", 0.0, 0.02), weights("size", 0.25, 0.25)),
    ),
    "no gradient for a layer": ("frozen", LAYER, weights("gradient", 1e-3, 0.0, 1, records=LASTING)),
    "an optimizer of other parameters": ("frozen", "", of_copies),
    "a lost state": ("state", "", scalar("state_age", 100, 1)),
    "no warm-up": ("warm-up", "", early),
    "an untied weight": ("untied", LAYER, untied),
    "a weight that something wrote between records": ("overwritten", LAYER, between),
    "mixed-up ranks": ("ranks", "", swapped),
    "gradients that are not clipped": ("gradients", "", both(update(50), weights("gradient", 1e-3, 5e-2))),
    "a frozen layer": ("frozen", LAYER, both(weights("gradient", 1e-3, 1e-3), frozen)),
    "a dead row": ("dead rows", LAYER, measure("zeros", 0.01, WEIGHT)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_said_first(name: str) -> None:
    assert_first(name, *FAULTS[name])


def test_a_weight_that_code_froze_is_a_note() -> None:
    """As of layers that are frozen one by one: its requires_grad is a choice."""
    for events, level in (([], "warning"), ([(50 * AT, "frozen", f"{LAYER}.weight, other.weight")], "note")):
        record = healthy(4, RECORDS)
        frozen(record)
        weights("gradient", 1e-3, 0.0, 1, records=LASTING)(record)
        record.events.extend(events)
        (finding,) = diagnose(record)
        assert (finding.kind, finding.layer, finding.level) == ("frozen", LAYER, level)


def test_weights_that_begin_at_0_change_by_large_shares() -> None:
    """As output projections, of which any step is large: the rate is judged by the other layers."""
    record = healthy(4, RECORDS)
    record.scalars.update(lr=(record.steps, [1.0] * RECORDS), state_age=([0], [1]))
    record.measures["rms"][:, 1::3], record.weights["update"][:] = 0.25, 2e-3
    record.measures["rms"][:, [1, 4, 7]] = np.linspace(0, 0.03, RECORDS)[:, None]
    assert diagnose(record) == []
    record.measures["rms"][:, 1::3] = np.linspace(1e-3, 0.03, RECORDS)[:, None]  # all begin so small
    assert diagnose(record)[0].kind == "warm-up"


def test_steps_between_two_records_may_have_had_higher_rates() -> None:
    """As in a short training, of which the second record is at its end."""
    record = healthy(4, RECORDS)
    weights("update", 1e-4, 1e-4)(record)
    weights("between", 1e-4, 0.5)(record)
    rates = dict.fromkeys(range(record.steps[-1] + 1), 1e-4)
    record.scalars["lr"] = [*rates], [*rates.values()]
    assert "overwritten" in {finding.kind for finding in diagnose(record)}
    rates |= dict.fromkeys(range(record.steps[AT - 1] + 1, record.steps[AT]), 4e-3)
    record.scalars["lr"] = [*rates], [*rates.values()]
    assert "overwritten" not in {finding.kind for finding in diagnose(record)}


def test_a_rate_that_is_too_high_from_the_first_step_on_is_named() -> None:
    """It explains what it does to casts, and a weight decay of 0.1 is not what to change."""
    record = healthy(4, RECORDS)
    record.scalars.update(lr=(record.steps, [0.25, 0.5, 0.75] + [1.0] * (RECORDS - 3)), state_age=([0], [1]))
    option("lr", 1.0, 1.0)(record), option("weight_decay", 0.1, 0.1)(record)
    record.measures["rms"][:, 1::3], record.measures["flushed"][2:, 2] = 0.25, 0.9
    record.weights["update"][:] = 0.2
    record.scalars["loss"] = record.steps, [5.5] + [9.0 + at % 3 for at in range(1, RECORDS)]
    (first,) = diagnose(record)
    assert (first.kind, first.begins, first.level) == ("learning rate", 0, "critical") and "80 %" in first.sentence
    assert 'group["lr"] /= 80' in first.remedy and [effect.kind for effect in first.consequences] == ["flushed"]


def test_weights_that_never_train_are_a_choice() -> None:
    """The base of an adapter: no gradient from the first step on. It is a warning where it begins later."""
    for records, level in ((slice(None), "note"), (LASTING, "warning")):
        record = healthy(4, RECORDS)
        weights("gradient", 1e-3, np.nan, 1, 2, records=records)(record)
        for name in ("update", "changed"):
            record.weights[name][records, 1:3] = 0
        assert [(finding.kind, finding.level) for finding in diagnose(record)] == [("frozen", level)]


def test_a_leap_begins_where_most_of_it_happens() -> None:
    """A loss that doubles comes before the gradients that leap with it, though these had grown a little before."""
    record = healthy(4, RECORDS)
    weights("gradient", 1e-3, 6e-3, records=LASTING)(record)
    record.weights["gradient"][AT - 2 : AT] = 1.3e-3
    record.scalars["loss"][1][AT:] = [loss * 2 for loss in record.scalars["loss"][1][AT:]]
    (first,) = diagnose(record)
    assert (first.kind, first.begins) == ("batch", 50 * AT)
    assert [(effect.kind, effect.begins) for effect in first.consequences] == [("gradients", 50 * AT)]


def test_gradients_that_make_no_larger_steps_are_a_note() -> None:
    """As of a new model, whose gradients grow, under an optimizer that divides by their size."""
    for factor, level in ((2.0, "warning"), (0.5, "note")):
        record = healthy(4, RECORDS)
        weights("gradient", 1e-3, 3e-2)(record), update(factor)(record)
        (first,) = diagnose(record)
        assert (first.kind, first.level) == ("gradients", level)


def test_gradients_that_fell_are_not_called_larger() -> None:
    record = healthy(4, RECORDS)
    weights("gradient", 1e-3, 2.5e-4, records=LASTING)(record)
    record.weights["gradient"][AT + 1 : AT + 6] *= 1.3 ** np.arange(1, 6)[:, None]
    assert diagnose(record) == []
