"""The tests that read numbers of each step: learning rates and options, losses, and what a twin says of a step.

In quotes stands, beside a condition, a kind of `python -m benchmarks causes` that is said otherwise without it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from octavo.inspect.departures import RATES
from octavo.inspect.incidents import severity_of
from octavo.inspect.record import np
from octavo.inspect.remedies import percent
from octavo.inspect.training import BEFORE, CERTAIN, FEW, Hit, Rule, Training, is_rate
from octavo.inspect.twin import CONTROL, LEFT, REPRODUCED_COSINE, SLOPE
from octavo.inspect.weights import GROUP

WARMING = 1.2  # a learning rate over that of the step before: with more it is a warm-up that raises it
STEADY = 1.5  # the highest learning rate of FEW over the lowest: with less it stays where it is


def find_rates(run: Training, rate_rises: Rule, rate_falls: Rule, rate_is_0: Rule, rate_below_0: Rule) -> Iterator[Hit]:
    """Yield the first learning rate, of the run or a group, that falls below 0, rises again, is 0, or collapses."""

    def first(name: str) -> Hit | None:
        (steps, values), group = run.filled(name), name.partition(GROUP)[2]
        for at, value in enumerate(values):
            previous, since, begins, times = values[max(0, at - 1)], values[at : at + FEW + 1], at, CERTAIN
            lasts = len(since) > FEW  # else it is a schedule's last step: "a schedule to 0"
            # else the rate of a warm-up, or of a restart, that rises from there again
            stays_low = lasts and 0 < max(since) < STEADY * min(since)
            if value < 0:
                rule = rate_below_0
            elif lasts and not any(since):  # "learning rate x 0"
                # the end of a schedule is a choice: "Muon whose rate ends at 0". One that is set to 0 gets there by no
                # steps as before, and one of too few steps long before the end
                falls_as_before = at > 1 and previous < 2 * (values[at - 2] - previous)
                is_near_end = len(values) - at < len(values) / 3
                rule = rate_is_0._replace(level="note") if falls_as_before and is_near_end else rate_is_0
            elif stays_low and max(since) < previous / rate_falls.limit:
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
    if was_steady and values[at] > limit * max(values[:at]) > 0:  # "learning rate x 10"; "one cycle" is not steady
        return at
    # "a rate that compounds": no step is a leap. The first warm-up has no step before it that did not raise it
    last_fall = next((place for place in range(at - 1, 0, -1) if values[place] <= values[place - 1]), 0)
    return last_fall + 1 if last_fall and values[at] > limit * max(values[: last_fall + 1]) > 0 else 0


USUAL_DECAY = 0.1  # the remedy for a weight decay that takes too much


def find_options(run: Training, option_leaps: Rule, decay_takes: Rule) -> Iterator[Hit]:
    """Yield the first leap of another option of the optimizer's groups, and weight decays that take too much in a step.

    The first leap only, of groups' options in the record's order: those after it, and how much their decay takes, are
    not looked at.
    """
    for name in run.record.scalars:
        option, _, group = name.partition(GROUP)
        if not group or option in RATES:
            continue
        steps, values = run.filled(name)
        # of a running mean counts what it takes of the new value: betas of 0.9 and 0.99 are far apart
        numbers = [1 - value if option.split()[0] in ("betas", "momentum", "alpha") else value for value in values]
        texts, is_decay = {"group": group, "option": option}, option == "weight_decay"
        for at in range(1, len(numbers)):
            low, high = sorted(numbers[at - 1 : at + 1])
            # a switch from or to 0 has no factor: "dampening of 1"
            times = high / low / option_leaps.limit if low > 0 else CERTAIN * (high > low)
            was_constant = numbers[at - 1] == numbers[max(0, at - 2)]  # else a schedule changes it
            if was_constant and times > 1:
                rule = option_leaps._replace(kind=decay_takes.kind) if is_decay else option_leaps
                yield Hit(rule, steps[at], times, {**texts, "was": values[at - 1], "now": values[at]})
                return
        is_unusual = is_decay and max(values) > USUAL_DECAY  # else the rate is too high, or as in "Adadelta" usual
        betas, decoupled = (run.scalar(f"{each}{GROUP}{group}")[1] for each in ("betas 0", "decoupled_weight_decay"))
        is_divided = betas and decoupled[:1] != [1]  # Adam's second moments divide a decay that is added to gradients
        if is_unusual and not is_divided and f"lr{GROUP}{group}" in run.record.scalars:
            taken = max(a * b for a, b in zip(values, run.filled(f"lr{GROUP}{group}")[1], strict=True))
            if taken > decay_takes.limit:
                yield Hit(decay_takes, steps[0], taken / decay_takes.limit, {**texts, "share": percent(taken)})


LOSSES_BEFORE = 16  # a loss is compared with so many earlier steps'
ERRORS = 4.0  # the rise of a mean of losses over its standard error
JUMP = 2.5  # an input's size over that before, where the loss rises with it; the last gradient of an output's, too
SAME_LEAP = 3.0  # the change of a module's output over the largest one before: by less it computes the same
LOOK = "look at that step's data and labels, and at what the forward computes otherwise: code, mode, checkpoint"
SAME_FORWARD = "look at that step's data and labels: of the first recorded batch modules compute what they did"


def find_rise(run: Training, loss_stays_up: Rule, loss_climbs: Rule) -> Iterator[Hit]:
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
        more = _largest_rise(run, bisect_left(run.steps, steps[at]))
        texts = {"was": level, "now": now, "more": more, "look": _where_to_look(run, steps[at])}
        is_beyond = min(loss[-FEW:]) > max(loss[:at])  # or it is as likely to be noise
        rule = loss_climbs._replace(level="" if is_beyond else "note") if climbs_on else loss_stays_up
        share = (now - level) / max(abs(level), 1e-9 * abs(now))  # a loss may be 0 or below
        yield Hit(rule, steps[at], share / rule.limit, texts, worst=steps[-1])


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


def _rises(run: Training, at: int) -> dict[str, float]:
    """Return by how many times a layer's input, or the last gradient of an output, is larger from a record on."""
    names = {(layer, "input"): f"the input of {layer}" for layer in run.layers}
    names[run.layers[-1], "grad_output"] = f"the gradient of {run.layers[-1]}'s output"
    sizes = np.stack([run.measure("rms", *where) for where in names], 1)
    before, since = sizes[max(0, at - BEFORE) : at], sizes[at : at + FEW]
    times = np.nan_to_num(np.nanmedian(since, axis=0) / np.nanmedian(before, axis=0))
    return dict(zip(names.values(), times.tolist(), strict=True))


