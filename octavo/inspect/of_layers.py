"""The tests that read layers: their inputs, gradients and experts, what is inf or NaN, and the first batch again."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from octavo.inspect.departures import innermost
from octavo.inspect.record import np
from octavo.inspect.remedies import percent
from octavo.inspect.training import CERTAIN, FEW, LIKELY, Detection, Detections, Rule, Training, earlier, first_true
from octavo.scaling.recipe import ROLES


def find_smaller_batches(run: Training, batch_shrinks: Rule) -> Detections:
    """Yield a step from which on batches have only a part of the numbers that all earlier ones had."""
    numbers = run.record.measure("elements", run.layers[0], "input")
    for at in range(2 * FEW, len(numbers) - FEW + 1):
        share = float(np.nanmax(numbers[at:]) / np.nanmin(numbers[:at]))
        if share <= batch_shrinks.limit:
            yield Detection(batch_shrinks, run.steps[at], 2 / share, {"share": percent(share)}, worst=run.steps[-1])
            return


def find_bad_losses(run: Training, loss_is_nonfinite: Rule) -> Detections:
    """Yield the first loss that is inf or NaN, if no layer has one in its recorded step."""
    for step in run.bad_losses[:1]:
        if step <= run.steps[-1] and not (run.record.measures["nonfinite"][bisect_left(run.steps, step)] > 0).any():
            yield Detection(loss_is_nonfinite, step, math.inf)


def _first_nonfinite(run: Training) -> Iterator[tuple[int, dict[str, list[int]]]]:
    """Yield the first recorded step with inf or NaN, if any, and {role: ascending places of layers with one in it}."""
    faulty = run.record.measures["nonfinite"] > 0
    if (at := first_true(faulty)) is not None:
        rows = [run.record.rows[place] for place in np.flatnonzero(faulty[at])]
        yield at, {role: sorted({run.layers.index(row.layer) for row in rows if row.role == role}) for role in ROLES}


def find_nonfinite_forward(
    run: Training, made_between_records: Rule, made_by_batch: Rule, made_by_activation: Rule, made_by_weight: Rule
) -> Detections:
    """Yield what made the first inf or NaN, if forward had it: the layer before the first input with one."""
    for at, places in _first_nonfinite(run):
        step, step_before = run.steps[at], run.steps[at - 1] if at else -1
        names = [run.layers[place] for place in places["input"]]
        if step_before < min(run.bad_losses, default=math.inf) < step:
            yield Detection(made_between_records, min(run.bad_losses), math.inf)
        elif 0 in places["input"]:
            yield Detection(made_by_batch, step, math.inf)
        elif names and _is_rare(run, at, names[0]):
            yield Detection(made_by_activation, step, math.inf, where=(names[0], "input"))
        elif names:
            layer_before = run.layers[places["input"][0] - 1]
            yield Detection(made_by_weight, step, math.inf, {"then": names[0]}, (layer_before, "weight"))
        elif step in run.bad_losses and places["grad_output"]:
            yield Detection(made_by_weight, step, math.inf, {"then": "the loss"}, (run.layers[-1], "weight"))


FLOAT16 = 2.0**13  # finite gradients, where others are inf: so large they are float16's


def find_nonfinite_backward(
    run: Training, made_by_loss_scale: Rule, made_by_backward: Rule, made_after_backward: Rule
) -> Detections:
    """Yield what made the first inf or NaN, if gradients have one: the last layer with one in its output's gradient."""
    for at, places in _first_nonfinite(run):
        if gradients := places["grad_output"]:
            where = run.layers[gradients[-1]], "grad_output"
            is_float16 = "loss_scale" in run.record.scalars or run.record.measure("amax", *where)[at] > FLOAT16
            if gradients[-1] == len(run.layers) - 1 and is_float16:
                yield Detection(made_by_loss_scale, run.steps[at], math.inf, {"scale": run.loss_scale(at)})
            else:
                yield Detection(made_by_backward, run.steps[at], math.inf, where=where)
        elif np.isinf(run.weights["gradient"][at]).any() or (
            run.record.is_written("grad_norm")[at] and not math.isfinite(run.record.last("grad_norm")[at])
        ):
            yield Detection(made_after_backward, run.steps[at], math.inf)


def find_nonfinite_weights(run: Training, made_by_update: Rule, made_by_updates: Rule) -> Detections:
    """Yield the weights with the first inf or NaN."""
    for at, places in _first_nonfinite(run):
        names = [run.layers[place] for place in places["weight"]]
        rule, where = (made_by_update, (names[0], "weight")) if len(names) == 1 else (made_by_updates, ("", ""))
        yield Detection(rule, run.steps[at], math.inf, where=where)


def _is_rare(run: Training, at: int, layer: str) -> bool:
    """Return whether a layer's input has inf or NaN in less than half of its rows, as no weight would cause."""
    row = run.record.places[layer, "input"]
    input_size, weight_size, output_size = (np.nanmax(run.record.measure("elements", layer, role)) for role in ROLES)
    features = run.record.rows[row].features or math.sqrt(input_size * weight_size / output_size)
    return float(run.record.of_worst.measures["nonfinite"][at, row]) * features < 0.5


