"""A cause comes before its effects, which are folded under it."""

import pytest

from octavo.inspect import Finding, diagnose
from octavo.inspect.incidents import LATER, LEVEL_PLACES, NEVER, SOON, level_of, reach_rule, severity_of

np = pytest.importorskip("numpy")

from tests.inspect.test_findings import healthy  # noqa: E402
from tests.inspect.test_of_layers import FAULTS  # noqa: E402
from tests.inspect.test_training import AT, LAYER, RECORDS  # noqa: E402


def finding_of(kind: str, level: str, layer: str = "", role: str = "", severity: float = 2.0) -> Finding:
    """Return a finding that begins, and is worst, at step 5."""
    products = ("output",) if role else ()
    return Finding(kind, layer, role, products, "", 5, 5, {}, "", "", "", severity, level=level)


@pytest.mark.parametrize(
    ("cause", "effect", "name", "reach"),
    [
        (finding_of("learning rate", "warning"), finding_of("overwritten", "note"), "rate moves weight", SOON),
        (finding_of("drift", "warning"), finding_of("options", "note"), "effect from outside", NEVER),
        (finding_of("batch", "note"), finding_of("stale", "warning", "a", "input"), "fault of a step", SOON),
        (finding_of("learning rate", "warning"), finding_of("drift", "warning"), "fault of the whole training", LATER),
        (
            finding_of("flushed", "note", "a", "input"),
            finding_of("flushed", "warning", "b", "input"),
            "same fault in other layers",
            SOON,
        ),
        (
            finding_of("clipped", "note", "a", "weight"),
            finding_of("flushed", "warning", "a", "input"),
            "milder cast",
            NEVER,
        ),
        (finding_of("clipped", "note", "a", "weight"), finding_of("flushed", "note", "a", "input"), "same layer", SOON),
        (finding_of("clipped", "warning", "a", "input"), finding_of("drift", "warning"), "symptom of a cast", SOON),
        (finding_of("clipped", "note", "a", "input"), finding_of("drift", "note"), "unrelated", NEVER),
    ],
)
def test_the_rule_that_says_whether_a_cause_explains_an_effect(
    cause: Finding, effect: Finding, name: str, reach: int
) -> None:
    rule = reach_rule(cause, effect, records=0, is_first=False)
    assert (rule.name, rule.reach) == (name, reach)


def test_a_risen_rate_explains_what_follows() -> None:
    """A risen rate explains what follows, but not what was wrong earlier, nor what begins long after."""
    record = healthy(4, 40)
    record.scalars["lr"] = record.steps, [1e-3] * AT + [1e-2] * 32
    record.weights["update"][AT] *= 10
    record.scalars["loss"][1][AT + 1 :] = [15.0 + at % 3 / 10 for at in range(AT + 1, 40)]
    record.measures["assumed"][AT + 1, 3] = 60.0
    record.measures["flushed"][:, 0] = 0.05
    record.measures["clipped"][30:, 9] = 0.01
    first, *others = diagnose(record)
    assert (first.kind, first.begins) == ("learning rate", 50 * AT)
    assert [effect.kind for effect in first.consequences] == ["batch", "stale"]
    assert first.level == "warning" and first.severity >= max(each.severity for each in first.consequences)
    assert {(each.kind, each.begins) for each in others} == {("flushed", 0), ("clipped", 1500)}


def test_upstream_explains_downstream() -> None:
    """Inputs in the order of the layers, gradients in the opposite order."""
    for role, places in {"input": (0, 3, 6), "grad_output": (8, 5, 2)}.items():
        record = healthy(3, RECORDS)
        record.measures["flushed"][AT:, places] = 0.1
        (finding,) = diagnose(record)
        assert finding.role == role and finding.layer == record.rows[places[0]].layer
        assert [effect.layer for effect in finding.consequences] == [record.rows[place].layer for place in places[1:]]


def test_a_mild_clip_explains_no_worse_one_later_on() -> None:
    for later, count in ((0, 1), (1, 2)):
        record = healthy(3, RECORDS)
        record.measures["assumed"][AT:, 8], record.measures["clipped"][AT:, 8] = 3.0, 2e-3
        record.measures["assumed"][AT + later :, 5], record.measures["clipped"][AT + later :, 5] = 9.0, 0.2
        findings = diagnose(record)
        assert len(findings) == count and findings[0].level == "warning"


def test_a_note_of_the_training_explains_no_warning_of_it() -> None:
    """A slope that never was 1, and later gradients that are not their batch's."""
    record = healthy(4, RECORDS)
    record.scalars["twin_slope"] = record.steps, [0.7] * RECORDS
    assert [(finding.kind, finding.level) for finding in diagnose(record)] == [("backward", "note")]
    record.scalars["twin_control"] = record.steps[AT + 1 :], [0.1] * (RECORDS - AT - 1)
    first, other = diagnose(record)
    assert [(each.kind, each.level) for each in (first, other)] == [("gradients", "warning"), ("backward", "note")]


def test_an_inf_or_nan_explains_all_others() -> None:
    record = healthy(4, RECORDS)
    FAULTS["a NaN in a gradient"][2](record)
    (finding,) = diagnose(record)
    assert (finding.layer, finding.level, finding.severity) == (LAYER, "critical", 10)
    assert len(finding.consequences) == 12


def test_severities_are_bounded_and_have_words() -> None:
    assert [severity_of("gradients", times) for times in (1, 4, 16, 1e30)] == pytest.approx([1, 3, 5, 10])
    assert severity_of("flushed", 20) == pytest.approx(3)
    assert [level_of(severity) for severity in (2.9, 3, 9.9, 10)] == ["note", "warning", "warning", "critical"]
    assert level_of(1, lost=0.6) == "critical" and {level_of(1), level_of(3), level_of(10)} == LEVEL_PLACES.keys()
