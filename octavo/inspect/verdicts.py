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
from typing import Any, NamedTuple

from octavo.inspect.departures import LEAST_BEFORE, Departure, departures
from octavo.inspect.incidents import Finding
from octavo.inspect.record import Record, np
from octavo.inspect.training import earlier
from octavo.inspect.twin import DIFFERING_COSINE, NO_OPTIMIZER, NO_TWIN, OTHERS_COSINE, TWIN_LOSS

# --- limits, chosen by how many verdicts of `python -m benchmarks causes` are right with them, "FP8 or not" above all;
# rules.py says how to change one

# FP8 differs from a step on where so many of WINDOW compared steps in turn exceed a limit: that of the loss below, or
# that of a layer's gradient, twin.DIFFERING_COSINE; and so many of the FIRST_STEPS of them
DIFFERING_STEPS, WINDOW = 3, 5
DIFFERING_AT_FIRST, FIRST_STEPS = 2, 3
# A step's loss over its twin's, less 1, above or below. In the benchmark's 78 healthy runs with twins the third largest
# of five in turn is at most 0.0059
LOSS_DIFFERS = 0.006
FIRST_SHARE = 0.25  # the first of these steps has so much of their median distance: else it exceeds the limit by chance
LIMIT_FACTOR_IF_OTHER_FAULT = 2.0  # both limits are doubled if a finding that is no cast's was made: it disturbs scales
HARMFUL_COSINE = 0.9  # of a layer's gradient and its twin's, median of WINDOW steps: below, FP8 harms it
FIRST_ORDER = 0.3  # |loss less twin's| over the loss: known to first order, a loss further away is no number to be said
USUAL_LEAP = 4.0  # the factor of a change of gradients whose finding has none
LEAST_FACTOR = 1e-9  # a fall of gradients to 0 counts as one to this factor

# --- words

# kinds of findings that are made from these
FROM_LOSS = "batch", "drift"
FROM_GRADIENTS = "gradients", "labels", "frozen"
# kinds made from what layers compute, which changes once FP8 has raised the loss
EFFECTS = (*FROM_LOSS, *FROM_GRADIENTS, "idle expert", "logits")
CAUSE = "FP8 is the cause"
TAKES_PART = "FP8 takes part, though not first"
SUFFERS = "FP8 is not the cause, though it suffers"
HARMS, CHANGES = (f"FP8 {does} gradients, though not the loss so far" for does in ("harms", "changes"))
FP8_TAKES_PART = CAUSE, TAKES_PART, HARMS
OTHER_PARAMETERS = "all weights that are no layer's"
LISTED = 3  # departures, or steps, that a sentence names


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
    return f"{answer_of_twin(record, worst)}. {first_departures(record) if worst is None else worst.sentence}"


def checked(record: Record, findings: Sequence[Finding]) -> list[Finding]:
    """Return findings as far as the twin agrees with them.

    A cast's is a note where FP8 changes neither loss nor gradients, or suffers from something earlier. What high
    precision does not have is left out as an effect of FP8: a rise of the loss, another size of gradients that differ
    from then on, and what layers do after FP8 became the cause of a loss.
    """
    twins = _TwinComparison(record)
    remaining = [each for each in findings if not (each.kind in EFFECTS and twins.is_by_fp8_alone(each))]
    return [replace(each, level="note") if each.products and twins.acquits_cast(each) else each for each in remaining]


def answer_of_twin(record: Record, worst: Finding | None = None) -> str:
    """Return a sentence on whether FP8 is the cause of what a run does, from the twins of its recorded steps."""
    twins = _TwinComparison(record)
    if not twins.steps:
        reasons = [text for _, kind, text in record.events if kind == NO_TWIN]
        return f"Whether FP8 is the cause is not measured: {(reasons or [NO_OPTIMIZER])[0]}"
    nonfinite = next((at for at, loss in enumerate(twins.losses) if not math.isfinite(loss)), None)
    if nonfinite is not None and math.isfinite(twins.twin_losses[nonfinite]):
        return f"{CAUSE}: at step {twins.steps[nonfinite]} the loss is {twins.losses_in_words(nonfinite)}"
    if (first := twins.difference(worst)) is None:
        cause = "FP8 changes little" if worst is None or worst.products else "FP8 is not the cause"
        return f"{cause}: in high precision the same batch has nearly the same {twins.agreement_in_words(worst)}"
    since = f"{twins.part_of_fp8(worst, first)}: from step {twins.steps[first.at]}"
    if first.layer is None:
        return f"{since} the loss is {twins.losses_in_words(first.at)}"
    low = f"a cosine of {twins.cosines[first.at, first.layer]:.2f} with that in high precision"
    return f"{since} the gradient of {[*record.layers, OTHER_PARAMETERS][first.layer]} has {low}"


