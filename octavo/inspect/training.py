"""The tests of a record outside of its casts: on data, loss, learning rate, optimizer, weights and moments.

What they say, and by which limits, is in rules.RULES: a test gets its rows by their names. Most compare a quantity with
its own earlier records, with other layers' in the same step, or with what another quantity allows: an optimizer's step
with the weight, a moment with the gradient.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from octavo.inspect.departures import RATES
from octavo.inspect.incidents import KINDS, ONCE, Finding, level_of, severity_of, worst_stretch
from octavo.inspect.record import Record, innermost, is_inside, np
from octavo.inspect.remedies import percent
from octavo.inspect.twin import CONTROL, LEFT, REPRODUCED_COSINE, SLOPE
from octavo.inspect.weights import FROZEN, GROUP
from octavo.scaling.recipe import ROLES

DECOUPLED = f"decoupled_weight_decay{GROUP}"
PROJECTION = re.compile(r"(qkv|q_proj|k_proj|query|key|c_attn|in_proj|\bw[qk]\b)")
LOOK = "look at that step's data and labels, and at what the forward computes otherwise: code, mode, checkpoint"
SAME_FORWARD = "look at that step's data and labels: of the first recorded batch modules compute what they did"
USUAL_DECAY = 0.1  # the remedy for a weight decay that takes too much

# --- limits beside those of rules.py, chosen by how many first findings of `python -m benchmarks causes` are right with
# them, and by how many of its healthy runs have one above a note

# counts of records, or of steps
BEFORE = 8  # a measure is compared with the median of so many earlier records
LOSSES_BEFORE = 16  # a loss with so many earlier steps'
FEW = 3  # a fault has to last for so many
IN_TURN = 4  # at most so many batches repeat in turn
BUSY = 16  # the last record's tokens for each expert: with fewer an expert may get none by chance
# a measure over what it is compared with
CERTAIN, LIKELY = 8.0, 4.0  # over its limit: of a fault that has no measure, as it is one or not
JUMP = 2.5  # an input's size over that before, where the loss rises with it; the last gradient of an output's, too
OUTPUT_LEAP = 1.5  # the change of a module's output over the largest one before: by more gradients change with it
SAME_LEAP = 3.0  # the change of a module's output over the largest one before: by less it computes the same
# a change of a weight over three times what explains it: the updates of the steps since the last record, all in one
# direction; what else changed it before; or, of its root mean square, the changes of sampled numbers
EXPLAINED = 3
ERRORS = 4.0  # the rise of a mean of losses over its standard error
WARMING = 1.2  # a learning rate over that of the step before: with more it is a warm-up that raises it
STEADY = 1.5  # the highest learning rate of FEW over the lowest: with less it stays where it is
NO_MEAN = 5.0  # a second moment over the larger one of the last and the gradient's square, beside a rule's limit
LARGER = 2.0  # an update over those before: with more it isn't the rate that makes a step too large
LEAP_BEGINS = 1.2  # gradients over the median before: from the record on in which they have more a leap goes on
# a share
WRITTEN = 0.03  # a change of a weight by something but the optimizer, over the weight's root mean square
CHANGED = 0.1  # the change of a module's output over its size: one that changes by less means nothing
TURNED = 0.5  # the same of a parameter's gradient: where a token goes to another expert some change by 0.4
NEAR_0 = 0.01  # a weight's size over that of the largest layer's: one that begins with less begins at 0
UNMOVED = 0.9  # of a weight's numbers: a step does not change so many
NOISY = 0.75  # of losses' changes: if fewer are falls, the losses differ from batch to batch
STOPPED = 1e-3  # a learning rate over its highest: with less nothing trains
# a size of gradients
FLOAT16 = 2.0**13  # finite ones, where others are inf: so large they are float16's


class Rule(NamedTuple):
    """A row of rules.RULES: a fault and what is said of it. Texts are formats of the values of a Hit.

    Attributes:
        kind: the finding's kind.
        limit: of the measure that the test takes; 0 where any is a fault.
        test: yields the hits of all rows with this test, from the run and these rows, which are arguments by name.
        text: the fault, without its layer's name.
        remedy: as Python, or what to look at.
        expected: the remedy's effect.
        advice: the remedy in plain words, if it is code; else the remedy up to its first semicolon is taken.
        level: the level of these findings, if their severity does not say it.
    """

    kind: str
    limit: float
    test: Callable[..., Iterator[Hit]]
    text: str
    remedy: str
    expected: str = ""
    advice: str = ""
    level: str = ""


class Hit(NamedTuple):
    """A fault that a test found, by its rule; ``times``: its measure over the limit; ``values``: those that texts name.

    ``where``: (layer, role); ``worst``: the step where it is worst, if that is another; ``numbers``: the finding's.
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
        rule, kind, (layer, role) = self.rule, self.rule.kind, self.where
        formats = rule.text, rule.remedy, rule.expected, rule.advice
        text, remedy, expected, advice = (each.format_map(self.values) for each in formats)
        since = f"{'at' if ONCE in KINDS[kind].traits else 'since'} step {self.begins}"
        subject = f"{layer} {text}" if layer else f"{text[:1].upper()}{text[1:]}"
        sentence = f"{subject} {since}: {advice or remedy.split(';')[0]}"
        severity, worst = severity_of(kind, self.times), self.begins if self.worst is None else self.worst
        steps_and_words = self.begins, worst, dict(self.numbers), text, remedy, expected
        level = rule.level or level_of(severity)
        return Finding(kind, layer, role, (), "", *steps_and_words, severity, level=level, sentence=sentence)


