"""The first finding in a healthy record with any one fault put into it is that fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.inspect import Record, diagnose
from octavo.inspect.record import OfExperts
from octavo.inspect.training import Training

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy  # noqa: E402

AT, RECORDS = 8, 16  # the record that faults begin in, and all
LASTING = slice(AT, None)
LAYER = "model.layers.1.mlp"
INPUT, WEIGHT, GRADIENT = 3, 4, 5  # rows of this layer; the last layer's are 9 to 11


def scalar(name: str, before: float, after: float) -> Callable[[Record], Any]:
    return lambda record: record.scalars.update({name: (record.steps, [before] * AT + [after] * (RECORDS - AT))})


def loss(*values: float) -> Callable[[Record], None]:
    """Losses from AT on; the last one again and again."""

    def put(record: Record) -> None:
        for at in range(AT, RECORDS):
            record.scalars["loss"][1][at] += values[min(at - AT, len(values) - 1)]

    return put


def measure(name: str, value: float, *places: int) -> Callable[[Record], None]:
    def put(record: Record) -> None:
        record.measures[name][AT:, places] = value

    return put


def nonfinite(at: int, *places: int) -> Callable[[Record], None]:
    """Return a change that puts faults into these rows, and into all rows of the record after it."""

    def put(record: Record) -> None:
        record.measures["nonfinite"][at, places] = 0.5
        record.measures["nonfinite"][at + 1 :] = 0.5

    return put


def update(factor: float, *layers: int) -> Callable[[Record], None]:
    def put(record: Record) -> None:
        record.weights["update"][AT, layers or slice(None)] *= factor

    return put


def both(*faults: Callable[[Record], Any]) -> Callable[[Record], None]:
    return lambda record: [fault(record) for fault in faults] and None


def same_norms(record: Record) -> None:
    record.measures["rms"][:, 1::3] = 0.25


def swapped(record: Record) -> None:
    same_norms(record)
    weights("outside", 0.0, 0.35)(record)


def repeats(record: Record) -> None:
    record.scalars["loss"][1][AT:] = [4.2 * 0.98**place for place in range(RECORDS - AT)]


def of_copies(record: Record) -> None:
    """An optimizer that changes nothing."""
    record.scalars["lr"] = record.steps, [1e-3] * RECORDS
    weights("gradient", 1e-3, 1e-3)(record)
    weights("update", 1e-4, 0.0, records=LASTING)(record)


def logits(record: Record) -> None:
    record.layers[1] = LAYER.replace("mlp", "qkv")
    record.rows[INPUT : GRADIENT + 1] = [
        replace(row, layer=record.layers[1]) for row in record.rows[INPUT : GRADIENT + 1]
    ]
    record.measures["rms"][AT:, WEIGHT] = 2.0


def frozen(record: Record) -> None:
    record.weights["update"][AT:, 1] = record.weights["changed"][AT:, 1] = 0


def other_gradient(record: Record) -> None:
    record.parameters.extend(["embedding.weight", "head.weight"])
    record.of_parameters["change"] = np.tile([[0.1], [0.12]], (RECORDS // 2, 2))
    record.of_parameters["change"][AT, 0] = 0.6


def between(record: Record) -> None:
    record.weights["between"][AT, 1] = 0.1  # of a weight whose root mean square is 0.25, in 49 steps of 1e-4 each


def early(record: Record) -> None:
    record.scalars.update(state_age=(record.steps, [*range(1, RECORDS + 1)]), lr=(record.steps, [1.0] * RECORDS))
    record.weights["update"][0] = 0.1  # of weights whose root mean square is 0.25


def untied(record: Record) -> None:
    record.events.append((50 * AT, "untied", f"embedding.weight and {LAYER}.weight"))


def option(name: str, before: float, after: float) -> Callable[[Record], Any]:
    """An option of the optimizer's first group, which is written where it changes."""
    return lambda record: record.scalars.update({f"{name} of group 0": ([0, 50 * AT], [before, after])})


def weights(
    name: str, before: float, after: float, *layers: int, records: slice = slice(AT, AT + 1)
) -> Callable[[Record], None]:
    """Return a change of the measures of all weights, and in ``records`` of those of these layers."""

    def put(record: Record) -> None:
        record.weights[name] = np.full_like(record.weights["update"], before)
        record.weights[name][records, layers or slice(None)] = after

    return put


def grows(record: Record) -> None:
    record.scalars["lr"] = record.steps, [1e-3] * AT + [1e-3 * 1.5**k for k in range(1, RECORDS - AT + 1)]


def gradients_of_outputs(factor: float) -> Callable[[Record], None]:
    def put(record: Record) -> None:
        record.measures["rms"][AT:, 2::3] *= factor

    return put


def skips(record: Record) -> None:
    """A GradScaler that skips every step from AT on, as gradients have inf: the optimizer's step is not seen."""
    record.scalars["lr"] = record.steps, [1e-3] * RECORDS
    record.scalars["loss_scale"] = record.steps, [1024.0] * AT + [2.0 ** (9 - at) for at in range(RECORDS - AT)]
    weights("gradient", 1e-3, np.nan, records=LASTING)(record)
    for name in ("update", "changed"):
        record.weights[name][AT:] = 0


