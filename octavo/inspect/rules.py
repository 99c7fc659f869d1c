"""The rules on a training: each is a fault with its kind, the test that looks for it, limit, sentence and remedy.

To add a rule:

1. Write its test, ``find_...``, in ``of_steps.py``, ``of_weights.py`` or ``of_layers.py``, by what it reads; or extend
   one. It gets a Training and the rules that name it, as arguments by their names here, and yields a Detection where a
   rule holds, with the values that the rule's texts name. Tests don't depend on each other.
2. Add a row to FAULT_RULES; training.Rule says what its fields mean. A comment before the row says what the limit is
   compared with. If the detections of other tests explain this fault, name these tests in ``unless``.
3. A new kind gets a row in ``incidents.KINDS``, by which it explains other findings, and one on docs/inspect.md.
4. Put the fault into a healthy record: a row of FAULTS in ``tests/inspect/test_of_*.py``, for the test's file.

Limits, here and in the other files that judge a record, were chosen by how many first findings of `python -m benchmarks
causes` are right with them, and how many of its healthy runs have one above a note. To change one, run

    python -m benchmarks causes --no-write --records FOLDER

before and after: the second run reads the records that the first one kept, so it takes the time of the diagnoses alone.
It prints each run whose first finding, answer of the twin or first departure is wrong, or of healthy runs each with a
finding above a note, and tables of the shares that are right. What the second prints and the first does not is the
price of the change.
"""

from __future__ import annotations

import warnings
from collections import defaultdict

from octavo.inspect.incidents import Finding
from octavo.inspect.of_layers import (
    find_bad_losses,
    find_changed_backward,
    find_changed_forward,
    find_idle_experts,
    find_large_logits,
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
    find_loss_rise,
    find_options,
    find_rates,
    find_repeated_batches,
    find_slope,
    find_uncleared_gradients,
)
from octavo.inspect.of_weights import (
    UPDATES_LOST,
    find_dead_rows,
    find_flushed_moments,
    find_frozen,
    find_gradient_leaps,
    find_large_steps,
    find_lost_updates,
    find_state,
    find_untied,
    find_written,
)
from octavo.inspect.record import Record, np
from octavo.inspect.training import WRITTEN, Rule, Test, Training
from octavo.inspect.twin import LEAST_RERUN_COSINE

# parts of sentences and remedies of several rules
SCHEDULE = "look at the schedule's length and end, and at the lr that it gives"
RESTORE = "load weights and optimizer from the last checkpoint before that step"
FIND_WRITER = f"{RESTORE}; find what wrote them"
RECOVERY = "octavo.schedule.Recovery(octavo.schedule.Phase(octavo.recipes.high_precision()))"
SKIP = "leave out such steps"
AFTER = "after the optimizer's step, and in no layer's input or gradient of its output"
MEAN = "divide the loss once by the batches that it is summed over"
CLEAR_GRADIENTS = "call optimizer.zero_grad() before each step's backward"
FALL = "the gradients are {share} of those before"
BACKWARD = "look at hooks, autograd functions, detach(), and what checkpoints compute again, with which random numbers"
TRAINS = "a weight that trains has requires_grad, a group of the optimizer, and no detach(), no_grad() or way around it"
BELOW = "has updates below the distance of its {}'s numbers: {{share}} of them stay, {{extent}},"
LOAD_STATE = {
    "remedy": 'optimizer.load_state_dict(checkpoint["optimizer"])  # where the run resumes',
    "expected": "moments go on as they were",
    "advice": "load it",
}
SKIP_STEPS = {"remedy": RECOVERY, "expected": "leaves out steps with such gradients", "advice": SKIP}
# tests of several rules' ``unless``
NONFINITE_BEFORE = find_nonfinite_forward, find_nonfinite_backward