class Training:
    """A record's numbers that belong to the training as a whole, for the tests below.

    ``names``: of all parameters, the layers' weights before the others; ``weights``: their measures, [steps, names].
    ``norms``: of gradients, by record. ``fired``: the tests that found something so far.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.steps, self.layers = record, record.steps, record.layers
        self.rate_name = next((name for name in RATES if name in record.scalars), "")
        self.loss, self.rate = self.scalar("loss"), self.scalar(self.rate_name)
        norms = record.scalar("grad_norm")
        self.norms = np.where(np.isfinite(norms), norms, np.nan)
        self.places = record.places
        self.names = [*self.layers, *(name.removesuffix(".weight") for name in record.others)]
        missing, of_layers = np.full((len(self.steps), len(record.others)), np.nan), record.weights.items()
        self.weights = {name: np.concatenate([x, record.of_others.get(name, missing)], 1) for name, x in of_layers}
        self.rms = np.stack([self.measure("rms", layer, "weight") for layer in self.layers], 1)
        sizes = self.weights["size"][:, : len(self.layers)]
        np.copyto(sizes, self.rms, where=~(sizes > 0))  # of a weight with inf or NaN, or whose sampled numbers are 0
        self.gaps = np.diff(self.steps, prepend=self.steps[0] - 1)[:, None]
        self.fired: set[Callable[..., Iterator[Hit]]] = set()

    def scalar(self, name: str) -> tuple[list[int], list[float]]:
        """Return a number's steps and values; none of either where it was not recorded."""
        return self.record.scalars.get(name, ([], []))

    def filled(self, name: str) -> tuple[list[int], list[float]]:
        """Return a number's steps and values; of an option, which is written where it changes, those of all records."""
        steps, values = self.record.scalars[name]
        if GROUP not in name or len(values) == len(self.steps):
            return steps, values
        return self.steps, self.record.last(name).tolist()

    def measure(self, name: str, layer: str, role: str) -> Any:
        """Return a measure of a layer's role by record; nan where there is none."""
        place = self.places.get((layer, role))
        return np.full(len(self.steps), np.nan) if place is None else self.record.measures[name][:, place]

    @property
    def rates_between(self) -> Any:
        """The sum of the learning rates of the steps between each record and the one before, [steps, 1]."""
        (steps, rates), before = self.rate, [self.steps[0], *self.steps[:-1]]
        sums = np.cumsum([0.0, *rates])
        return (sums[np.searchsorted(steps, self.steps)] - sums[np.searchsorted(steps, before, "right")])[:, None]

    def loss_scale(self, at: int) -> str:
        """Return the loss scale of a record in words, nothing where none is recorded."""
        scale = self.record.last("loss_scale")[at]
        return f" of {scale:.3g}" if math.isfinite(scale) else ""

    @property
    def bad_losses(self) -> list[int]:
        """The steps whose loss is inf or NaN."""
        return [step for step, value in zip(*self.loss, strict=True) if not math.isfinite(value)]

    def rises(self, at: int) -> dict[str, float]:
        """Return by how many times a layer's input, or the last gradient of an output, is larger from a record on."""
        names = {(layer, "input"): f"the input of {layer}" for layer in self.layers}
        names[self.layers[-1], "grad_output"] = f"the gradient of {self.layers[-1]}'s output"
        sizes = np.stack([self.measure("rms", *where) for where in names], 1)
        before, since = sizes[max(0, at - BEFORE) : at], sizes[at : at + FEW]
        times = np.nan_to_num(np.nanmedian(since, axis=0) / np.nanmedian(before, axis=0))
        return dict(zip(names.values(), times.tolist(), strict=True))

    def largest_rise(self, at: int) -> str:
        """Return in words which of ``rises`` is the largest, if it is many times as large."""
        name, times = max(self.rises(at).items(), key=lambda pair: pair[1])
        return f", and {name} is {times:.3g} times as large" if times > JUMP else ""

    def is_rare(self, at: int, layer: str) -> bool:
        """Return whether a layer's input has inf or NaN in less than half of its rows, as no weight would cause."""
        row = self.places[layer, "input"]
        measures = self.record.of_worst.measures
        input_size, weight_size, output_size = (np.nanmax(self.measure("elements", layer, role)) for role in ROLES)
        features = self.record.rows[row].features or math.sqrt(input_size * weight_size / output_size)
        return float(measures["nonfinite"][at, row]) * features < 0.5

    def worst(self, values: Any, of_weight: Rule, of_master: Rule) -> Iterator[Hit]:
        """Yield the layer where a measure [steps, layers] exceeds a limit by most: of its weight, or of its master."""
        over = values > of_weight.limit
        if over.any():
            place = int(np.where(over, values, -1).max(axis=0).argmax())
            begins, worst = worst_stretch(over[:, place], values[:, place])
            numbers = {name: float(values_of_name[worst, place]) for name, values_of_name in self.weights.items()}
            rule, value = of_master if numbers["master_update"] > 0 else of_weight, float(values[worst, place])
            texts = {"share": percent(value), "extent": f"in {over[worst].sum()} of {len(over[0])} layers"}
            at = self.steps[begins], value / rule.limit
            yield Hit(rule, *at, texts, (self.layers[place], "weight"), self.steps[worst], numbers)

    @cached_property
    def always_updates(self) -> bool:
        """Whether the optimizer changed weights in each recorded step, or in none: each step has an update."""
        changes = (self.weights["update"] > 0).any(axis=1)
        return bool(changes.all() or not changes.any())

    @cached_property
    def weights_changed(self) -> Any:
        """Factors by which each weight changed more than ever since the last recorded step's forward, at least 1.

        [steps, names], by the optimizer, in that step and until this one, or by something else.
        """
        update = self.weights["update"]
        last_updates = np.concatenate([np.full_like(update[:1], np.nan), update[:-1]])
        sums = sum(np.nan_to_num(values) for values in (last_updates, self.weights["between"], self.weights["outside"]))
        return np.where(sums > 0, np.fmax(1.0, sums / earlier(sums, np.nanmax)), 1.0)

    @cached_property
    def forward_leaps(self) -> Any:
        """Factors by which each module's output of the same batch changed more than ever: [steps, modules].

        The least of its change, and its change over its input's, by earlier ones; over that of weights inside of it.
        0 where it means nothing.
        """
        modules, changes = self.record.modules, self.record.of_modules
        if not modules:
            return np.zeros((len(self.steps), 0))
        leaps = np.fmin(*(changes[name] / earlier(changes[name], np.nanmax) for name in ("own", "output")))
        is_part = np.array([[is_inside(name, module) for name in self.names] for module in modules])
        leaps /= np.where(is_part, self.weights_changed[:, None], 1.0).max(axis=2)
        leaps[:FEW] = 0  # too few earlier records to compare with
        return np.where(changes["output"] > CHANGED, np.nan_to_num(leaps, posinf=1e30), 0.0)

    @cached_property
    def backward_leaps(self) -> Any:
        """Factors by which each parameter's gradient of the same batch changed more than ever: [steps, parameters].

        Over the largest change before and twice what all before differ by, and over the changes of weights. 0 where it
        means nothing, or where outputs of the same batch changed more than ever too.
        """
        if not self.record.parameters:
            return np.zeros((len(self.steps), 0))
        changes = self.record.of_parameters["change"]
        most, least = earlier(changes, np.nanmax), earlier(changes, np.nanmin)
        leaps = changes / (most + 2 * (most - least)) / self.weights_changed.max(axis=1, keepdims=True)
        leaps[: FEW + 1] = 0  # too few earlier records to compare with
        leaps[self.forward_leaps.max(axis=1, initial=0.0) > OUTPUT_LEAP] = 0
        return np.where(changes > TURNED, np.nan_to_num(leaps, posinf=1e30), 0.0)

    def where_to_look(self, step: int) -> str:
        """Return where the cause of a loss may be: not in the forward, if modules compute as before."""
        at = bisect_left(self.steps, step)
        around = slice(max(0, at - 1), at + 2)
        outputs, (*inputs, _) = self.record.of_modules.get("output", np.zeros(0)), self.rises(at).values()
        if at < FEW or max(inputs) > JUMP or not (outputs[around] > 0).any():
            return LOOK
        return LOOK if (self.forward_leaps[around] > SAME_LEAP).any() else SAME_FORWARD

    @cached_property
    def rates_by_record(self) -> Any:
        """The learning rate at each record, [steps, 1]; 1 where it is 0 or was not recorded."""
        rates = self.record.last(self.rate_name)[:, None]
        return np.where(rates > 0, rates, 1.0)

    @cached_property
    def usual_updates(self) -> Any:
        """The median of earlier updates, [steps, names], as large as this record's rate makes them."""
        return earlier(self.weights["update"] / self.rates_by_record) * self.rates_by_record

    @cached_property
    def largest_moves(self) -> Any:
        """The most by which the optimizer may have moved weights since the last record's update, [steps, names].

        Each number by an update a step, all in one direction.
        """
        updates, rates = self.weights["update"], self.rates_by_record
        by_rate = np.fmax(updates, np.nan_to_num(self.usual_updates)) / rates
        by_rate[1:] = np.fmax(by_rate[1:], updates[:-1] / rates[:-1])
        return EXPLAINED * by_rate * np.fmax(self.rates_between, rates * (self.gaps - 1))

    @cached_property
    def written(self) -> Any:
        """The change of weights by something but the optimizer, over their root mean squares: [steps, names]."""
        count, size, updates = len(self.layers), self.weights["size"], self.weights["update"]
        between, outside = self.weights["between"], self.weights["outside"]
        last_size = np.concatenate([size[:1], size[:-1]])
        written = np.fmax(between - self.largest_moves, outside - earlier(outside) * EXPLAINED) / last_size
        # a single number that was written moves a weight's root mean square, but hardly that of the sampled numbers
        moved, ratio = (between + updates * self.gaps)[1:, :count] * EXPLAINED, self.rms / size[:, :count]
        unexplained = np.abs(ratio[1:] / ratio[:-1] - 1) - moved / last_size[1:, :count]
        written[1:, :count] = np.fmax(written[1:, :count], unexplained)
        return np.nan_to_num(written, nan=0, posinf=1e30)

    @cached_property
    def leaps(self) -> Leaps:
        """The factors by which updates, gradients and norms grow over those of earlier records."""
        updates, gradients = self.weights["update"], self.weights["gradient"]
        gradients = np.where(np.isinf(gradients), np.nan, gradients)  # of inf there is no factor: another test's
        outputs = np.stack([self.measure("rms", layer, "grad_output") for layer in self.layers], 1)
        outputs /= np.nan_to_num(self.record.last("loss_scale"), nan=1.0)[:, None]
        # a schedule changes updates, too: a leap is beyond those of this rate and those that there were
        usual = self.usual_updates
        leaps = Leaps(
            np.where(usual > 0, updates / np.fmax(usual, earlier(updates)), np.nan),
            gradients / earlier(positive(gradients)),
            (gradients / earlier(gradients, np.nanmax))[:, : len(self.layers)],
            self.norms / earlier(positive(self.norms)),
            outputs / earlier(positive(outputs)),
        )
        is_written = (self.written > WRITTEN).any(axis=1)  # which changes gradients, and is the cause then
        for factors in leaps:
            factors[is_written] = np.nan
        for factors in leaps[1:]:
            factors[:FEW] = np.nan  # too few earlier records to compare with
        return leaps


