"""Findings, and the incidents that they belong to: a cause with its consequences.

A finding comes before another in time, by recorded step, and within one as a step goes: what happened between the
steps, the data, the layers' forward in their order, the loss, backward in the opposite order, the update, and the
weights, as they are counted after it. An earlier finding explains a later one if it could have caused it.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, IntEnum
from typing import Any, NamedTuple

from octavo.inspect.record import Record, np
from octavo.inspect.remedies import LayerRule

# The levels of findings, the worst first:
#     critical  numbers are lost for good: inf or NaN, or more than half of a tensor
#     warning   severity 3 or more: the training computes something else than was meant
#     note      beyond a limit by less; of a step that the training got over; or a choice that is worth a look
LEVEL_PLACES = {"critical": 0, "warning": 1, "note": 2}
# the parts of a step, in order; MODULES: a module's own computation, after the layers inside of it
StepPart = IntEnum("StepPart", ["BETWEEN", "DATA", "FORWARD", "MODULES", "LOSS", "BACKWARD", "UPDATE", "AFTER"])
# the part in which a finding of a role begins
PART_OF_ROLE = {"input": StepPart.FORWARD, "grad_output": StepPart.BACKWARD, "weight": StepPart.AFTER}

# --- limits, chosen by how many first findings of `python -m benchmarks causes` are right with them; rules.py says how
# to change one

MOST_SEVERE = 10.0  # the severity of inf or NaN
OF_WARNING = 3.0  # the severity from which on a finding is a warning
MOST_LOST = 0.5  # share of a tensor's numbers: a finding with more of them lost is critical
LEAPS = 8.0  # a measure that becomes so many times as large from one recorded step to the next begins anew
# a cause explains an effect that begins at most so many recorded steps after it; one with the trait WHOLE takes LATER
SOON, LATER, NEVER = 2, 10, -1


# Traits that kinds of findings have in common:
#     ONCE          the finding happens at one step; those without this trait last from a step on
#     OUTSIDE       its cause is outside of the training's arithmetic, such as an option or the data
#     WHOLE         it harms the whole training
#     OF_A_STEP     it may be over after a step
#     TOO_MUCH      its updates may change a weight so much that a finding with LIKE_A_WRITE is made, without a write
#     LIKE_A_WRITE  it is made where a weight changed by more than its updates explain
#     GROWS         as a finding of an input it gets worse step by step: its effects may begin when it is worst
#     SYMPTOM       a finding of a cast explains it from the level warning on
Trait = Flag("Trait", ["ONCE", "OUTSIDE", "WHOLE", "OF_A_STEP", "TOO_MUCH", "LIKE_A_WRITE", "GROWS", "SYMPTOM"])
ONCE, OUTSIDE, WHOLE, OF_A_STEP, TOO_MUCH, LIKE_A_WRITE, GROWS, SYMPTOM = Trait
EVENT = OUTSIDE | ONCE | WHOLE


class Kind(NamedTuple):
    """A row of KINDS: properties that all findings of a kind have in common.

    ``limit``, ``says`` and ``lost`` are set for the kinds of casts; rules.FAULT_RULES has them for the other kinds.
    """

    part: StepPart | None = None  # the part of a step in which they begin; None: the role of the cast or layer says it
    traits: Trait = Trait(0)
    warns: float = 4.0  # a measure of so many times its limit is a warning
    limit: float | None = None
    says: str = ""  # the sentence, to be formatted with the role and the measures
    lost: str = ""  # the name of the measure that says which share of the numbers is lost


_flushed = functools.partial(Kind, warns=20.0, limit=1e-2, lost="flushed")
KINDS = {
    **dict.fromkeys(("options", "state", "untied", "ranks"), Kind(StepPart.BETWEEN, EVENT)),
    "overwritten": Kind(StepPart.BETWEEN, EVENT | LIKE_A_WRITE),
    "learning rate": Kind(StepPart.BETWEEN, EVENT | TOO_MUCH),
    "warm-up": Kind(StepPart.BETWEEN, OUTSIDE | WHOLE | TOO_MUCH),
    "dead rows": Kind(StepPart.BETWEEN, OUTSIDE | TOO_MUCH),
    "decay": Kind(StepPart.BETWEEN, OUTSIDE | WHOLE),
    "repeats": Kind(StepPart.DATA, OUTSIDE | WHOLE),
    "batch": Kind(StepPart.DATA, ONCE | WHOLE | OF_A_STEP | SYMPTOM),
    "forward": Kind(StepPart.MODULES, ONCE | WHOLE),
    "backward": Kind(StepPart.FORWARD, ONCE | WHOLE),  # a wrong program: before what its gradients cause
    "logits": Kind(StepPart.FORWARD, WHOLE),
    "loss scale": Kind(StepPart.LOSS, WHOLE),
    "labels": Kind(StepPart.LOSS, ONCE | WHOLE | SYMPTOM),
    "drift": Kind(StepPart.LOSS, WHOLE | SYMPTOM),
    "gradients": Kind(StepPart.LOSS, ONCE | WHOLE | OF_A_STEP | SYMPTOM | TOO_MUCH),
    **dict.fromkeys(("frozen", "unmoved", "second moments"), Kind(StepPart.UPDATE)),
    "idle expert": Kind(),
    # The measures of casts are shares of the numbers, but for two: of "stale" it is the amax divided by the largest
    # number that the delayed scale has room for, of "rounded" by how many dB the SQNR is below what the role needs.
    # "outliers" is "flushed" where few numbers determine the scale.
    "nonfinite": Kind(traits=WHOLE, limit=0.0, says="has inf or NaN in {nonfinite} of its {role}", lost="nonfinite"),
    "stale": Kind(traits=GROWS, warns=8.0, limit=2.0, says="clips {clipped} of its {role}", lost="clipped"),
    "clipped": Kind(warns=20.0, limit=1e-3, says="clips {clipped} of its {role}", lost="clipped"),
    "flushed": _flushed(says="flushes {flushed} of its {role} to 0"),
    "outliers": _flushed(says="flushes {flushed} of its {role} to 0, as a few outliers determine its scale"),
    "rounded": Kind(warns=2.0, limit=3.0, says="rounds its {role} to an SQNR of {sqnr} dB"),
}


@dataclass(frozen=True)
class Finding:
    """One fault of a run: its cast or weight, its steps, its cause and its remedy.

    Attributes:
        kind: one of KINDS.
        layer, role, products: of the cast; for weights and moments the layer where they are worst, without products. A
            finding that belongs to no layer (of the learning rate, the data, the loss scale) has "" for layer and role.
        cast: the cast, as Python.
        begins, worst: the step where the worst stretch began, and the step where it was worst.
        numbers: the measures at the worst step, by name.
        cause: a sentence.
        remedy: as Python: for a cast its rules, else a line of a training; or what to look at.
        expected: the remedy's effect, by the recorded numbers.
        severity: from 0 to 10: 1 at the limit, 3 at ``warns`` times it, and so on by the logarithm; 10 for inf or NaN.
        rules: of a RecipeMap, to mend a cast; see ``octavo.recipes.to_json``.
        level: "critical", "warning" or "note": see LEVEL_PLACES.
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
    rules: Mapping[str, LayerRule] = field(default_factory=dict)
    level: str = "note"
    sentence: str = ""
    consequences: tuple[Finding, ...] = ()

    @property
    def where(self) -> tuple[str, str, tuple[str, ...]]:
        """(layer, role, products)."""
        return self.layer, self.role, self.products


