"""The tests that read weights, the gradients that the optimizer gets, its moments, and its updates.

In quotes stands, beside a condition, a kind of `python -m benchmarks causes` that is said otherwise without it.
"""

from __future__ import annotations

import itertools
from typing import Any

from octavo.inspect.incidents import worst_stretch
from octavo.inspect.record import np
from octavo.inspect.remedies import percent
from octavo.inspect.training import (
    CERTAIN,
    FEW,
    LIKELY,
    Detection,
    Detections,
    Rule,
    Training,
    earlier,
    first_true,
    is_rate,
)
from octavo.inspect.weight_updates import FROZEN, GROUP

NO_MEAN = 5.0  # a second moment over the larger one of the last and the gradient's square, beside a rule's limit


def find_state(run: Training, moments_written: Rule, state_is_new: Rule) -> Detections:
    """Yield a state that is new, and second moments that can't be a mean of the last ones and the gradient."""
    for (_, then), (step, now) in itertools.pairwise(zip(*run.scalar("state_age"), strict=True)):
        if now < then:
            yield Detection(state_is_new, step, CERTAIN, {"now": now, "then": then})
    if (name := f"betas 1{GROUP}0") in run.record.scalars:
        moments = run.weights["second_moment"]
        then, now = moments[:-1], moments[1:]
        decay = run.record.last(name)[1:, None] ** run.gaps[1:]
        largest = NO_MEAN * moments_written.limit * np.fmax(then, run.weights["gradient"][1:] ** 2)
        is_off = (now * moments_written.limit < decay * then) | ((run.gaps[1:] == 1) & (now > largest))
        for at in np.flatnonzero(is_off.mean(axis=1) > 0.5)[:1]:
            yield Detection(moments_written, run.steps[at + 1], CERTAIN)


NEAR_0 = 0.01  # a weight's size over that of the largest layer's: one that begins with less begins at 0
LARGER = 2.0  # an update over those before: with more it isn't the rate that makes a step too large


def find_large_steps(run: Training, large_first_step: Rule, large_steps: Rule) -> Detections:
    """Yield a very first step that is too large, or steps that are, though no larger than the rate makes them."""
    ages = run.scalar("state_age").values
    rates = run.rate.values
    losses = run.loss.values
    begins_at_0 = run.rms[0] < NEAR_0 * np.nanmax(run.rms[0])  # which any step changes by a large share
    sizes = np.where(begins_at_0 & ~begins_at_0.all(), np.nan, run.rms)
    shares = np.nanmedian(run.weights["update"][:, : len(run.layers)] / sizes, axis=1)
    is_fresh = bool(rates and ages) and ages[0] <= 1 and rates[0] >= max(rates) / 2
    is_lost = len(losses) > FEW and not np.median(losses[-FEW:]) < losses[0]  # whose first is a random guess's
    if is_fresh and shares[0] > large_first_step.limit and not is_lost:
        texts = {"share": percent(shares[0]), "rate": max(rates)}
        yield Detection(large_first_step, run.steps[0], shares[0] / large_first_step.limit, texts)
    elif rates:
        over = (shares > large_steps.limit) & ~(np.nanmedian(run.update_leaps, axis=1) > LARGER)
        if (at := first_true(over)) is not None:
            worst = int(np.where(over, shares, 0).argmax())
            texts = {"share": percent(shares[worst]), "times": shares[worst] / (large_steps.limit / 5)}
            times = shares[worst] / large_steps.limit
            yield Detection(large_steps, run.steps[at], times, texts, worst=run.steps[worst])


def find_untied(run: Training, weight_untied: Rule) -> Detections:
    """Yield weights that were one parameter and are two."""
    for step, kind, names in run.record.events:
        if kind == weight_untied.kind:
            layer = next((name for name in run.layers if f"{name}.weight" in names.split(" and ")), "")
            yield Detection(weight_untied, step, CERTAIN, {"names": names}, (layer, ""))


def find_dead_rows(run: Training, rows_died: Rule) -> Detections:
    """Yield layers with rows of the weight that became 0; none if most layers have some."""
    zeros = np.nan_to_num(np.stack([run.record.measure("zeros", layer, "weight") for layer in run.layers], 1))
    over = zeros > rows_died.limit + 2 * zeros[0]
    places = np.flatnonzero(over.any(axis=0))
    for place in places if len(places) <= len(run.layers) / 2 else ():
        texts = {"share": percent(float(zeros[:, place].max()))}
        yield Detection(rows_died, run.steps[over[:, place].argmax()], LIKELY, texts, (run.layers[place], "weight"))


