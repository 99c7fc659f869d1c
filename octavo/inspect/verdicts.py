"""The sentences that answer first: whether FP8 is the cause, by the twin; what changed first, by the run's own past.

Neither knows a fault. The twin compares a step with itself in high precision; departures compare each number of a run
with its earlier values, whatever it is.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from octavo.inspect.departures import LEAST, Departure, departures
from octavo.inspect.incidents import Finding
from octavo.inspect.record import Record, np
from octavo.inspect.training import earlier
from octavo.inspect.twin import LOSS, NO_OPTIMIZER, NO_TWIN, OTHERS

# FP8 differs where so many of so many compared steps in turn are beyond a limit: the loss is so far above the twin's,
# or below it, or a layer's gradient has so low a cosine. In 245 runs of the first four draws without a fault of FP8 the
# third of five losses is at most 0.6 % and the cosine at least 0.89, but where something wrote weights; in 36 healthy
# runs 0.37 % and 0.983, but for one with 0.41, whose loss scale doubles in each second step, beyond delayed scales.
# With a fault of FP8 that changes either it is at least 0.66 %, or at most 0.947.
OVER, AMONG = 3, 5
APART, COSINE = 0.006, 0.95
OTHERWISE = 2.0  # times these limits, where something else than a cast is found: it disturbs scales
BEGINS = 0.25  # of the usual distance of such steps has the first: a step before may be beyond the limit by chance
FAR = 0.3  # of the loss, beyond which its change to first order is no number to be said
OF_LOSS, OF_GRADIENTS = ("batch", "drift"), ("gradients", "frozen")  # kinds of findings that read these
# kinds that read what layers compute, which changes once FP8 has raised the loss
EFFECTS = (*OF_LOSS, *OF_GRADIENTS, "idle expert", "logits")
ONLY_GRADIENTS, HARMS = (f"FP8 {does} gradients, though not the loss so far" for does in ("changes", "harms"))
BLAMES = "FP8 is the cause", "FP8 takes part, though not first", HARMS
HARMED = 0.9  # the cosine of a layer's gradient, in most steps of so many, below which FP8 harms it
OTHER_WEIGHTS = "all weights that are no layer's"
# the factor of a change of gradients whose finding has none, and the least factor: a fall to 0 counts as one to this
LEAP, LEAST_FACTOR = 4.0, 1e-9
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


def measured(record: Record, findings: Sequence[Finding]) -> list[Finding]:
    """Return findings as far as the twin agrees with them.

    A cast's is a note where FP8 changes neither loss nor gradients, or suffers from something earlier. What high
    precision does not have is left out as an effect of FP8: a rise of the loss, another size of gradients that differ
    from then on, and what layers do after FP8 became the cause of a loss.
    """
    twins = _Twins(record)
    return [
        replace(finding, level="note") if finding.products and twins.clear(finding) else finding
        for finding in findings
        if not (finding.kind in EFFECTS and twins.has_alone(finding))
    ]


def of_fp8(record: Record, worst: Finding | None = None) -> str:
    """Return a sentence on whether FP8 is the cause of what a run does, from the twins of its recorded steps."""
    twins = _Twins(record)
    if not twins.steps:
        reasons = [text for _, kind, text in record.events if kind == NO_TWIN]
        return f"Whether FP8 is the cause is not measured: {(reasons or [NO_OPTIMIZER])[0]}"
    lost = next((at for at, loss in enumerate(twins.losses) if not math.isfinite(loss)), None)
    if lost is not None and math.isfinite(twins.of_twins[lost]):
        at, where, cause = lost, None, "FP8 is the cause"
    elif (first := twins.first_apart(worst) or twins.at_the_cast(worst)) is not None:
        at, where = first
        cause = twins.cause(worst, at, where is not None)
    else:
        at, where, cause = twins.usual(worst), None, "FP8 changes little"
        cause = cause if worst is None or worst.products else "FP8 is not the cause"
        return f"{cause}: in high precision the same batch has nearly the same {twins.said(at, worst)}"
    if where is None:
        return f"{cause}: {'at' if at == lost else 'from'} step {twins.steps[at]} the loss is {twins.beside(at)}"
    low = f"a cosine of {twins.cosines[at, where]:.2f} with that in high precision"
    return f"{cause}: from step {twins.steps[at]} the gradient of {[*record.layers, OTHER_WEIGHTS][where]} has {low}"


class _Twins:
    """The compared steps of a record: losses of the step and of the twin, and cosines [steps, layers + 1].

    The last cosine is of all weights that are no layer's; nan where something is not measured.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        loss, twin, others = (record.scalar(name) for name in ("loss", LOSS, OTHERS))
        cosines = np.concatenate([record.weights.get("twin_cosine", others[:, None][:, :0]), others[:, None]], 1)
        compared = np.flatnonzero(np.isfinite(twin) | np.isfinite(cosines).any(axis=1))
        self.steps, self.cosines, self.losses = [record.steps[at] for at in compared], cosines[compared], loss[compared]
        # a loss that is far from the twin's while all gradients agree was multiplied before its backward
        least = np.nanmin(np.append(self.cosines, np.full((len(compared), 1), 2.0), 1), axis=1)
        is_multiplied = (abs(loss - twin)[compared] > FAR * abs(self.losses)) & (least > COSINE) & (least <= 1)
        is_multiplied |= is_multiplied.sum() > 1  # as of a sum whose mean is recorded
        self.of_twins = np.where(is_multiplied | (twin[compared] == 0), math.nan, twin[compared])
        norms = np.array([_median(of_layers) for of_layers in record.weights.get("twin_norm", cosines[:, :0])])
        self.norms = (norms / np.nan_to_num(record.scalar("loss_scale"), nan=1.0))[compared]  # the median layer's
        # the change of a loss is known by the gradient of the outputs, which a factor of the loss multiplies
        self.apart = (self.losses / self.of_twins - 1) / _factor(record)[compared]

    def clear(self, finding: Finding) -> bool:
        """Return whether a cast that a finding blames changes nothing, or only what something else changed before."""
        if not self.steps or finding.kind == "nonfinite":
            return False
        first = self.first_apart(finding) or self.at_the_cast(finding)
        return first is None or self.cause(finding, first[0], first[1] is not None) not in BLAMES

    def has_alone(self, finding: Finding) -> bool:
        """Return whether FP8 alone has most of what a finding says: of the loss, of gradients, or by a loss before."""
        at, first = bisect_left(self.steps, finding.begins), self.first_of_all
        if first is not None and first[0] <= at and first[1] is None and self.part(first[0]) > 0:
            return True
        if finding.kind in OF_GRADIENTS:
            return self.has_gradients_alone(finding, at)
        parts = [(self.losses[soon], self.of_twins[soon]) for soon in (slice(at, at + OVER), slice(at, None))]
        rises = [(_median(loss - twin), _median(loss) - _median(self.losses[:at])) for loss, twin in parts]
        return finding.kind in OF_LOSS and any(part > rise / 2 > 0 for part, rise in rises)

    def has_gradients_alone(self, finding: Finding, at: int) -> bool:
        """Return whether gradients change in FP8 as a finding says, and by less than its square root in the twins.

        A layer's gradient must differ from the twin's by that record; of a frozen layer, its own.
        """
        first, layers = self.first_of_gradients, self.record.layers[: self.cosines.shape[1] - 1]
        if finding.kind == "frozen" and finding.layer in layers:
            cosines = self.cosines[at : at + OVER, layers.index(finding.layer)]
            first = at if _median(cosines) < COSINE else None
        if first is None or first > at:
            return False
        change = _median(self.norms[at : at + OVER]) / _median(self.norms[:first])
        said = 0.0 if finding.kind == "frozen" else finding.numbers.get("times", LEAP)
        return change > 0 and abs(math.log(change)) < abs(math.log(max(said, LEAST_FACTOR))) / 2

    @cached_property
    def first_of_all(self) -> tuple[int, int | None] | None:
        """The place where FP8 differs first, whatever findings there are; see ``first_apart``."""
        return self.first_apart(None)

    @cached_property
    def departures(self) -> list[Departure]:
        return departures(self.record)

    def first_apart(self, worst: Finding | None) -> tuple[int, int | None] | None:
        """Return where FP8 differs first: the place of the step, and of the layer or None for the loss."""
        first = _first_beyond(self.times() / (1.0 if worst is None or worst.products else OTHERWISE))
        return first and (first[0], None if first[1] < 2 else first[1] - 2)

    @cached_property
    def first_of_gradients(self) -> int | None:
        """The place of the step where a layer's gradient differs first, whatever the loss does."""
        first = _first_beyond(self.times()[:, 2:])
        return first and first[0]

    def times(self) -> Any:
        """Return distances from the twin over their limits, [steps, 2 + layers + 1]: losses above, below; cosines."""
        apart = np.stack([self.apart, -self.apart], 1) / APART
        return np.concatenate([apart, (1 - self.cosines) / (1 - COSINE)], 1)

    def at_the_cast(self, worst: Finding | None) -> tuple[int, int | None] | None:
        """Return the same at the step where a cast's finding is worst, or begins, if FP8 differs in it alone."""
        for step in () if worst is None or not worst.products else (worst.begins, worst.worst):
            at = self.steps.index(step) if step in self.steps else None
            if at is not None and len(columns := np.flatnonzero(self.times()[at] > 1)):
                return at, None if columns[0] < 2 else int(columns[0]) - 2
        return None

    def part(self, at: int) -> float:
        """Return by how much more FP8 raises the loss from a place on than the twin's is above its own before."""
        soon = slice(at, at + AMONG)
        of_twin = _median(self.of_twins[soon]) - _median(self.of_twins[:at])
        return _median(self.losses[soon] - self.of_twins[soon]) - max(of_twin, 0.0)

    def cause(self, worst: Finding | None, at: int, is_gradient: bool) -> str:
        """Return what FP8 is, if it differs from a place on, by its part of what the loss has more than before it."""
        soon, before = slice(at, at + AMONG), self.of_twins[:at]
        if not is_gradient and self.part(at) > 0:
            return "FP8 is the cause"
        is_raised = at >= LEAST and _median(self.of_twins[at:]) > np.max(before[np.isfinite(before)], initial=-math.inf)
        has_departed = is_raised and any(each.step < self.steps[at] for each in self.departures[:1])
        if has_departed or (worst is not None and not worst.products and worst.begins <= self.steps[at]):
            has_none = is_gradient and _median(np.nan_to_num(self.cosines[soon], nan=1.0)) == 0  # all is flushed
            is_part = has_none or (worst is not None and not has_departed and self.is_over(worst))
            return "FP8 takes part, though not first" if is_part else "FP8 is not the cause, though it suffers"
        if worst is not None or not is_gradient or is_raised:
            return "FP8 is the cause"
        is_harmed = (np.median(np.nan_to_num(self.cosines[soon], nan=1.0), axis=0) < HARMED).any()
        return HARMS if is_harmed else ONLY_GRADIENTS

    def is_over(self, worst: Finding) -> bool:
        """Return whether in high precision the loss got over a finding that reads it or the forward, or had nothing."""
        halves = np.split(self.of_twins, [bisect_left(self.steps, worst.begins)])
        before, since = (losses[np.isfinite(losses)] for losses in halves)
        is_well = min(len(before), len(since)) > 0 and bool(np.median(since) <= before.max())
        return worst.kind in (*OF_LOSS, "forward") and is_well

    def usual(self, worst: Finding | None) -> int:
        """Return the place of a step of the worst finding whose loss is as far from its twin's as in most."""
        begins = 0 if worst is None else worst.begins
        places = [at for at, step in enumerate(self.steps) if step >= begins] or [len(self.steps) - 1]
        apart = np.nan_to_num(abs(self.apart[places]), nan=math.inf)
        return places[int(apart.argsort(kind="stable")[(len(places) - 1) // 2])]

    def said(self, at: int, worst: Finding | None) -> str:
        """Return what a step's twin has, in words."""
        cosines = self.cosines[at][np.isfinite(self.cosines[at])]
        said = [f"loss ({self.of_twins[at]:.4g}, in FP8 {self.losses[at]:.4g})"] * math.isfinite(self.of_twins[at])
        said += [f"gradients (cosine {float(np.median(cosines)):.3f})"] if len(cosines) else []
        single = [step for step, is_over in zip(self.steps, (self.times() > 1).any(axis=1), strict=True) if is_over]
        later = "; later steps were not compared" if worst is not None and self.steps[at] < worst.begins else ""
        but = f", but for {', '.join(map(str, single[:SAID]))}{' and others' * (len(single) > SAID)}" * bool(single)
        return f"{' and '.join(said)} at step {self.steps[at]}{but}{later}"

    def beside(self, at: int) -> str:
        loss, twin = self.losses[at], self.of_twins[at]
        if math.isfinite(loss) and abs(loss - twin) > FAR * abs(loss):
            return f"{loss:.4g}, and far {'less' if twin < loss else 'more'} of the same batch in high precision"
        return f"{loss:.4g}, and {twin:.4g} of the same batch in high precision"


def _first_beyond(times: Any) -> tuple[int, int] | None:
    """Return the first step and column from which on distances, over their limits, stay beyond them; or None."""
    for at in range(len(times)):
        soon = np.nan_to_num(times[at : at + AMONG])
        begins = (soon[0] > np.maximum(1, np.median(soon, axis=0) * BEGINS)) & ((soon[:3] > 1).sum(axis=0) >= 2)
        columns = np.flatnonzero(begins & ((soon > 1).sum(axis=0) >= OVER))
        if len(columns):
            return at, int(columns[0])
    return None


def _factor(record: Record) -> Any:
    """Return how many times as large as the least earlier ones the last layer's gradients are by record: at least 1."""
    where = record.layers[-1] if record.layers else "", "grad_output"
    if (place := record.places.get(where)) is None:
        return np.ones(len(record.steps))
    sizes = record.measures["rms"][:, place] / np.nan_to_num(record.scalar("loss_scale"), nan=1.0)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of medians where nothing is recorded
        return np.fmax(1.0, sizes / np.fmin.accumulate(earlier(sizes)))


def _median(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def of_run(record: Record) -> str:
    """Return a sentence on what changed first in a run, whatever it is."""
    nothing = f"Nothing exceeds its limit in {len(record.steps)} recorded step{'s' * (len(record.steps) != 1)}"
    if not (first := departures(record)):
        return nothing
    said = "; ".join(f"{each}{'' if place else f' at step {each.step}'}" for place, each in enumerate(first[:SAID]))
    return f"{nothing}. What changed first: {said}"
