"""The first finding in a healthy record with a fault of layers, or inf or NaN, in it is that fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.inspect import Record, diagnose
from octavo.inspect.record import OfExperts

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy  # noqa: E402
from tests.inspect.test_training import (  # noqa: E402
    AT,
    GRADIENT,
    INPUT,
    LAYER,
    RECORDS,
    WEIGHT,
    Fault,
    assert_first,
    both,
    loss,
    measure,
    scalar,
    weights,
)


def nonfinite(at: int, *places: int) -> Callable[[Record], None]:
    """Return a change that puts faults into these rows, and into all rows of the record after it."""

    def put(record: Record) -> None:
        record.measures["nonfinite"][at, places] = 0.5
        record.measures["nonfinite"][at + 1 :] = 0.5

    return put


def activation(record: Record) -> None:
    """A NaN in one of a hundred rows of 100 numbers."""
    nonfinite(AT, 6, 9, 11, 8, 5)(record)
    record.measures["nonfinite"][AT, INPUT] = 1e-4


def other_gradient(record: Record) -> None:
    record.parameters.extend(["embedding.weight", "head.weight"])
    record.of_parameters["change"] = np.tile([[0.1], [0.12]], (RECORDS // 2, 2))
    record.of_parameters["change"][AT, 0] = 0.6


def logits(record: Record) -> None:
    record.layers[1] = LAYER.replace("mlp", "qkv")
    record.rows[INPUT : GRADIENT + 1] = [
        replace(row, layer=record.layers[1]) for row in record.rows[INPUT : GRADIENT + 1]
    ]
    record.measures["rms"][AT:, WEIGHT] = 2.0


FAULTS: dict[str, Fault] = {
    "smaller batches": ("batch", "", measure("elements", 64.0, INPUT - 3)),
    "a loss without labels": ("batch", "", both(loss(math.nan, 0), measure("zeros", 0.9, 11))),
    "a NaN in a batch": ("batch", "", nonfinite(AT, 0, 3, 6, 9, 11)),
    "a NaN in an activation": ("nonfinite", LAYER, activation),
    "a NaN in a weight": ("nonfinite", LAYER, nonfinite(AT, 6, 9, 11, 8, 5)),
    "a NaN in a gradient": ("nonfinite", LAYER, nonfinite(AT, GRADIENT, 2)),
    "a NaN in the gradient of another rank": (
        *("nonfinite", ""),
        both(nonfinite(AT, *range(1, 12, 3)), weights("gradient", 1e-3, np.inf)),
    ),
    "a NaN after the update": ("nonfinite", LAYER, nonfinite(AT, WEIGHT)),
    "a loss scale too high": ("loss scale", "", both(scalar("loss_scale", 2.0, 1e9), nonfinite(AT, 11, 8, 5, 2))),
    "a loss scale too low": ("loss scale", "", both(scalar("loss_scale", 1.0, 1e-9), measure("zeros", 0.9, 11))),
    "labels that the loss ignores": ("labels", "", measure("zeros", 0.9, 11)),
    "a gradient that changes": ("backward", "", other_gradient),
    "saturated logits": ("logits", LAYER.replace("mlp", "qkv"), logits),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_said_first(name: str) -> None:
    assert_first(name, *FAULTS[name])


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
