"""The sentences that answer first: whether FP8 is the cause, by the twin; what changed first, by the run's own past.

Neither knows a fault. The twin compares a step with itself in high precision; departures compare each number of a run
with its earlier values, whatever it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from octavo.inspect.incidents import BETWEEN, DATA, KINDS, Finding
from octavo.inspect.record import Record, np
from octavo.inspect.recorder import NO_TWIN
from octavo.inspect.twin import COSINE, LOSS, NO_OPTIMIZER

LASTS = 3  # so many records in turn are no accident of one batch
APART = 0.02  # of the twin's loss: healthy runs of all draws are apart by less than 0.006
PAST = 16  # records that a number is compared with
SPREAD, FEW = 6.0, 8.0  # a departure: so many times the usual change, and more of few records
LEAST = {"the loss": 1.05, "the learning rate": 1.3}  # and at least by this factor
TIMES = 2.5  # of all other numbers
FAR = 0.3  # of the loss, beyond which its change to first order is no number to be said
SAID = 3  # departures that the sentence names


def verdict(record: Record, findings: Sequence[Finding]) -> str:
    """Return what a run's record says first: whether FP8 is the cause, and the worst finding or what changed first.

    Args:
        record, findings: a record, and the findings that ``diagnose`` returned.

    Example:
        >>> import tempfile, torch, octavo
        >>> layer = octavo.nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with octavo.inspect.record(layer, folder, optimizer=optimizer) as recorder:
        ...         layer(torch.ones(16, 64)).mean().backward()
        ...         optimizer.step()
        ...         recorder.step()
        ...     found = octavo.inspect.load(folder)
        >>> octavo.inspect.verdict(found, octavo.inspect.diagnose(found)).split(". ")[1]
        'Nothing exceeds its limit in 1 recorded step'
    """
    worst = next((finding for finding in findings if finding.level != "note"), None)
    return f"{of_fp8(record, worst)}. {of_run(record) if worst is None else worst.sentence}"


def of_fp8(record: Record, worst: Finding | None = None) -> str:
    """Return a sentence on whether FP8 is the cause of what a run does, from the twins of its recorded steps."""
    none = np.full((len(record.steps), 1), np.nan)
    cosines, (steps, twins) = record.weights.get("twin_cosine", none), record.scalars.get(LOSS, ([], []))
    losses = dict(zip(*record.scalars.get("loss", ([], [])), strict=True))
    pairs = {step: (losses[step], twin) for step, twin in zip(steps, twins, strict=True) if step in losses}
    compared = [
        s for s, row in zip(record.steps, cosines, strict=True) if np.isfinite([*row, *pairs.get(s, ())[1:]]).any()
    ]
    if not compared:
        reasons = [text for _, kind, text in record.events if kind == NO_TWIN]
        return f"Whether FP8 is the cause is not measured: {(reasons or [NO_OPTIMIZER])[0]}"
    for step, (loss, twin) in pairs.items():
        if math.isfinite(twin) and not math.isfinite(loss):
            return f"FP8 is the cause: at step {step} the loss is {loss}, and in high precision {twin:.4g}"
    over = [abs(loss - twin) > APART * abs(twin) for loss, twin in pairs.values()]
    low = cosines < COSINE
    begins = [*_lasting(np.array(over, dtype=bool).reshape(-1, 1), list(pairs)), *_lasting(low, record.steps)]
    if begins:
        step, layer = min(begins)
        is_earlier = worst is not None and not worst.products and worst.begins <= step - (not _precedes_casts(worst))
        cause = "FP8 takes part, though not first" if is_earlier else "FP8 is the cause"
        if step in pairs and over[list(pairs).index(step)]:
            return f"{cause}: from step {step} the loss is {_beside(*pairs[step])}"
        cosine, name = cosines[record.steps.index(step), layer], record.layers[layer]
        return f"{cause}: from step {step} {name}'s gradient has a cosine of {cosine:.2f} with that in high precision"
    begins_at = record.steps[-1] if worst is None else worst.begins  # the first twin of the fault, if there is one
    step = next((step for step in compared if step >= begins_at), compared[-1])
    loss, twin = pairs.get(step, (math.nan, math.nan))
    of_step = cosines[record.steps.index(step)]
    cosine = float(np.median(of_step[np.isfinite(of_step)])) if np.isfinite(of_step).any() else math.nan
    said = [f"loss ({twin:.4g}, in FP8 {loss:.4g})"] * math.isfinite(twin)
    said += [f"gradients (cosine {cosine:.3f})"] * math.isfinite(cosine)
    later = "; later steps were not compared" if step < begins_at else ""
    what = f"{' and '.join(said)} at step {step}{later}"
    if abs(loss - twin) > APART * abs(twin) or cosine < COSINE:
        return f"FP8 changes single steps: in high precision the same batch has another {what}"
    answer = "FP8 changes little" if worst is None or worst.products else "FP8 is not the cause"
    return f"{answer}: in high precision the same batch has nearly the same {what}"


def _precedes_casts(finding: Finding) -> bool:
    """Return whether a finding is of what happens in a step before its first cast."""
    return KINDS[finding.kind].part in (BETWEEN, DATA)


def _beside(loss: float, twin: float) -> str:
    if abs(loss - twin) > FAR * abs(loss):
        return f"{loss:.4g}, and far {'less' if twin < loss else 'more'} of the same batch in high precision"
    return f"{loss:.4g}, and {twin:.4g} of the same batch in high precision"


def _lasting(over: Any, steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (step, column) where a column of ``over`` is true in LASTS records in turn, from this step on."""
    for at in range(len(over) - LASTS + 1):
        for column in np.flatnonzero(over[at : at + LASTS].all(axis=0)):
            yield steps[at], int(column)