class Leaps(NamedTuple):
    """The factors by which numbers grow over those of earlier records, nan where there are too few.

    ``updates``, ``gradients`` as the optimizer gets them, [steps, names]; ``highest``, [steps, layers]: such gradients
    over the largest of those records, not their median. ``norms``, [steps]: of all gradients, before they are clipped;
    ``outputs``, [steps, layers]: of the gradients of layers' outputs, which neither clipping nor a loss scale changes.
    """

    updates: Any
    gradients: Any
    highest: Any
    norms: Any
    outputs: Any


def earlier(values: Any, statistic: Any = None) -> Any:
    """Return the median (or another ``statistic``) of up to BEFORE earlier records; nan for the first two."""
    statistics = np.full(values.shape, np.nan)
    for at in range(2, len(values)):
        statistics[at] = (statistic or np.nanmedian)(values[max(0, at - BEFORE) : at], axis=0)
    return statistics


def first_true(is_true: Any) -> int | None:
    """Return the first record where something is true, of [records, ...]; None where nothing is."""
    by_record = is_true.reshape(len(is_true), -1).any(axis=1)
    return int(by_record.argmax()) if by_record.any() else None


def positive(values: Any) -> Any:
    """Return values that are above 0, and nan for others, over which nothing is larger by a factor."""
    return np.where(values > 0, values, np.nan)


