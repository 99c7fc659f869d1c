"""The rules on a training: for each fault a row with its kind, limit, test, sentence and remedy.

A test yields hits of all rows that name it, which it gets as arguments by the rows' names; see training.py. These rows
must stand beside each other. Tests don't depend on each other: where the hit of one explains those of a row, the row
says ``unless``. A comment before a row says what its limit is compared with.

Limits, here and in the other files that judge a record, were chosen by how many first findings of `python -m benchmarks
causes` are right with them, and how many of its healthy runs have one above a note. To change one, run

    python -m benchmarks causes --no-write --records FOLDER

before and after: the second run reads the records that the first one kept, so it takes the time of the diagnoses alone.
It prints each run whose first finding, answer of the twin or first departure is wrong, or of healthy runs each with a
finding above a note, and tables of the shares that are right. What the second prints and the first does not is the
price of the change.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

from octavo.inspect.incidents import Finding
from octavo.inspect.of_layers import (
    find_bad_losses,
    find_idle_experts,
    find_large_logits,
    find_new_backward,
    find_new_forward,
    find_nonfinite_backward,
    find_nonfinite_forward,
    find_nonfinite_weights,
    find_smaller_batches,
    find_underflow,
)
from octavo.inspect.of_steps import (
    LOOK,
    USUAL_DECAY,
    find_changed_gradients,
    find_left_gradients,
    find_options,
    find_rates,
    find_repeated_batches,
    find_rise,
    find_slope,
)
from octavo.inspect.of_weights import (
    UNMOVED,
    find_dead_rows,
    find_flushed,
    find_frozen,
    find_large_steps,
    find_leaps,
    find_state,
    find_unmoved,
    find_untied,
    find_written,
)
from octavo.inspect.record import Record, np
from octavo.inspect.training import WRITTEN, Rule, Training
from octavo.inspect.twin import CONTROL_COSINE

# parts of sentences and remedies of several rows
SCHEDULE = "look at the schedule's length and end, and at the lr that it gives"
WORSE = "updates make it worse: look at the rate, at the gradients' sign and what changes them, and at the optimizer"
RESTORE = "load weights and optimizer from the last checkpoint before that step"
RECOVERY = "octavo.schedule.Recovery(octavo.schedule.Phase(octavo.recipes.high_precision()))"
SKIP = "leave out such steps"
AFTER = "after the optimizer's step, and in no layer's input or gradient of its output"
MEAN = "divide the loss once by the batches that it is summed over"
CLEAR_GRADIENTS = "call optimizer.zero_grad() before each step's backward"
FALL = "the gradients are {share} of those before"
BACKWARD = "look at hooks, autograd functions, detach(), and what checkpoints compute again, with which random numbers"
TRAINS = "a weight that trains has requires_grad, a group of the optimizer, and no detach(), no_grad() or way around it"
BELOW = "has updates below the distance of its {}'s numbers: {{share}} of them stay, {{extent}},"


def _about(**fields: Any) -> functools.partial[Rule]:
    """Return a function that makes a Rule of these fields and of a row's, which win where they name one again."""
    return functools.partial(Rule, **fields)


_rate = _about(kind="learning rate", test=find_rates)
_low_rate = functools.partial(_rate, remedy=SCHEDULE, expected="it trains on")
_state = _about(
    kind="state",
    test=find_state,
    remedy='optimizer.load_state_dict(checkpoint["optimizer"])  # where the run resumes',
    expected="moments go on as they were",
    advice="load it",
)
_written = _about(kind="overwritten", limit=WRITTEN, test=find_written, remedy=f"{RESTORE}; find what wrote them")
_forward = _about(kind="nonfinite", test=find_nonfinite_forward)
_backward = _about(kind="nonfinite", test=find_nonfinite_backward, unless=(find_nonfinite_forward,))
_skipped = functools.partial(_backward, remedy=RECOVERY, expected="leaves out steps with such gradients", advice=SKIP)
_weights = _about(
    kind="nonfinite",
    test=find_nonfinite_weights,
    remedy=RESTORE,
    unless=(find_nonfinite_forward, find_nonfinite_backward),
)
_frozen = _about(kind="frozen", test=find_frozen, remedy=TRAINS)
_rise = _about(kind="batch", limit=0.05, test=find_rise)
_underflow = _about(kind="loss scale", limit=0.3, test=find_underflow)
_leap = _about(kind="gradients", test=find_leaps)
_unmoved = _about(kind="unmoved", limit=UNMOVED, test=find_unmoved)
_slope = _about(kind="backward", test=find_slope)

