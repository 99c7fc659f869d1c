"""Findings, and the incidents that they belong to: a cause with its consequences.

A finding comes before another in time, by record, and within a record as a step goes: what happened between the steps,
the data, the layers' forward in their order, the loss, backward in the opposite order, the update, and the weights, as
they are counted after it. An earlier finding explains a later one if it could have caused it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.inspect.record import Record, np
from octavo.inspect.remedies import as_text
from octavo.scaling.recipe import RecipeRule

LEVELS = {
    "critical": "numbers are lost for good: inf or NaN, or more than half of a tensor",
    "warning": "severity 3 or more: the training computes something else than was meant",
    "note": "beyond a limit by less; of a step that the training got over; or a choice that is worth a look",
}
MOST_SEVERE = 10.0
# a measure of so many times its limit is a warning; for other kinds four times
WARNS = {"clipped": 20.0, "stale": 8.0, "flushed": 20.0, "outliers": 20.0, "rounded": 2.0}
LEAPS = 8.0  # a measure that becomes so many times as large in a record begins anew
SOON = 2  # a cast's finding explains findings that begin within so many records
LATER = 10  # a finding of WHOLE explains findings that begin within so many records
BETWEEN, DATA, FORWARD, LOSS, BACKWARD, UPDATE, AFTER = range(7)  # the parts of a step, in order
_BETWEEN = "decay", "warm-up", "learning rate", "options", "state", "untied", "dead rows", "overwritten", "ranks"
PARTS = {
    **dict.fromkeys(_BETWEEN, BETWEEN),
    **dict.fromkeys(("batch", "repeats"), DATA),
    "logits": FORWARD,
    **dict.fromkeys(("labels", "loss scale", "gradients"), LOSS),
    **dict.fromkeys(("jump", "frozen", "unmoved", "second moments"), UPDATE),
}
OF_ROLES = {"input": FORWARD, "grad_output": BACKWARD, "weight": AFTER}
# kinds of findings that harm the whole training
WHOLE = {*PARTS} - {"decay", "frozen", "unmoved", "second moments", "dead rows"} | {"nonfinite"}
OF_A_STEP = ("batch", "gradients", "jump")
FROM_OUTSIDE = {*_BETWEEN, "repeats"}
TOO_MUCH = ("dead rows", "learning rate", "warm-up", "gradients")  # other reasons for a weight to change that much
SYMPTOMS = ("batch", "labels", "gradients", "jump")  # a severe finding of a cast explains these


@dataclass(frozen=True)
class Finding:
    """One fault of a run: its cast or weight, its steps, its cause and its remedy.

    Attributes:
        kind: one of LIMITS.
        layer, role, products: of the cast; for weights and moments the layer where they are worst, without products. A
            finding that belongs to no layer (of the learning rate, the data, the loss scale) has "" for layer and role.
        cast: the cast, as Python.
        begins, worst: the step where the worst stretch began, and the step where it was worst.
        numbers: the measures at the worst step, by name.
        cause: a sentence.
        remedy: as Python: for a cast its rules, else a line of a training; or what to look at.
        expected: the remedy's effect, by the recorded numbers.
        severity: from 0 to 10: 1 at the limit, 3 at WARNS times it, and so on by the logarithm; 10 for inf or NaN.
        rules: of a RecipeMap, to mend a cast; see ``octavo.recipes.to_json``.
        level: "critical", "warning" or "note": see LEVELS.
        sentence: the finding in plain words, without a full stop: what happens where, since when, and what to do.
        consequences: findings that this one explains, in the order in which they began.

    Example:
        >>> import tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(layer, folder) as recorder:
        ...         layer(torch.full((16, 64), torch.inf)).sum().backward()
        ...         recorder.step()
        ...     first, *others = octavo.inspect.diagnose(octavo.inspect.load(folder))
        >>> first.kind, first.level
        ('batch', 'critical')
    """

    kind: str
    layer: str
    role: str
    products: tuple[str, ...]
    cast: str
    begins: int
    worst: int
    numbers: dict[str, float]
    cause: str
    remedy: str
    expected: str
    severity: float
    rules: Mapping[str, RecipeRule] = field(default_factory=dict)
    level: str = "note"
    sentence: str = ""
    consequences: tuple[Finding, ...] = ()

    @property
    def where(self) -> tuple[str, str, tuple[str, ...]]:
        """(layer, role, products)."""
        return self.layer, self.role, self.products

    def mended(self, cause: str, rules: Mapping[str, RecipeRule], expected: str) -> Finding:
        """Return the finding with its cause and with rules that mend it."""
        return replace(self, cause=cause, remedy=as_text(rules), expected=expected, rules=rules)


def severity_of(kind: str, times: float) -> float:
    """Return the severity of a measure that is ``times`` times its limit."""
    if times == math.inf:
        return MOST_SEVERE
    return min(MOST_SEVERE, max(0.0, 1 + 2 * math.log(max(times, 0.1)) / math.log(WARNS.get(kind, 4.0))))


def level_of(severity: float, lost: float = 0.0) -> str:
    """Return the level of a severity, if a share ``lost`` of the numbers is lost."""
    return "critical" if severity == MOST_SEVERE or lost > 0.5 else "warning" if severity >= 3 else "note"


def verdict(record: Record, findings: Sequence[Finding]) -> str:
    """Return one sentence on a run: its first finding, or that nothing exceeds its limit.

    Args:
        record, findings: a record, and the findings that ``diagnose`` returned.

    Example:
        >>> import tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(layer, folder) as recorder:
        ...         layer(torch.randn(16, 64)).sum().backward()
        ...         recorder.step()
        ...     found = octavo.inspect.load(folder)
        >>> octavo.inspect.verdict(found, octavo.inspect.diagnose(found))
        'Nothing exceeds its limit in 1 recorded step'
    """
    nothing = f"Nothing exceeds its limit in {len(record.steps)} recorded step{'s' * (len(record.steps) != 1)}"
    return findings[0].sentence if findings else nothing


def stretch(over: Any, values: Any) -> tuple[int, int]:
    """Return (the start, or last leap, of the run over the limit up to the largest value; that value's index)."""
    worst = begins = int(np.where(over, values, -math.inf).argmax())
    while begins > 0 and over[begins - 1] and values[begins - 1] * LEAPS > values[begins]:
        begins -= 1
    return begins, worst


def incidents(record: Record, findings: Sequence[Finding]) -> list[Finding]:
    """Return findings, folded under those that explain them, by level, then severity, then time."""
    layers = {layer: place for place, layer in enumerate(record.layers)}
    levels = {level: place for place, level in enumerate(LEVELS)}

    def at(finding: Finding) -> int:
        return bisect_left(record.steps, finding.begins)

    def order(finding: Finding) -> tuple[int, int, int]:
        part, place = PARTS.get(finding.kind, OF_ROLES.get(finding.role, FORWARD)), layers.get(finding.layer, -1)
        part = BETWEEN if finding.role == "weight" and finding.kind == "nonfinite" and not finding.products else part
        return at(finding), part, -place if finding.role == "grad_output" else place

    def explains(cause: Finding, effect: Finding) -> bool:
        records, first = at(effect) - at(cause), at(cause) == 0
        if (cause.kind, cause.role) == ("stale", "input") and cause.level != "note":  # later than its worst step
            records -= min(records, bisect_left(record.steps, cause.worst) - at(cause))
        if effect.kind in FROM_OUTSIDE and cause.severity < MOST_SEVERE:
            return records <= SOON and effect.kind == "overwritten" and cause.kind in TOO_MUCH
        is_of_its_batch = cause.kind == "batch" and records == 0  # casts of such data
        if cause.kind in WHOLE and (cause.level != "note" or effect.level == "note" or is_of_its_batch):
            is_over = cause.kind in OF_A_STEP and cause.worst == cause.begins and cause.severity < MOST_SEVERE
            return records <= (SOON if is_over else LATER) and not (first and cause.kind in OF_A_STEP)
        if records > SOON:
            return False
        if cause.kind == effect.kind and cause.role == effect.role and not first:  # it goes on from there
            return True
        if cause.kind not in PARTS and levels[cause.level] > levels[effect.level]:
            return False
        if cause.layer == effect.layer:
            return True
        return not first and cause.level != "note" and (cause.level == "critical" or effect.kind in SYMPTOMS)

    groups: list[list[Finding]] = []
    for finding in sorted(findings, key=order):
        group = next((group for group in groups if any(explains(cause, finding) for cause in group)), None)
        groups.append([finding]) if group is None else group.append(finding)
    joined = []
    for group in groups:  # a cause is at least as severe as its effects
        level, severity = (
            min((finding.level for finding in group), key=levels.__getitem__),
            max(finding.severity for finding in group),
        )
        joined.append(replace(group[0], severity=severity, level=level, consequences=tuple(group[1:])))
    return sorted(joined, key=lambda one: (levels[one.level], bool(one.products), -one.severity, order(one)))