def is_rate(name: str) -> bool:
    """Return whether a recorded number is a learning rate, of the run or of a group."""
    return name.split(GROUP)[0] in RATES


# --- numbers of each step


def rates(run: Training, rate_rises: Rule, rate_falls: Rule, rate_is_0: Rule, rate_below_0: Rule) -> Iterator[Hit]:
    """Yield the first learning rate, of the run or a group, that falls below 0, rises again, is 0, or collapses."""

    def first(name: str) -> Hit | None:
        (steps, values), group = run.filled(name), name.partition(GROUP)[2]
        for at, value in enumerate(values):
            previous, since = values[max(0, at - 1)], values[at : at + FEW + 1]
            lasts, begins, times = len(since) > FEW, at, CERTAIN
            if value < 0:
                rule = rate_below_0
            elif lasts and not any(since):  # a choice, where a schedule gets there by steps as before, near the end
                is_end = at > 1 and previous < 2 * (values[at - 2] - previous) and len(values) - at < len(values) / 3
                rule = rate_is_0._replace(level="note") if is_end else rate_is_0
            elif lasts and 0 < max(since) < min(previous / rate_falls.limit, STEADY * min(since)):
                rule = rate_falls
            elif begins := _begin_of_rise(values, at, rate_rises.limit):
                rule, times = rate_rises, max(values[begins:]) / max(values[:begins]) / rate_rises.limit
            else:
                continue
            texts = {"name": f"the learning rate{f' of group {group}' if group else ''}", "previous": previous}
            most, top = max(values[begins:]), max(values[:begins], default=value)
            return Hit(rule, steps[begins], times, {**texts, "value": value, "most": most, "top": top})
        return None

    hits = filter(None, map(first, filter(is_rate, run.record.scalars)))
    yield from sorted(hits, key=lambda hit: (hit.begins, -severity_of(rate_rises.kind, hit.times)))[:1]


def _begin_of_rise(values: list[float], at: int, limit: float) -> int:
    """Return where a rate begins to rise that is ``limit`` times the highest one before that; 0 if it is not.

    It begins at once, unless the rate of the step before is of a warm-up; or after the last step that did not raise it.
    """
    was_steady = at > 1 and values[at - 1] <= WARMING * values[at - 2]
    if was_steady and values[at] > limit * max(values[:at]) > 0:
        return at
    last_fall = next((place for place in range(at - 1, 0, -1) if values[place] <= values[place - 1]), 0)
    return last_fall + 1 if last_fall and values[at] > limit * max(values[: last_fall + 1]) > 0 else 0


def options(run: Training, option_leaps: Rule, decay_takes: Rule) -> Iterator[Hit]:
    """Yield other options of the optimizer's groups that leap, and a weight decay that takes too much in a step."""
    for name in run.record.scalars:
        option, _, group = name.partition(GROUP)
        if not group or option in RATES:
            continue
        steps, values = run.filled(name)
        numbers = [1 - value if option.split()[0] in ("betas", "momentum", "alpha") else value for value in values]
        texts, is_decay = {"group": group, "option": option}, option == "weight_decay"
        for at in range(1, len(numbers)):
            low, high = sorted(numbers[at - 1 : at + 1])
            times = high / low / option_leaps.limit if low > 0 else CERTAIN * (high > low)
            if numbers[at - 1] == numbers[max(0, at - 2)] and times > 1:
                rule = option_leaps._replace(kind=decay_takes.kind) if is_decay else option_leaps
                yield Hit(rule, steps[at], times, {**texts, "was": values[at - 1], "now": values[at]})
                return
        # if weight decay is not decoupled, Adam's second moments divide it too
        is_coupled = run.scalar(f"betas 0{GROUP}{group}")[1] and run.scalar(DECOUPLED + group)[1][:1] != [1]
        is_unusual = is_decay and max(values) > USUAL_DECAY  # else the rate is too high
        if is_unusual and f"lr{GROUP}{group}" in run.record.scalars and not is_coupled:
            taken = max(a * b for a, b in zip(values, run.filled(f"lr{GROUP}{group}")[1], strict=True))
            if taken > decay_takes.limit:
                yield Hit(decay_takes, steps[0], taken / decay_takes.limit, {**texts, "share": percent(taken)})


def state(run: Training, moments_written: Rule, state_is_new: Rule) -> Iterator[Hit]:
    """Yield a state that is new, and second moments that can't be a mean of the last ones and the gradient."""
    for (_, then), (step, now) in itertools.pairwise(zip(*run.scalar("state_age"), strict=True)):
        if now < then:
            yield Hit(state_is_new, step, CERTAIN, {"now": now, "then": then})
    values, squares = run.weights["second_moment"], run.weights["gradient"] ** 2
    if (name := f"betas 1{GROUP}0") in run.record.scalars:
        decay, limit = np.array(run.filled(name)[1])[1:, None] ** run.gaps[1:], moments_written.limit
        now, then, is_next = values[1:], values[:-1], run.gaps[1:] == 1
        off = (now * limit < decay * then) | (is_next & (now > NO_MEAN * limit * np.fmax(then, squares[1:])))
        for at in np.flatnonzero(off.mean(axis=1) > 0.5)[:1]:
            yield Hit(moments_written, run.steps[at + 1], CERTAIN)


