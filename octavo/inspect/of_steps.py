"""The tests that read numbers of each step: learning rates and options, losses, and what a twin says of a step.

rules.py has their rules, and says how a test is written. A place ``at`` is an index of a number's own steps, which
may be more than the recorded ones.

In quotes stands, beside a condition, a kind of `python -m benchmarks causes` that is said otherwise without it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from typing import Any, NamedTuple

from octavo.inspect.departures import RATES
from octavo.inspect.incidents import severity_of
from octavo.inspect.record import np
from octavo.inspect.remedies import percent
from octavo.inspect.training import CERTAIN, FEW, RECORDS_BEFORE, Detection, Detections, Rule, Training, is_rate
from octavo.inspect.twin import LEFTOVER_SHARE, REPRODUCED_COSINE, RERUN_COSINE, SLOPE
from octavo.inspect.weight_updates import GROUP

WARMING = 1.2  # a learning rate over that of the step before: with more it is a warm-up that raises it
STEADY = 1.5  # the highest learning rate of FEW over the lowest: with less it stays where it is


def find_rates(run: Training, rate_rises: Rule, rate_falls: Rule, rate_is_0: Rule, rate_below_0: Rule) -> Detections:
    """Yield the first fault of a learning rate, of the run or a group: it rises, collapses, is 0 or below."""
    detections = []
    for name in filter(is_rate, run.record.scalars):
        steps, rates = run.scalar(name)
        rules = rate_rises, rate_falls, rate_is_0, rate_below_0
        if fault := next(filter(None, (_fault_of_rate(rates, at, *rules) for at in range(len(rates)))), None):
            rule, at, times = fault
            group = name.partition(GROUP)[2]
            texts: dict[str, Any] = {"name": f"the learning rate{f' of group {group}' if group else ''}"}
            texts |= {"previous": rates[max(0, at - 1)], "value": rates[at]}
            texts |= {"most": max(rates[at:]), "top": max(rates[:at], default=rates[at])}
            detections.append(Detection(rule, steps[at], times, texts))
    yield from sorted(detections, key=lambda each: (each.begins, -severity_of(rate_rises.kind, each.times)))[:1]


def _fault_of_rate(
    rates: list[float], at: int, rises: Rule, falls: Rule, is_0: Rule, below_0: Rule
) -> tuple[Rule, int, float] | None:
    """Return the fault of a rate that is seen at a place: (rule, place where it begins, times its limit); or None."""
    if rates[at] < 0:
        return below_0, at, CERTAIN
    since = rates[at : at + FEW + 1]
    if len(since) > FEW:
        # "learning rate x 0", and not only a schedule's last steps: "a schedule to 0"
        if not any(since):
            return (is_0._replace(level="note") if _ends_by_choice(rates, at) else is_0), at, CERTAIN
        # else it is the rate of a warm-up, or of a restart, that rises from there again
        if 0 < max(since) < min(STEADY * min(since), rates[max(0, at - 1)] / falls.limit):
            return falls, at, CERTAIN
    if (begins := _begin_of_rise(rates, at, rises.limit)) is None:
        return None
    return rises, begins, max(rates[begins:]) / max(rates[:begins]) / rises.limit


def _ends_by_choice(rates: list[float], at: int) -> bool:
    """Return whether a rate that is 0 from a place on was meant to end there: "Muon whose rate ends at 0".

    A rate that is set to 0 gets there by no steps as before, and one of a schedule with too few steps long before the
    end.
    """
    falls_as_before = at > 1 and rates[at - 1] < 2 * (rates[at - 2] - rates[at - 1])
    return falls_as_before and len(rates) - at < len(rates) / 3


def _begin_of_rise(rates: list[float], at: int, limit: float) -> int | None:
    """Return where a rate begins to rise that is ``limit`` times the highest one before that; None if it is not.

    It begins at once, unless the rate of the step before is of a warm-up; or after the last step that did not raise it.
    """
    was_steady = at > 1 and rates[at - 1] <= WARMING * rates[at - 2]
    if was_steady and rates[at] > limit * max(rates[:at]) > 0:  # "learning rate x 10"; "one cycle" is not steady
        return at
    # "a rate that compounds": no step is a leap. The first warm-up has no step before it that did not raise it
    last_fall = next((place for place in range(at - 1, 0, -1) if rates[place] <= rates[place - 1]), 0)
    return last_fall + 1 if last_fall and rates[at] > limit * max(rates[: last_fall + 1]) > 0 else None


USUAL_DECAY = 0.1  # the remedy for a weight decay that takes too much


def find_options(run: Training, option_leaps: Rule, decay_takes: Rule) -> Detections:
    """Yield the first leap of another option of the optimizer's groups, and weight decays that take too much in a step.

    The first leap only, of groups' options in the record's order: those after it, and how much their decay takes, are
    not looked at.
    """
    for name in run.record.scalars:
        option, _, group = name.partition(GROUP)
        if not group or option in RATES:
            continue
        is_decay = option == "weight_decay"
        texts = {"group": group, "option": option}
        steps, values = run.scalar(name)
        if (leap := _first_leap(option, values, option_leaps.limit)) is not None:
            at, times = leap
            rule = option_leaps._replace(kind=decay_takes.kind) if is_decay else option_leaps
            yield Detection(rule, steps[at], times, {**texts, "was": values[at - 1], "now": values[at]})
            return
        if is_decay and (taken := _share_of_decay(run, group, values)) > decay_takes.limit:
            yield Detection(decay_takes, steps[0], taken / decay_takes.limit, {**texts, "share": percent(taken)})


def _first_leap(option: str, values: list[float], limit: float) -> tuple[int, float] | None:
    """Return the first place where an option that was constant leaps, and by how many times the limit; or None."""
    # of a running mean counts what it takes of the new value: betas of 0.9 and 0.99 are far apart
    numbers = [1 - value if option.split()[0] in ("betas", "momentum", "alpha") else value for value in values]
    for at in range(1, len(numbers)):
        low, high = sorted(numbers[at - 1 : at + 1])
        # a switch from or to 0 has no factor: "dampening of 1"
        times = high / low / limit if low > 0 else CERTAIN * (high > low)
        was_constant = numbers[at - 1] == numbers[max(0, at - 2)]  # else a schedule changes it
        if was_constant and times > 1:
            return at, times
    return None


def _share_of_decay(run: Training, group: str, decays: list[float]) -> float:
    """Return the largest share of weights that an unusual decay of a group takes in a step; 0 for others."""
    is_unusual = max(decays) > USUAL_DECAY  # else the rate is too high, or as in "Adadelta" usual
    betas = run.scalar(f"betas 0{GROUP}{group}").values
    decoupled = run.scalar(f"decoupled_weight_decay{GROUP}{group}").values
    is_divided = betas and decoupled[:1] != [1]  # Adam's second moments divide a decay that is added to gradients
    if not is_unusual or is_divided or f"lr{GROUP}{group}" not in run.record.scalars:
        return 0.0
    return max(decay * rate for decay, rate in zip(decays, run.scalar(f"lr{GROUP}{group}").values, strict=True))


LOSSES_BEFORE = 16  # a loss is compared with so many earlier steps'
ERRORS = 4.0  # the rise of a mean of losses over its standard error
JUMP = 2.5  # an input's size over that before, where the loss rises with it; the last gradient of an output's, too
SAME_LEAP = 3.0  # the change of a module's output over the largest one before: by less it computes the same
LOOK = "look at that step's data and labels, and at what the forward computes otherwise: code, mode, checkpoint"
SAME_FORWARD = "look at that step's data and labels: of the first recorded batch modules compute what they did"


class _Rise(NamedTuple):
    """A place from which on losses are higher: by how many standard errors, and their means before and from there."""

    errors: float
    at: int
    was: float
    now: float


def find_loss_rise(run: Training, loss_stays_up: Rule, loss_climbs: Rule) -> Detections:
    """Yield a loss that rises and stays up, or goes on to rise."""
    steps, losses = run.loss
    rises = []
    for at in range(4, len(losses) - FEW + 1):
        before, since = losses[max(0, at - LOSSES_BEFORE) : at], losses[at : at + 2 * FEW]
        was, now = float(np.mean(before)), float(np.mean(since))
        error = float(np.std(before)) * math.sqrt(1 / len(before) + 1 / len(since))
        if now - was > max(ERRORS * error, loss_stays_up.limit * abs(was)) and min(since) > was:
            rises.append(_Rise((now - was) / max(error, 1e-9 * abs(now)), at, was, now))
    if (rise := max(rises, default=None)) is None:
        return
    at, climbs_on = _where_it_rises(np.array(losses), rise.at)
    at_record = bisect_left(run.steps, steps[at])
    growth = _growth(run, at_record)
    name, times = max(growth.items(), key=lambda pair: pair[1])
    more = f", and {name} is {times:.3g} times as large" if times > JUMP else ""
    texts = {"was": rise.was, "now": rise.now, "more": more, "look": _where_to_look(run, at_record, growth)}
    ends_above_all = min(losses[-FEW:]) > max(losses[:at])  # or it is as likely to be noise
    rule = loss_climbs._replace(level="" if ends_above_all else "note") if climbs_on else loss_stays_up
    share = (rise.now - rise.was) / max(abs(rise.was), 1e-9 * abs(rise.now))  # a loss may be 0 or below
    yield Detection(rule, steps[at], share / rule.limit, texts, worst=steps[-1])


def _where_it_rises(losses: Any, near: int) -> tuple[int, bool]:
    """Return the place near another where losses [steps] rise, and whether they go on to rise, by the least squares.

    Before its place the loss is constant with noise; from it on it is constant too, or a line that begins there.
    """
    first = max(0, near - LOSSES_BEFORE)
    window = losses[first : near + 4 * FEW]
    fits = []
    for at in range(max(1, near - FEW), min(near + 2 * FEW, len(losses) - 1)):
        before, since = np.split(window, [at - first])
        level = before.mean()
        distance = np.arange(1, len(since) + 1)
        slope = (distance * (since - level)).sum() / (distance**2).sum()
        error_before = ((before - level) ** 2).sum()
        fits.append((error_before + ((since - since.mean()) ** 2).sum(), at, False))
        fits.append((error_before + ((since - level - slope * distance) ** 2).sum(), at, True))
    _, at, climbs_on = min(fits)
    return at, climbs_on


def _growth(run: Training, at: int) -> dict[str, float]:
    """Return by how many times a layer's input, or the last output's gradient, is larger from a recorded step on."""
    names = {(layer, "input"): f"the input of {layer}" for layer in run.layers}
    names[run.layers[-1], "grad_output"] = f"the gradient of {run.layers[-1]}'s output"
    sizes = np.stack([run.record.measure("rms", *where) for where in names], 1)
    before = np.nanmedian(sizes[max(0, at - RECORDS_BEFORE) : at], axis=0)
    times = np.nan_to_num(np.nanmedian(sizes[at : at + FEW], axis=0) / before)
    return dict(zip(names.values(), times.tolist(), strict=True))


def _where_to_look(run: Training, at: int, growth: dict[str, float]) -> str:
    """Return where the cause of a loss may be: not in the forward, if modules compute as before."""
    around = slice(max(0, at - 1), at + 2)
    outputs = run.record.of_modules.get("output", np.zeros(0))
    *inputs, _ = growth.values()
    is_known = at >= FEW and max(inputs) <= JUMP and (outputs[around] > 0).any()
    return SAME_FORWARD if is_known and not (run.forward_leaps[around] > SAME_LEAP).any() else LOOK


MOST_BATCHES = 4  # so many, at most, repeat in turn
NOISY = 0.75  # a share of losses' changes: if fewer are falls, the losses differ from batch to batch


def find_repeated_batches(run: Training, batches_repeat: Rule) -> Detections:
    """Yield a step from which on losses fall as smoothly as those of one batch, or of a few in turn."""
    losses = np.array(run.loss.values)
    for turn in range(1, MOST_BATCHES + 1):
        changes = losses[turn:] - losses[:-turn]
        falls = changes < 0
        bends = np.abs(np.diff(changes))
        for at in range(6, len(bends) - 2 * FEW + 1):
            before, since = slice(max(0, at - LOSSES_BEFORE), at), slice(at, at + 2 * FEW)
            usual = float(np.median(bends[before]))
            now = float(bends[since].max())
            if falls[before].mean() < NOISY and falls[since].all() and usual > 0 and now < batches_repeat.limit * usual:
                yield Detection(batches_repeat, run.loss.steps[at], usual / max(now, 1e-9 * usual), {"turn": turn})
                return


def find_uncleared_gradients(run: Training, gradients_not_cleared: Rule) -> Detections:
    """Yield the first step whose backward begins with gradients of an earlier one, if each step has its update."""
    shares = zip(*run.scalar(LEFTOVER_SHARE), strict=True)
    steps = [step for step, share in shares if share > gradients_not_cleared.limit]
    if steps and run.always_updates:
        yield Detection(gradients_not_cleared, steps[0], CERTAIN)


def find_changed_gradients(run: Training, gradients_changed: Rule) -> Detections:
    """Yield the first step that was computed once more and has other gradients then, at once and not by and by.

    None where an update takes several recorded steps together, whose gradients it sums.
    """
    steps, cosines = run.scalar(RERUN_COSINE)
    pairs = enumerate(itertools.pairwise([1.0, *cosines]))
    low = [place for place, (last, now) in pairs if now < gradients_changed.limit and last > REPRODUCED_COSINE]
    if low and run.always_updates:
        yield Detection(gradients_changed, steps[low[0]], CERTAIN, {"cosine": cosines[low[0]]})


def find_slope(run: Training, slope_leaves: Rule, slope_is_off: Rule) -> Detections:
    """Yield the first of a few recorded steps whose slope is further from 1 than all before; or one that never was 1.

    By the limit, and by more than twice what all before differ by, as experts' routing jumps.
    """
    slopes = run.record.scalar(SLOPE)
    for at in range(2 * FEW, len(slopes) - FEW + 1):
        before, since = slopes[max(0, at - RECORDS_BEFORE) : at], slopes[at : at + FEW]
        was, now = np.nanmedian(before), np.median(since)
        least, most = np.nanmin(before), np.nanmax(before)
        leaves_its_range = (since < least).all() or (since > most).all()
        change = min(abs(now - was), abs(now - 1) - abs(was - 1))
        if leaves_its_range and change > max(slope_leaves.limit, 2 * (most - least)):
            yield Detection(
                slope_leaves, run.steps[at], float(abs(now - was) / slope_leaves.limit), {"was": was, "now": now}
            )
            return
    now = float(np.nanmedian(slopes))
    if abs(now - 1) > slope_is_off.limit:
        yield Detection(slope_is_off, run.steps[0], abs(now - 1) / slope_is_off.limit, {"now": now})
