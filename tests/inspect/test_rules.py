"""The table of rules is whole: each has a kind that incidents know, and its test gets all rules that name it."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

from octavo.inspect import Record, of_layers, of_steps, of_weights, rules
from octavo.inspect.incidents import KINDS
from octavo.inspect.rules import FAULT_RULES

pytest.importorskip("numpy")

from tests.inspect import test_of_layers, test_of_steps
from tests.inspect.test_findings import healthy
from tests.inspect.test_of_layers import nonfinite
from tests.inspect.test_training import AT, GRADIENT, RECORDS, WEIGHT, Fault, scalar


def test_each_test_takes_the_rules_that_name_it() -> None:
    tests = {rule.test for rule in FAULT_RULES.values()}
    for test in tests:
        inspect.signature(test).bind("a training", **{n: rule for n, rule in FAULT_RULES.items() if rule.test == test})
    assert {rule.kind for rule in FAULT_RULES.values()} <= KINDS.keys()
    assert {test for rule in FAULT_RULES.values() for test in rule.unless} <= tests
    assert all(rule.text and rule.remedy for rule in FAULT_RULES.values())


def test_each_test_and_each_kind_has_a_rule() -> None:
    """No test is left out; kinds with a limit are casts', which findings.py tests."""
    functions = [each for file in (of_steps, of_weights, of_layers) for each in vars(file).items()]
    tests = {test for name, test in functions if name.startswith("find_")}
    assert {test.__annotations__["return"] for test in tests} == {"Detections"}
    assert len(tests) > 20 and tests == {rule.test for rule in FAULT_RULES.values()}
    assert {kind for kind, each in KINDS.items() if each.limit is None} <= {rule.kind for rule in FAULT_RULES.values()}


def large_steps(record: Record) -> None:
    """Updates of 8 % of all weights in each step, which are as large as before where the rate rises."""
    record.measures["rms"][:, 1::3], record.weights["update"][:] = 0.25, 0.02


@pytest.mark.parametrize(
    ("cause", "other", "explained"),
    [
        (test_of_steps.FAULTS["a rate that rises"], large_steps, "large_steps"),
        (
            test_of_steps.FAULTS["gradients that are not set to zero"],
            scalar("twin_control", 1.0, 0.3),
            "gradients_changed",
        ),
        (test_of_layers.FAULTS["a NaN in a weight"], nonfinite(AT, GRADIENT), "made_by_backward"),
        (test_of_layers.FAULTS["a NaN in a batch"], nonfinite(AT, 1, WEIGHT), "made_by_updates"),
        (test_of_layers.FAULTS["a NaN in a gradient"], nonfinite(AT, WEIGHT), "made_by_update"),
    ],
)
def test_a_detection_that_another_explains_is_dropped(
    cause: Fault, other: Callable[[Record], Any], explained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order the rules stand."""
    record = healthy(4, RECORDS)
    cause[2](record), other(record)
    findings = rules.apply_rules(record)
    monkeypatch.setattr(rules, "FAULT_RULES", dict(reversed(FAULT_RULES.items())))
    assert rules.apply_rules(record) == findings[::-1]
    rule = FAULT_RULES[explained]
    monkeypatch.setattr(rules, "FAULT_RULES", FAULT_RULES | {explained: rule._replace(unless=())})
    assert len(rules.apply_rules(record)) == len(findings) + 1


@pytest.mark.parametrize("norm", [None, 1.0, math.nan])
def test_a_nan_of_the_update_is_none_of_gradients_whose_norm_is_finite_or_not_recorded(norm: float | None) -> None:
    record = healthy(4, RECORDS)
    nonfinite(AT, WEIGHT)(record)
    if norm is None:
        del record.scalars["grad_norm"]
    else:
        record.scalars["grad_norm"] = [record.steps[0]], [norm]
    (finding,) = rules.apply_rules(record)
    assert ("gradients" in str(finding)) == (norm is not None and math.isnan(norm))
