"""Departures: the numbers of a run that leave their own course, whatever they are, and the step where they do.

A number's course is a straight line in its logarithm, with noise around it. At a recorded step it may leave that line
for this one alone, jump to a parallel one, or take another slope. The evidence of a change is the logarithm of how much
likelier the numbers are with it than without, by their own noise. Numbers that tell of the same are a family, such as
all gradients: its evidence is that of its most changed number, less what the largest of so many has by chance; or that
of all its numbers together, less what each has by chance, where more of them change by less. As they share noise they
count as so many as would be independent.

Arrays' names end with their layout: R recorded steps of a window, N numbers, F families; R2 and R3 are the line's and
the change's shapes.

A run changed at the recorded step with the most evidence of all families together. Training may react to a fault more
than the fault itself changed, and some recorded steps later: so those before it are asked again, as long as they have
enough evidence of a change of their own. What changed first there is the family that a step computes first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from octavo.inspect.record import Record, np
from octavo.inspect.twin import NO_OUTPUT, NO_TWIN, SLOPE, TWIN_LOSS
from octavo.inspect.weight_updates import GROUP

RATES = ("lr", "learning_rate")  # names under which the learning rate is recorded, the second by transformers' Trainer
SCALARS = {"loss": "loss", "grad_norm": "gradients", "loss_scale": "loss scale"} | dict.fromkeys(RATES, "learning rate")
ROLE_FAMILIES = {"input": ("inputs", "input"), "grad_output": ("gradients", "gradient of the output")}  # and in words
FAMILIES: tuple[str, ...] = ("learning rate", "loss scale", "writes", "forward", "inputs", "loss")  # as a step goes
FAMILIES += ("backward", "gradients", "updates", "weights")
# --- limits, chosen by how many first departures of `python -m benchmarks causes` are right with them; rules.py says
# how to change one

PAST = 16  # recorded steps before a change, and as many after it, that it is judged by
LEAST_BEFORE = 3  # recorded steps before a change: a line through fewer has no noise
NOISE = 0.02  # the least noise of a number's logarithm: a change by less than 2 % means nothing
# A logarithm is multiplied by this, so that NOISE stands for 0.2 %, 7 % or 10 %: of numbers with less noise, or more
QUIET, NOISY, NOISIEST = 10.0, 0.3, 0.2
# Logarithms of likelihoods. A run changed if all families have so much together, as also many healthy runs do: by a
# schedule, a loss scale, or by chance
EVIDENCE = 7.5
CLEAR_EVIDENCE = 11.0  # of a family: with so much, or half as much as another one, it changed too
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
    """A number of a run: its family and name, its values by recorded step, and what their logarithms are multiplied by.

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
        """Return the logarithms by recorded step, 0 as a thousandth of the median; None for one with too few values."""
        logarithms = np.log(np.abs(self.values))
        finite = logarithms[np.isfinite(logarithms)]
        if len(finite) <= LEAST_BEFORE:
            return None
        logarithms = np.where(np.isneginf(logarithms), np.median(finite) - math.log(1e3), logarithms)
        last = np.maximum.accumulate(np.where(np.isfinite(logarithms), np.arange(len(logarithms)), 0))
        return self.unit * np.where(np.isfinite(logarithms[last]), logarithms[last], finite[0])


def departures(record: Record) -> list[Departure]:
    """Return what changed at the recorded step where a run changed first: a number of each family, as a step goes."""
    with np.errstate(all="ignore"):
        numbers = [*_numbers(record)]
        has_loss = record.is_written("loss")
        ends = [*filter(None, (_lost(number, has_loss) for number in numbers)), *_other_ways(record)]
        lost_at, lost = min(ends, default=(len(record.steps), None))
        courses = [(number, course) for number in numbers if (course := number.course()) is not None]
        if lost_at > LEAST_BEFORE and courses:
            columns = np.stack([course[:lost_at] for _, course in courses], 1)
            if first := _at_the_change(record.steps, [number for number, _ in courses], columns):
                return first
    return [Departure(record.steps[lost_at], lost, math.inf)] if lost else []


def _lost(number: _Number, has_loss: Any) -> tuple[int, str] | None:
    """Return the first recorded step where a number is inf, or a loss NaN, and words for it.

    ``has_loss``: by recorded step whether a loss had been written, before which the loss's number is nan too.
    """
    is_lost = np.isinf(number.values) | (np.isnan(number.values) & has_loss & (number.name == "the loss"))
    return (int(is_lost.argmax()), f"{number.name} became inf or NaN") if is_lost.any() else None