def _largest_rise(run: Training, at: int) -> str:
    """Return in words which of ``_rises`` is the largest, if it is many times as large."""
    name, times = max(_rises(run, at).items(), key=lambda pair: pair[1])
    return f", and {name} is {times:.3g} times as large" if times > JUMP else ""


def _where_to_look(run: Training, step: int) -> str:
    """Return where the cause of a loss may be: not in the forward, if modules compute as before."""
    at = bisect_left(run.steps, step)
    around = slice(max(0, at - 1), at + 2)
    outputs, (*inputs, _) = run.record.of_modules.get("output", np.zeros(0)), _rises(run, at).values()
    if at < FEW or max(inputs) > JUMP or not (outputs[around] > 0).any():
        return LOOK
    return LOOK if (run.forward_leaps[around] > SAME_LEAP).any() else SAME_FORWARD


IN_TURN = 4  # at most so many batches repeat in turn
NOISY = 0.75  # a share of losses' changes: if fewer are falls, the losses differ from batch to batch


def find_repeated_batches(run: Training, batches_repeat: Rule) -> Iterator[Hit]:
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


def find_left_gradients(run: Training, gradients_left: Rule) -> Iterator[Hit]:
    """Yield the first step whose backward begins with gradients of an earlier one, if each step has its update."""
    if run.always_updates:
        for step, share in zip(*run.scalar(LEFT), strict=True):
            if share > gradients_left.limit:
                yield Hit(gradients_left, step, CERTAIN)
                return


def find_changed_gradients(run: Training, gradients_changed: Rule) -> Iterator[Hit]:
    """Yield the first step that was computed once more and has other gradients then, at once and not by and by.

    None where an update takes several recorded steps together, whose gradients it sums.
    """
    (steps, cosines), limit = run.scalar(CONTROL), gradients_changed.limit
    before = [1.0, *cosines]
    low = [place for place, cosine in enumerate(cosines) if cosine < limit and before[place] > REPRODUCED_COSINE]
    if low and run.always_updates:
        yield Hit(gradients_changed, steps[low[0]], CERTAIN, {"cosine": cosines[low[0]]})


def find_slope(run: Training, slope_leaves: Rule, slope_is_off: Rule) -> Iterator[Hit]:
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
