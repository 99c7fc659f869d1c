"""Departures: the numbers of a run that leave their own course, whatever they are, and the step where they do.

A number's course is a straight line in its logarithm, with noise around it. At a record it may leave that line for this
record alone, jump to a parallel one, or take another slope. The evidence of a change is the logarithm of how much
likelier the numbers are with it than without, by their own noise. Numbers that tell of the same are a family, such as
all gradients: its evidence is that of its most changed number, less what the largest of so many has by chance. A run
changed at the record with the most evidence of all families together, and what changed first there is the family that
a step computes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from octavo.inspect.record import Record, np
from octavo.inspect.twin import LOSS
from octavo.inspect.weights import GROUP

RATES = ("lr", "learning_rate")  # names under which the learning rate is recorded, the second by transformers' Trainer
SCALARS = {
    "loss": "loss",
    "grad_norm": "gradients",
    "loss_scale": "loss scale",
    **dict.fromkeys(RATES, "learning rate"),
}
OF_ROLES = {"input": ("inputs", "input"), "grad_output": ("gradients", "gradient of the output")}
FAMILIES = (
    "learning rate",
    "loss scale",
    "writes",
    "inputs",
    "loss",
    "gradients",
    "updates",
    "weights",
)  # as a step goes
PAST = 16  # records before a change, and as many after it, that it is judged by
LEAST = 3  # records before a change
NOISE = 0.02  # the least noise of a logarithm: smaller changes mean nothing
QUIET, LOUD = 10.0, 0.3  # units of numbers whose least noise is a tenth of that, or three times as much
# Of all families, beyond which a run changed. In 24 healthy runs it is 8 in the median, at most 11 by chance, and 9
# to 85 where a rate, a batch's size or an adapter begins to change.
EVIDENCE = 8.0
ENOUGH = 20.0  # of a family, which changed then whatever the evidence of others
HOWS = ("", " for a record", " in each record")


class Departure(NamedTuple):
    """A number that leaves its course: its name, the step, the factor by which, the evidence, and for how long.

    ``times``: for good, for a record or in each record (``how``); inf where the number is inf or NaN.
    """

    step: int
    name: str
    times: float
    size: float
    how: str = ""

    def __str__(self) -> str:
        if self.times == math.inf:
            return f"{self.name} became inf or NaN"
        return (
            f"{self.name} {'rose' if self.times > 1 else 'fell'} {max(self.times, 1 / self.times):.3g} times{self.how}"
        )


class _Number(NamedTuple):
    """A number of a run: its family and name, its values by record, and what their logarithms are multiplied by."""

    family: str
    name: str
    values: Any
    unit: float = 1.0

    def course(self) -> Any | None:
        """Return the logarithms by record, 0 as a thousandth of the median; None for a number with too few values."""
        logarithms = np.log(np.abs(self.values))
        finite = logarithms[np.isfinite(logarithms)]
        if len(finite) <= LEAST:
            return None
        logarithms = np.where(np.isneginf(logarithms), np.median(finite) - math.log(1e3), logarithms)
        last = np.maximum.accumulate(np.where(np.isfinite(logarithms), np.arange(len(logarithms)), 0))
        return self.unit * np.where(np.isfinite(logarithms[last]), logarithms[last], finite[0])


def departures(record: Record) -> list[Departure]:
    """Return what changed at the record where a run changed most, one number of a family, in the order of a step."""
    with np.errstate(all="ignore"):
        numbers = [*_numbers(record)]
        lost = min((lost for lost in map(_lost, numbers) if lost is not None), default=(len(record.steps), ""))
        courses = [(number, course) for number in numbers if (course := number.course()) is not None]
        if lost[0] > LEAST and courses:
            columns = np.stack([course[: lost[0]] for _, course in courses], 1)
            if first := _at_the_change(record.steps, [number for number, _ in courses], *_changes(columns)):
                return first
    return [Departure(record.steps[lost[0]], lost[1], math.inf, math.inf)] if lost[1] else []


def _lost(number: _Number) -> tuple[int, str] | None:
    """Return the first record where a number is inf, or a loss NaN, and the number's name."""
    is_lost = np.isinf(number.values) | (np.isnan(number.values) & (number.name == "the loss"))
    return (int(is_lost.argmax()), number.name) if is_lost.any() else None