def find_written(run: Training, weight_written: Rule, weights_written: Rule, weights_permuted: Rule) -> Detections:
    """Yield the first step in which something but the optimizer wrote weights."""
    over = run.written > weight_written.limit
    if (at := first_true(over)) is None:
        return
    where = "", ""
    share = float(run.written[at].max())
    last = max(0, at - 1)
    texts: dict[str, Any] = {"count": int(over[at].sum()), "all": len(run.names)}
    if texts["count"] >= max(2, len(run.layers) / 2):
        is_permuted = np.abs(run.rms[at] / run.rms[last] - 1) < 0.1
        is_permuted &= run.written[at, : len(run.layers)] > 1  # unrelated numbers, not averages of earlier ones
        rule = weights_permuted if is_permuted.mean() > 0.5 else weights_written
        share = max(share, 4 * rule.limit)  # no accident of sampling
    else:
        rule = weight_written
        place = int(run.written[at].argmax())
        where = run.names[place], "weight"
        is_layer = place < len(run.layers)
        sizes = run.record.measure("amax", *where) if is_layer else run.weights["size"][:, place]
        texts = {"name": "amax" if is_layer else "size", "was": sizes[last], "now": sizes[at]}
    yield Detection(rule, run.steps[at], share / rule.limit, texts, where, numbers={"changed": share})


def find_gradient_leaps(run: Training, gradients_leap: Rule, gradients_fall: Rule, clipped_fall: Rule) -> Detections:
    """Yield gradients of all layers that leap, or that fall."""
    gradients = run.weights["gradient"]
    gradients = np.where(np.isinf(gradients), np.nan, gradients)  # of inf there is no factor: another test's
    outputs = np.stack([run.record.measure("rms", layer, "grad_output") for layer in run.layers], 1)
    outputs /= np.nan_to_num(run.record.last("loss_scale"), nan=1.0)[:, None]
    # of most layers; over the largest of earlier ones too, as gradients of noisy batches often leap over the median
    over_largest = np.nanmedian((gradients / earlier(gradients, np.nanmax))[:, : len(run.layers)], axis=1)
    typical, of_outputs, norms = (
        np.nanmedian(values / earlier(np.where(values > 0, values, np.nan)), axis=1)  # nothing is a factor over 0
        for values in (gradients, outputs, run.norms[:, None])  # norms: of all gradients, before they are clipped
    )
    for factors in (typical, over_largest, of_outputs, norms):
        factors[:FEW] = factors[run.is_written] = np.nan  # too few earlier recorded steps, or another cause
    fallen = np.fmin(typical, np.maximum(norms, of_outputs))  # clipping makes up for a fall
    # within one recorded step, of which the one before may have taken half; and it lasts FEW more
    falls = fallen < 2 * np.roll(fallen, 1) / gradients_fall.limit
    for distance in range(FEW + 1):  # the first recorded steps, nan, roll to the end: False
        falls &= np.roll(fallen, -distance) < 1 / gradients_fall.limit
    if (over := (typical > gradients_leap.limit) & ~(over_largest < gradients_leap.limit / 2)).any():
        yield _leap(run, gradients_leap, over, np.nan_to_num(typical))
    elif (at := first_true(falls)) is not None:
        share = float(fallen[at])
        rule = clipped_fall if norms[at] > clipped_fall.limit else gradients_fall
        times = 1 / max(share, 1e-9) / gradients_fall.limit
        texts = {"share": percent(share)}
        yield Detection(rule, run.steps[at], times, texts, worst=run.steps[at + FEW], numbers={"times": share})


LEAP_BEGINS = 1.2  # gradients over the median before: from the recorded step on with more a leap goes on


def _leap(run: Training, rule: Rule, over: Any, times_of: Any) -> Detection:
    """Return the detection of gradients ``times_of`` times as large as earlier ones.

    It begins in the recorded step with the largest part of the leap.
    """
    begins, worst = worst_stretch(over, times_of)
    while begins > 2 and times_of[begins - 1] > LEAP_BEGINS:
        begins -= 1
    begins += int((times_of[begins : worst + 1] / np.fmax(times_of[begins - 1 : worst], 1)).argmax())
    times = float(times_of[worst])
    ratio = float(np.nanmedian(run.update_leaps[worst]))  # of updates
    texts = {"times": times, "ratio": ratio, "norm": 2 * run.norms[begins - 1]}
    if ratio < 1:  # an optimizer that divides by their size makes no larger steps
        rule = rule._replace(level="note")
    over_limit = times * max(1.0, ratio) / rule.limit
    return Detection(rule, run.steps[begins], over_limit, texts, worst=run.steps[worst], numbers={"times": times})


STOPPED = 1e-3  # a learning rate over its highest: with less nothing trains
UPDATES_LOST = 0.9  # a share of a weight's numbers: a step does not change so many