def find_underflow(run: Training, gradients_underflow: Rule, labels_ignored: Rule) -> Detections:
    """Yield where too many of the last layer's gradients become 0: without a loss scale no number underflows."""
    rule = gradients_underflow if "loss_scale" in run.record.scalars else labels_ignored
    zeros = run.record.measure("zeros", run.layers[-1], "grad_output")
    if (at := first_true(zeros > rule.limit + np.nan_to_num(zeros[0]))) is not None:
        texts = {"share": percent(float(np.nanmax(zeros))), "scale": run.loss_scale(at)}
        yield Detection(rule, run.steps[at], CERTAIN, texts)


BUSY = 16  # the last recorded step's tokens for each expert: with fewer an expert may get none by chance


def find_idle_experts(run: Training, expert_is_idle: Rule) -> Detections:
    """Yield experts that get no tokens up to the last recorded step."""
    for load in run.record.expert_loads():
        for expert, step in load.idle.items():
            if len(run.steps) - run.steps.index(step) >= FEW and sum(load.tokens) >= BUSY * len(load.tokens):
                texts = {"expert": expert, "count": len(load.tokens)}
                yield Detection(expert_is_idle, step, LIKELY, texts, (load.layer, "input"), numbers={"expert": expert})


def find_changed_forward(run: Training, forward_changed: Rule) -> Detections:
    """Yield the innermost module whose output of the same batch first changes by more than its past explains.

    By more than earlier outputs did, than its input does beside them, and than weights inside of it do beside theirs.
    """
    modules = run.record.modules
    over = run.forward_leaps > forward_changed.limit
    if (at := first_true(over)) is not None:
        changes = run.record.of_modules["output"]
        layer = innermost([module for module, is_over in zip(modules, over[at], strict=True) if is_over])
        place = modules.index(layer)
        numbers = {"now": float(changes[at, place]), "most": float(np.nanmax(changes[:at, place]))}
        texts = {**{name: percent(value) for name, value in numbers.items()}, "who": "" if layer else "the model "}
        times = float(run.forward_leaps[at, place]) / forward_changed.limit
        yield Detection(forward_changed, run.steps[at], times, texts, (layer, ""), numbers=numbers)


OUTPUT_LEAP = 1.5  # the change of a module's output over the largest one before: by more gradients change with it
# the change of a parameter's gradient over its size: less means nothing; where a token goes to another expert some
# change by 0.4
TURNED = 0.5


def find_changed_backward(run: Training, backward_changed: Rule) -> Detections:
    """Yield the first recorded step whose gradients of the same batch are others, by more than the past explains.

    The layer is the last one whose gradient does: where backward begins to differ.
    """
    leaps = _backward_leaps(run)
    over = leaps > backward_changed.limit
    if (at := first_true(over)) is not None:
        place = int(np.flatnonzero(over[at])[-1])
        changes = run.record.of_parameters["change"][:, place]
        name = run.record.parameters[place].removesuffix(".weight")
        texts = {"name": name, "now": percent(float(changes[at])), "most": percent(float(np.nanmax(changes[:at])))}
        yield Detection(backward_changed, run.steps[at], float(leaps[at, place]) / backward_changed.limit, texts)


def _backward_leaps(run: Training) -> Any:
    """Return the factors by which parameters' gradients of one batch changed more than ever: [records, parameters].

    Over the largest change before and twice what all before differ by, and over the changes of weights. 0 where it
    means nothing, or where outputs of the same batch changed more than ever too.
    """
    if not run.record.parameters:
        return np.zeros((len(run.steps), 0))
    changes = run.record.of_parameters["change"]
    most, least = earlier(changes, np.nanmax), earlier(changes, np.nanmin)
    leaps = changes / (most + 2 * (most - least)) / run.weights_changed.max(axis=1, keepdims=True)
    leaps[: FEW + 1] = 0  # too few earlier recorded steps to compare with
    leaps[run.forward_leaps.max(axis=1, initial=0.0) > OUTPUT_LEAP] = 0
    return np.where(changes > TURNED, np.nan_to_num(leaps, posinf=1e30), 0.0)


PROJECTION = re.compile(r"(qkv|q_proj|k_proj|query|key|c_attn|in_proj|\bw[qk]\b)")


def find_large_logits(run: Training, logits_are_large: Rule) -> Detections:
    """Yield queries and keys so large that the softmax saturates, by norms of their layer's input and weight."""
    for layer in filter(PROJECTION.search, run.layers):
        size = {role: run.record.measure("elements", layer, role) for role in ROLES}
        features = np.sqrt(size["input"] * size["weight"] / size["grad_output"])
        rms = {role: run.record.measure("rms", layer, role) for role in ROLES}
        deviation = features * (rms["input"] * rms["weight"]) ** 2
        if (at := first_true(np.nan_to_num(deviation, posinf=0) > logits_are_large.limit)) is not None:
            most = float(np.nanmax(deviation))
            times = most / logits_are_large.limit
            yield Detection(logits_are_large, run.steps[at], times, {"most": most}, (layer, "weight"))