def severity_of(kind: str, times: float) -> float:
    """Return the severity of a measure that is ``times`` times its limit."""
    if times == math.inf:
        return MOST_SEVERE
    return min(MOST_SEVERE, max(0.0, 1 + 2 * math.log(max(times, 0.1)) / math.log(KINDS[kind].warns)))


def level_of(severity: float, lost: float = 0.0) -> str:
    """Return the level of a severity, if a share ``lost`` of the numbers is lost."""
    if severity == MOST_SEVERE or lost > MOST_LOST:
        return "critical"
    return "warning" if severity >= OF_WARNING else "note"


def worst_stretch(over: Any, values: Any) -> tuple[int, int]:
    """Return the indices (where the worst stretch begins, where it is worst).

    A stretch is a run of values over their limit, as the mask ``over`` says. The worst one ends at the largest value.
    It begins where the run does, or at the last leap in it; a leap right after another one is growth, and no begin.
    """
    worst = begins = int(np.where(over, values, -math.inf).argmax())
    leaps = np.append(False, over[:-1] & (values[1:] >= values[:-1] * LEAPS))
    while begins > 0 and over[begins - 1] and not (leaps[begins] and not leaps[begins - 1]):
        begins -= 1
    return begins, worst


class ReachRule(NamedTuple):
    """A rule that says within how many recorded steps of its begin a cause explains an effect; NEVER: it doesn't."""

    name: str
    holds: bool  # whether the rule is about a cause and an effect
    reach: int