FAULT_RULES: dict[str, Rule] = {
    # times the highest earlier one, after a step that hardly raised it
    "rate_rises": _rate(
        limit=2.0,
        text="{name} rises from {top:.3g} to {most:.3g}",
        remedy='for group in optimizer.param_groups: group["lr"] = min(group["lr"], {top:.3g})',
        expected="the rate of the steps before; look at the schedule and at what resumed the run",
        advice="keep it at {top:.3g}",
    ),
    # a rate that falls to less than one in so many, and stays low
    "rate_falls": _low_rate(limit=30.0, text="{name} falls from {previous:.3g} to {value:.3g}"),
    "rate_is_0": _low_rate(text="{name} is 0"),
    "rate_below_0": _low_rate(text="{name} is below 0: {value:.3g}", expected="each such step goes uphill"),
    # times its last value, of another option of the optimizer that did not change a step earlier
    "option_leaps": _about(kind="options", limit=2.0, test=find_options)(
        text="{option} of group {group} changes from {was:.3g} to {now:.3g}",
        remedy='optimizer.param_groups[{group}]["{option}"] = {was:.3g}',
        advice="keep it at {was:.3g}",
    ),
    # share of a weight that weight decay takes in a step
    "decay_takes": _about(kind="decay", limit=0.02, test=find_options)(
        text="weight decay takes {share} of the weights of group {group} in a step",
        remedy=f'optimizer.param_groups[{{group}}]["{{option}}"] = {USUAL_DECAY}',
        advice="lower it",
    ),
    # times the bound of a moment by its last value and the gradient, or the bound over the moment
    "moments_written": _state(limit=1.3, text="something but the optimizer wrote its moments"),
    "state_is_new": _state(text="the optimizer's state is new: it has seen {now:.0f} steps, after {then:.0f}"),
    # the very first step's change of a weight, over its root mean square: median of layers
    "large_first_step": _about(kind="warm-up", limit=0.1, test=find_large_steps)(
        text="the first step, without a warm-up, changes most weights by {share} of their size",
        remedy="let the learning rate rise to {rate:.3g} over the first steps: a warm-up",
        expected="smaller first updates",
    ),
    # the same of any step, where the update is as large as before for its rate
    "large_steps": _about(kind="learning rate", limit=0.05, test=find_large_steps)(
        text="the learning rate is too high: a step changes most weights by {share} of their size",
        remedy='for group in optimizer.param_groups: group["lr"] /= {times:.3g}',
        expected="steps of about 1 %",
        advice="divide it by {times:.3g}",
        unless=(find_rates,),
    ),
    # the numbers of a batch, over those of all earlier batches, where it lasts
    "batch_shrinks": _about(kind="batch", limit=0.3, test=find_smaller_batches)(
        text="batches have {share} of the numbers that they had",
        remedy="look at the data loader, and at what splits its batches or accumulates them",
    ),
    # how much higher the loss stays, over the earlier loss
    "loss_stays_up": _rise(text="the loss rose and stays up, from {was:.3g} to {now:.3g}{more}", remedy="{look}"),
    "loss_climbs": _rise(kind="drift", text="the loss climbs step by step, from {was:.3g} to {now:.3g}", remedy=WORSE),
    # the curvature of the loss over that of earlier steps
    "batches_repeat": _about(kind="repeats", limit=0.25, test=find_repeated_batches)(
        text="the loss no longer differs from batch to batch, as if the loader gave the same {turn} in turn",
        remedy="look whether the data loader shuffles, goes on, and gives each worker its own data",
    ),
    "loss_is_nonfinite": _about(kind="batch", test=find_bad_losses)(
        text="the loss is inf or NaN, though no layer has one: as of a batch without a label", remedy=LOOK
    ),
    "made_between_records": _forward(
        text="inf or NaN began between two recorded steps",
        remedy="train from the last checkpoint under octavo.inspect.trace_faults, which names the layer",
    ),
    "made_by_batch": _forward(
        kind="batch",
        text="the batch, or what embeds it, brings inf or NaN to the first layer",
        remedy=f"{LOOK}; then {RESTORE}",
        expected="the other layers had none before",
    ),
    "made_by_activation": _forward(
        text="gets inf or NaN in fewer numbers than one of each row: an activation, and no weight, made them",
        remedy=RECOVERY,
        advice=SKIP,
    ),
    "made_by_weight": _forward(
        text="has inf or NaN in its weight, or in what is computed up to {then}: its input has none", remedy=RESTORE
    ),
    "made_by_loss_scale": _backward(
        kind="loss scale",
        text="gradients overflow at a loss scale{scale}",
        remedy="take a loss scale that is lower: let GradScaler halve it",
    ),
    "made_by_backward": _skipped(text="gets a gradient with inf or NaN, which the layers behind it did not have"),
    "made_after_backward": _skipped(
        text="the gradients that the optimizer gets have inf or NaN, and no layer's do: another rank made them, or "
        "what changes gradients after backward",
    ),
    "made_by_update": _weights(text=f"has inf or NaN in its weight {AFTER}"),
    "made_by_updates": _weights(text=f"inf or NaN are in the weights {AFTER}"),
    # share of the last layer's gradients that became 0
    "gradients_underflow": _underflow(
        text="{share} of the last layer's gradients are 0 at a loss scale{scale}",
        remedy="take a loss scale that is higher: they underflow",
    ),
    "labels_ignored": _underflow(
        kind="labels",
        text="{share} of the last layer's gradients are 0",
        remedy="look at the labels that the loss ignores, and at what changes its gradient; in float16 these may "
        "underflow",
    ),
    "weight_untied": _about(kind="untied", test=find_untied)(
        text="no longer shares its weight: {names} were one",
        remedy="tie them again, before the optimizer is made",
        expected="one parameter, which the optimizer trains",
    ),
    # share of a weight's numbers that became 0
    "rows_died": _about(kind="dead rows", limit=1e-4, test=find_dead_rows)(
        text="has 0 in {share} of its weight",
        remedy="give these units their initial weights anew; look for what masks them, and at the bias before",
    ),
    # a change of a weight by something but the optimizer, over the weight's root mean square
    "weight_written": _written(
        text="has a weight that the optimizer did not write: its {name} went from {was:.3g} to {now:.3g}"
    ),
    "weights_written": _written(text="{count} of {all} weights have new numbers, not by the optimizer"),
    "weights_permuted": _written(
        kind="ranks",
        text="{count} of {all} weights have the same numbers in other places, as if ranks had loaded each other's "
        "shards, not by the optimizer",
    ),
    "gradients_left": _about(kind="gradients", test=find_left_gradients)(
        text="gradients of the step before are left when backward begins",
        remedy=CLEAR_GRADIENTS,
    ),
    # their cosine with those of the same step, computed once more
    "gradients_changed": _about(kind="gradients", limit=CONTROL_COSINE, test=find_changed_gradients)(
        text="the gradients that the optimizer gets are not those of its batch (the least cosine is {cosine:.2f})",
        remedy="look at what changes gradients after backward: hooks, what ranks send, an average with other steps' "
        "gradients",
        unless=(find_left_gradients,),
    ),
    # the gradients that the optimizer gets over the median of earlier ones, and half as much over the largest
    "gradients_leap": _leap(
        limit=3.0,
        text="the gradients are {times:.3g} times as large as before, and a step changes most weights {ratio:.3g} "
        "times as much",
        remedy=f"{CLEAR_GRADIENTS}, and {MEAN}; or torch.nn.utils.clip_grad_norm_(model.parameters(), {{norm:.3g}})",
        expected="before each optimizer.step(): no more than twice the last record's",
        advice=f"{CLEAR_GRADIENTS}, and {MEAN}; or clip their norm",
    ),
    # of all layers' gradients, which fall to one in so many
    "gradients_fall": _leap(limit=8.0, text=FALL, remedy=MEAN),
    # such a fall, where the norm of all gradients over the median of earlier ones rises to this
    "clipped_fall": _leap(
        limit=3.0,
        text=f"{FALL}, though their norm rose",
        remedy="divide gradients by the loss scale before clip_grad_norm_: scaler.unscale_(optimizer)",
    ),
    "not_in_optimizer": _frozen(
        text="does not train{others}, though it has gradients: no group of the optimizer has it"
    ),
    "without_gradient": _frozen(text="does not train{others}, and gets no gradient"),
    "nothing_trains": _frozen(
        text="no weight changes{scale}: the optimizer has none of them, or its step() is skipped",
        remedy="look at what the optimizer has, and at what skips it: a GradScaler does where gradients have inf or "
        "NaN",
    ),
    # share of a weight's, or its master's, numbers that a step does not change
    "weight_unmoved": _unmoved(
        text=BELOW.format("weight"),
        remedy='octavo.optim.AdamW(model.parameters(), master="split24")',
        expected="keeps 8 more bits of what is rounded off",
    ),
    "master_unmoved": _unmoved(
        text=BELOW.format("master"),
        remedy='octavo.optim.AdamW(model.parameters(), master="fp32")',
        expected="keeps all that is rounded off",
    ),
    # share of second moments that are flushed
    "moments_flushed": _about(kind="second moments", limit=1e-2, test=find_flushed)(
        text="flushes {share} of its second moments where the first are not, {extent},",
        remedy='octavo.optim.AdamW(model.parameters(), moments="bf16")',
        expected="bf16 has float32's range: nothing is flushed",
    ),
    # tokens of an expert
    "expert_is_idle": _about(kind="idle expert", test=find_idle_experts)(
        text="gives no tokens to expert {expert} of {count}",
        remedy="balance the router: a bias for each expert, or a loss for balance; look at its scores",
    ),
    # times the largest earlier change of a module's output of the same batch, beside its input's and weights' too; in
    # the benchmark's healthy runs at most 3.9
    "new_forward": _about(kind="forward", limit=4.0, test=find_new_forward)(
        text="{who}computes something else of the same input: its output changed by {now}, by {most} at most before",
        remedy="look at what it computes besides its layers' products (its code, mask, positions, mode, buffers), and, "
        "of a run that was resumed, at the weights that it loaded",
        level="warning",
    ),
    # the change of a gradient of the same batch, over the largest and twice the spread of those before
    "new_backward": _about(kind="backward", limit=2.0, test=find_new_backward)(
        text="backward computes another gradient of {name} for the same batch: it changed by {now}, by {most} before",
        remedy=BACKWARD,
        level="warning",
    ),
    # the change of the loss along the gradients over what they say, less what it was; less 1. In healthy runs it is
    # within 0.01 of 1; with experts, whose routing jumps, within 0.1, for which find_slope compares it with its spread
    "slope_leaves": _slope(
        limit=0.04,
        text="backward no longer computes the gradients of what the model computes: along them its loss changes by "
        "{now:.2f} times what they say, by {was:.2f} times before",
        remedy=BACKWARD,
        level="warning",
    ),
    "slope_is_off": _slope(
        limit=0.2,
        text="backward computes other gradients than those of what the model computes: along them its loss changes by "
        "{now:.2f} times what they say",
        remedy=f"{BACKWARD}, unless this is meant",
        level="note",
    ),
    # standard deviation of attention's logits
    "logits_are_large": _about(kind="logits", limit=10.0, test=find_large_logits)(
        text="makes queries and keys so large that attention's logits deviate by about {most:.2g}",
        remedy="norm queries and keys before they are multiplied (QK norm)",
    ),
}


def apply_rules(record: Record) -> list[Finding]:
    """Return a finding for each fault of a record by FAULT_RULES, but for those that another one explains."""
    if not record.steps or not record.layers:
        return []
    run = Training(record)
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of medians where nothing is recorded
        tests = itertools.groupby(FAULT_RULES.items(), key=lambda row: row[1].test)
        hits = [hit for test, rows in tests for hit in test(run, **dict(rows))]
        tests_with_hits = {hit.rule.test for hit in hits}
        return [hit.finding() for hit in hits if tests_with_hits.isdisjoint(hit.rule.unless)]