def step_sizes(run: Training, large_first_step: Rule, large_steps: Rule) -> Iterator[Hit]:
    """Yield a very first step that is too large, or steps that are, though no larger than the rate makes them."""
    ages, rates_of_steps, losses_of_steps = run.scalar("state_age")[1], run.rate[1], run.loss[1]
    begins_at_0 = run.rms[0] < NEAR_0 * np.nanmax(run.rms[0])  # which any step changes by a large share
    sizes = np.where(begins_at_0 & ~begins_at_0.all(), np.nan, run.rms)
    shares = np.nanmedian(run.weights["update"][:, : len(run.layers)] / sizes, axis=1)
    is_fresh = bool(rates_of_steps and ages) and ages[0] <= 1 and rates_of_steps[0] >= max(rates_of_steps) / 2
    last_losses = losses_of_steps[-FEW:] if len(losses_of_steps) > FEW else []
    is_lost = bool(last_losses) and not np.median(last_losses) < losses_of_steps[0]  # whose first is a random guess's
    if is_fresh and shares[0] > large_first_step.limit and not is_lost:
        texts = {"share": percent(shares[0]), "rate": max(rates_of_steps)}
        yield Hit(large_first_step, run.steps[0], shares[0] / large_first_step.limit, texts)
    elif rates_of_steps and rates not in run.fired:
        over = (shares > large_steps.limit) & ~(np.nanmedian(run.leaps.updates, axis=1) > LARGER)
        if (at := first_true(over)) is not None:
            worst = int(np.where(over, shares, 0).argmax())
            texts = {"share": percent(shares[worst]), "times": shares[worst] / (large_steps.limit / 5)}
            yield Hit(large_steps, run.steps[at], shares[worst] / large_steps.limit, texts, worst=run.steps[worst])


def elements(run: Training, batch_shrinks: Rule) -> Iterator[Hit]:
    """Yield a step from which on batches have only a part of the numbers that all earlier ones had."""
    numbers = run.measure("elements", run.layers[0], "input")
    for at in range(2 * FEW, len(numbers) - FEW + 1):
        share = float(np.nanmax(numbers[at:]) / np.nanmin(numbers[:at]))
        if share <= batch_shrinks.limit:
            yield Hit(batch_shrinks, run.steps[at], 2 / share, {"share": percent(share)}, worst=run.steps[-1])
            return


def losses(run: Training, loss_stays_up: Rule, loss_climbs: Rule) -> Iterator[Hit]:
    """Yield a loss that rises and stays up, or goes on to rise."""
    (steps, loss), lasting = run.loss, []
    for at in range(4, len(loss) - FEW + 1):
        earlier_losses, later = loss[max(0, at - LOSSES_BEFORE) : at], loss[at : at + 2 * FEW]
        level, now = float(np.mean(earlier_losses)), float(np.mean(later))
        error = float(np.std(earlier_losses)) * math.sqrt(1 / len(earlier_losses) + 1 / len(later))
        if now - level > max(ERRORS * error, loss_stays_up.limit * abs(level)) and min(later) > level:
            lasting.append(((now - level) / max(error, 1e-9 * abs(now)), at, level, now))
    for _, at, level, now in [max(lasting)] if lasting else []:
        at, climbs_on = _where_it_rises(np.array(loss), at)
        more = run.largest_rise(bisect_left(run.steps, steps[at]))
        texts = {"was": level, "now": now, "more": more, "look": run.where_to_look(steps[at])}
        is_beyond = min(loss[-FEW:]) > max(loss[:at])  # or it is as likely to be noise
        rule = loss_climbs._replace(level="" if is_beyond else "note") if climbs_on else loss_stays_up
        share = (now - level) / max(abs(level), 1e-9 * abs(now))  # a loss may be 0 or below
        yield Hit(rule, steps[at], share / loss_stays_up.limit, texts, worst=steps[-1])


def _where_it_rises(loss: Any, near: int) -> tuple[int, bool]:
    """Return the place near another where a loss rises, and whether it goes on to rise, by the least squares.

    Before that place the loss is constant with noise; from it on it is constant too, or a line that begins there.
    """
    first = max(0, near - LOSSES_BEFORE)
    window = loss[first : near + 4 * FEW]
    errors = []
    for at in range(max(1, near - FEW), min(near + 2 * FEW, len(loss) - 1)):
        before, since = window[: at - first], window[at - first :]
        level, places = before.mean(), np.arange(1, len(since) + 1)
        slope = (places * (since - level)).sum() / (places**2).sum()
        error_before = ((before - level) ** 2).sum()
        errors.append((error_before + ((since - since.mean()) ** 2).sum(), at, False))
        errors.append((error_before + ((since - level - slope * places) ** 2).sum(), at, True))
    _, at, climbs_on = min(errors)
    return at, climbs_on


def repeats(run: Training, batches_repeat: Rule) -> Iterator[Hit]:
    """Yield a step from which on losses fall as smoothly as those of one batch, or of a few in turn."""
    steps, loss = run.loss[0], np.array(run.loss[1])
    for turn in range(1, IN_TURN + 1):
        change = loss[turn:] - loss[:-turn]
        falls, bend = change < 0, np.abs(np.diff(change))
        for at in range(6, len(bend) - 2 * FEW + 1):
            usual, now = float(np.median(bend[max(0, at - LOSSES_BEFORE) : at])), float(bend[at : at + 2 * FEW].max())
            was_noisy = falls[max(0, at - LOSSES_BEFORE) : at].mean() < NOISY and falls[at : at + 2 * FEW].all()
            if was_noisy and usual > 0 and now < batches_repeat.limit * usual:
                yield Hit(batches_repeat, steps[at], usual / max(now, 1e-9 * usual), {"turn": turn})
                return