def activation(record: Record) -> None:
    """A NaN in one of a hundred rows of 100 numbers."""
    nonfinite(AT, 6, 9, 11, 8, 5)(record)
    record.measures["nonfinite"][AT, INPUT] = 1e-4


FAULTS: dict[str, tuple[str, str, Callable[[Record], Any]]] = {  # kind, layer, the fault
    "a rate that rises": ("learning rate", "", scalar("lr", 1e-3, 1e-2)),
    "a rate below 0": ("learning rate", "", scalar("lr", 1e-3, -1e-4)),
    "a rate that grows": ("learning rate", "", grows),
    "a rate that collapses": ("learning rate", "", scalar("lr", 1e-3, 1e-6)),
    "a coefficient that leaps": ("options", "", option("betas 1", 0.95, 0.5)),
    "an optimizer that turns round": ("options", "", option("maximize", False, True)),
    "a decay that leaps": ("decay", "", option("weight_decay", 0.1, 30.0)),
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
    "gradients that are not set to zero": ("gradients", "", scalar("left_gradient", 0.0, 0.3)),
    "steps that are all skipped": ("frozen", "", skips),
    "a NaN in the gradient of another rank": (
        *("nonfinite", ""),
        both(nonfinite(AT, *range(1, 12, 3)), weights("gradient", 1e-3, np.inf)),
    ),
    "weights that are replaced by their average": (
        *("overwritten", ""),
        both(same_norms, weights("outside", 0.0, 0.02), weights("size", 0.25, 0.25)),
    ),
    "no gradient for a layer": ("frozen", LAYER, weights("gradient", 1e-3, 0.0, 1, records=LASTING)),
    "an optimizer of other parameters": ("frozen", "", of_copies),
    "a loss without labels": ("batch", "", both(loss(math.nan, 0), measure("zeros", 0.9, 11))),
    "smaller batches": ("batch", "", measure("elements", 64.0, INPUT - 3)),
    "a NaN in an activation": ("nonfinite", LAYER, activation),
    "a rate of 0": ("learning rate", "", scalar("learning_rate", 1e-3, 0.0)),
    "a lost state": ("state", "", scalar("state_age", 100, 1)),
    "no warm-up": ("warm-up", "", early),
    "shifted labels": ("batch", "", loss(5)),
    "an ascent": ("drift", "", loss(*(1.5 * at for at in range(1, RECORDS)))),
    "gradients that something changed": ("gradients", "", scalar("twin_control", 1.0, 0.3)),
    "a loader that repeats": ("repeats", "", repeats),
    "a NaN in a batch": ("batch", "", nonfinite(AT, 0, 3, 6, 9, 11)),
    "a NaN in a weight": ("nonfinite", LAYER, nonfinite(AT, 6, 9, 11, 8, 5)),
    "a NaN in a gradient": ("nonfinite", LAYER, nonfinite(AT, GRADIENT, 2)),
    "a NaN after the update": ("nonfinite", LAYER, nonfinite(AT, WEIGHT)),
    "a loss scale too high": ("loss scale", "", both(scalar("loss_scale", 2.0, 1e9), nonfinite(AT, 11, 8, 5, 2))),
    "a loss scale too low": ("loss scale", "", both(scalar("loss_scale", 1.0, 1e-9), measure("zeros", 0.9, 11))),
    "labels that the loss ignores": ("labels", "", measure("zeros", 0.9, 11)),
    "a norm that is left out": ("batch", "", both(loss(5), measure("rms", 40.0, INPUT))),
    "an untied weight": ("untied", LAYER, untied),
    "a weight that something wrote between records": ("overwritten", LAYER, between),
    "mixed-up ranks": ("ranks", "", swapped),
    "gradients that are not clipped": ("gradients", "", both(update(50), weights("gradient", 1e-3, 5e-2))),
    "a frozen layer": ("frozen", LAYER, both(weights("gradient", 1e-3, 1e-3), frozen)),
    "a dead row": ("dead rows", LAYER, measure("zeros", 0.01, WEIGHT)),
    "a backward that changes": ("backward", "", scalar("twin_slope", 1.0, 0.9)),
    "a gradient that changes": ("backward", "", other_gradient),
    "saturated logits": ("logits", LAYER.replace("mlp", "qkv"), logits),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_said_first(name: str) -> None:
    """The first finding's sentence names the fault's layer and step; severities stay within bounds."""
    kind, layer, put = FAULTS[name]
    record = healthy(4, RECORDS)
    put(record)
    first = diagnose(record)[0]
    assert (first.kind, first.layer) == (kind, layer)
    assert first.sentence.startswith(layer) and first.remedy and 0 <= first.severity <= 10
    begins = 0 if name == "no warm-up" else 50 * AT
    assert first.begins == begins and f"step {begins}" in first.sentence


def test_healthy_numbers_of_a_training_are_no_finding() -> None:
    record = healthy(4, RECORDS)
    ages, warmup = [*range(1, RECORDS + 1)], [1e-3 * min(1, (at + 1) / 5) for at in range(RECORDS)]
    for name, values in {"lr": warmup, "state_age": ages}.items():
        record.scalars[name] = record.steps, values
    assert diagnose(record) == []
    record.scalars["lr"] = (record.steps, [abs(math.cos(at / 2)) + 0.01 for at in range(RECORDS)])  # warm restarts
    # a distillation whose teacher is read inside of the model: its part of the gradients grows by and by
    record.scalars["twin_control"] = (record.steps, [1 - 0.05 * at for at in range(RECORDS)])
    record.scalars["twin_slope"] = (record.steps, [1 + 0.1 * (-1) ** at - 0.05 * (at == AT) for at in range(RECORDS)])
    assert diagnose(record) == []


def test_a_gradient_of_the_first_batch_may_change_with_what_it_is_of() -> None:
    """Its weights, or outputs; or as noise does; beyond that it is a finding, which names the last such parameter."""
    record = healthy(4, RECORDS)
    other_gradient(record)
    (finding,) = diagnose(record)
    assert (finding.kind, finding.level, finding.begins) == ("backward", "warning", 50 * AT)
    assert "another gradient of embedding for the same batch: it changed by 60 %, by 12 % before" in finding.sentence
    for value in (0.45, 1.0):
        record.of_parameters["change"][AT, 0] = value
        record.of_parameters["change"][1, 0] = value / 3
        assert diagnose(record) == []


def test_a_weight_that_code_froze_is_a_note() -> None:
    """As of layers that are frozen one by one: its requires_grad is a choice."""
    for events, level in (([], "warning"), ([(50 * AT, "frozen", f"{LAYER}.weight, other.weight")], "note")):
        record = healthy(4, RECORDS)
        frozen(record)
        weights("gradient", 1e-3, 0.0, 1, records=LASTING)(record)
        record.events.extend(events)
        (finding,) = diagnose(record)
        assert (finding.kind, finding.layer, finding.level) == ("frozen", LAYER, level)


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


def test_an_expert_without_tokens_is_named() -> None:
    record = healthy(2, RECORDS)
    tokens = np.full((RECORDS, 4), 30.0)
    tokens[AT:, 2] = 0
    worst = np.zeros_like(record.measures["amax"]) - 1
    of_experts = OfExperts(record.measures, record.exponents, worst, worst, dict.fromkeys(record.layers, tokens))
    (finding,) = diagnose(replace(record, experts=of_experts))
    assert (finding.kind, finding.layer, finding.begins) == ("idle expert", record.layers[0], 50 * AT)
    assert "expert 2 of 4" in finding.cause


def test_what_began_between_two_records_is_not_blamed_on_a_layer() -> None:
    record = healthy(4, RECORDS)
    nonfinite(AT, *range(12))(record)
    steps = range(50 * RECORDS)
    record.scalars["loss"] = (
        [*steps],
        [math.nan if step > 50 * AT - 20 else 4 + step % 7 * step % 5 / 10 for step in steps],
    )
    first = diagnose(record)[0]
    assert (first.kind, first.layer, first.begins) == ("nonfinite", "", 50 * AT - 19) and "trace_faults" in first.remedy


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


def test_a_leap_begins_where_most_of_it_happens() -> None:
    """A loss that doubles comes before the gradients that leap with it, though these had grown a little before."""
    record = healthy(4, RECORDS)
    weights("gradient", 1e-3, 6e-3, records=LASTING)(record)
    record.weights["gradient"][AT - 2 : AT] = 1.3e-3
    record.scalars["loss"][1][AT:] = [loss * 2 for loss in record.scalars["loss"][1][AT:]]
    (first,) = diagnose(record)
    assert (first.kind, first.begins) == ("batch", 50 * AT)
    assert [(effect.kind, effect.begins) for effect in first.consequences] == [("gradients", 50 * AT)]


def test_a_loss_begins_to_rise_where_most_of_it_happens() -> None:
    """Also where a noisy step or two before it are higher than those before them."""
    record = healthy(4, RECORDS)
    past, higher = [2.2, 2.3, 2.2, 2.3, 2.9, 2.4, 2.4, 2.5], [3.0, 3.0, 3.2, 3.3, 3.1, 3.0, 3.1, 3.3]
    for later, kind in (([3.9, 4.0] * 4, "batch"), (higher, "batch"), ([2.7 + at / 3 for at in range(8)], "drift")):
        record.scalars["loss"] = record.steps, past + later
        first = diagnose(record)[0]
        assert (first.kind, first.begins) == (kind, 50 * AT)


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


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of records with too few before them
def test_what_was_0_is_exceeded_by_no_factor() -> None:
    record = healthy(4, RECORDS)
    record.weights["gradient"][:] = 1e-3
    record.weights["gradient"][AT : AT + 2] = 0.0
    assert np.nanmax(Training(record).leaps.gradients) == pytest.approx(1)
