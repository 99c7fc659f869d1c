"""Findings of a record outside of its casts: on data, loss, learning rate, optimizer, weights and moments.

Most rules compare a quantity with its own earlier records, with other layers' in the same step, or with what another
quantity allows: an optimizer's step with the weight, a moment with the gradient. Limits were chosen by all faults of
benchmarks/training/causes.py, causes_held_out.py and causes_third_draw.py.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

from octavo.inspect.incidents import Finding, level_of, severity_of, stretch
from octavo.inspect.record import Record, np
from octavo.inspect.remedies import called
from octavo.inspect.weights import GROUP
from octavo.scaling.recipe import ROLES

LIMITS = {
    "learning rate": 2.0,  # times the highest earlier one, after a step that hardly raised it
    "options": 2.0,  # times its last value, of another option of the optimizer that did not change a step earlier
    "decay": 0.02,  # share of a weight that weight decay takes in a step
    "state": 1.3,  # times the bound of a moment by its last value and the gradient, or the bound over the moment
    "warm-up": 0.1,  # the very first step's change of a weight, over its root mean square: median of layers
    "loss": 4.0,  # a loss above earlier ones, over the usual difference of two steps; a mean of some, over its error
    "batch": 0.3,  # the numbers of a batch, over those of all earlier batches, where it lasts
    "labels": 0.05,  # how much higher the loss stays, over the earlier loss
    "repeats": 0.25,  # the curvature of the loss over that of earlier steps
    "overwritten": 0.03,  # a change of a weight by something but the optimizer, over the weight's root mean square
    "gradients": 3.0,  # the gradients over the largest earlier ones, if updates rose too; of a single layer, ALONE
    "jump": 8.0,  # a step's update over earlier ones' median, if neither gradients nor the learning rate rose
    "frozen": 0.0,  # a step's change of a weight
    "dead rows": 1e-4,  # share of a weight's numbers that became 0
    "dead units": 0.9,  # share of an input's numbers that became 0
    "idle expert": 0.0,  # tokens of an expert
    "logits": 10.0,  # standard deviation of attention's logits
    "loss scale": 0.3,  # share of the last layer's gradients that became 0
    "unmoved": 0.9,  # share of a weight's numbers that a step does not change
    "second moments": 1e-2,  # share of them flushed
}
ALONE = 8.0  # times, of one layer while the others stay; or all layers' gradients fall to one in so many
COLLAPSED = 30.0  # a learning rate falls to less than one in so many, and stays low
DECOUPLED = f"decoupled_weight_decay{GROUP}"
RATES = ("lr", "learning_rate")  # names under which the learning rate is recorded, the second by transformers' Trainer
BEFORE = 8  # a jump is measured against the median of so many earlier records
IN_TURN = 4  # at most so many batches repeat in turn
FEW = 3  # records or steps in a row that a fault has to last
PROJECTION = re.compile(r"(qkv|q_proj|k_proj|query|key|c_attn|in_proj|\bw[qk]\b)")
FLOAT16 = 2.0**13  # finite gradients of this size, where others are inf, are float16's
RESTORE = "load weights and optimizer from the last checkpoint before that step"
WRITTEN = f"{RESTORE}; find what wrote them"
ANEW = "give these units their initial weights anew; look for what masks them, and at the bias before"
RECOVERY = "octavo.schedule.Recovery(octavo.schedule.Phase(octavo.recipes.high_precision()))"
FROZEN = "requires_grad, a group of the optimizer, and no detach() or no_grad() behind it: a weight that trains has all"
MEAN = "divide the loss once by the batches that it is summed over"
UNSCALE = "divide gradients by the loss scale before clip_grad_norm_: scaler.unscale_(optimizer)"
SIZE = "look at the data loader, and at what splits its batches or accumulates them"
LOOK = "look at the data of that step, and leave out what is not as the rest"

ONCE = ("learning rate", "options", "state", "batch", "overwritten", "ranks", "gradients", "jump", "untied", "labels")
Worst = tuple[int, int, str, float, dict[str, float], str]  # of a Finding: begins, worst, layer, value, numbers; extent


class Training:
    """A record's numbers that belong to the training as a whole, and the findings on them."""

    def __init__(self, record: Record) -> None:
        self.record, self.steps, self.layers = record, record.steps, record.layers
        self.loss, self.rate, norm = self._scalar("loss"), self._scalar(*RATES), self._scalar("grad_norm")
        self.norms = {step: value for step, value in zip(*norm, strict=True) if math.isfinite(value)}
        self.places = {(row.layer, row.role): place for place, row in reversed([*enumerate(record.rows)])}
        # measures of all parameters, [steps, names]: the layers' weights, and then the others
        self.names = [*self.layers, *(name.removesuffix(".weight") for name in record.others)]
        others = np.full((len(self.steps), len(record.others)), np.nan)
        measures = record.weights.items()
        self.of = {name: np.concatenate([layers, record.of_others.get(name, others)], 1) for name, layers in measures}

    def findings(self) -> Iterator[Finding]:
        """Yield all findings, in no order."""
        if self.steps and self.layers:
            rules = (
                *(self._learning_rate, self._options, self._state, self._decayed, self._warmup, self._elements),
                *(self._loss, self._repeats, self._nonfinite, self._scale_too_low, self._untied, self._dead),
                *(self._weights, self._frozen, self._small, self._idle, self._logits),
            )
            with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of medians where nothing is recorded
                self.rms = np.stack([self._measure("rms", layer, "weight") for layer in self.layers], 1)
                sizes = self.of["size"][:, : len(self.layers)]
                np.copyto(sizes, self.rms, where=~(sizes > 0))  # an older octavo recorded no sizes
                self.gaps = np.diff(self.steps, prepend=self.steps[0] - 1)[:, None]
                yield from itertools.chain(*(rule() for rule in rules))

    def _earlier(self, values: Any, statistic: Any = None) -> Any:
        """Return the median (or another ``statistic``) of up to BEFORE earlier records; nan for the first two."""
        earlier = np.full(values.shape, np.nan)
        for at in range(2, len(values)):
            earlier[at] = (statistic or np.nanmedian)(values[max(0, at - BEFORE) : at], axis=0)
        return earlier

    def _finding(
        self,
        kind: str,
        begins: int,
        times: float,
        text: str,
        remedy: str,
        expected: str = "",
        where: tuple[str, str] = ("", ""),
        worst: int | None = None,
        advice: str = "",
        numbers: dict[str, float] | None = None,
    ) -> Finding:
        """Return a finding; ``times``: its measure over the limit; ``text``: the fault, without the layer's name.

        ``advice``: the remedy in plain words, if it is code; else the remedy up to its first semicolon is taken.
        """
        subject = f"{where[0]} {text}" if where[0] else f"{text[:1].upper()}{text[1:]}"
        since = f"{'at' if kind in ONCE else 'since'} step {begins}"
        severity, sentence = severity_of(kind, times), f"{subject} {since}: {advice or remedy.split(';')[0]}"
        worst, texts, level_and_sentence = (
            begins if worst is None else worst,
            (text, remedy, expected),
            (level_of(severity), sentence),
        )
        return Finding(kind, *where, (), "", begins, worst, numbers or {}, *texts, severity, {}, *level_and_sentence)

    def _scalar(self, *names: str) -> tuple[list[int], list[float]]:
        return next((self.record.scalars[name] for name in names if name in self.record.scalars), ([], []))

    def _measure(self, name: str, layer: str, role: str) -> Any:
        """Return a measure of a layer's role by record; nan where there is none."""
        place = self.places.get((layer, role))
        return np.full(len(self.steps), np.nan) if place is None else self.record.measures[name][:, place]

    # --- numbers of each step

    def _filled(self, name: str) -> tuple[list[int], list[float]]:
        """Return a number's steps and values; of an option, which is written where it changes, those of all records."""
        steps, values = self.record.scalars[name]
        if GROUP not in name or len(values) == len(self.steps):
            return steps, values
        return self.steps, [values[max(0, bisect_right(steps, step) - 1)] for step in self.steps]

    def _learning_rate(self) -> Iterator[Finding]:
        """Yield the first learning rate, of the run or a group, that falls below 0, rises again, is 0, or collapses."""
        names = [name for name in self.record.scalars if name.split(GROUP)[0] in RATES]
        findings = filter(None, (self._rate(name.partition(GROUP)[2], *self._filled(name)) for name in names))
        yield from sorted(findings, key=lambda finding: (finding.begins, -finding.severity))[:1]

    def _rate(self, group: str, steps: list[int], values: list[float]) -> Finding | None:
        name = f"the learning rate{f' of group {group}' if group else ''}"
        flat, times, remedy, advice = 0, 8.0, "look at the schedule's length and end, and at the lr that it gives", ""
        for at, value in enumerate(values):
            previous, top, next_values = values[max(0, at - 1)], max(values[: flat + 1]), values[at : at + FEW + 1]
            highest, lasts = max(values[:at], default=math.inf), len(next_values) > FEW
            jumps = at > 1 and previous <= 1.2 * values[at - 2] and value > LIMITS["learning rate"] * highest > 0
            if value < 0:
                text, expected = f"{name} is below 0: {value:.3g}", "each such step goes uphill"
            elif lasts and not any(next_values):
                text, expected = f"{name} is 0", "it trains on"
            elif lasts and 0 < max(next_values) < min(previous / COLLAPSED, 1.5 * min(next_values)):
                text, expected = f"{name} falls from {previous:.3g} to {value:.3g}", "it trains on"
            elif jumps or (0 < flat < at and value > LIMITS["learning rate"] * top > 0):
                at, top = (at, highest) if jumps else (flat + 1, top)
                times = max(values[at:]) / top / LIMITS["learning rate"]
                text, advice = f"{name} rises from {top:.3g} to {max(values[at:]):.3g}", f"keep it at {top:.3g}"
                remedy = f'for group in optimizer.param_groups: group["lr"] = min(group["lr"], {top:.3g})'
                expected = "the rate of the steps before; look at the schedule and at what resumed the run"
            else:
                flat = at if at and value <= previous else flat
                continue
            return self._finding("learning rate", steps[at], times, text, remedy, expected, advice=advice)
        return None

    def _options(self) -> Iterator[Finding]:
        """Yield other options of the optimizer's groups that leap, and a weight decay that takes too much in a step."""
        for name in self.record.scalars:
            option, _, group = name.partition(GROUP)
            if not group or option in RATES:
                continue
            steps, values = self._filled(name)
            numbers = [1 - value if option.split()[0] in ("betas", "momentum", "alpha") else value for value in values]
            place = f'optimizer.param_groups[{group}]["{option}"]'
            kind = "decay" if option == "weight_decay" else "options"
            for at in range(1, len(numbers)):
                low, high = sorted(numbers[at - 1 : at + 1])
                times = high / low / LIMITS["options"] if low > 0 else 8 * (high > low)
                if numbers[at - 1] == numbers[max(0, at - 2)] and times > 1:
                    was, now = f"{values[at - 1]:.3g}", f"{values[at]:.3g}"
                    text, advice = f"{option} of group {group} changes from {was} to {now}", f"keep it at {was}"
                    yield self._finding(kind, steps[at], times, text, f"{place} = {was}", advice=advice)
                    return
            # if weight decay is not decoupled, Adam's second moments divide it too
            is_coupled = self._scalar(f"betas 0{GROUP}{group}")[1] and self._scalar(DECOUPLED + group)[1][:1] != [1]
            if kind == "decay" and f"lr{GROUP}{group}" in self.record.scalars and not is_coupled:
                taken = max(a * b for a, b in zip(values, self._filled(f"lr{GROUP}{group}")[1], strict=True))
                if taken > LIMITS["decay"]:
                    text = f"weight decay takes {called(taken)} of the weights of group {group} in a step"
                    finding = kind, steps[0], taken / LIMITS["decay"], text, f"{place} = 0.1"
                    yield self._finding(*finding, advice="lower it")

    def _state(self) -> Iterator[Finding]:
        """Yield a state that is new, and second moments that can't be a mean of the last ones and the gradient."""
        ages = itertools.pairwise(zip(*self._scalar("state_age"), strict=True))
        new = "the optimizer's state is new: it has seen {:.0f} steps, after {:.0f}"
        problems = [(step, new.format(now, then)) for (_, then), (step, now) in ages if now < then]
        values, squares = self.of["second_moment"], self.of["gradient"] ** 2
        if (name := f"betas 1{GROUP}0") in self.record.scalars:
            decay, limit = np.array(self._filled(name)[1])[1:, None] ** self.gaps[1:], LIMITS["state"]
            now, then, is_next = values[1:], values[:-1], self.gaps[1:] == 1
            off = (now * limit < decay * then) | (is_next & (now > 5 * limit * np.fmax(then, squares[1:])))
            records = np.flatnonzero(off.mean(axis=1) > 0.5)[:1]
            problems += [(self.steps[at + 1], "something but the optimizer wrote its moments") for at in records]
        for step, text in problems:
            remedy = 'optimizer.load_state_dict(checkpoint["optimizer"])  # where the run resumes'
            yield self._finding("state", step, 8, text, remedy, "moments go on as they were", advice="load it")

    def _decayed(self) -> Iterator[Finding]:
        for step, count in [*zip(*self._scalar("decayed_vectors"), strict=True)][:1]:
            if count:
                text = f"weight decay pulls {count:.0f} biases and norms' weights to 0"
                remedy = "give parameters of one dimension a group of their own with weight_decay=0"
                yield self._finding("decay", step, 1, text, remedy, "matrices decay, biases and norms do not")

    def _warmup(self) -> Iterator[Finding]:
        ages, rates = self._scalar("state_age")[1], self.rate[1]
        share = float(np.median(np.nan_to_num(self.record.weights["update"][0] / self.rms[0])))
        if rates and ages and ages[0] <= 1 and rates[0] >= max(rates) / 2 and share > LIMITS["warm-up"]:
            text = f"the first step, without a warm-up, changes most weights by {called(share)} of their size"
            remedy = f"let the learning rate rise to {max(rates):.3g} over the first steps: a warm-up"
            times = share / LIMITS["warm-up"]
            yield self._finding("warm-up", self.steps[0], times, text, remedy, "smaller first updates")

    def _elements(self) -> Iterator[Finding]:
        """Yield a step from which on batches have only a part of the numbers that all earlier ones had."""
        numbers = self._measure("elements", self.layers[0], "input")
        for at in range(2 * FEW, len(numbers) - FEW + 1):
            share = float(np.nanmax(numbers[at:]) / np.nanmin(numbers[:at]))
            if share <= LIMITS["batch"]:
                text = f"batches have {called(share)} of the numbers that they had"
                yield self._finding("batch", self.steps[at], 2 / share, text, SIZE, worst=self.steps[-1])
                return

    def _loss(self) -> Iterator[Finding]:
        steps, loss = self.loss
        at = 6
        while at < len(loss):
            earlier_loss, changes = np.median(loss[at - 6 : at]), np.abs(np.diff(loss[max(0, at - 16) : at]))
            limit = LIMITS["loss"] * max(1.5 * float(np.median(changes)), 0.05 * abs(earlier_loss))
            rise, below, end = loss[at] - earlier_loss, min(loss[:at]) - loss[at], at + 1
            if below > limit:
                text = f"the loss fell at once, from {loss[at - 1]:.3g} to {loss[at]:.3g}: batches are other, or easier"
                yield self._finding("labels", steps[at], below / limit, text, LOOK)
                break
            if math.isfinite(rise) and rise > limit > 0:
                end = next((i for i in range(end, len(loss)) if loss[i] < earlier_loss + rise / 2), len(loss))
                if end - at < FEW:
                    text = f"the loss rose for a step: from {earlier_loss:.3g} to {loss[at]:.3g}"
                    yield self._finding("batch", steps[at], rise / limit, text, LOOK)
            at = end
        lasting = []
        for at in range(4, len(loss) - FEW + 1):
            earlier, later = loss[max(0, at - 16) : at], loss[at : at + 2 * FEW]
            level, now = float(np.mean(earlier)), float(np.mean(later))
            error = float(np.std(earlier)) * math.sqrt(1 / len(earlier) + 1 / len(later))
            if now - level > max(LIMITS["loss"] * error, LIMITS["labels"] * abs(level)) and min(later) > level:
                lasting.append(((now - level) / max(error, 1e-9 * now), at, level, now))
        for _, at, level, now in [max(lasting)] if lasting else []:
            times, text = (now - level) / level, f"the loss rose and stays up: from {level:.3g} to {now:.3g}"
            yield self._finding("labels", steps[at], times / LIMITS["labels"], text, LOOK)

    def _repeats(self) -> Iterator[Finding]:
        """Yield a step from which on losses fall as smoothly as those of one batch, or of a few in turn."""
        steps, loss = self.loss[0], np.array(self.loss[1])
        for turn in range(1, IN_TURN + 1):
            change = loss[turn:] - loss[:-turn]
            falls, bend = change < 0, np.abs(np.diff(change))
            for at in range(6, len(bend) - 2 * FEW + 1):
                usual, now = float(np.median(bend[max(0, at - 16) : at])), float(bend[at : at + 2 * FEW].max())
                was_noisy = falls[max(0, at - 16) : at].mean() < 0.75 and falls[at : at + 2 * FEW].all()
                if was_noisy and usual > 0 and now < LIMITS["repeats"] * usual:
                    text = "the loss no longer differs from batch to batch, as if the loader gave the same"
                    remedy = "look whether the data loader shuffles, goes on, and gives each worker its own data"
                    finding = "repeats", steps[at], usual / max(now, 1e-9 * usual), f"{text} {turn} in turn", remedy
                    yield self._finding(*finding)
                    return

    # --- inf and NaN

    def _nonfinite(self) -> Iterator[Finding]:
        """Yield the origin of the first inf or NaN: the layer before the first input with one, or the last gradient."""
        record, names, last = self.record, self.layers, len(self.layers) - 1
        faulty = record.measures["nonfinite"] > 0
        bad = [s for s, value in zip(*self.loss, strict=True) if not math.isfinite(value)]
        if bad and bad[0] <= self.steps[-1] and not faulty[bisect_left(self.steps, bad[0])].any():
            text = "the loss is inf or NaN, though no layer has one: as of a batch without a label"
            yield self._finding("batch", bad[0], math.inf, text, LOOK)
        if not faulty.any():
            return
        at = int(faulty.any(axis=1).argmax())
        rows = [record.rows[place] for place in np.flatnonzero(faulty[at])]
        layers_of_role = {role: sorted({names.index(row.layer) for row in rows if row.role == role}) for role in ROLES}
        inputs, weights, gradients = layers_of_role.values()
        step, earlier = self.steps[at], [s for s in bad if s < self.steps[at]]
        kind, where, remedy, expected, advice = "nonfinite", ("", ""), RESTORE, "", ""
        if earlier and (not at or self.steps[at - 1] < min(earlier)):
            step, text = min(earlier), "inf or NaN began between two recorded steps"
            remedy = "train from the last checkpoint under octavo.inspect.trace_faults, which names the layer"
        elif 0 in inputs:
            kind, text = "batch", "the batch, or what embeds it, brings inf or NaN to the first layer"
            remedy, expected = f"{LOOK}; then {RESTORE}", "the other layers had none before"
        elif inputs and self._is_rare(at, names[inputs[0]]):
            where, remedy, advice = (names[inputs[0]], "input"), RECOVERY, "leave out such steps"
            text = "gets inf or NaN in fewer numbers than one of each row: an activation, and no weight, made them"
        elif inputs or (step in bad and gradients):
            where = names[inputs[0] - 1 if inputs else last], "weight"
            then = names[inputs[0]] if inputs else "the loss"
            text = f"has inf or NaN in its weight, or in what is computed up to {then}: its input has none"
        elif gradients:
            where = names[gradients[-1]], "grad_output"
            amax = self._measure("amax", *where)[at]
            if gradients[-1] == last and ("loss_scale" in record.scalars or amax > FLOAT16):
                yield self._of_loss_scale("gradients overflow", at, math.inf, "lower: let GradScaler halve it")
                return
            text = "gets a gradient with inf or NaN, which the layers behind it did not have"
            remedy, expected, advice = RECOVERY, "leaves out steps with such gradients", "leave out such steps"
        else:
            after = "after the optimizer's step, though inputs and gradients have none"
            where = (names[weights[0]], "weight") if len(weights) == 1 else where
            text = f"{'has inf or NaN in its weight' if where[0] else 'inf or NaN are in the weights'} {after}"
        yield self._finding(kind, step, math.inf, text, remedy, expected, where, advice=advice)

    def _is_rare(self, at: int, layer: str) -> bool:
        """Return whether a layer's input has inf or NaN in less than half of its rows, as no weight would cause."""
        row = self.places[layer, "input"]
        measures = self.record.of_worst.measures
        sizes = [float(np.nanmax(self._measure("elements", layer, role))) for role in ROLES]
        features = self.record.rows[row].features or math.sqrt(sizes[0] * sizes[1] / sizes[2])
        return float(measures["nonfinite"][at, row]) * features < 0.5

    def _of_loss_scale(self, symptom: str, at: int, times: float, direction: str) -> Finding:
        steps, values = self._scalar("loss_scale")
        scale = f" of {values[max(0, bisect_left(steps, self.steps[at]))]:.3g}" if values else ""
        text = f"{symptom} at a loss scale{scale}"
        return self._finding("loss scale", self.steps[at], times, text, f"take a loss scale that is {direction}")

    def _scale_too_low(self) -> Iterator[Finding]:
        zeros = self._measure("zeros", self.layers[-1], "grad_output")
        over = zeros > LIMITS["loss scale"] + np.nan_to_num(zeros[0])
        if over.any():
            symptom = f"{called(float(np.nanmax(zeros)))} of the last layer's gradients are 0"
            yield self._of_loss_scale(symptom, int(over.argmax()), 8, "higher: they underflow")

    # --- weights

    def _untied(self) -> Iterator[Finding]:
        for step, kind, names in self.record.events:
            if kind == "untied":
                layer = next((name for name in self.layers if f"{name}.weight" in names.split(" and ")), "")
                words = f"no longer shares its weight: {names} were one", "tie them again, before the optimizer is made"
                yield self._finding(kind, step, 8, *words, "one parameter, which the optimizer trains", (layer, ""))

    def _weights(self) -> Iterator[Finding]:
        """Yield weights that something but an update wrote, and gradients and updates that leap."""
        measures, count = self.of, len(self.layers)
        size, updates = measures["size"], measures["update"]
        last_size = np.concatenate([size[:1], size[:-1]])
        when, rate = self.rate  # rates: of each record; 1 where it is not recorded
        rates = np.array([rate[max(0, bisect_right(when, step) - 1)] if when else 1.0 for step in self.steps])[:, None]
        rates = np.where(rates > 0, rates, 1.0)
        usual, ratio = self._earlier(updates / rates) * rates, self.rms / size[:, :count]
        jumps = np.where(usual > 0, updates / np.fmax(usual, self._earlier(updates)), np.nan)
        risen = measures["gradient"] / self._earlier(measures["gradient"])
        norms = np.array([self.norms.get(step, np.nan) for step in self.steps])[:, None]
        norms = norms / self._earlier(norms)
        risen = np.where(np.isnan(risen), np.where(jumps > 2, norms, np.nan), risen)
        expected = np.fmax(np.nan_to_num(usual), updates) * 3 * (self.gaps - 1)
        written = (
            np.fmax(measures["between"] - expected, measures["outside"] - self._earlier(measures["outside"]) * 3)
            / last_size
        )
        alone = jumps > LIMITS["jump"] * np.fmax(1, np.nanmedian(jumps, axis=1, keepdims=True))
        alone |= (updates > last_size / 2) & (jumps > LIMITS["jump"])
        is_unseen = np.isnan(measures["outside"]) & ~(norms > 2)  # no optimizer's step was seen
        written = np.fmax(written, np.where(is_unseen & alone, updates / last_size, 0))
        # a single number that was written moves a weight's root mean square, but hardly that of the sampled numbers
        moved = (measures["between"] + updates * self.gaps)[1:, :count] * 3 / last_size[1:, :count]
        unexplained = np.abs(ratio[1:] / ratio[:-1] - 1) - moved
        written[1:, :count] = np.fmax(written[1:, :count], unexplained)
        written = np.nan_to_num(written, nan=0, posinf=1e30)
        yield from self._overwritten(written)
        over = (written > LIMITS["overwritten"]).any(axis=1)
        jumps[over], risen[over], norms[over] = np.nan, np.nan, np.nan
        risen[:FEW], norms[:FEW] = np.nan, np.nan  # too few earlier records to compare with
        yield from self._jump(jumps, risen, norms[:, 0])

    def _overwritten(self, written: Any) -> Iterator[Finding]:
        over = written > LIMITS["overwritten"]
        if not over.any():
            return
        at = int(over.any(axis=1).argmax())
        many, share, kind, where = int(over[at].sum()), float(written[at].max()), "overwritten", ("", "")
        if many > 1 and many >= len(self.layers) / 2:
            content = "new numbers"
            if (np.abs(self.rms[at] / self.rms[max(0, at - 1)] - 1) < 0.1).mean() > 0.5:
                kind, content = "ranks", "the same numbers in other places, as if ranks had loaded each other's shards"
            text = f"{many} of {len(self.names)} weights have {content}, not by the optimizer"
        else:
            place = int(written[at].argmax())
            where, is_layer = (self.names[place], "weight"), place < len(self.layers)
            name, sizes = ("amax", self._measure("amax", *where)) if is_layer else ("size", self.of["size"][:, place])
            went = f"its {name} went from {sizes[max(0, at - 1)]:.3g} to {sizes[at]:.3g}"
            text = f"has a weight that the optimizer did not write: {went}"
        times = share / LIMITS["overwritten"]
        yield self._finding(kind, self.steps[at], times, text, WRITTEN, where=where, numbers={"changed": share})

    def _frozen(self) -> Iterator[Finding]:
        """Yield weights that no longer change; those of layers also if they get no gradient, or never change."""
        gradients, many = self.of["gradient"], len(self.layers)
        still = (self.of["update"] == 0) & ~(self.of["master_update"] > 0)
        still[:, :many] |= gradients[:, :many] == 0  # an embedding's sampled rows may get no gradient
        changed = np.where(still, np.nan, self.of["changed"])
        lasts = np.flip(np.minimum.accumulate(np.flip(still, 0), 0), 0)  # to the end
        places_by_record: dict[int, list[int]] = {}
        for place in np.flatnonzero(lasts[-FEW:].all(axis=0) & (len(still) >= FEW)):
            at = int(lasts[:, place].argmax())
            should_change = np.isfinite(np.log(gradients[at:, place])).all() and min(self.rate[1][-FEW:], default=0) > 0
            should_change &= not np.nanmedian(changed) < 1 - LIMITS["unmoved"]  # else rounding stops weights
            if ((changed[at:] > 0.5).mean() > 0.25 or should_change) and (at or place < many):
                places_by_record.setdefault(at, []).append(place)
        for at, places in places_by_record.items():
            layers, why, first = [place for place in places if place < many] or places, "while other layers do", 0
            if (gradients[at:, places] > 0).any():
                why = "though it has gradients: no group of the optimizer has it"
            elif np.isfinite(gradients[at:]).any():  # gradients are cut off behind the last of these layers
                why, first = "and gets no gradient", -1
            others = f", nor do {len(places) - 1} other weights" if len(places) > 1 else ""
            where, text = (self.names[layers[first]], "weight"), f"does not train{others}, {why}"
            if len(places) == len(self.names):
                where, text = ("", ""), "no weight changes, though all have gradients: the optimizer has none of them"
            yield self._finding("frozen", self.steps[at], 4, text, FROZEN, where=where)

    def _worst(self, kind: str, values: Any) -> Iterator[Worst]:
        """Yield the layer and the steps where a measure [steps, names] exceeds its limit by most, if one does."""
        over = values > LIMITS[kind]
        if over.any():
            place = int(np.where(over, values, -1).max(axis=0).argmax())
            begins, worst = stretch(over[:, place], values[:, place])
            numbers = {name: float(values_of_name[worst, place]) for name, values_of_name in self.of.items()}
            noun = "layers" if len(over[0]) == len(self.layers) else "weights"
            extent = f"in {over[worst].sum()} of {len(over[0])} {noun}"
            steps, value = (self.steps[begins], self.steps[worst]), float(values[worst, place])
            yield *steps, self.names[place], value, numbers, extent

    def _jump(self, jumps: Any, risen: Any, norms: Any) -> Iterator[Finding]:
        """Yield gradients that leap, of all layers or from one layer back; else updates that leap without them."""
        gradients, typical = self.of["gradient"], np.nanmedian(risen, axis=1)
        climbs, falls, grown = True, True, 1.0
        for distance in reversed(range(FEW + 1)):  # whether each of so many records exceeds the last
            ratio = np.nanmedian(np.roll(gradients, distance, 0) / np.roll(gradients, distance + 1, 0), axis=1)
            climbs, grown = climbs & (ratio > 1), grown * ratio
            falls &= np.roll(typical, -distance) < 1 / ALONE  # the first records, nan, roll to the end: False
        falls &= ratio < 1 / ALONE
        climbs &= (grown > 2) & (np.arange(len(risen)) > FEW + 1) & np.isfinite(risen).any(axis=1)
        alone = np.where(np.isfinite(risen), gradients / self._earlier(gradients, np.nanmax), np.nan)
        alone = alone[:, : len(self.layers)]
        if (over := (typical > LIMITS["gradients"]) | climbs).any():
            yield self._leap(over, typical, jumps)
            return
        if falls.any():
            at, share = int(falls.argmax()), float(typical[falls][0])
            is_scaled = bool(norms[at] > LIMITS["gradients"])  # gradients are clipped
            text = f"the gradients are {called(share)} of those before{', though their norm rose' * is_scaled}"
            times, remedy = 1 / max(share, 1e-9) / LIMITS["gradients"], UNSCALE if is_scaled else MEAN
            yield self._finding("gradients", self.steps[at], times, text, remedy, worst=self.steps[at + FEW])
            return
        if (over := (alone > ALONE).any(axis=1)).any():
            at = int(over.argmax())  # backward goes from the last layer to the first
            yield self._leap(over, np.nanmax(alone, axis=1), jumps, self.layers[np.flatnonzero(alone[at] > ALONE)[-1]])
            return
        if (norms > LIMITS["gradients"]).any() and not any(self._loss()):
            at = int((norms > LIMITS["gradients"]).argmax())
            text = f"the gradients' norm, before it is clipped, is {norms[at]:.3g} times what it was"
            yield self._finding("batch", self.steps[at], 1, text, LOOK)
        for begins, worst, _, value, numbers, extent in self._worst("jump", jumps):
            text = f"the step changes weights {value:.3g} times as much as those before, {extent}"
            missing = ["lr"] * (not self.rate[0]) + ["grad_norm"] * ("grad_norm" not in self.record.scalars)
            cause = f"record {' and '.join(missing)} to see what" if missing else "neither lr nor grad_norm"
            expected = f"leaves out the steps after it whose loss jumps; {cause} rose"
            finding = "jump", begins, value / LIMITS["jump"], text, RECOVERY, expected, ("", ""), worst
            yield self._finding(*finding, advice="leave out such steps", numbers=numbers)

    def _leap(self, over: Any, times_of: Any, jumps: Any, layer: str = "") -> Finding:
        """Return a finding on gradients, of all layers or one, that are ``times_of`` times as large as earlier ones."""
        begins, worst = stretch(over, np.nan_to_num(times_of))
        while begins > 2 and times_of[begins - 1] > 1.2 and not layer:
            begins -= 1
        lasts, where = (times_of[begins:] > LIMITS["gradients"] / 2).sum() >= FEW, (layer, "grad_output" * bool(layer))
        ratio, times = float(np.nanmedian(jumps[worst])), float(times_of[worst])
        verb = "gets gradients" if layer else "the gradients are"
        text = f"{verb} {times:.3g} times as large as before, and a step changes most weights {ratio:.3g} times as much"
        last_norm = self.norms.get(self.steps[begins - 1], math.nan)
        remedy, advice = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {2 * last_norm:.3g})", "clip their norm"
        if lasts and not layer:
            advice = f"call optimizer.zero_grad() before each backward, and {MEAN}"
            remedy = f"{advice}; or {remedy}"
        expected = "before each optimizer.step(): no more than twice the last record's"
        severe = times * max(1.0, ratio) / LIMITS["gradients"]
        finding = "gradients", self.steps[begins], severe, text, remedy, expected, where, self.steps[worst], advice
        return self._finding(*finding, numbers={"times": times})

    def _small(self) -> Iterator[Finding]:
        """Yield updates that rounding loses, and moments that are flushed, where it is worst."""
        weights = {name: values[:, : len(self.layers)] for name, values in self.of.items()}
        has_master = weights["master_update"] > 0  # rounding the master then loses updates, not rounding the weight
        changed = np.where(weights["update"] > 0, weights["changed"], np.nan)
        unmoved = 1 - np.where(has_master, weights["master_changed"], changed)
        for begins, worst, layer, value, numbers, extent in self._worst("unmoved", unmoved):
            storage, bits = ("fp32", "all") if numbers["master_update"] > 0 else ("split24", "8 more bits of")
            owner = "its master" if storage == "fp32" else "its weight"
            text = f"has updates below the distance of {owner}'s numbers: {called(value)} of them stay, {extent},"
            remedy = f'octavo.optim.AdamW(model.parameters(), master="{storage}")'
            finding = "unmoved", begins, value / LIMITS["unmoved"], text, remedy, f"keeps {bits} what is rounded off"
            yield self._finding(*finding, (layer, "weight"), worst, numbers=numbers)
        for begins, worst, layer, value, numbers, extent in self._worst("second moments", weights["second_flushed"]):
            text = f"flushes {called(value)} of its second moments where the first are not, {extent},"
            remedy = 'octavo.optim.AdamW(model.parameters(), moments="bf16")'
            times, expected = value / LIMITS["second moments"], "bf16 has float32's range: nothing is flushed"
            finding = "second moments", begins, times, text, remedy, expected
            yield self._finding(*finding, (layer, "weight"), worst, numbers=numbers)

    # --- layers

    def _dead(self) -> Iterator[Finding]:
        for kind, role in (("dead rows", "weight"), ("dead units", "input")):
            layers_over = []
            for layer in self.layers:
                zeros = np.nan_to_num(self._measure("zeros", layer, role))
                over = zeros > LIMITS[kind] + 2 * (zeros[0] if role == "weight" else 0)
                if over.any() and (role == "weight" or zeros.max() > zeros[0] + 0.05 or zeros[0] > 0.97):
                    layers_over.append((int(over.argmax()), float(zeros.max()), layer))
            for at, share, layer in layers_over if len(layers_over) <= len(self.layers) / 2 else ():
                text = f"has 0 in {called(share)} of its {role}"
                times = 4 if role == "weight" else 0.1 / max(1 - share, 1e-3)
                yield self._finding(kind, self.steps[at], times, text, ANEW, where=(layer, role))

    def _idle(self) -> Iterator[Finding]:
        for load in self.record.loads():
            for expert, step in load.idle.items():
                if len(self.steps) - self.steps.index(step) >= FEW and sum(load.tokens) >= 16 * len(load.tokens):
                    text = f"gives no tokens to expert {expert} of {len(load.tokens)}"
                    remedy = "balance the router: a bias for each expert, or a loss for balance; look at its scores"
                    finding = "idle expert", step, 4, text, remedy
                    yield self._finding(*finding, where=(load.layer, "input"), numbers={"expert": expert})

    def _logits(self) -> Iterator[Finding]:
        """Yield queries and keys so large that the softmax saturates, by norms of their layer's input and weight."""
        for layer in filter(PROJECTION.search, self.layers):
            size = {role: self._measure("elements", layer, role) for role in ("input", "weight", "grad_output")}
            with np.errstate(divide="ignore", invalid="ignore"):
                features = np.sqrt(size["input"] * size["weight"] / size["grad_output"])
                product = self._measure("rms", layer, "input") * self._measure("rms", layer, "weight")
                deviation = features * product**2
            over = np.nan_to_num(deviation, posinf=0) > LIMITS["logits"]
            if over.any():
                at, most = int(over.argmax()), float(np.nanmax(deviation))
                text = f"makes queries and keys so large that attention's logits deviate by about {most:.2g}"
                remedy = "norm queries and keys before they are multiplied (QK norm)"
                times, where = most / LIMITS["logits"], (layer, "weight")
                yield self._finding("logits", self.steps[at], times, text, remedy, where=where)