# --- inf and NaN


def loss_alone(run: Training, loss_is_nonfinite: Rule) -> Iterator[Hit]:
    """Yield the first loss that is inf or NaN, if no layer has one in its record."""
    faulty = run.record.measures["nonfinite"] > 0
    for step in run.bad_losses[:1]:
        if step <= run.steps[-1] and not faulty[bisect_left(run.steps, step)].any():
            yield Hit(loss_is_nonfinite, step, math.inf)


def first_nonfinite(run: Training, **origins: Rule) -> Iterator[Hit]:
    """Yield the origin of the first inf or NaN: the layer before the first input with one, or the last gradient."""
    faulty = run.record.measures["nonfinite"] > 0
    if (at := first_true(faulty)) is not None:
        rows = [run.record.rows[place] for place in np.flatnonzero(faulty[at])]
        layers = {role: sorted({run.layers.index(row.layer) for row in rows if row.role == role}) for role in ROLES}
        origin, where = _origin_of_nonfinite(run, at, layers)
        step = min(run.bad_losses) if origin == "made_between_records" else run.steps[at]
        then = run.layers[layers["input"][0]] if layers["input"] else "the loss"
        yield Hit(origins[origin], step, math.inf, {"then": then, "scale": run.loss_scale(at)}, where)


def _origin_of_nonfinite(run: Training, at: int, layers: dict[str, list[int]]) -> tuple[str, tuple[str, str]]:
    """Return the name of the rule on an inf or NaN, and (layer, role); ``layers``: that have one, by role."""
    inputs, weights, gradients = layers.values()
    names, last, step, whole_run = run.layers, len(run.layers) - 1, run.steps[at], ("", "")
    if (run.steps[at - 1] if at else -1) < min(run.bad_losses, default=math.inf) < step:
        return "made_between_records", whole_run
    if 0 in inputs:
        return "made_by_batch", whole_run
    if inputs and run.is_rare(at, names[inputs[0]]):
        return "made_by_activation", (names[inputs[0]], "input")
    if inputs or (step in run.bad_losses and gradients):
        return "made_by_weight", (names[inputs[0] - 1 if inputs else last], "weight")
    if gradients:
        where = names[gradients[-1]], "grad_output"
        is_float16 = "loss_scale" in run.record.scalars or run.measure("amax", *where)[at] > FLOAT16
        overflows = gradients[-1] == last and is_float16
        return ("made_by_loss_scale", whole_run) if overflows else ("made_by_backward", where)
    if np.isinf(run.weights["gradient"][at]).any() or not math.isfinite(run.record.last("grad_norm")[at] or 0):
        return "made_after_backward", whole_run
    return ("made_by_update", (names[weights[0]], "weight")) if len(weights) == 1 else ("made_by_updates", whole_run)


def underflow(run: Training, gradients_underflow: Rule, labels_ignored: Rule) -> Iterator[Hit]:
    """Yield where too many of the last layer's gradients become 0: without a loss scale no number underflows."""
    rule = gradients_underflow if "loss_scale" in run.record.scalars else labels_ignored
    zeros = run.measure("zeros", run.layers[-1], "grad_output")
    if (at := first_true(zeros > rule.limit + np.nan_to_num(zeros[0]))) is not None:
        texts = {"share": percent(float(np.nanmax(zeros))), "scale": run.loss_scale(at)}
        yield Hit(rule, run.steps[at], CERTAIN, texts)


# --- weights


def untied(run: Training, weight_untied: Rule) -> Iterator[Hit]:
    """Yield weights that were one parameter and are two."""
    for step, kind, names in run.record.events:
        if kind == weight_untied.kind:
            layer = next((name for name in run.layers if f"{name}.weight" in names.split(" and ")), "")
            yield Hit(weight_untied, step, CERTAIN, {"names": names}, (layer, ""))


def dead(run: Training, rows_died: Rule) -> Iterator[Hit]:
    """Yield layers with rows of the weight that became 0; none if most layers have some."""
    zeros = np.nan_to_num(np.stack([run.measure("zeros", layer, "weight") for layer in run.layers], 1))
    over = zeros > rows_died.limit + 2 * zeros[0]
    places = np.flatnonzero(over.any(axis=0))
    for place in places if len(places) <= len(run.layers) / 2 else ():
        step, share = run.steps[over[:, place].argmax()], percent(float(zeros[:, place].max()))
        yield Hit(rows_died, step, LIKELY, {"share": share}, (run.layers[place], "weight"))


def written(run: Training, weight_written: Rule, weights_written: Rule, weights_permuted: Rule) -> Iterator[Hit]:
    """Yield the first step in which something but the optimizer wrote weights."""
    limit = weight_written.limit
    over = run.written > limit
    if (at := first_true(over)) is None:
        return
    count, share, where = int(over[at].sum()), float(run.written[at].max()), ("", "")
    texts: dict[str, Any] = {"count": count, "all": len(run.names)}
    if count > 1 and count >= len(run.layers) / 2:
        is_permuted = np.abs(run.rms[at] / run.rms[max(0, at - 1)] - 1) < 0.1
        is_permuted &= run.written[at, : len(run.layers)] > 1  # unrelated numbers, not averages of earlier ones
        rule = weights_permuted if is_permuted.mean() > 0.5 else weights_written
        share = max(share, 4 * limit)  # no accident of sampling
    else:
        rule, place = weight_written, int(run.written[at].argmax())
        where, is_layer = (run.names[place], "weight"), place < len(run.layers)
        name, sizes = ("amax", run.measure("amax", *where)) if is_layer else ("size", run.weights["size"][:, place])
        texts = {"name": name, "was": sizes[max(0, at - 1)], "now": sizes[at]}
    yield Hit(rule, run.steps[at], share / limit, texts, where, numbers={"changed": share})