def _at_the_change(
    steps: Sequence[int], numbers: Sequence[_Number], evidence: Any, sizes: Any, hows: Any
) -> list[Departure]:
    """Return the most changed number of each family that changed where most changed; none where little did."""
    families = [number.family for number in numbers]
    places = {name: np.flatnonzero([each == name for each in families]) for name in FAMILIES if name in families}
    of_families = np.stack([evidence[:, its].max(axis=1) - math.log(len(its)) for its in places.values()]).clip(min=0)
    at = int(of_families.sum(axis=0).argmax())
    if of_families[:, at].sum() < EVIDENCE:
        return []
    first = []
    for its, of_family in zip(places.values(), of_families[:, at].tolist(), strict=True):
        if of_family >= min(ENOUGH, of_families[:, at].max() / 2):
            place = its[evidence[at, its].argmax()]
            times = math.exp(min(300.0, max(-300.0, sizes[at, place] / numbers[place].unit)))
            first.append(Departure(steps[at], numbers[place].name, times, of_family, HOWS[hows[at, place]]))
    return first


def _changes(courses: Any) -> tuple[Any, Any, Any]:
    """Return a change's evidence at each record, its size in logarithms, its place in HOWS: [records, numbers] each."""
    count, changes = len(courses), (np.zeros(courses.shape), np.zeros(courses.shape), np.zeros(courses.shape, int))
    for begin in range(0, max(1, count - PAST), PAST):
        window, is_last = courses[begin : begin + 2 * PAST], begin + 2 * PAST >= count
        for at in range(LEAST if begin == 0 else PAST // 2, len(window) if is_last else PAST * 3 // 2):
            for changes_of, values in zip(changes, _change(window, at), strict=True):
                changes_of[begin + at] = values
    return changes


def _change(window: Any, at: int) -> tuple[Any, Any, Any]:
    """Return what ``_changes`` does for one record of a window of records."""
    records = np.arange(len(window))
    line, _ = np.linalg.qr(np.stack([np.ones(len(window)), records], 1))
    noise = window - line @ (line.T @ window)
    shapes = np.stack([records >= at, records == at, np.maximum(0, records - at + 1)], 1).astype(float)
    shapes -= line @ (line.T @ shapes)
    norms = np.maximum(np.sqrt((shapes**2).sum(axis=0)), 1e-9)
    explained = (shapes / norms).T @ noise  # [3, numbers]
    how = np.abs(explained).argmax(axis=0)
    size = np.take_along_axis(explained, how[None], 0)[0]
    squares, least = (noise**2).sum(axis=0), len(window) * NOISE**2
    likelier = (squares + least) / (np.maximum(squares - size**2, 0) + least)
    return len(window) / 2 * np.log(likelier), size / norms[how], how


def _numbers(record: Record) -> Iterator[_Number]:
    """Yield the numbers of a run, in the order of a step within a family."""
    for name, (steps, values) in record.scalars.items():
        option, _, group = name.partition(GROUP)
        if (family := SCALARS.get(option)) is not None:  # as it was last written
            at = np.searchsorted(steps, record.steps, side="right") - 1
            said = "the gradients' norm" if option == "grad_norm" else f"the {family}{group and f' of group {group}'}"
            yield _Number(family, said, np.where(at >= 0, np.array(values)[np.maximum(at, 0)], np.nan))
    ratios = record.scalar("loss") / record.scalar(LOSS)
    yield _Number("loss", "the loss over the twin's", np.where(np.isfinite(ratios), ratios, np.nan), QUIET)
    for (layer, role), place in {(row.layer, row.role): at for at, row in reversed([*enumerate(record.rows)])}.items():
        if role in OF_ROLES:
            family, what = OF_ROLES[role]
            yield _Number(family, f"the size of {layer}'s {what}", record.measures["rms"][:, place])
    for names, measures in ((record.layers, record.weights), (record.others, record.of_others)):
        for place, name in enumerate(names if measures else ()):
            of = {measure: values[:, place] for measure, values in measures.items()}
            yield _Number("gradients", f"the gradient of {name}", of["gradient"])
            yield _Number("updates", f"the update of {name}", of["update"], LOUD)
            yield _Number("weights", f"the weight of {name}", of["size"])
            written = 1e-3 + of["outside"] / of["size"]
            yield _Number("writes", f"the weight of {name}, by something else than the optimizer,", written)