class Departure(NamedTuple):
    """A number that leaves its own past: its name, the step, and the factor; inf where it becomes inf or NaN.

    ``size``: the logarithm of the factor, over the least that is a departure.
    """

    step: int
    name: str
    times: float
    size: float

    def __str__(self) -> str:
        if self.times == math.inf:
            return f"{self.name} became inf or NaN"
        return f"{self.name} {'rose' if self.times > 1 else 'fell'} {max(self.times, 1 / self.times):.3g} times"


def of_run(record: Record) -> str:
    """Return a sentence on what changed first in a run, whatever it is."""
    nothing = f"Nothing exceeds its limit in {len(record.steps)} recorded step{'s' * (len(record.steps) != 1)}"
    if not (first := departures(record)):
        return nothing
    said = "; ".join(f"{each}{'' if place else f' at step {each.step}'}" for place, each in enumerate(first[:SAID]))
    return f"{nothing}. What changed first: {said}"


def departures(record: Record) -> list[Departure]:
    """Return the departures of the step where the first one begins, the largest first; of a layer's numbers one."""
    by_name: dict[str, Departure] = {}
    for name, steps, values in _numbers(record):
        for departure in _departures(name, steps, values):
            by_name.setdefault(name, departure)  # two casts of a tensor count the same numbers
    first = min((each.step for each in by_name.values()), default=None)
    return sorted((each for each in by_name.values() if each.step == first), key=lambda each: -each.size)


def _numbers(record: Record) -> Iterator[tuple[str, Sequence[int], Any]]:
    """Yield (name, steps, values) of the numbers of a run, in the order of a step."""
    for name, what in (("lr", "the learning rate"), ("loss", "the loss"), ("grad_norm", "the gradients' norm")):
        if name in record.scalars:
            steps, values = record.scalars[name]
            yield what, steps, np.array(values)
    for place, row in enumerate(record.rows):
        where = f"{row.layer}'s {row.role.replace('grad_output', 'gradient of the output')}"
        yield f"the size of {where}", record.steps, record.measures["rms"][:, place]
    for names, measures in ((record.layers, record.weights), (record.others, record.of_others)):
        for measure, what in (("gradient", "gradient"), ("update", "update")):
            for place, name in enumerate(names if measures else ()):
                yield f"the {what} of {name}", record.steps, measures[measure][:, place]


def _departures(name: str, steps: Sequence[int], values: Any) -> Iterator[Departure]:
    """Yield the first departure of a number from its earlier values."""
    with np.errstate(all="ignore"):
        logarithms = np.log(np.abs(values))
    seen: list[float] = []
    for step, value, logarithm in zip(steps, values, logarithms, strict=True):
        if not math.isfinite(value):
            if seen and (math.isinf(value) or name == "the loss"):
                yield Departure(step, name, math.inf, math.inf)
                return
            continue
        if not math.isfinite(logarithm):
            continue
        past = np.array(seen[-PAST:])
        if len(past) > LASTS:
            change = logarithm - np.median(past)
            usual = max(float(np.median(np.abs(np.diff(past)))), float(np.median(np.abs(past - np.median(past)))))
            limit = max(SPREAD * usual * (1 + FEW / len(past)), math.log(LEAST.get(name, TIMES)))
            if abs(change) > limit:
                yield Departure(step, name, math.exp(change), abs(change) / limit)
                return
        seen.append(float(logarithm))