def left(run: Training, gradients_left: Rule) -> Iterator[Hit]:
    """Yield the first step whose backward begins with gradients of an earlier one, if each step has its update."""
    if run.always_updates:
        for step, share in zip(*run.scalar(LEFT), strict=True):
            if share > gradients_left.limit:
                yield Hit(gradients_left, step, CERTAIN)
                return


def changed(run: Training, gradients_changed: Rule) -> Iterator[Hit]:
    """Yield the first step that was computed once more and has other gradients then, at once and not by and by.

    None where an update takes several recorded steps together, whose gradients it sums.
    """
    (steps, cosines), limit = run.scalar(CONTROL), gradients_changed.limit
    before = [1.0, *cosines]
    low = [place for place, cosine in enumerate(cosines) if cosine < limit and before[place] > REPRODUCED_COSINE]
    if low and left not in run.fired and run.always_updates:
        yield Hit(gradients_changed, steps[low[0]], CERTAIN, {"cosine": cosines[low[0]]})


def leaps(run: Training, gradients_leap: Rule, gradients_fall: Rule, clipped_gradients_fall: Rule) -> Iterator[Hit]:
    """Yield gradients of all layers that leap, or that fall."""
    grown = run.leaps
    # of most layers; over the largest of earlier records too, as gradients of noisy batches often leap over the median
    typical, at_most, outputs = (np.nanmedian(x, axis=1) for x in (grown.gradients, grown.highest, grown.outputs))
    fallen = np.fmin(typical, np.maximum(grown.norms, outputs))  # clipping makes up for a fall
    # at once, but for half a step before it, and for the next records too
    falls = fallen < 2 * np.roll(fallen, 1) / gradients_fall.limit
    for distance in range(FEW + 1):  # the first records, nan, roll to the end: False
        falls &= np.roll(fallen, -distance) < 1 / gradients_fall.limit
    if (over := (typical > gradients_leap.limit) & ~(at_most < gradients_leap.limit / 2)).any():
        yield _leap(run, gradients_leap, over, np.nan_to_num(typical))
    elif (at := first_true(falls)) is not None:
        share = float(fallen[at])
        rule = clipped_gradients_fall if grown.norms[at] > gradients_leap.limit else gradients_fall
        times = 1 / max(share, 1e-9) / gradients_leap.limit
        worst = run.steps[at + FEW]
        yield Hit(rule, run.steps[at], times, {"share": percent(share)}, worst=worst, numbers={"times": share})


def _leap(run: Training, rule: Rule, over: Any, times_of: Any) -> Hit:
    """Return the hit of gradients ``times_of`` times as large as earlier ones.

    It begins in the record with the largest part of the leap.
    """
    begins, worst = worst_stretch(over, times_of)
    while begins > 2 and times_of[begins - 1] > LEAP_BEGINS:
        begins -= 1
    begins += int((times_of[begins : worst + 1] / np.fmax(times_of[begins - 1 : worst], 1)).argmax())
    times, ratio = float(times_of[worst]), float(np.nanmedian(run.leaps.updates[worst]))
    texts = {"times": times, "ratio": ratio, "norm": 2 * run.norms[begins - 1]}
    if ratio < 1:  # an optimizer that divides by their size makes no larger steps
        rule = rule._replace(level="note")
    over_limit = times * max(1.0, ratio) / rule.limit
    return Hit(rule, run.steps[begins], over_limit, texts, worst=run.steps[worst], numbers={"times": times})


def frozen(run: Training, not_in_optimizer: Rule, without_gradient: Rule, nothing_trains: Rule) -> Iterator[Hit]:
    """Yield weights that no longer change; those of layers also if they get no gradient, or never change."""
    gradients, count, scales = run.weights["gradient"], len(run.layers), run.record.last("loss_scale")
    rates_of_groups = [run.filled(name)[1] for name in run.record.scalars if is_rate(name)]
    is_stopped = any(max(values[-FEW:]) <= STOPPED * max(values) for values in rates_of_groups)
    names_frozen = (text.split(", ") for _, kind, text in run.record.events if kind == FROZEN)
    frozen_by_choice = {name.removesuffix(".weight") for name in itertools.chain(*names_frozen)}
    for at, places in _stopped_weights(run).items():
        layers, others = [place for place in places if place < count] or places, len(places) - 1
        if len(places) == len(run.names):
            rule, where = nothing_trains, ("", "")
        elif not np.isfinite(gradients[at:]).any():
            continue
        elif (gradients[at:, places] > 0).any():
            rule, where = not_in_optimizer, (run.names[layers[0]], "weight")
        else:  # they are cut off behind the last of these layers
            rule, where = without_gradient, (run.names[layers[-1]], "weight")
        if is_stopped and rule is not without_gradient:
            continue
        # as the base of an adapter, or by requires_grad_(False) in the training
        is_choice = at == 0 or frozen_by_choice >= {run.names[place] for place in places}
        if is_choice and rule is without_gradient:
            rule = rule._replace(level="note")
        scale = f", and the loss scale fell to {scales[-1]:.3g}" if scales[-1] < scales[max(0, at - 1)] / 4 else ""
        texts = {"others": f", nor do {others} other weights" if others else "", "scale": scale}
        yield Hit(rule, run.steps[at], LIKELY, texts, where)