FAULT_RULES: dict[str, Rule] = {
    # times the highest earlier one, after a step that hardly raised it
    "rate_rises": Rule("learning rate", find_rates, limit=2.0).says(
        text="{name} rises from {top:.3g} to {most:.3g}",
        remedy='for group in optimizer.param_groups: group["lr"] = min(group["lr"], {top:.3g})',
        expected="the rate of the steps before; look at the schedule and at what resumed the run",
        advice="keep it at {top:.3g}",
    ),
    # a rate that falls to less than one in so many, and stays low
    "rate_falls": Rule("learning rate", find_rates, limit=30.0).says(
        text="{name} falls from {previous:.3g} to {value:.3g}", remedy=SCHEDULE, expected="it trains on"
    ),
    "rate_is_0": Rule("learning rate", find_rates).says(text="{name} is 0", remedy=SCHEDULE, expected="it trains on"),
    "rate_below_0": Rule("learning rate", find_rates).says(
        text="{name} is below 0: {value:.3g}", remedy=SCHEDULE, expected="each such step goes uphill"
    ),
    # times its last value, of another option of the optimizer that did not change a step earlier
    "option_leaps": Rule("options", find_options, limit=2.0).says(
        text="{option} of group {group} changes from {was:.3g} to {now:.3g}",
        remedy='optimizer.param_groups[{group}]["{option}"] = {was:.3g}',
        advice="keep it at {was:.3g}",
    ),
    # share of a weight that weight decay takes in a step
    "decay_takes": Rule("decay", find_options, limit=0.02).says(
        text="weight decay takes {share} of the weights of group {group} in a step",
        remedy=f'optimizer.param_groups[{{group}}]["{{option}}"] = {USUAL_DECAY}',
        advice="lower it",
    ),
    # times the bound of a moment by its last value and the gradient, or the bound over the moment
    "moments_written": Rule("state", find_state, limit=1.3).says(
        text="something but the optimizer wrote its moments", **LOAD_STATE
    ),
    "state_is_new": Rule("state", find_state).says(
        text="the optimizer's state is new: it has seen {now:.0f} steps, after {then:.0f}", **LOAD_STATE
    ),
    # the very first step's change of a weight, over its root mean square: median of layers
    "large_first_step": Rule("warm-up", find_large_steps, limit=0.1).says(
        text="the first step, without a warm-up, changes most weights by {share} of their size",
        remedy="let the learning rate rise to {rate:.3g} over the first steps: a warm-up",
        expected="smaller first updates",
    ),
    # the same of any step, where the update is as large as before for its rate
    "large_steps": Rule("learning rate", find_large_steps, limit=0.05, unless=(find_rates,)).says(
        text="the learning rate is too high: a step changes most weights by {share} of their size",
        remedy='for group in optimizer.param_groups: group["lr"] /= {times:.3g}',
        expected="steps of about 1 %",
        advice="divide it by {times:.3g}",
    ),
    # the numbers of a batch, over those of all earlier batches, where it lasts
    "batch_shrinks": Rule("batch", find_smaller_batches, limit=0.3).says(
        text="batches have {share} of the numbers that they had",
        remedy="look at the data loader, and at what splits its batches or accumulates them",
    ),
    # how much higher the loss stays, over the earlier loss
    "loss_stays_up": Rule("batch", find_loss_rise, limit=0.05).says(
        text="the loss rose and stays up, from {was:.3g} to {now:.3g}{more}", remedy="{look}"
    ),
    "loss_climbs": Rule("drift", find_loss_rise, limit=0.05).says(
        text="the loss climbs step by step, from {was:.3g} to {now:.3g}",
        remedy="updates make it worse: look at the rate, at the gradients' sign and what changes them, and at the "
        "optimizer",
    ),
    # the curvature of the loss over that of earlier steps
    "batches_repeat": Rule("repeats", find_repeated_batches, limit=0.25).says(
        text="the loss no longer differs from batch to batch, as if the loader gave the same {turn} in turn",
        remedy="look whether the data loader shuffles, goes on, and gives each worker its own data",
    ),
    "loss_is_nonfinite": Rule("batch", find_bad_losses).says(
        text="the loss is inf or NaN, though no layer has one: as of a batch without a label", remedy=LOOK
    ),
    "made_between_records": Rule("nonfinite", find_nonfinite_forward).says(
        text="inf or NaN began between two recorded steps",
        remedy="train from the last checkpoint under octavo.inspect.trace_faults, which names the layer",
    ),
    "made_by_batch": Rule("batch", find_nonfinite_forward).says(
        text="the batch, or what embeds it, brings inf or NaN to the first layer",
        remedy=f"{LOOK}; then {RESTORE}",
        expected="the other layers had none before",
    ),
    "made_by_activation": Rule("nonfinite", find_nonfinite_forward).says(
        text="gets inf or NaN in fewer numbers than one of each row: an activation, and no weight, made them",
        remedy=RECOVERY,
        advice=SKIP,
    ),
    "made_by_weight": Rule("nonfinite", find_nonfinite_forward).says(
        text="has inf or NaN in its weight, or in what is computed up to {then}: its input has none", remedy=RESTORE
    ),
    "made_by_loss_scale": Rule("loss scale", find_nonfinite_backward, unless=(find_nonfinite_forward,)).says(
        text="gradients overflow at a loss scale{scale}",
        remedy="take a loss scale that is lower: let GradScaler halve it",
    ),
    "made_by_backward": Rule("nonfinite", find_nonfinite_backward, unless=(find_nonfinite_forward,)).says(
        text="gets a gradient with inf or NaN, which the layers behind it did not have", **SKIP_STEPS
    ),
    "made_after_backward": Rule("nonfinite", find_nonfinite_backward, unless=(find_nonfinite_forward,)).says(
        text="the gradients that the optimizer gets have inf or NaN, and no layer's do: another rank made them, or "
        "what changes gradients after backward",
        **SKIP_STEPS,
    ),
    "made_by_update": Rule("nonfinite", find_nonfinite_weights, unless=NONFINITE_BEFORE).says(
        text=f"has inf or NaN in its weight {AFTER}", remedy=RESTORE
    ),
    "made_by_updates": Rule("nonfinite", find_nonfinite_weights, unless=NONFINITE_BEFORE).says(
        text=f"inf or NaN are in the weights {AFTER}", remedy=RESTORE
    ),
    # share of the last layer's gradients that became 0
    "gradients_underflow": Rule("loss scale", find_underflow, limit=0.3).says(
        text="{share} of the last layer's gradients are 0 at a loss scale{scale}",
        remedy="take a loss scale that is higher: they underflow",
    ),
    "labels_ignored": Rule("labels", find_underflow, limit=0.3).says(
        text="{share} of the last layer's gradients are 0",
        remedy="look at the labels that the loss ignores, and at what changes its gradient; in float16 these may "
        "underflow",
    ),
    "weight_untied": Rule("untied", find_untied).says(
        text="no longer shares its weight: {names} were one",
        remedy="tie them again, before the optimizer is made",
        expected="one parameter, which the optimizer trains",
    ),
    # share of a weight's numbers that became 0
    "rows_died": Rule("dead rows", find_dead_rows, limit=1e-4).says(
        text="has 0 in {share} of its weight",
        remedy="give these units their initial weights anew; look for what masks them, and at the bias before",
    ),
    # a change of a weight by something but the optimizer, over the weight's root mean square
    "weight_written": Rule("overwritten", find_written, limit=WRITTEN).says(
        text="has a weight that the optimizer did not write: its {name} went from {was:.3g} to {now:.3g}",
        remedy=FIND_WRITER,
    ),
    "weights_written": Rule("overwritten", find_written, limit=WRITTEN).says(
        text="{count} of {all} weights have new numbers, not by the optimizer", remedy=FIND_WRITER
    ),
    "weights_permuted": Rule("ranks", find_written, limit=WRITTEN).says(
        text="{count} of {all} weights have the same numbers in other places, as if ranks had loaded each other's "
        "shards, not by the optimizer",
        remedy=FIND_WRITER,
    ),
    "gradients_not_cleared": Rule("gradients", find_uncleared_gradients).says(
        text="gradients of the step before are left when backward begins", remedy=CLEAR_GRADIENTS
    ),
    # their cosine with those of the same step, computed once more
    "gradients_changed": Rule(
        "gradients", find_changed_gradients, limit=LEAST_RERUN_COSINE, unless=(find_uncleared_gradients,)
    ).says(
        text="the gradients that the optimizer gets are not those of its batch (the least cosine is {cosine:.2f})",
        remedy="look at what changes gradients after backward: hooks, what ranks send, an average with other "
        "steps' gradients",
    ),
    # the gradients that the optimizer gets over the median of earlier ones, and half as much over the largest
    "gradients_leap": Rule("gradients", find_gradient_leaps, limit=3.0).says(
        text="the gradients are {times:.3g} times as large as before, and a step changes most weights {ratio:.3g} "
        "times as much",
        remedy=f"{CLEAR_GRADIENTS}, and {MEAN}; or torch.nn.utils.clip_grad_norm_(model.parameters(), {{norm:.3g}})",
        expected="before each optimizer.step(): no more than twice the last record's",
        advice=f"{CLEAR_GRADIENTS}, and {MEAN}; or clip their norm",
    ),
    # of all layers' gradients, which fall to one in so many
    "gradients_fall": Rule("gradients", find_gradient_leaps, limit=8.0).says(text=FALL, remedy=MEAN),
    # such a fall, where the norm of all gradients over the median of earlier ones rises to this
    "clipped_fall": Rule("gradients", find_gradient_leaps, limit=3.0).says(
        text=f"{FALL}, though their norm rose",
        remedy="divide gradients by the loss scale before clip_grad_norm_: scaler.unscale_(optimizer)",
    ),
    "not_in_optimizer": Rule("frozen", find_frozen).says(
        text="does not train{others}, though it has gradients: no group of the optimizer has it", remedy=TRAINS
    ),
    "without_gradient": Rule("frozen", find_frozen).says(
        text="does not train{others}, and gets no gradient", remedy=TRAINS
    ),
    "nothing_trains": Rule("frozen", find_frozen).says(
        text="no weight changes{scale}: the optimizer has none of them, or its step() is skipped",
        remedy="look at what the optimizer has, and at what skips it: a GradScaler does where gradients have inf "
        "or NaN",
    ),
    # share of a weight's, or its master's, numbers that a step does not change
    "weight_updates_lost": Rule("unmoved", find_lost_updates, limit=UPDATES_LOST).says(
        text=BELOW.format("weight"),
        remedy='octavo.optim.AdamW(model.parameters(), master="split24")',
        expected="keeps 8 more bits of what is rounded off",
    ),
    "master_updates_lost": Rule("unmoved", find_lost_updates, limit=UPDATES_LOST).says(
        text=BELOW.format("master"),
        remedy='octavo.optim.AdamW(model.parameters(), master="fp32")',
        expected="keeps all that is rounded off",
    ),
    # share of second moments that are flushed
    "moments_flushed": Rule("second moments", find_flushed_moments, limit=1e-2).says(
        text="flushes {share} of its second moments where the first are not, {extent},",
        remedy='octavo.optim.AdamW(model.parameters(), moments="bf16")',
        expected="bf16 has float32's range: nothing is flushed",
    ),
    # tokens of an expert
    "expert_is_idle": Rule("idle expert", find_idle_experts).says(
        text="gives no tokens to expert {expert} of {count}",
        remedy="balance the router: a bias for each expert, or a loss for balance; look at its scores",
    ),
    # times the largest earlier change of a module's output of the same batch, beside its input's and weights' too;
    # in the benchmark's healthy runs at most 3.9
    "forward_changed": Rule("forward", find_changed_forward, limit=4.0, level="warning").says(
        text="{who}computes something else of the same input: its output changed by {now}, by {most} at most before",
        remedy="look at what it computes besides its layers' products (its code, mask, positions, mode, buffers), "
        "and, of a run that was resumed, at the weights that it loaded",
    ),
    # the change of a gradient of the same batch, over the largest and twice the spread of those before
    "backward_changed": Rule("backward", find_changed_backward, limit=2.0, level="warning").says(
        text="backward computes another gradient of {name} for the same batch: it changed by {now}, by {most} before",
        remedy=BACKWARD,
    ),
    # the change of the loss along the gradients over what they say, less what it was; less 1. In healthy runs it is
    # within 0.01 of 1; with experts, whose routing jumps, within 0.1: find_slope compares it with its spread
    "slope_leaves": Rule("backward", find_slope, limit=0.04, level="warning").says(
        text="backward no longer computes the gradients of what the model computes: along them its loss changes by "
        "{now:.2f} times what they say, by {was:.2f} times before",
        remedy=BACKWARD,
    ),
    "slope_is_off": Rule("backward", find_slope, limit=0.2, level="note").says(
        text="backward computes other gradients than those of what the model computes: along them its loss changes "
        "by {now:.2f} times what they say",
        remedy=f"{BACKWARD}, unless this is meant",
    ),
    # standard deviation of attention's logits
    "logits_are_large": Rule("logits", find_large_logits, limit=10.0).says(
        text="makes queries and keys so large that attention's logits deviate by about {most:.2g}",
        remedy="norm queries and keys before they are multiplied (QK norm)",
    ),
}


def apply_rules(record: Record) -> list[Finding]:
    """Return a finding for each fault of a record by FAULT_RULES, but for those that another one explains."""
    if not record.steps or not record.layers:
        return []
    run = Training(record)
    rules_by_test: dict[Test, dict[str, Rule]] = defaultdict(dict)
    for name, rule in FAULT_RULES.items():
        rules_by_test[rule.test][name] = rule
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of medians where nothing is recorded
        detections = [each for test, rules in rules_by_test.items() for each in test(run, **rules)]
        tests_with_detections = {each.rule.test for each in detections}
        return [each.finding() for each in detections if tests_with_detections.isdisjoint(each.rule.unless)]
