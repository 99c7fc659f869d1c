"""What is wrong in a record outside of its casts: data, loss, learning rate, optimizer, weights and moments.

Thresholds are of the open faults of benchmarks/training/causes.py alone.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from octavo.inspect.incidents import Finding, level_of, severity_of, stretch
from octavo.inspect.record import Record, numpy
from octavo.inspect.remedies import called
from octavo.scaling.recipe import ROLES

LIMITS = {
    "learning rate": 2.0,  # times the highest before, after a step that hardly raised it
    "warm-up": 0.1,  # what the very first step changes of a weight, over its root mean square: most layers' median
    "loss": 4.0,  # a loss above those before, over the usual difference of two steps; a mean of some, over its error
    "labels": 0.05,  # how much higher the loss stays, over what it was before
    "repeats": 0.25,  # the curvature of the loss over that of the steps before
    "overwritten": 0.03,  # what changed of a weight without an update of its size, over the weight's root mean square
    "gradients": 8.0,  # a step's update over the median of those before, as the gradients' norm rose
    "jump": 8.0,  # the same, as nothing recorded rose
    "frozen": 0.0,  # what a step changes of a weight
    "dead rows": 1e-4,  # share of a weight's numbers that became 0
    "dead units": 0.9,  # share of an input's numbers that became 0
    "idle expert": 0.0,  # tokens of an expert
    "logits": 10.0,  # standard deviation of attention's logits
    "loss scale": 0.3,  # share of the last layer's gradients that became 0
    "unmoved": 0.9,  # share of a weight's numbers that a step does not change
    "second moments": 1e-2,  # share of them flushed
}
RATES = ("lr", "learning_rate")  # names under which the learning rate is recorded, the second by transformers' Trainer
BEFORE = 8  # a jump is measured against the median of so many records
FEW = 3  # records or steps in a row that something has to last
PROJECTION = re.compile(r"(qkv|q_proj|k_proj|query|key|c_attn|in_proj|\bw[qk]\b)")
FLOAT16 = 2.0**13  # finite gradients of this size, where others are inf, are float16's
RESTORE = "load weights and optimizer from the last checkpoint before that step"
WRITTEN = f"{RESTORE}; find what wrote them"
ANEW = "give these units their initial weights anew; look for what masks them, and at the bias before"
RECOVERY = "octavo.schedule.Recovery(octavo.schedule.Phase(octavo.recipes.high_precision()))"
LOOK = "look at the data of that step, and leave out what is not as the rest"


ONCE = ("learning rate", "state", "batch", "overwritten", "ranks", "gradients", "jump", "untied", "labels")
Worst = tuple[int, int, str, float, dict[str, float], str]  # Finding's begins and worst, layer, value, numbers; where


class Training:
    """A record's numbers that belong to the training as a whole."""

    def __init__(self, record: Record) -> None:
        self.record, self.np, self.steps, self.layers = record, numpy(), record.steps, record.layers
        self.loss, self.rate, norm = self._scalar("loss"), self._scalar(*RATES), self._scalar("grad_norm")
        self.norms = {step: value for step, value in zip(*norm, strict=True) if math.isfinite(value)}
        self.places = {(row.layer, row.role): place for place, row in reversed([*enumerate(record.rows)])}

    def findings(self) -> Iterator[Finding]:
        """All of them, in no order."""
        if self.steps and self.layers:
            self.rms = self.np.stack([self._measure("rms", layer, "weight") for layer in self.layers], 1)
            yield from itertools.chain(
                *(self._learning_rate(), self._optimizer(), self._warmup(), self._loss(), self._repeats()),
                *(self._nonfinite(), self._scale_too_low(), self._untied(), self._dead(), self._weights()),
                *(self._small(), self._idle(), self._logits()),
            )

    def _found(
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
        """A finding; ``times``: its measure over the limit; ``text``: what happens, of a layer without its name.

        ``advice``: the remedy in plain words, if it is code; else it is taken up to its first semicolon.
        """
        subject = f"{where[0]} {text}" if where[0] else f"{text[:1].upper()}{text[1:]}"
        since = f"{'at' if kind in ONCE else 'since'} step {begins}"
        severity, sentence = severity_of(kind, times), f"{subject} {since}: {advice or remedy.split(';')[0]}"
        worst, said, rest = begins if worst is None else worst, (text, remedy, expected), (level_of(severity), sentence)
        return Finding(kind, *where, (), "", begins, worst, numbers or {}, *said, severity, {}, *rest)

    def _scalar(self, *names: str) -> tuple[list[int], list[float]]:
        return next((self.record.scalars[name] for name in names if name in self.record.scalars), ([], []))

    def _measure(self, name: str, layer: str, role: str) -> Any:
        """A measure of a layer's role by record; nan where there is none."""
        place = self.places.get((layer, role))
        return self.np.full(len(self.steps), self.np.nan) if place is None else self.record.measures[name][:, place]

    # --- numbers of each step

    def _learning_rate(self) -> Iterator[Finding]:
        steps, values = self.rate
        for at in range(2, len(values)):
            top = max(values[:at])
            if values[at - 1] <= 1.2 * values[at - 2] and top > 0 and values[at] > LIMITS["learning rate"] * top:
                times, text = values[at] / top, f"the learning rate rises from {top:.3g} to {values[at]:.3g}"
                remedy = f'for group in optimizer.param_groups: group["lr"] = min(group["lr"], {top:.3g})'
                expected = "the rate of the steps before; look at the schedule and at what resumed the run"
                what = steps[at], times / LIMITS["learning rate"], text, remedy, expected
                yield self._found("learning rate", *what, advice=f"keep it at {top:.3g}")
                break
        for at in range(len(values) - FEW):
            if not any(values[at : at + FEW + 1]):
                remedy = "give the optimizer a learning rate: lr is 0 in all its groups; look at the schedule's length"
                yield self._found("learning rate", steps[at], 8, "the learning rate is 0", remedy, "it trains on")
                break

    def _optimizer(self) -> Iterator[Finding]:
        for (_, then), (step, now) in itertools.pairwise(zip(*self._scalar("state_age"), strict=True)):
            if now < then:
                text = f"the optimizer's state is new: it has seen {now:.0f} steps, after {then:.0f}"
                remedy = 'optimizer.load_state_dict(checkpoint["optimizer"])  # where the run resumes'
                yield self._found("state", step, 8, text, remedy, "moments go on as they were", advice="load it")
        steps, counts = self._scalar("decayed_vectors")
        if counts and counts[0]:
            text = f"weight decay pulls {counts[0]:.0f} biases and norms' weights to 0"
            remedy = "give parameters of one dimension a group of their own with weight_decay=0"
            yield self._found("decay", steps[0], 1, text, remedy, "matrices decay, biases and norms do not")

    def _warmup(self) -> Iterator[Finding]:
        ages, rates = self._scalar("state_age")[1], self.rate[1]
        if not rates or not ages or ages[0] > 1 or rates[0] < max(rates) / 2:
            return
        with self.np.errstate(divide="ignore", invalid="ignore"):
            share = float(self.np.median(self.np.nan_to_num(self.record.weights["update"][0] / self.rms[0])))
        if share > LIMITS["warm-up"]:
            text = f"the first step, without a warm-up, changes most weights by {called(share)} of their size"
            remedy = f"let the learning rate rise to {max(rates):.3g} over the first steps: a warm-up"
            what = "warm-up", self.steps[0], share / LIMITS["warm-up"], text, remedy
            yield self._found(*what, "smaller first updates")

    def _loss(self) -> Iterator[Finding]:
        steps, loss = self.loss
        at = 6
        while at < len(loss):
            before = self.np.median(loss[at - 6 : at])
            changes = self.np.abs(self.np.diff(loss[max(0, at - 16) : at]))
            usual = max(1.5 * float(self.np.median(changes)), 0.05 * abs(before))
            rise = loss[at] - before
            if not (math.isfinite(rise) and rise > LIMITS["loss"] * usual > 0):
                at += 1
                continue
            back = next((i for i in range(at + 1, len(loss)) if loss[i] < before + rise / 2), len(loss))
            if back - at < FEW:
                text, times = f"the loss rose for a step: from {before:.3g} to {loss[at]:.3g}", rise / usual
                yield self._found("batch", steps[at], times / LIMITS["loss"], text, LOOK)
            at = back
        lasting = []
        for at in range(6, len(loss) - FEW + 1):
            earlier, later = loss[max(0, at - 16) : at], loss[at : at + 2 * FEW]
            level, now = float(self.np.mean(earlier)), float(self.np.mean(later))
            error = float(self.np.std(earlier)) * math.sqrt(1 / len(earlier) + 1 / len(later))
            if now - level > max(LIMITS["loss"] * error, LIMITS["labels"] * abs(level)) and min(later) > level:
                lasting.append(((now - level) / max(error, 1e-9 * now), at, level, now))
        for _, at, level, now in [max(lasting)] if lasting else []:
            times, text = (now - level) / level, f"the loss rose and stays up: from {level:.3g} to {now:.3g}"
            yield self._found("labels", steps[at], times / LIMITS["labels"], text, LOOK)

    def _repeats(self) -> Iterator[Finding]:
        steps, loss = self.loss
        bend = self.np.abs(self.np.diff(loss, 2)) if len(loss) > 2 else self.np.zeros(0)
        falls = self.np.diff(loss) < 0
        for at in range(6, len(bend) - 2 * FEW + 1):
            usual, now = float(self.np.median(bend[max(0, at - 16) : at])), float(bend[at : at + 2 * FEW].max())
            was_noisy = falls[max(0, at - 16) : at].mean() < 0.75 and falls[at : at + 2 * FEW].all()
            if was_noisy and usual > 0 and now < LIMITS["repeats"] * usual:
                text = "the loss no longer differs from batch to batch, as if the loader gave the same one"
                remedy = "look at the data loader: does it shuffle, go on, and give each worker its own data?"
                yield self._found("repeats", steps[at], usual / max(now, 1e-9 * usual), text, remedy)
                break

    # --- inf and NaN

    def _nonfinite(self) -> Iterator[Finding]:
        """Where the first inf or NaN came from: the layer before the first input with one, or the last gradient."""
        np, record, names, last = self.np, self.record, self.layers, len(self.layers) - 1
        faulty = record.measures["nonfinite"] > 0
        if not faulty.any():
            return
        at = int(faulty.any(axis=1).argmax())
        rows = [record.rows[place] for place in np.flatnonzero(faulty[at])]
        of = {role: sorted({names.index(row.layer) for row in rows if row.role == role}) for role in ROLES}
        inputs, weights, gradients = of.values()
        step, of_step = self.steps[at], dict(zip(*self.loss, strict=True))
        earlier = [s for s, value in of_step.items() if not math.isfinite(value) and s < step]
        kind, where, remedy, expected, advice = "nonfinite", ("", ""), RESTORE, "", ""
        if earlier and (not at or self.steps[at - 1] < min(earlier)):
            step, text = min(earlier), "inf or NaN began between two recorded steps"
            remedy = "train from the last checkpoint under octavo.inspect.trace_faults, which names the layer"
        elif 0 in inputs:
            kind, text = "batch", "the batch, or what embeds it, brings inf or NaN to the first layer"
            remedy, expected = f"{LOOK}; then {RESTORE}", "the other layers had none before"
        elif inputs or (not math.isfinite(of_step.get(step, 0.0)) and gradients):
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
        yield self._found(kind, step, math.inf, text, remedy, expected, where, advice=advice)

    def _of_loss_scale(self, what: str, at: int, times: float, how: str) -> Finding:
        steps, values = self._scalar("loss_scale")
        scale = f" of {values[max(0, bisect_left(steps, self.steps[at]))]:.3g}" if values else ""
        text = f"{what} at a loss scale{scale}"
        return self._found("loss scale", self.steps[at], times, text, f"take a loss scale that is {how}")

    def _scale_too_low(self) -> Iterator[Finding]:
        zeros = self._measure("zeros", self.layers[-1], "grad_output")
        over = zeros > LIMITS["loss scale"] + self.np.nan_to_num(zeros[0])
        if over.any():
            what = f"{called(float(self.np.nanmax(zeros)))} of the last layer's gradients are 0"
            yield self._of_loss_scale(what, int(over.argmax()), 8, "higher: they underflow")

    # --- weights

    def _untied(self) -> Iterator[Finding]:
        for step, kind, names in self.record.events:
            if kind == "untied":
                layer = next((name for name in self.layers if f"{name}.weight" in names.split(" and ")), "")
                what = f"no longer shares its weight: {names} were one", "tie them again, before the optimizer is made"
                yield self._found(kind, step, 8, *what, "one parameter, which the optimizer trains", (layer, ""))

    def _weights(self) -> Iterator[Finding]:
        """Weights that something but an update wrote, updates that jump, and weights without any."""
        np, weights = self.np, self.record.weights
        updates, between, rms = weights["update"], weights["between"], np.concatenate([self.rms[:1], self.rms[:-1]])
        usual, risen = np.full_like(updates, np.nan), np.ones((len(updates), 1))
        norms = np.array([self.norms.get(step, np.nan) for step in self.steps])
        for at in range(2, len(updates)):
            usual[at] = np.median(updates[max(0, at - BEFORE) : at], axis=0)
            risen[at] = np.fmax(1, norms[at] / np.median(norms[max(0, at - BEFORE) : at]))
        gaps = np.diff(self.steps, prepend=self.steps[0])[:, None] - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            jumps = np.where(usual > 0, updates / usual, np.nan)
            most = np.maximum(np.nan_to_num(usual), updates) * 3 * np.maximum(gaps, 0)
            alone = jumps > LIMITS["jump"] * np.maximum(1, np.median(np.nan_to_num(jumps), axis=1, keepdims=True))
            large = (updates > rms / 2) & (jumps > np.maximum(LIMITS["jump"], 2 * risen))
            written = np.where(alone | large, updates, 0) / rms
            written = np.nan_to_num(np.maximum(written, (between - most) / rms), posinf=1e30)
        yield from self._overwritten(written)
        jumps[(written > LIMITS["overwritten"]).any(axis=1)] = np.nan
        yield from self._jump(jumps)
        still, moves = updates == 0, (updates > 0) & (weights["changed"] > 0.5)
        lasts = np.flip(np.minimum.accumulate(np.flip(still, 0), 0), 0)  # to the end
        for layer in np.flatnonzero(lasts[-FEW:].all(axis=0) & (len(still) >= FEW)):
            at = int(lasts[:, layer].argmax())
            if moves[at:].mean() > 0.5:
                remedy = "requires_grad, and a group of the optimizer: the weight has both or does not train"
                text, where = "does not train, while other layers do", (self.layers[layer], "weight")
                yield self._found("frozen", self.steps[at], 4, text, remedy, where=where)

    def _overwritten(self, written: Any) -> Iterator[Finding]:
        np, over = self.np, written > LIMITS["overwritten"]
        if not over.any():
            return
        at = int(over.any(axis=1).argmax())
        many, most, kind, where = int(over[at].sum()), float(written[at].max()), "overwritten", ("", "")
        if many > len(self.layers) / 2:
            what = "new numbers"
            if (np.abs(self.rms[at] / self.rms[max(0, at - 1)] - 1) < 0.1).mean() > 0.5:
                kind, what = "ranks", "the same numbers in other places, as if ranks had loaded each other's shards"
            text = f"{many} of {len(self.layers)} weights have {what}, not by the optimizer"
        else:
            where = self.layers[int(written[at].argmax())], "weight"
            amax = self._measure("amax", *where)
            amaxes = f"from {amax[max(0, at - 1)]:.3g} to {amax[at]:.3g}"
            text = f"has a weight that the optimizer did not write: its amax went {amaxes}"
        times = most / LIMITS["overwritten"]
        yield self._found(kind, self.steps[at], times, text, WRITTEN, where=where, numbers={"changed": most})

    def _worst(self, kind: str, values: Any) -> Iterator[Worst]:
        """The layer and the steps where a measure [steps, layers] exceeds its limit by most, if one does."""
        np, over = self.np, values > LIMITS[kind]
        if over.any():
            layer = int(np.where(over, values, -1).max(axis=0).argmax())
            begins, worst = stretch(over[:, layer], values[:, layer])
            numbers = {name: float(of[worst, layer]) for name, of in self.record.weights.items()}
            many = f"in {over[worst].sum()} of {len(self.layers)} layers"
            steps, value = (self.steps[begins], self.steps[worst]), float(values[worst, layer])
            yield *steps, self.layers[layer], value, numbers, many

    def _jump(self, jumps: Any) -> Iterator[Finding]:
        for begins, worst, _, value, numbers, many in self._worst("jump", jumps):
            text = f"the step changes weights {value:.3g} times as much as those before, {many}"
            before = self.steps[self.steps.index(begins) - 1]
            then = self.norms.get(before, math.inf)
            now = max(self.norms.get(step, 0.0) for step in self.steps if begins <= step <= worst)
            kind, remedy, advice = "jump", RECOVERY, "leave out such steps"
            if now > 2 * then:
                kind, advice = "gradients", "clip their norm"
                text = f"the gradients' norm rose from {then:.3g} to {now:.3g}, and {text}"
                remedy = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {2 * then:.3g})"
                expected = "before each optimizer.step(): no more than twice the last record's"
            else:
                missing = ["lr"] * (not self.rate[0]) + ["grad_norm"] * ("grad_norm" not in self.record.scalars)
                seen = f"record {' and '.join(missing)} to see what" if missing else "neither lr nor grad_norm"
                expected = f"leaves out the steps after it whose loss jumps; {seen} rose"
            what = kind, begins, value / LIMITS["jump"], text, remedy, expected, ("", ""), worst, advice
            yield self._found(*what, numbers=numbers)

    def _small(self) -> Iterator[Finding]:
        """Updates that rounding loses, and moments that are flushed, where it is worst."""
        np, weights = self.np, self.record.weights
        has_master = weights["master_update"] > 0  # then rounding the weight loses nothing, rounding the master does
        changed = np.where(weights["update"] > 0, weights["changed"], np.nan)
        unmoved = 1 - np.where(has_master, weights["master_changed"], changed)
        for begins, worst, layer, value, numbers, many in self._worst("unmoved", unmoved):
            form, bits = ("fp32", "all") if numbers["master_update"] > 0 else ("split24", "8 more bits of")
            owner = "its master" if form == "fp32" else "its weight"
            text = f"has updates below the distance of {owner}'s numbers: {called(value)} of them stay, {many},"
            remedy = f'octavo.optim.AdamW(model.parameters(), master="{form}")'
            what = "unmoved", begins, value / LIMITS["unmoved"], text, remedy, f"keeps {bits} what is rounded off"
            yield self._found(*what, (layer, "weight"), worst, numbers=numbers)
        for begins, worst, layer, value, numbers, many in self._worst("second moments", weights["second_flushed"]):
            text = f"flushes {called(value)} of its second moments where the first are not, {many},"
            remedy = 'octavo.optim.AdamW(model.parameters(), moments="bf16")'
            times, expected = value / LIMITS["second moments"], "bf16 has float32's range: nothing is flushed"
            what = "second moments", begins, times, text, remedy, expected
            yield self._found(*what, (layer, "weight"), worst, numbers=numbers)

    # --- layers

    def _dead(self) -> Iterator[Finding]:
        for kind, role in (("dead rows", "weight"), ("dead units", "input")):
            found = []
            for layer in self.layers:
                zeros = self.np.nan_to_num(self._measure("zeros", layer, role))
                over = zeros > LIMITS[kind] + 2 * (zeros[0] if role == "weight" else 0)
                if over.any() and (role == "weight" or zeros.max() > zeros[0] + 0.05 or zeros[0] > 0.97):
                    found.append((int(over.argmax()), float(zeros.max()), layer))
            for at, share, layer in found if len(found) <= len(self.layers) / 2 else ():
                text = f"has 0 in {called(share)} of its {role}"
                times = 4 if role == "weight" else 0.1 / max(1 - share, 1e-3)
                yield self._found(kind, self.steps[at], times, text, ANEW, where=(layer, role))

    def _idle(self) -> Iterator[Finding]:
        for load in self.record.loads():
            for expert, step in load.idle.items():
                if len(self.steps) - self.steps.index(step) >= FEW and sum(load.tokens) >= 16 * len(load.tokens):
                    text = f"gives no tokens to expert {expert} of {len(load.tokens)}"
                    remedy = "balance the router: a bias for each expert, or a loss for balance; look at its scores"
                    what = "idle expert", step, 4, text, remedy
                    yield self._found(*what, where=(load.layer, "input"), numbers={"expert": expert})

    def _logits(self) -> Iterator[Finding]:
        """Queries and keys so large that the softmax is saturated, from the norms of their layer's input and weight."""
        for layer in filter(PROJECTION.search, self.layers):
            size = {role: self._measure("elements", layer, role) for role in ("input", "weight", "grad_output")}
            with self.np.errstate(divide="ignore", invalid="ignore"):
                features = self.np.sqrt(size["input"] * size["weight"] / size["grad_output"])
                product = self._measure("rms", layer, "input") * self._measure("rms", layer, "weight")
                deviation = features * product**2
            over = self.np.nan_to_num(deviation, posinf=0) > LIMITS["logits"]
            if over.any():
                at, most = int(over.argmax()), float(self.np.nanmax(deviation))
                text = f"makes queries and keys so large that attention's logits deviate by about {most:.2g}"
                remedy = "norm queries and keys before they are multiplied (QK norm)"
                times, where = most / LIMITS["logits"], (layer, "weight")
                yield self._found("logits", self.steps[at], times, text, remedy, where=where)