def _stopped_weights(run: Training) -> dict[int, list[int]]:
    """Return the places of weights that should change and don't, by the record from which on they don't."""
    gradients, count = run.weights["gradient"], len(run.layers)
    still = (run.weights["update"] == 0) & ~(run.weights["master_update"] > 0)
    still[:, :count] |= gradients[:, :count] == 0  # an embedding's sampled rows may get no gradient
    changed = np.where(still, np.nan, run.weights["changed"])
    rounding_stops_them = np.nanmedian(changed) < 1 - UNMOVED
    trains = min(run.rate[1][-FEW:], default=0) > 0 and not rounding_stops_them
    lasts = np.flip(np.minimum.accumulate(np.flip(still, 0), 0), 0)  # to the end
    places_by_record: dict[int, list[int]] = {}
    for place in np.flatnonzero(lasts[-FEW:].all(axis=0) & (len(still) >= FEW)):
        at = int(lasts[:, place].argmax())
        has_gradients = np.isfinite(np.log(gradients[at:, place])).all() or still[at:].all()
        others_change = (changed[at:] > 0.5).mean() > 0.25
        if (others_change or (has_gradients and trains)) and (at or place < count):
            places_by_record.setdefault(at, []).append(place)
    return places_by_record


def unmoved(run: Training, weight_unmoved: Rule, master_unmoved: Rule) -> Iterator[Hit]:
    """Yield updates that rounding loses, where it is worst."""
    weights = {name: values[:, : len(run.layers)] for name, values in run.weights.items()}
    has_master = weights["master_update"] > 0  # rounding the master then loses updates, not rounding the weight
    changed = np.where(weights["update"] > 0, weights["changed"], np.nan)
    yield from run.worst(1 - np.where(has_master, weights["master_changed"], changed), weight_unmoved, master_unmoved)


def second_moments(run: Training, moments_flushed: Rule) -> Iterator[Hit]:
    """Yield second moments that are flushed, where it is worst."""
    yield from run.worst(run.weights["second_flushed"][:, : len(run.layers)], moments_flushed, moments_flushed)


# --- layers


def idle_experts(run: Training, expert_is_idle: Rule) -> Iterator[Hit]:
    """Yield experts that get no tokens up to the last record."""
    for load in run.record.loads():
        for expert, step in load.idle.items():
            if len(run.steps) - run.steps.index(step) >= FEW and sum(load.tokens) >= BUSY * len(load.tokens):
                texts, where = {"expert": expert, "count": len(load.tokens)}, (load.layer, "input")
                yield Hit(expert_is_idle, step, LIKELY, texts, where, numbers={"expert": expert})


def forward(run: Training, new_forward: Rule) -> Iterator[Hit]:
    """Yield the innermost module whose output of the same batch first changes by more than its past explains.

    By more than earlier outputs did, than its input does beside them, and than weights inside of it do beside theirs.
    """
    modules, leap = run.record.modules, run.forward_leaps
    over = leap > new_forward.limit
    if (at := first_true(over)) is not None:
        changes = run.record.of_modules["output"]
        layer = innermost([module for module, is_over in zip(modules, over[at], strict=True) if is_over])
        place = modules.index(layer)
        numbers = {"now": float(changes[at, place]), "most": float(np.nanmax(changes[:at, place]))}
        texts = {**{name: percent(value) for name, value in numbers.items()}, "who": "" if layer else "the model "}
        times = float(leap[at, place]) / new_forward.limit
        yield Hit(new_forward, run.steps[at], times, texts, (layer, ""), numbers=numbers)


def gradient_of_batch(run: Training, new_backward: Rule) -> Iterator[Hit]:
    """Yield the first record where backward of the same batch gives other gradients, by more than the past explains.

    The layer is the last one whose gradient does: where backward begins to differ.
    """
    over = run.backward_leaps > new_backward.limit
    if (at := first_true(over)) is not None:
        place = int(np.flatnonzero(over[at])[-1])
        changes, name = run.record.of_parameters["change"], run.record.parameters[place].removesuffix(".weight")
        texts = {"now": percent(float(changes[at, place])), "most": percent(float(np.nanmax(changes[:at, place])))}
        times = float(run.backward_leaps[at, place]) / new_backward.limit
        yield Hit(new_backward, run.steps[at], times, texts | {"name": name})


def slope(run: Training, slope_leaves: Rule, slope_is_off: Rule) -> Iterator[Hit]:
    """Yield the first of some records in a row whose slope is further from 1 than all before; or one that never was 1.

    By the limit, and by more than twice what all before differ by, as experts' routing jumps.
    """
    slopes, limit = run.record.scalar(SLOPE), slope_leaves.limit
    for at in range(2 * FEW, len(slopes) - FEW + 1):
        past, since = slopes[max(0, at - BEFORE) : at], slopes[at : at + FEW]
        was, now, least, most = np.nanmedian(past), np.median(since), np.nanmin(past), np.nanmax(past)
        is_beyond = (since < least).all() or (since > most).all()
        if is_beyond and min(abs(now - was), abs(now - 1) - abs(was - 1)) > max(limit, 2 * (most - least)):
            yield Hit(slope_leaves, run.steps[at], float(abs(now - was) / limit), {"was": was, "now": now})
            return
    now = float(np.nanmedian(slopes))
    if abs(now - 1) > slope_is_off.limit:
        yield Hit(slope_is_off, run.steps[0], abs(now - 1) / slope_is_off.limit, {"now": now})


def logits(run: Training, logits_are_large: Rule) -> Iterator[Hit]:
    """Yield queries and keys so large that the softmax saturates, by norms of their layer's input and weight."""
    for layer in filter(PROJECTION.search, run.layers):
        size = {role: run.measure("elements", layer, role) for role in ROLES}
        features = np.sqrt(size["input"] * size["weight"] / size["grad_output"])
        product = run.measure("rms", layer, "input") * run.measure("rms", layer, "weight")
        deviation = features * product**2
        if (at := first_true(np.nan_to_num(deviation, posinf=0) > logits_are_large.limit)) is not None:
            most = float(np.nanmax(deviation))
            yield Hit(logits_are_large, run.steps[at], most / logits_are_large.limit, {"most": most}, (layer, "weight"))
