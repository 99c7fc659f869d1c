"""Departures: the numbers of a run that leave their own course, whatever they are, and the step where they do.

A number's course is a straight line in its logarithm, with noise around it. At a record it may leave that line for this
record alone, jump to a parallel one, or take another slope. The evidence of a change is the logarithm of how much
likelier the numbers are with it than without, by their own noise. Numbers that tell of the same are a family, such as
all gradients: its evidence is that of its most changed number, less what the largest of so many has by chance; or that
of all its numbers together, less what each has by chance, where more of them change by less. As they share noise they
count as so many as would be independent.

A run changed at the record with the most evidence of all families together. Training may react to a fault more than
the fault itself changed, and some records later: so the records before that one are asked again, as long as they have
enough evidence of a change of their own. What changed first there is the family that a step computes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from octavo.inspect.record import Record, np
from octavo.inspect.twin import LOSS, NO_OUTPUT, NO_TWIN, SLOPE
from octavo.inspect.weights import GROUP

RATES = ("lr", "learning_rate")  # names under which the learning rate is recorded, the second by transformers' Trainer
SCALARS = {"loss": "loss", "grad_norm": "gradients", "loss_scale": "loss scale"} | dict.fromkeys(RATES, "learning rate")
ROLE_FAMILIES = {"input": ("inputs", "input"), "grad_output": ("gradients", "gradient of the output")}  # and in words
FAMILIES = (  # as a step goes
    *("learning rate", "loss scale", "writes", "forward", "inputs", "loss"),
    *("backward", "gradients", "updates", "weights"),
)
# --- limits, chosen by how many first departures of `python -m benchmarks causes` are right with them

PAST = 16  # records before a change, and as many after it, that it is judged by
LEAST_BEFORE = 3  # records before a change: a line through fewer has no noise
NOISE = 0.02  # the least noise of a number's logarithm: a change by less than 2 % means nothing
# What logarithms are multiplied by beside that noise: of numbers that are as quiet as 0.2 %, as loud as 7 %, or as 10 %
QUIET, LOUD, FAINT = 10.0, 0.3, 0.2
# Logarithms of likelihoods. A run changed if all families have so much together, as also many healthy runs do: by a
# schedule, a loss scale, or by chance
EVIDENCE = 7.5
CLEAR = 11.0  # of a family: with so much, or half as much as another one, it changed too
BY_CHANCE = 1.0  # the mean of a number that does not change, in windows of any length
HOWS = ("", " for a record", " in each record")


class Departure(NamedTuple):
    """A number that leaves its course: the step, its name, the factor by which, and for how long.

    ``times``: for good, for a record or in each record (``how``); inf where ``name`` says all, such as of inf or NaN.
    """

    step: int
    name: str
    times: float
    how: str = ""

    def __str__(self) -> str:
        if self.times == math.inf:
            return self.name
        change = "rose" if self.times > 1 else "fell"
        return f"{self.name} {change} {max(self.times, 1 / self.times):.3g} times{self.how}"


class _Number(NamedTuple):
    """A number of a run: its family and name, its values by record, and what their logarithms are multiplied by.

    ``only_rises``: its fall is no change, as it follows smaller updates. ``module``: whose output it is, of numbers of
    the family "forward".
    """

    family: str
    name: str
    values: Any
    unit: float = 1.0
    only_rises: bool = False
    module: str = ""

    def course(self) -> Any | None:
        """Return the logarithms by record, 0 as a thousandth of the median; None for a number with too few values."""
        logarithms = np.log(np.abs(self.values))
        finite = logarithms[np.isfinite(logarithms)]
        if len(finite) <= LEAST_BEFORE:
            return None
        logarithms = np.where(np.isneginf(logarithms), np.median(finite) - math.log(1e3), logarithms)
        last = np.maximum.accumulate(np.where(np.isfinite(logarithms), np.arange(len(logarithms)), 0))
        return self.unit * np.where(np.isfinite(logarithms[last]), logarithms[last], finite[0])


def departures(record: Record) -> list[Departure]:
    """Return what changed at the record where a run changed first, one number of a family, in the order of a step."""
    with np.errstate(all="ignore"):
        numbers = [*_numbers(record)]
        ends = [*filter(None, map(_lost, numbers)), *_other_ways(record)]
        lost_at, lost = min(ends, default=(len(record.steps), None))
        courses = [(number, course) for number in numbers if (course := number.course()) is not None]
        if lost_at > LEAST_BEFORE and courses:
            columns = np.stack([course[:lost_at] for _, course in courses], 1)
            if first := _at_the_change(record.steps, [number for number, _ in courses], columns):
                return first
    return [Departure(record.steps[lost_at], lost, math.inf)] if lost else []


def _lost(number: _Number) -> tuple[int, str] | None:
    """Return the first record where a number is inf, or a loss NaN, and words for it."""
    is_lost = np.isinf(number.values) | (np.isnan(number.values) & (number.name == "the loss"))
    return (int(is_lost.argmax()), f"{number.name} became inf or NaN") if is_lost.any() else None


def _other_ways(record: Record) -> Iterator[tuple[int, str]]:
    """Yield the first record, but for the very first, whose gradients came by another way, and words for it."""
    for step, kind, text in record.events:
        if kind == NO_TWIN and text == NO_OUTPUT and step > record.steps[0]:
            yield record.steps.index(step), "gradients no longer come through the outputs of the recorded model"


def _at_the_change(steps: Sequence[int], numbers: Sequence[_Number], courses: Any) -> list[Departure]:
    """Return the most changed number of each family that changed at the first change; none where little did."""
    families = [number.family for number in numbers]
    places = [np.flatnonzero([each == name for each in families]) for name in FAMILIES if name in families]
    only_rises = np.array([number.only_rises for number in numbers])
    if (change := _first_change(courses, places, only_rises)) is None:
        return []
    first = []
    for places_of_family, evidence in zip(places, change.family_evidence, strict=True):
        if evidence >= min(CLEAR, change.family_evidence.max() / 2):
            place = places_of_family[change.evidence[places_of_family].argmax()]
            if numbers[place].family == "forward":  # of a module and those around it the innermost
                least = change.evidence[place] / 2
                modules = {numbers[each].module: each for each in places_of_family}
                place = modules[innermost([name for name, each in modules.items() if change.evidence[each] >= least])]
            times = math.exp(min(300.0, max(-300.0, change.sizes[place] / numbers[place].unit)))
            first.append(Departure(steps[change.at], numbers[place].name, times, HOWS[change.hows[place]]))
    return first


class _CourseChange(NamedTuple):
    """A change at a record: each number's evidence, its size in logarithms, its place in HOWS; families' evidence."""

    at: int
    evidence: Any
    sizes: Any
    hows: Any
    family_evidence: Any

    @property
    def total(self) -> float:
        return float(self.family_evidence.sum())


def _first_change(courses: Any, places: Sequence[Any], only_rises: Any) -> _CourseChange | None:
    """Return the change with the most evidence, or an earlier one that has enough without what came after it."""
    first, begin, end = None, 0, len(courses)
    while changes := _changes(courses[begin:end], places, only_rises):
        change = max(changes, key=lambda each: each.total)
        if change.total < EVIDENCE:
            break
        end = begin + change.at
        begin = begin if first is not None else max(0, end - PAST)
        first = change._replace(at=end)
    return first


def _changes(courses: Any, places: Sequence[Any], only_rises: Any) -> list[_CourseChange]:
    """Return the change at each record that has enough records before it."""
    count, changes = len(courses), []
    for begin in range(0, max(1, count - PAST), PAST):
        window, is_last = courses[begin : begin + 2 * PAST], begin + 2 * PAST >= count
        for at in range(LEAST_BEFORE if begin == 0 else PAST // 2, len(window) if is_last else PAST * 3 // 2):
            change = _change(window, at, places, only_rises)
            changes.append(change._replace(at=begin + at))
    return changes


def _change(window: Any, at: int, places: Sequence[Any], only_rises: Any) -> _CourseChange:
    """Return the change at a record of a window of records, of families whose numbers have these places.

    ``only_rises``: numbers whose fall is no change.
    """
    records = np.arange(len(window))
    line, _ = np.linalg.qr(np.stack([np.ones(len(window)), records], 1))
    noise = window - line @ (line.T @ window)
    shapes = np.stack([records >= at, records == at, np.maximum(0, records - at + 1)], 1).astype(float)
    shapes -= line @ (line.T @ shapes)
    norms = np.maximum(np.sqrt((shapes**2).sum(axis=0)), 1e-9)
    explained = (shapes / norms).T @ noise  # [3, numbers]
    hows = np.abs(explained).argmax(axis=0)
    sizes = np.take_along_axis(explained, hows[None], 0)[0]
    sizes = np.where(only_rises, np.maximum(sizes, 0), sizes)
    squares, least = (noise**2).sum(axis=0), len(window) * NOISE**2
    likelier = (squares + least) / (np.maximum(squares - sizes**2, 0) + least)
    evidence = (len(window) - 3) / 2 * np.log(likelier)  # three numbers are fitted: a line's two and the change
    unexplained = noise - (shapes / norms)[:, hows] * sizes
    unexplained /= np.maximum(np.sqrt((unexplained**2).sum(axis=0)), 1e-9)
    family_evidence = [_family_evidence(evidence[family], unexplained[:, family]) for family in places]
    return _CourseChange(at, evidence, sizes / norms[hows], hows, np.array(family_evidence))


def _family_evidence(evidence: Any, noise: Any) -> float:
    """Return a family's evidence, by that of its numbers and their noise [records, numbers], of norm 1."""
    alike = ((noise @ noise.T) ** 2).sum() / len(evidence)  # 1 if all are independent
    together = (evidence - BY_CHANCE).sum() / max(alike, 1.0)
    return max(0.0, evidence.max() - math.log(len(evidence)), together)