def find_frozen(run: Training, not_in_optimizer: Rule, without_gradient: Rule, nothing_trains: Rule) -> Detections:
    """Yield weights that no longer change; those of layers also if they get no gradient, or never change."""
    gradients = run.weights["gradient"]
    scales = run.record.last("loss_scale")
    rates_of_groups = [run.scalar(name).values for name in run.record.scalars if is_rate(name)]
    rate_stops_them = any(max(values[-FEW:]) <= STOPPED * max(values) for values in rates_of_groups)
    names_frozen = (text.split(", ") for _, kind, text in run.record.events if kind == FROZEN)
    frozen_by_choice = {name.removesuffix(".weight") for name in itertools.chain(*names_frozen)}
    for at, places in _stopped_weights(run).items():
        layers = [place for place in places if place < len(run.layers)] or places
        first, last = ((run.names[place], "weight") for place in (layers[0], layers[-1]))
        # as the base of an adapter, or by requires_grad_(False) in the training: "frozen part by part"
        is_choice = at == 0 or frozen_by_choice >= {run.names[place] for place in places}
        gradients_are_known = np.isfinite(gradients[at:]).any()  # some were there to be read: "updates in backward"
        rows = (
            (nothing_trains, ("", ""), len(places) == len(run.names)),
            (None, first, not gradients_are_known),
            (not_in_optimizer, first, (gradients[at:, places] > 0).any()),
            # they are cut off behind the last of these layers
            (without_gradient._replace(level="note"), last, is_choice),
            (without_gradient, last, True),
        )
        rule, where = next((rule, where) for rule, where, holds in rows if holds)
        # where the rate fell to 0, find_rates says so
        if rule is None or (rate_stops_them and rule in (nothing_trains, not_in_optimizer)):
            continue
        scale = f", and the loss scale fell to {scales[-1]:.3g}" if scales[-1] < scales[max(0, at - 1)] / 4 else ""
        others = f", nor do {len(places) - 1} other weights" if len(places) > 1 else ""
        yield Detection(rule, run.steps[at], LIKELY, {"others": others, "scale": scale}, where)


def _stopped_weights(run: Training) -> dict[int, list[int]]:
    """Return the places of weights that should change and don't, by the recorded step from which on they don't."""
    gradients = run.weights["gradient"]
    count = len(run.layers)
    still = (run.weights["update"] == 0) & ~(run.weights["master_update"] > 0)  # rounding may lose a master's updates
    still[:, :count] |= gradients[:, :count] == 0  # an embedding's sampled rows may get no gradient
    changed = np.where(still, np.nan, run.weights["changed"])
    rounding_stops_them = np.nanmedian(changed) < 1 - UPDATES_LOST  # find_lost_updates says it of "updates rounded off"
    trains = min(run.rate.values[-FEW:], default=0) > 0 and not rounding_stops_them
    lasts = np.flip(np.minimum.accumulate(np.flip(still, 0), 0), 0)  # to the end
    places_by_record: dict[int, list[int]] = {}
    # in a recorded step or two an expert may get no tokens
    for place in np.flatnonzero(lasts[-FEW:].all(axis=0) & (len(still) >= FEW)):
        at = int(lasts[:, place].argmax())
        # else it may be frozen by choice, as in "all blocks frozen"
        has_gradients = ((gradients[at:, place] > 0) & (gradients[at:, place] < np.inf)).all()
        others_change = (changed[at:] > 0.5).mean() > 0.25  # neither a rate of 0 nor a skipped step stops this one
        # or all stop, as each step is skipped whose gradients are inf: "loss scale too high"
        should_change = others_change or (trains and (has_gradients or still[at:].all()))
        if should_change and (at or place < count):  # an embedding or a norm that never trains is a choice
            places_by_record.setdefault(at, []).append(place)
    return places_by_record


def find_lost_updates(run: Training, weight_updates_lost: Rule, master_updates_lost: Rule) -> Detections:
    """Yield updates that rounding loses, where it is worst."""
    weights = {name: values[:, : len(run.layers)] for name, values in run.weights.items()}  # [records, layers]
    has_master = weights["master_update"] > 0  # rounding the master then loses updates, not rounding the weight
    changed = np.where(weights["update"] > 0, weights["changed"], np.nan)
    unchanged = 1 - np.where(has_master, weights["master_changed"], changed)
    yield from _worst_layer(run, unchanged, weight_updates_lost, master_updates_lost)


def find_flushed_moments(run: Training, moments_flushed: Rule) -> Detections:
    """Yield second moments that are flushed, where it is worst."""
    yield from _worst_layer(run, run.weights["second_flushed"][:, : len(run.layers)], moments_flushed, moments_flushed)


def _worst_layer(run: Training, values: Any, of_weight: Rule, of_master: Rule) -> Detections:
    """Yield the layer where a measure [records, layers] exceeds a limit by most: of its weight, or of its master."""
    over = values > of_weight.limit
    if over.any():
        place = int(np.where(over, values, -1).max(axis=0).argmax())
        begins, worst = worst_stretch(over[:, place], values[:, place])
        numbers = {name: float(values_of_name[worst, place]) for name, values_of_name in run.weights.items()}
        rule = of_master if numbers["master_update"] > 0 else of_weight
        value = float(values[worst, place])
        texts = {"share": percent(value), "extent": f"in {over[worst].sum()} of {len(over[0])} layers"}
        where = run.layers[place], "weight"
        yield Detection(rule, run.steps[begins], value / rule.limit, texts, where, run.steps[worst], numbers)
