"""A training's numbers and detections; and what puts faults into healthy records, for tests of all rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from octavo.inspect import Record, diagnose
from octavo.inspect.rules import FAULT_RULES
from octavo.inspect.training import Detection

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy  # noqa: E402

AT, RECORDS = 8, 16  # the record that faults begin in, and all
LASTING = slice(AT, None)
LAYER = "model.layers.1.mlp"
INPUT, WEIGHT, GRADIENT = 3, 4, 5  # rows of this layer; the last layer's are 9 to 11

Fault = tuple[str, str, Callable[[Record], Any]]  # the kind and layer of the finding, and what puts the fault in


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


def update(factor: float, *layers: int) -> Callable[[Record], None]:
    def put(record: Record) -> None:
        record.weights["update"][AT, layers or slice(None)] *= factor

    return put


def both(*faults: Callable[[Record], Any]) -> Callable[[Record], None]:
    return lambda record: [fault(record) for fault in faults] and None


def frozen(record: Record) -> None:
    record.weights["update"][AT:, 1] = record.weights["changed"][AT:, 1] = 0


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


def gradients_of_outputs(factor: float) -> Callable[[Record], None]:
    def put(record: Record) -> None:
        record.measures["rms"][AT:, 2::3] *= factor

    return put


def assert_first(name: str, kind: str, layer: str, put: Callable[[Record], Any]) -> None:
    """The first finding's sentence names the fault's layer and step; severities stay within bounds."""
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


def test_what_was_0_is_exceeded_by_no_factor() -> None:
    record = healthy(4, RECORDS)
    record.weights["gradient"][:] = 1e-3
    record.weights["gradient"][AT - 6 : AT] = 0.0
    assert diagnose(record) == []


def test_a_rule_can_say_its_level() -> None:
    detection = Detection(FAULT_RULES["not_in_optimizer"], 3, 4.0, {"others": ""}, ("head", "weight"))
    noted = detection._replace(rule=detection.rule._replace(level="note")).finding()
    assert (detection.finding().level, noted.level) == (
        "warning",
        "note",
    ) and noted.sentence == detection.finding().sentence