def reach_rule(cause: Finding, effect: Finding, records: int, is_first: bool) -> ReachRule:
    """Return the rule that says when a cause explains an effect: the first one that holds.

    Before each rule stands a run that needs it. The order counts, as a rule is meant for what those above it leave.

    Args:
        cause, effect: two findings.
        records: how many recorded steps later than the cause the effect begins.
        is_first: whether the cause is there in the first recorded step.
    """
    traits = KINDS[cause.kind].traits
    effect_traits = KINDS[effect.kind].traits
    is_severe = cause.severity == MOST_SEVERE
    is_warning = cause.level != "note"
    level_fits = is_warning or effect.level == "note"  # a note explains notes alone
    is_cast_of_its_step = OF_A_STEP in traits and records == 0 and bool(effect.products)
    harms_all = WHOLE in traits and (level_fits or is_cast_of_its_step)
    effect_is_from_outside = OUTSIDE in effect_traits and not is_severe
    may_look_written = TOO_MUCH in traits and LIKE_A_WRITE in effect_traits
    is_over_soon = OF_A_STEP in traits and cause.worst == cause.begins and not is_severe
    is_milder_cast = KINDS[cause.kind].part is None and LEVEL_PLACES[cause.level] > LEVEL_PLACES[effect.level]
    is_alike = (cause.kind, cause.role) == (effect.kind, effect.role) and not is_first
    reads_a_bad_cast = is_warning and not is_first and (cause.level == "critical" or SYMPTOM in effect_traits)
    rules = (
        # a rate that rises moves a weight so far that it looks as if something had written it
        ReachRule("rate moves weight", effect_is_from_outside and may_look_written, SOON),
        # a loss that climbs changes no option of the optimizer; but a NaN explains all that follows
        ReachRule("effect from outside", effect_is_from_outside, NEVER),
        # a single bad batch explains inputs that are clipped in its step, even if it is a note and they are not, but
        # nothing much later
        ReachRule("fault of a step", harms_all and is_over_soon, SOON),
        # a rate that rises explains a loss that rises, and amaxes that outgrow their scales ten recorded steps
        # later
        ReachRule("fault of the whole training", harms_all, LATER),
        # an input that is flushed explains the next layers' flushed inputs, and may get worse through the layers of its
        # step; but what the first recorded step has already explains nothing new
        ReachRule("same fault in other layers", is_alike and (records == 0 or not is_milder_cast), SOON),
        # a gradient of which little is clipped explains none that is clipped more a recorded step later
        ReachRule("milder cast", is_milder_cast, NEVER),
        # a clipped weight explains its layer's flushed gradients; but a slope that never was 1, a note without a layer,
        # explains no leap of gradients
        ReachRule("same layer", cause.layer == effect.layer and (bool(cause.layer) or level_fits), SOON),
        # an input of which most is clipped explains a loss that rises
        ReachRule("symptom of a cast", reads_a_bad_cast, SOON),
        ReachRule("unrelated", True, NEVER),
    )
    return next(rule for rule in rules if rule.holds)


def incidents(record: Record, findings: Sequence[Finding]) -> list[Finding]:
    """Return findings, folded under those that explain them, by level, then severity, then time."""
    layers = {layer: place for place, layer in enumerate(record.layers)}

    def record_of(step: int) -> int:
        """Return the index of the recorded step that first has what happened in a step."""
        return bisect_left(record.steps, step)

    def order(finding: Finding) -> tuple[int, int, int, int]:
        """Return what sorts findings as a run goes: recorded step, part of the step, layer."""
        place = layers.get(finding.layer, -1)
        if finding.role == "grad_output":
            place = -place
        # inf or NaN in the weight itself, not found by its cast, are there before the step's forward
        is_in_weight = finding.role == "weight" and not finding.products
        part_of_role = StepPart.BETWEEN if is_in_weight else PART_OF_ROLE.get(finding.role, StepPart.FORWARD)
        part = KINDS[finding.kind].part or part_of_role
        level = LEVEL_PLACES[finding.level] if finding.products else 0  # of one cast's findings the worse comes first
        return record_of(finding.begins), part, place, level

    def explains(cause: Finding, effect: Finding) -> bool:
        """Return whether an effect begins within the reach of a cause; of a growing cause, from where it is worst."""
        begins = record_of(cause.begins)
        records = record_of(effect.begins) - begins
        if GROWS in KINDS[cause.kind].traits and cause.role == "input" and cause.level != "note":
            records = max(0, record_of(effect.begins) - record_of(cause.worst))
        return records <= reach_rule(cause, effect, records, is_first=begins == 0).reach

    def comes_last(finding: Finding) -> bool:
        """Return whether others of its level come first: a cast's, but for a severe one that the twin made a note."""
        return bool(finding.products) and (finding.level != "note" or finding.severity < OF_WARNING)

    groups: list[list[Finding]] = []
    for finding in sorted(findings, key=order):
        group = next((group for group in groups if any(explains(cause, finding) for cause in group)), None)
        if group is None:
            groups.append(group := [])  # of a cause that no earlier finding explains
        group.append(finding)
    joined = []
    for group in groups:  # a cause is at least as severe as its effects
        level = min((finding.level for finding in group), key=LEVEL_PLACES.__getitem__)
        severity = max(finding.severity for finding in group)
        joined.append(replace(group[0], severity=severity, level=level, consequences=tuple(group[1:])))
    return sorted(joined, key=lambda each: (LEVEL_PLACES[each.level], comes_last(each), -each.severity, order(each)))