def _other_ways(record: Record) -> Iterator[tuple[int, str]]:
    """Yield the first recorded step, but for the very first, whose gradients came by another way, and words for it."""
    for step, kind, text in record.events:
        at = bisect_left(record.steps, step)  # of an event whose step has no counts, as of a killed run, the next one
        if kind == NO_TWIN and text == NO_OUTPUT and 0 < at < len(record.steps):
            yield at, "gradients no longer come through the outputs of the recorded model"


def _at_the_change(steps: Sequence[int], numbers: Sequence[_Number], courses: Any) -> list[Departure]:
    """Return the most changed number of each family that changed at the first change; none where little did.

    ``courses``: of the numbers, [records, numbers].
    """
    families = [number.family for number in numbers]
    places = [np.flatnonzero([each == name for each in families]) for name in FAMILIES if name in families]
    if (change := _first_change(courses, places, np.array([number.only_rises for number in numbers]))) is None:
        return []
    first = []
    for places_of_family, evidence in zip(places, change.evidence_F, strict=True):
        if evidence >= min(CLEAR_EVIDENCE, change.evidence_F.max() / 2):
            place = places_of_family[change.evidence_N[places_of_family].argmax()]
            if numbers[place].family == "forward":  # of a module and those around it the innermost
                least = change.evidence_N[place] / 2
                modules = {numbers[each].module: each for each in places_of_family}
                place = modules[innermost([name for name, each in modules.items() if change.evidence_N[each] >= least])]
            times = math.exp(min(300.0, max(-300.0, change.sizes_N[place] / numbers[place].unit)))
            first.append(Departure(steps[change.at], numbers[place].name, times, HOWS[change.hows_N[place]]))
    return first


class _CourseChange(NamedTuple):
    """A change of courses at a recorded step.

    Attributes:
        at: the index of that step.
        evidence_N: each number's evidence of a change.
        sizes_N: by how much its course, a logarithm, changes.
        hows_N: the place in HOWS of the shape of its change.
        evidence_F: each family's evidence.
    """

    at: int
    evidence_N: Any
    sizes_N: Any
    hows_N: Any
    evidence_F: Any


def _first_change(courses: Any, places: Sequence[Any], only_rises_N: Any) -> _CourseChange | None:
    """Return the change with the most evidence, or an earlier one that has enough without what came after it.

    Args:
        courses: [records, numbers].
        places: for each family the places of its numbers.
        only_rises_N: whether a number's fall is no change.
    """
    first = None
    begin, end = 0, len(courses)
    while changes := [*_changes(courses[begin:end], places, only_rises_N)]:
        change = max(changes, key=lambda each: each.evidence_F.sum())
        if change.evidence_F.sum() < EVIDENCE:
            break
        end = begin + change.at
        begin = begin if first is not None else max(0, end - PAST)
        first = change._replace(at=end)
    return first


