"""A training's numbers, for the tests that look for faults in them; a fault's rule, and its detection in a record.

What the tests say, and by which limits, is in rules.FAULT_RULES. They lie by what they read: of_steps.py,
of_weights.py, of_layers.py. Most compare a quantity with itself in earlier recorded steps, with other layers' in the
same step, or with what another quantity allows: an optimizer's step with the weight, a moment with the gradient.

Limits here and beside the tests were chosen as those of rules.py, which says how to change one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from octavo.inspect.departures import RATES, is_inside
from octavo.inspect.incidents import KINDS, ONCE, Finding, level_of, severity_of
from octavo.inspect.record import Record, np
from octavo.inspect.weight_updates import GROUP

RECORDS_BEFORE = 8  # a measure is compared with the median of so many earlier recorded steps
FEW = 3  # a fault has to last for so many recorded steps, or steps
CERTAIN = 8.0  # what a Detection reports as times its limit where a fault has no measure
LIKELY = 4.0  # the same, of what may be no fault
# A change of a weight beyond EXPLAINED times what explains it was written by something else. It is explained by the
# updates since the last recorded step, all in one direction; by what others usually change; or, if it is of the root
# mean square, by the change of its sampled numbers.
EXPLAINED = 3
WRITTEN = 0.03  # a change of a weight by something but the optimizer, over the weight's root mean square
CHANGED = 0.1  # the change of a module's output over its size: one that changes by less means nothing

Detections = Iterator["Detection"]  # what a rule's test returns
Test = Callable[..., Detections]


class Rule(NamedTuple):
    """A row of rules.FAULT_RULES: how a fault is found, and what is said of it.

    Texts are formats of the values of a Detection.

    Attributes:
        kind: the finding's kind: a row of incidents.KINDS.
        test: yields the detections of all rules with this test, from the run and these rules, which are arguments by
            name. It depends on no other test.
        limit: of the measure that the test takes; 0 where any is a fault.
        level: the level of these findings, if their severity does not say it.
        unless: tests whose detections explain this rule's, which are dropped then.
        text: the fault, without its layer's name.
        remedy: as Python, or what to look at.
        expected: the remedy's effect.
        advice: the remedy in plain words, if it is code; else the remedy up to its first semicolon is taken.
    """

    kind: str
    test: Test
    limit: float = 0.0
    level: str = ""
    unless: tuple[Test, ...] = ()
    text: str = ""
    remedy: str = ""
    expected: str = ""
    advice: str = ""

    def says(self, text: str, remedy: str, expected: str = "", advice: str = "") -> Rule:
        """Return the rule with its texts."""
        return self._replace(text=text, remedy=remedy, expected=expected, advice=advice)


class Detection(NamedTuple):
    """A fault that a test found in a record.

    Attributes:
        rule: the row of rules.FAULT_RULES that says what it is.
        begins: the step.
        times: its measure over the limit.
        values: the values that the rule's texts name.
        where: (layer, role); "" for what belongs to no layer.
        worst: the step where it is worst, if that is another.
        numbers: the finding's.
    """

    rule: Rule
    begins: int
    times: float
    values: Mapping[str, Any] = {}
    where: tuple[str, str] = ("", "")
    worst: int | None = None
    numbers: Mapping[str, float] = {}

    def finding(self) -> Finding:
        """Return the finding, in the rule's words."""
        rule = self.rule
        layer, role = self.where
        formats = rule.text, rule.remedy, rule.expected, rule.advice
        text, remedy, expected, advice = (each.format_map(self.values) for each in formats)
        since = f"{'at' if ONCE in KINDS[rule.kind].traits else 'since'} step {self.begins}"
        subject = f"{layer} {text}" if layer else f"{text[:1].upper()}{text[1:]}"
        sentence = f"{subject} {since}: {advice or remedy.split(';')[0]}"
        severity = severity_of(rule.kind, self.times)
        level = rule.level or level_of(severity)
        worst = self.begins if self.worst is None else self.worst
        numbers = dict(self.numbers)
        of_no_cast = (), ""  # its products, and the cast
        where = layer, role, *of_no_cast, self.begins, worst
        return Finding(rule.kind, *where, numbers, text, remedy, expected, severity, level=level, sentence=sentence)