def _numbers(record: Record) -> Iterator[_Number]:
    """Yield the numbers of a run, in the order of a step within a family."""
    for name in record.scalars:
        option, _, group = name.partition(GROUP)
        if (family := SCALARS.get(option)) is not None:
            words = "the gradients' norm" if option == "grad_norm" else f"the {family}{group and f' of group {group}'}"
            yield _Number(family, words, record.last(name))
    ratios = record.scalar("loss") / record.scalar(LOSS)
    yield _Number("loss", "the loss over the twin's", np.where(np.isfinite(ratios), ratios, np.nan), QUIET)
    yield _Number("backward", "the loss's change along the gradients", record.scalar(SLOPE))
    for place, module in enumerate(record.modules):
        name, changes = f"the output of {module or 'the model'} for the same batch", record.of_modules["own"][:, place]
        yield _Number("forward", name, changes, FAINT, True, module)
    for place, parameter in enumerate(record.parameters):
        name, changes = f"the gradient of {parameter} for the first batch", record.of_parameters["change"][:, place]
        yield _Number("backward", name, changes, FAINT, only_rises=True)
    sizes = {at: record.measures["rms"][:, place] for at, place in record.places.items() if at[1] in ROLE_FAMILIES}
    for (layer, role), size in sizes.items():
        family, what = ROLE_FAMILIES[role]
        yield _Number(family, f"the size of {layer}'s {what}", size)
    for place, layer in enumerate(record.layers):  # how far a batch's tokens agree: the same at any scale of gradients
        if all((layer, role) in sizes for role in ROLE_FAMILIES):
            agreed = record.weights["gradient"][:, place] / math.prod(sizes[layer, role] for role in ROLE_FAMILIES)
            yield _Number("gradients", f"the gradient of {layer}, over its operands' sizes,", agreed)
    for names, measures in ((record.layers, record.weights), (record.others, record.of_others)):
        for place, name in enumerate(names if measures else ()):
            by_name = {measure: values[:, place] for measure, values in measures.items()}
            yield _Number("gradients", f"the gradient of {name}", by_name["gradient"])
            if (cosines := by_name.get("twin_cosine")) is not None:
                yield _Number("gradients", f"the gradient of {name}, beside the twin's,", 1 - cosines, FAINT)
            yield _Number("updates", f"the update of {name}", by_name["update"], LOUD)
            yield _Number("weights", f"the weight of {name}", by_name["size"])
            written = 1e-3 + by_name["outside"] / by_name["size"]
            yield _Number("writes", f"the weight of {name}, by something else than the optimizer,", written)


def is_inside(name: str, module: str) -> bool:
    """Return whether a name is that of a module, or of something inside of it; "" is the model."""
    return not module or name == module or name.startswith(f"{module}.")


def innermost(names: Sequence[str]) -> str:
    """Return the first of some modules, in the order of ``named_modules``, that has none of the others inside."""
    return next(name for name in names if not any(other != name and is_inside(other, name) for other in names))