def _changes(courses: Any, places: Sequence[Any], only_rises_N: Any) -> Iterator[_CourseChange]:
    """Yield the change at each recorded step that has enough before it; see _first_change for the arguments."""
    for begin in range(0, max(1, len(courses) - PAST), PAST):
        window_RN = courses[begin : begin + 2 * PAST]
        is_last = begin + 2 * PAST >= len(courses)
        for at in range(LEAST_BEFORE if begin == 0 else PAST // 2, len(window_RN) if is_last else PAST * 3 // 2):
            yield _change(window_RN, at, places, only_rises_N)._replace(at=begin + at)


def _change(window_RN: Any, at: int, places: Sequence[Any], only_rises_N: Any) -> _CourseChange:
    """Return the change at a recorded step of a window of courses.

    Each course is a line and noise (``noise_RN``). The part of the noise that has the shape of a change (``shapes_R3``,
    in the order of HOWS, each less the line that fits it) is the change's size; the evidence compares the squares of
    the noise with and without it.
    """
    records = len(window_RN)
    places_R = np.arange(records)
    line_R2, _ = np.linalg.qr(np.stack([np.ones(records), places_R], 1))
    noise_RN = window_RN - line_R2 @ (line_R2.T @ window_RN)

    shapes_R3 = np.stack([places_R >= at, places_R == at, np.maximum(0, places_R - at + 1)], 1).astype(float)
    shapes_R3 -= line_R2 @ (line_R2.T @ shapes_R3)
    norms_3 = np.maximum(np.sqrt((shapes_R3**2).sum(axis=0)), 1e-9)
    parts_3N = (shapes_R3 / norms_3).T @ noise_RN
    hows_N = np.abs(parts_3N).argmax(axis=0)
    sizes_N = np.take_along_axis(parts_3N, hows_N[None], 0)[0]
    sizes_N = np.where(only_rises_N, np.maximum(sizes_N, 0), sizes_N)

    squares_N = (noise_RN**2).sum(axis=0)
    least = records * NOISE**2
    times_likelier_N = (squares_N + least) / (np.maximum(squares_N - sizes_N**2, 0) + least)
    evidence_N = (records - 3) / 2 * np.log(times_likelier_N)  # three numbers are fitted: a line's two and the change

    unexplained_RN = noise_RN - (shapes_R3 / norms_3)[:, hows_N] * sizes_N
    unexplained_RN /= np.maximum(np.sqrt((unexplained_RN**2).sum(axis=0)), 1e-9)
    evidence_F = np.array([_family_evidence(evidence_N[family], unexplained_RN[:, family]) for family in places])
    return _CourseChange(at, evidence_N, sizes_N / norms_3[hows_N], hows_N, evidence_F)


def _family_evidence(evidence_N: Any, noise_RN: Any) -> float:
    """Return a family's evidence, by that of its numbers, and by their noise, which has norm 1 over steps."""
    alike = ((noise_RN @ noise_RN.T) ** 2).sum() / len(evidence_N)  # 1 if all are independent
    together = (evidence_N - BY_CHANCE).sum() / max(alike, 1.0)
    return max(0.0, evidence_N.max() - math.log(len(evidence_N)), together)


def _numbers(record: Record) -> Iterator[_Number]:
    """Yield the numbers of a run, in the order of a step within a family."""
    for name in record.scalars:
        option, _, group = name.partition(GROUP)
        if (family := SCALARS.get(option)) is not None:
            words = "the gradients' norm" if option == "grad_norm" else f"the {family}{group and f' of group {group}'}"
            yield _Number(family, words, record.last(name))
    ratios = record.scalar("loss") / record.scalar(TWIN_LOSS)
    yield _Number("loss", "the loss over the twin's", np.where(np.isfinite(ratios), ratios, np.nan), QUIET)
    yield _Number("backward", "the loss's change along the gradients", record.scalar(SLOPE))
    for place, module in enumerate(record.modules):
        changes = record.of_modules["output_over_input"][:, place]
        name = f"the output of {module or 'the model'} for the same batch"
        yield _Number("forward", name, changes, NOISIEST, only_rises=True, module=module)
    for place, parameter in enumerate(record.parameters):
        changes = record.of_parameters["change"][:, place]
        name = f"the gradient of {parameter} for the first batch"
        yield _Number("backward", name, changes, NOISIEST, only_rises=True)
    for layer, role in record.places:
        if role in ROLE_FAMILIES:
            family, what = ROLE_FAMILIES[role]
            yield _Number(family, f"the size of {layer}'s {what}", record.measure("rms", layer, role))
    for place, layer in enumerate(record.layers):  # how far a batch's tokens agree: the same at any scale of gradients
        sizes = math.prod(record.measure("rms", layer, role) for role in ROLE_FAMILIES)
        agreed = record.weights["gradient"][:, place] / sizes
        yield _Number("gradients", f"the gradient of {layer}, over its operands' sizes,", agreed)
    for names, measures in ((record.layers, record.weights), (record.others, record.of_others)):
        for place, name in enumerate(names if measures else ()):
            by_name = {measure: values[:, place] for measure, values in measures.items()}
            yield _Number("gradients", f"the gradient of {name}", by_name["gradient"])
            if (cosines := by_name.get("twin_cosine")) is not None:
                yield _Number("gradients", f"the gradient of {name}, beside the twin's,", 1 - cosines, NOISIEST)
            yield _Number("updates", f"the update of {name}", by_name["update"], NOISY)
            yield _Number("weights", f"the weight of {name}", by_name["size"])
            written = 1e-3 + by_name["outside"] / by_name["size"]
            yield _Number("writes", f"the weight of {name}, by something else than the optimizer,", written)


def is_inside(name: str, module: str) -> bool:
    """Return whether a name is that of a module, or of something inside of it; "" is the model."""
    return not module or name == module or name.startswith(f"{module}.")


def innermost(names: Sequence[str]) -> str:
    """Return the first of some modules, in the order of ``named_modules``, that has none of the others inside."""
    return next(name for name in names if not any(other != name and is_inside(other, name) for other in names))