class Series(NamedTuple):
    """A recorded number: the steps in which it was recorded, and its values in these."""

    steps: list[int]
    values: list[float]


class Training:
    """A record's numbers that belong to the training as a whole, for the tests.

    Attributes:
        names: of all parameters, the layers' weights before the others.
        weights: {measure: [records, names]}; its "size" is a weight's root mean square, by its sampled numbers.
        rms: the root mean square of layers' weights by all numbers, [records, layers].
        norms: of all gradients together, [records].
        gaps: how many steps each recorded step is after the one before, [records, 1].
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.steps, self.layers = record.steps, record.layers
        self.rate_name = next((name for name in RATES if name in record.scalars), "")
        self.loss = self.scalar("loss")
        self.rate = self.scalar(self.rate_name)
        norms = record.scalar("grad_norm")
        self.norms = np.where(np.isfinite(norms), norms, np.nan)
        self.names = [*self.layers, *(name.removesuffix(".weight") for name in record.others)]
        missing = np.full((len(self.steps), len(record.others)), np.nan)
        pairs = {name: [values, record.of_others.get(name, missing)] for name, values in record.weights.items()}
        self.weights = {name: np.concatenate(layers_and_others, 1) for name, layers_and_others in pairs.items()}
        self.rms = np.stack([record.measure("rms", layer, "weight") for layer in self.layers], 1)
        sizes = self.weights["size"][:, : len(self.layers)]
        np.copyto(sizes, self.rms, where=~(sizes > 0))  # of a weight with inf or NaN, or whose sampled numbers are 0
        self.gaps = np.diff(self.steps, prepend=self.steps[0] - 1)[:, None]

    def scalar(self, name: str) -> Series:
        """Return a number's steps and values, none of either where it was not recorded.

        Of an option, which is written where it changes, return those of all recorded steps since its group was added.
        """
        if GROUP in name and name in self.record.scalars:
            begins = int(self.record.is_written(name).argmax())
            return Series(self.steps[begins:], self.record.last(name)[begins:].tolist())
        return Series(*self.record.scalars.get(name, ([], [])))

    @property
    def rates_between(self) -> Any:
        """The sum of the learning rates of the steps between each recorded step and the one before, [records, 1]."""
        sums = np.cumsum([0.0, *self.rate.values])
        begins = np.searchsorted(self.rate.steps, [self.steps[0], *self.steps[:-1]], "right")
        return (sums[np.searchsorted(self.rate.steps, self.steps)] - sums[begins])[:, None]

    def loss_scale(self, at: int) -> str:
        """Return the loss scale of a recorded step in words, nothing where none is recorded."""
        scale = self.record.last("loss_scale")[at]
        return f" of {scale:.3g}" if math.isfinite(scale) else ""

    @property
    def bad_losses(self) -> list[int]:
        """The steps whose loss is inf or NaN."""
        return [step for step, value in zip(*self.loss, strict=True) if not math.isfinite(value)]

    @cached_property
    def always_updates(self) -> bool:
        """Whether the optimizer changed weights in each recorded step, or in none: each step has an update."""
        changes = (self.weights["update"] > 0).any(axis=1)
        return bool(changes.all() or not changes.any())

    @cached_property
    def weights_changed(self) -> Any:
        """Factors by which each weight changed more than ever since the last recorded step's forward, at least 1.

        [records, names], by the optimizer, in that step and until this one, or by something else.
        """
        changes = of_last(self.weights["update"]), self.weights["between"], self.weights["outside"]
        sums = sum(map(np.nan_to_num, changes))
        return np.where(sums > 0, np.fmax(1.0, sums / earlier(sums, np.nanmax)), 1.0)

    @cached_property
    def forward_leaps(self) -> Any:
        """Factors by which each module's output of the same batch changed more than ever: [records, modules].

        The smaller of two ratios to the largest earlier value (output change; output change over input change),
        divided by weights_changed of the weights inside. 0 where it means nothing.
        """
        if not self.record.modules:
            return np.zeros((len(self.steps), 0))
        changes = self.record.of_modules
        leaps = np.fmin.reduce([values / earlier(values, np.nanmax) for values in changes.values()])
        is_part = np.array([[is_inside(name, module) for name in self.names] for module in self.record.modules])
        leaps /= np.where(is_part, self.weights_changed[:, None], 1.0).max(axis=2)
        leaps[:FEW] = 0  # too few earlier recorded steps to compare with
        return np.where(changes["output"] > CHANGED, np.nan_to_num(leaps, posinf=1e30), 0.0)

    @cached_property
    def rates_by_record(self) -> Any:
        """The learning rate at each recorded step, [records, 1]; 1 where it is 0 or was not recorded."""
        rates = self.record.last(self.rate_name)[:, None]
        return np.where(rates > 0, rates, 1.0)

    @cached_property
    def usual_updates(self) -> Any:
        """The median of earlier updates, [records, names], as large as this step's rate makes them."""
        return earlier(self.weights["update"] / self.rates_by_record) * self.rates_by_record

    @cached_property
    def largest_moves(self) -> Any:
        """The most by which the optimizer may have moved weights since the last recorded update, [records, names].

        Each number by an update a step, all in one direction: this recorded step's, the last one's, or the usual one.
        """
        updates = self.weights["update"]
        per_rate = np.fmax(updates, np.nan_to_num(self.usual_updates)) / self.rates_by_record
        per_rate = np.fmax(per_rate, of_last(updates / self.rates_by_record))
        return EXPLAINED * per_rate * np.fmax(self.rates_between, self.rates_by_record * (self.gaps - 1))

    @cached_property
    def written(self) -> Any:
        """The change of weights by something but the optimizer, over their root mean squares: [records, names]."""
        sizes = self.weights["size"]
        last_sizes = np.concatenate([sizes[:1], sizes[:-1]])
        outside = self.weights["outside"]
        unexplained = np.fmax(self.weights["between"] - self.largest_moves, outside - EXPLAINED * earlier(outside))
        unknown = np.full((len(self.steps), len(self.names) - len(self.layers)), np.nan)
        written = np.fmax(unexplained / last_sizes, np.concatenate([self._rms_written, unknown], 1))
        return np.nan_to_num(written, nan=0, posinf=1e30)

    @property
    def _rms_written(self) -> Any:
        """The change of a weight's root mean square that its sampled numbers don't have, [records, layers].

        Of more than its moves explain. A single number that was written moves a weight's root mean square, but hardly
        that of the sampled numbers.
        """
        of_layers = np.s_[:, : len(self.layers)]
        sizes = self.weights["size"][of_layers]
        moves = EXPLAINED * (self.weights["between"] + self.weights["update"] * self.gaps)[of_layers]
        ratios = self.rms / sizes
        return np.abs(ratios / of_last(ratios) - 1) - moves / of_last(sizes)

    @property
    def is_written(self) -> Any:
        """Whether something but the optimizer wrote weights, [records]: that makes updates and gradients leap."""
        return (self.written > WRITTEN).any(axis=1)

    @cached_property
    def update_leaps(self) -> Any:
        """The factors by which updates grow over those of earlier recorded steps, [records, names]; nan for too few.

        A schedule changes updates, too: a leap is beyond those of this rate and those that there were.
        """
        updates, usual = self.weights["update"], self.usual_updates
        leaps = np.where(usual > 0, updates / np.fmax(usual, earlier(updates)), np.nan)
        leaps[self.is_written] = np.nan
        return leaps


def earlier(values: Any, statistic: Any = None) -> Any:
    """Return the median (or another ``statistic``) of the last RECORDS_BEFORE recorded steps; nan for the first two."""
    statistics = np.full(values.shape, np.nan)
    for at in range(2, len(values)):
        statistics[at] = (statistic or np.nanmedian)(values[max(0, at - RECORDS_BEFORE) : at], axis=0)
    return statistics


def of_last(values: Any) -> Any:
    """Return the values of the recorded step before each, [records, ...]; nan for the first."""
    return np.concatenate([np.full_like(values[:1], np.nan), values[:-1]])


def first_true(is_true: Any) -> int | None:
    """Return the first recorded step where something is true, of [records, ...]; None where nothing is."""
    by_record = is_true.reshape(len(is_true), -1).any(axis=1)
    return int(by_record.argmax()) if by_record.any() else None


def is_rate(name: str) -> bool:
    """Return whether a recorded number is a learning rate, of the run or of a group."""
    return name.split(GROUP)[0] in RATES