LOSS_COLUMNS = 2  # of _TwinComparison.distances: how far the loss is above the twin's, and below; then follow cosines


class _Difference(NamedTuple):
    """A place among the compared steps where FP8 differs, and whose gradient does; ``layer`` None: the loss does."""

    at: int
    layer: int | None


class _TwinComparison:
    """The steps of a record that were compared with their twins, and what these say of FP8 and of findings.

    The comment before each branch describes a run that needs the branch. A name in quotes is a kind of run in
    benchmarks/training/causes.py, or in one of its draws, of which another sentence would be said without the branch.

    Attributes:
        steps: those that were compared; numbers of these are nan where something is not measured.
        losses, twin_losses: of the step and of its twin, [steps], without losses that say nothing beside the twins'.
        cosines: of a layer's gradient and its twin's, the last of all weights that are no layer's, [steps, layers + 1].
        distances: from the twin, over their limits, of losses and of cosines, [steps, LOSS_COLUMNS + layers + 1].
        twin_norms: of the median layer's gradient, [steps].
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        losses, twin_losses, others = (record.scalar(name) for name in ("loss", TWIN_LOSS, OTHERS_COSINE))
        cosines = np.concatenate([record.weights["twin_cosine"], others[:, None]], 1)
        norms = np.array([_median(by_layer) for by_layer in record.weights["twin_norm"]])
        norms /= np.nan_to_num(record.scalar("loss_scale"), nan=1.0)
        compared = np.flatnonzero(np.isfinite(twin_losses) | np.isfinite(cosines).any(axis=1))
        self.steps = [record.steps[at] for at in compared]
        self.losses, self.cosines, self.twin_norms = losses[compared], cosines[compared], norms[compared]
        self.twin_losses = _comparable(twin_losses[compared], self.losses, self.cosines)
        # the change of a loss is known by the gradient of the outputs, which a factor of the loss multiplies ("clipping
        # off")
        above = (self.losses / self.twin_losses - 1) / _factor_of_loss(record)[compared]
        of_losses = np.stack([above, -above], 1) / LOSS_DIFFERS
        self.distances = np.concatenate([of_losses, (1 - self.cosines) / (1 - DIFFERING_COSINE)], 1)

    @cached_property
    def departures(self) -> list[Departure]:
        """The numbers of the run that changed first, by its own past."""
        return departures(self.record)

    def acquits_cast(self, finding: Finding) -> bool:
        """Return whether the cast of a finding changes nothing, or only what something else changed before."""
        # the twin has inf and NaN, too, and what passes them on is no note: "inf in a gradient"
        if not self.steps or finding.kind == "nonfinite":
            return False
        first = self.difference(finding)
        return first is None or self.part_of_fp8(finding, first) not in FP8_TAKES_PART

    def is_by_fp8_alone(self, finding: Finding) -> bool:
        """Return whether FP8 alone has most of what a finding says: of the loss, of gradients, or by a loss before."""
        at = bisect_left(self.steps, finding.begins)
        first = self.lasting_difference(None)
        # FP8 clips, the loss leaves the twin's, and later gradients leap and an expert gets no tokens
        if first is not None and first.at <= at and first.layer is None and self.rise_of_loss_by_fp8(first.at) > 0:
            return True
        # gradients are flushed to 0 in FP8, and the finding is "frozen", or that they fall: "a floor under gradients'
        # amaxes"
        if finding.kind in FROM_GRADIENTS:
            return self.gradients_change_by_fp8_alone(finding, at)
        # the loss rises in FP8, at once or by and by, and most of the rise the twins don't have: no batch raised it. So
        # "scales back off"
        for since in (slice(at, at + DIFFERING_STEPS), slice(at, None)) if finding.kind in FROM_LOSS else ():
            rise = _median(self.losses[since]) - _median(self.losses[:at])
            if _median(self.losses[since] - self.twin_losses[since]) > rise / 2 > 0:
                return True
        return False

    def gradients_change_by_fp8_alone(self, finding: Finding, at: int) -> bool:
        """Return whether gradients change in FP8 as a finding says, and by less than its square root in the twins.

        A layer's gradient must differ from the twin's by that recorded step; of a frozen layer, its own.
        """
        # a frozen layer's own gradient, flushed to 0, has no direction in common with the twin's; another layer's that
        # differs explains nothing, as where code detached this one
        if finding.kind == "frozen" and finding.layer in self.record.layers:
            cosine = _median(self.cosines[at : at + DIFFERING_STEPS, self.record.layers.index(finding.layer)])
            differs_from = at if cosine < DIFFERING_COSINE else None
        else:
            difference = _first_lasting_difference(self.distances[:, LOSS_COLUMNS:])  # of gradients alone
            differs_from = difference and difference.at
        if differs_from is None or differs_from > at:
            return False
        twins_factor = _median(self.twin_norms[at : at + DIFFERING_STEPS]) / _median(self.twin_norms[:differs_from])
        factor = 0.0 if finding.kind == "frozen" else finding.numbers.get("times", USUAL_LEAP)
        return twins_factor > 0 and abs(math.log(twins_factor)) < abs(math.log(max(factor, LEAST_FACTOR))) / 2

    def difference(self, finding: Finding | None) -> _Difference | None:
        """Return where FP8 differs first and lastingly, or else at the step of a cast's worst finding alone."""
        return self.lasting_difference(finding) or self.difference_at_cast(finding)

    def lasting_difference(self, finding: Finding | None) -> _Difference | None:
        """Return where FP8 differs first, in most of some steps in turn; by twice as much beside another fault."""
        # another fault disturbs scales for some steps: "weight x 10,000"
        has_other_fault = finding is not None and not finding.products
        return _first_lasting_difference(self.distances / (LIMIT_FACTOR_IF_OTHER_FAULT if has_other_fault else 1.0))

    def difference_at_cast(self, finding: Finding | None) -> _Difference | None:
        """Return the same at the step where a cast's finding is worst, or begins, if FP8 differs in it alone."""
        # FP8 differs where the cast is worst, and in too few steps in turn: "outlier channel"
        for step in (finding.begins, finding.worst) if finding is not None and finding.products else ():
            at = self.steps.index(step) if step in self.steps else None
            if at is not None and len(columns := np.flatnonzero(self.distances[at] > 1)):
                return _Difference(at, _layer_of(int(columns[0])))
        return None

    def rise_of_loss_by_fp8(self, at: int) -> float:
        """Return by how much more FP8 raises the loss from a place on than the twin's is above its own before."""
        since = slice(at, at + WINDOW)
        rise_of_twin = _median(self.twin_losses[since]) - _median(self.twin_losses[:at])
        return _median(self.losses[since] - self.twin_losses[since]) - max(rise_of_twin, 0.0)

    def twin_recovers_from(self, finding: Finding) -> bool:
        """Return whether the twin's loss, by its median since a finding of loss or forward, is as low as before."""
        halves = np.split(self.twin_losses, [bisect_left(self.steps, finding.begins)])
        before, since = (losses[np.isfinite(losses)] for losses in halves)
        is_well = min(len(before), len(since)) > 0 and bool(np.median(since) <= before.max())
        return is_well and finding.kind in (*FROM_LOSS, "forward")

    def part_of_fp8(self, worst: Finding | None, first: _Difference) -> str:
        """Return what FP8 is, if it differs from a place on, beside the worst finding: by the first row that holds.

        - The loss differs, and is above the twin's by more than the twin's rises: the cause.
        - Another number changed before and the twin's loss rises, or the worst finding is no cast's and begins no
          later: FP8 takes part if it leaves all gradients 0, or if no other number changed and the twin got over that
          finding; else it suffers.
        - There is a worst finding, the loss differs, or the twin's loss rises: the cause.
        - Else only gradients differ: it harms them, or changes them.
        """
        at = first.at
        is_of_loss = first.layer is None
        cosines = np.nan_to_num(self.cosines[at : at + WINDOW], nan=1.0)
        # inputs are clipped from step 100 on: the loss rises there, the twin's does not
        if is_of_loss and self.rise_of_loss_by_fp8(at) > 0:
            return CAUSE
        # a rate rose at step 90, the twin's loss rises with it, and from step 100 on amaxes outgrow their scales: FP8
        # suffers. "saturated logits" have the earlier fault alone
        before = self.twin_losses[:at]
        highest_before = np.max(before[np.isfinite(before)], initial=-math.inf)
        twin_rises = at >= LEAST_BEFORE and _median(self.twin_losses[at:]) > highest_before
        other_departed = twin_rises and any(each.step < self.steps[at] for each in self.departures[:1])
        other_fault_is_earlier = worst is not None and not worst.products and worst.begins <= self.steps[at]
        is_second = other_departed or other_fault_is_earlier
        flushes_all = not is_of_loss and _median(cosines) == 0
        outlasts_fault = worst is not None and not other_departed and self.twin_recovers_from(worst)
        parts = (
            # besides, it flushes all gradients; or the twin's loss came down again, and FP8's did not
            (TAKES_PART, is_second and (flushes_all or outlasts_fault)),
            (SUFFERS, is_second),
            # casts flush gradients, and the updates let both losses rise: the twin has the same weights. A cast is the
            # worst finding in "scales that stay at 1", and of the loss alone FP8 has "rows of the other block's weight"
            (CAUSE, worst is not None or is_of_loss or twin_rises),
            # gradients lose their direction, and no loss shows it yet: "saved codes of the first block"
            (HARMS, (np.median(cosines, axis=0) < HARMFUL_COSINE).any()),
            # or they lose a few digits
            (CHANGES, True),
        )
        return next(part for part, holds in parts if holds)

    def losses_in_words(self, at: int) -> str:
        """Return a step's loss and its twin's in words."""
        loss, twin = self.losses[at], self.twin_losses[at]
        if math.isfinite(loss) and abs(loss - twin) > FIRST_ORDER * abs(loss):
            return f"{loss:.4g}, and far {'less' if twin < loss else 'more'} of the same batch in high precision"
        return f"{loss:.4g}, and {twin:.4g} of the same batch in high precision"

    def agreement_in_words(self, worst: Finding | None) -> str:
        """Return the loss and gradients that a step and its twin have, of a step as far from its twin as most are.

        It is one of the worst finding's steps, if any of these was compared.
        """
        begins = 0 if worst is None else worst.begins
        candidates = [at for at, step in enumerate(self.steps) if step >= begins] or [len(self.steps) - 1]
        distances = np.nan_to_num(abs(self.distances[candidates, 0]), nan=math.inf)  # of the loss
        at = candidates[int(distances.argsort(kind="stable")[(len(candidates) - 1) // 2])]
        parts = []
        if math.isfinite(self.twin_losses[at]):
            parts.append(f"loss ({self.twin_losses[at]:.4g}, in FP8 {self.losses[at]:.4g})")
        if len(cosines := self.cosines[at][np.isfinite(self.cosines[at])]):
            parts.append(f"gradients (cosine {float(np.median(cosines)):.3f})")
        sentence = f"{' and '.join(parts)} at step {self.steps[at]}"
        if single := [self.steps[each] for each in np.flatnonzero((self.distances > 1).any(axis=1))]:
            more = " and others" if len(single) > LISTED else ""
            sentence += f", but for {', '.join(map(str, single[:LISTED]))}{more}"
        return f"{sentence}; later steps were not compared" if self.steps[at] < begins else sentence


def _comparable(twin_losses: Any, losses: Any, cosines: Any) -> Any:
    """Return the twins' losses, nan for those that are not of the loss that the step's backward began with."""
    # a loss that is far from the twin's while all gradients agree was multiplied before its backward
    gradients_agree = np.fmin.reduce(cosines, axis=1) > DIFFERING_COSINE
    is_multiplied = gradients_agree & (abs(losses - twin_losses) > FIRST_ORDER * abs(losses))
    # where two are, the record has other losses than backward begins with ("sums in place of means"): no step's is
    # compared, of whichever gradients
    return np.where(is_multiplied | (is_multiplied.sum() > 1) | (twin_losses == 0), math.nan, twin_losses)


def _layer_of(column: int) -> int | None:
    """Return the layer of a column of ``distances``; None for one of the loss."""
    return None if column < LOSS_COLUMNS else column - LOSS_COLUMNS


def _first_lasting_difference(distances: Any) -> _Difference | None:
    """Return the first place and column from which on distances [steps, columns] mostly exceed 1; None without one."""
    for at in range(len(distances)):
        since = np.nan_to_num(distances[at : at + WINDOW])
        is_first = since[0] > np.maximum(1, np.median(since, axis=0) * FIRST_SHARE)
        lasts_at_first = (since[:FIRST_STEPS] > 1).sum(axis=0) >= DIFFERING_AT_FIRST
        lasts = (since > 1).sum(axis=0) >= DIFFERING_STEPS
        if len(columns := np.flatnonzero(is_first & lasts_at_first & lasts)):
            return _Difference(at, _layer_of(int(columns[0])))
    return None


def _factor_of_loss(record: Record) -> Any:
    """Return how many times the last layer's gradients exceed their smallest earlier median, [records]; at least 1."""
    sizes = record.measure("rms", record.layers[-1] if record.layers else "", "grad_output")
    sizes = sizes / np.nan_to_num(record.scalar("loss_scale"), nan=1.0)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of medians where nothing is recorded
        return np.fmax(1.0, sizes / np.fmin.accumulate(earlier(sizes)))


def _median(values: Any) -> float:
    """Return the median of the finite values; nan if there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def first_departures(record: Record) -> str:
    """Return a sentence on what changed first in a run, whatever it is."""
    nothing = f"Nothing exceeds its limit in {len(record.steps)} recorded step{'s' if len(record.steps) != 1 else ''}"
    if not (first := departures(record)):
        return nothing
    names = "; ".join(f"{each}{'' if index else f' at step {each.step}'}" for index, each in enumerate(first[:LISTED]))
    return f"{nothing}. What changed first: {names}"
