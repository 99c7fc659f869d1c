"""What is wrong in a record outside of its casts: data, loss, learning rate, optimizer, weights that something writes.

Thresholds are of the first two thirds of the faults of benchmarks/training/causes.py alone.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from octavo.inspect.incidents import Finding, level_of, severity_of
from octavo.inspect.record import Record, numpy
from octavo.inspect.remedies import called

LIMITS = {
    "learning rate": 2.0,  # times the highest before, after a step that hardly raised it
    "warm-up": 1.1,  # the third highest loss of the first steps over the very first
    "loss": 4.0,  # a loss above those before, over the usual difference of two steps
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
}
RATES = ("lr", "learning_rate")  # names under which the learning rate is recorded, the second by transformers' Trainer
BEFORE = 8  # a jump is measured against the median of so many records
FEW = 3  # records or steps in a row that something has to last
PROJECTION = re.compile(r"(qkv|q_proj|k_proj|query|key|c_attn|in_proj|\bw[qk]\b)")
FLOAT16 = 2.0**13  # finite gradients of this size, where others are inf, are float16's
RESTORE = "load weights and optimizer from the last checkpoint before that step"
WRITTEN = f"{RESTORE}; find what wrote them"
LOOK = "look at the data of that step, and leave out what is not as the rest"


class Training:
    """A record's numbers that belong to the training as a whole."""

    def __init__(self, record: Record) -> None:
        self.record, self.np, self.steps = record, numpy(), record.steps
        self.loss = record.scalars.get("loss", ([], []))
        self.rate = next((record.scalars[name] for name in RATES if name in record.scalars), ([], []))
        self.places = {(row.layer, row.role): place for place, row in reversed([*enumerate(record.rows)])}

    def findings(self) -> Iterator[Finding]:
        """All of them, in no order."""
        if self.steps and self.record.layers:
            yield from itertools.chain(
                *(self._learning_rate(), self._optimizer(), self._warmup(), self._loss(), self._repeats()),
                *(self._nonfinite(), self._scale_too_low(), self._untied(), self._dead(), self._weights()),
                *(self._idle(), self._logits()),
            )

    def _found(
        self,
        kind: str,
        begins: int,
        severity: float,
        text: str,
        remedy: str,
        expected: str = "",
        where: tuple[str, str] = ("", ""),
        worst: int | None = None,
        advice: str = "",
        **numbers: float,
    ) -> Finding:
        """A finding; ``text``: what happens, of a layer without its name, which goes before it.

        ``advice``: the remedy in plain words, if it is code; else it is taken up to its first semicolon.
        """
        advice = advice or remedy.split(";")[0]
        subject = f"{where[0]} {text}" if where[0] else f"{text[:1].upper()}{text[1:]}"
        sentence = f"{subject} {'at' if kind in ONCE else 'since'} step {begins}: {advice}"
        steps = begins, begins if worst is None else worst
        found = Finding(kind, *where, (), "", *steps, numbers, text, remedy, expected, severity)
        return replace(found, level=level_of(severity), sentence=sentence)

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
                text = f"the learning rate rises from {top:.3g} to {values[at]:.3g}"
                remedy = f'for group in optimizer.param_groups: group["lr"] = min(group["lr"], {top:.3g})'
                expected = "the rate of the steps before; look at the schedule and at what resumed the run"
                advice = f"keep it at {top:.3g}"
                yield self._found(
                    "learning rate",
                    steps[at],
                    severity_of("learning rate", values[at] / top / LIMITS["learning rate"]),
                    text,
                    remedy,
                    expected,
                    advice=advice,
                )
                break
        zeros = [value == 0 for value in values]
        for at in range(len(values) - FEW):
            if all(zeros[at : at + FEW + 1]):
                remedy = "give the optimizer a learning rate: lr is 0 in all its groups; look at the schedule's length"
                yield self._found("learning rate", steps[at], 4.0, "the learning rate is 0", remedy, "it trains on")
                break

    def _optimizer(self) -> Iterator[Finding]:
        steps, ages = self.record.scalars.get("state_age", ([], []))
        for at in range(1, len(ages)):
            if ages[at] < ages[at - 1]:
                text = f"the optimizer's state is new: it has seen {ages[at]:.0f} steps, after {ages[at - 1]:.0f}"
                remedy = 'optimizer.load_state_dict(checkpoint["optimizer"])  # where the run resumes'
                yield self._found("state", steps[at], 4.0, text, remedy, "moments go on as they were", advice="load it")
        steps, counts = self.record.scalars.get("decayed_vectors", ([], []))
        if counts and counts[0]:
            text = f"weight decay pulls {counts[0]:.0f} biases and norms' weights to 0"
            remedy = "give parameters of one dimension a group of their own with weight_decay=0"
            yield self._found("decay", steps[0], 1.0, text, remedy, "matrices decay, biases and norms do not")

    def _warmup(self) -> Iterator[Finding]:
        ages, (steps, loss), rates = self.record.scalars.get("state_age", ([], []))[1], self.loss, self.rate[1]
        if len(loss) < 4 or not rates or not ages or ages[0] > 1 or rates[0] < max(rates) / 2:
            return
        if (rise := sorted(loss[1:12])[-FEW] / loss[0]) > LIMITS["warm-up"]:  # not by a single batch
            text = f"the loss rises from {loss[0]:.3g} to {max(loss[1:12]):.3g} in the first steps, without a warm-up"
            remedy = f"let the learning rate rise to {max(rates):.3g} over the first steps: a warm-up"
            yield self._found(
                "warm-up", steps[0], severity_of("warm-up", 10 * (rise - 1)), text, remedy, "smaller first updates"
            )

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
            lasts = back - at > FEW - 1
            text = (
                f"the loss {'rose and stays up' if lasts else 'rose for a step'}: from {before:.3g} to {loss[at]:.3g}"
            )
            severity = severity_of("loss", rise / usual / LIMITS["loss"])
            yield self._found("labels" if lasts else "batch", steps[at], severity, text, LOOK, before=float(before))
            at = back

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
                yield self._found(
                    "repeats", steps[at], severity_of("repeats", usual / max(now, 1e-9 * usual)), text, remedy
                )
                break

    # --- inf and NaN

    def _nonfinite(self) -> Iterator[Finding]:
        """Where the first inf or NaN came from: the layer before the first input with one, or the last gradient."""
        np, record = self.np, self.record
        faulty = record.measures["nonfinite"] > 0
        if not faulty.any():
            return
        at = int(faulty.any(axis=1).argmax())
        layers: dict[str, set[int]] = {role: set() for role in ("input", "weight", "grad_output")}
        for place in np.flatnonzero(faulty[at]):
            row = record.rows[place]
            layers[row.role].add(record.layers.index(row.layer))
        step, names, last = self.steps[at], record.layers, len(record.layers) - 1
        of_step = dict(zip(*self.loss, strict=True))
        earlier = [s for s, value in of_step.items() if not math.isfinite(value) and s < step]
        if earlier and (not at or self.steps[at - 1] < min(earlier)):
            text = "inf or NaN began between two recorded steps"
            remedy = "train from the last checkpoint under octavo.inspect.trace_faults, which names the layer"
            yield self._found("nonfinite", min(earlier), 10.0, text, remedy)
        elif 0 in layers["input"]:
            text = "the batch, or what embeds it, brings inf or NaN to the first layer"
            yield self._found("batch", step, 10.0, text, f"{LOOK}; then {RESTORE}", "the other layers had none before")
        elif layers["input"] or (not math.isfinite(of_step.get(step, 0.0)) and layers["grad_output"]):
            layer = names[min(layers["input"], default=last + 1) - 1]
            then = names[min(layers["input"])] if layers["input"] else "the loss"
            text = f"has inf or NaN in its weight, or in what is computed up to {then}: its input has none"
            yield self._found("nonfinite", step, 10.0, text, RESTORE, where=(layer, "weight"))
        elif layers["grad_output"]:
            first = max(layers["grad_output"])
            amax = self._measure("amax", names[first], "grad_output")[at]
            if first == last and ("loss_scale" in record.scalars or amax > FLOAT16):
                yield self._of_loss_scale(
                    "gradients overflow", step, 10.0, "lower: let GradScaler halve it where they do"
                )
            else:
                remedy = "octavo.schedule.Recovery(octavo.schedule.Phase(octavo.recipes.high_precision()))"
                text = "gets a gradient with inf or NaN, which the layers behind it did not have"
                where, expected = (names[first], "grad_output"), "leaves out steps with such gradients"
                yield self._found("nonfinite", step, 10.0, text, remedy, expected, where, advice="leave out such steps")
        else:
            name = names[min(layers["weight"])] if len(layers["weight"]) == 1 else ""
            text = "has inf or NaN in its weight" if name else "inf or NaN are in the weights"
            text += " after the optimizer's step, though inputs and gradients have none"
            yield self._found("nonfinite", step, 10.0, text, RESTORE, where=(name, "weight" * bool(name)))

    def _of_loss_scale(self, what: str, step: int, severity: float, how: str) -> Finding:
        steps, values = self.record.scalars.get("loss_scale", ([], []))
        scale = f" of {values[max(0, bisect_left(steps, step))]:.3g}" if values else ""
        return self._found(
            "loss scale", step, severity, f"{what} at a loss scale{scale}", f"take a loss scale that is {how}"
        )

    def _scale_too_low(self) -> Iterator[Finding]:
        zeros = self._measure("zeros", self.record.layers[-1], "grad_output")
        over = zeros > LIMITS["loss scale"] + self.np.nan_to_num(zeros[0])
        if over.any():
            at = int(over.argmax())
            what = f"{called(float(self.np.nanmax(zeros)))} of the last layer's gradients are 0"
            yield self._of_loss_scale(what, self.steps[at], 4.0, "higher: they underflow")

    # --- weights

    def _untied(self) -> Iterator[Finding]:
        for step, kind, names in self.record.events:
            if kind == "untied":
                layer = next((name for name in self.record.layers if f"{name}.weight" in names.split(" and ")), "")
                text, remedy = (
                    f"no longer shares its weight: {names} were one",
                    "tie them again, before the optimizer is made",
                )
                yield self._found(
                    "untied", step, 4.0, text, remedy, "one parameter, which the optimizer trains", (layer, "")
                )

    def _weights(self) -> Iterator[Finding]:
        """Weights that something but an update wrote, updates that jump, and weights without any."""
        np, record = self.np, self.record
        updates, between = record.weights["update"], record.weights["between"]
        rms = np.stack([self._measure("rms", layer, "weight") for layer in record.layers], 1)
        rms = np.concatenate([rms[:1], rms[:-1]])
        usual = np.full_like(updates, np.nan)
        for at in range(2, len(updates)):
            usual[at] = np.median(updates[max(0, at - BEFORE) : at], axis=0)
        gaps = np.diff(self.steps, prepend=self.steps[0])[:, None] - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            jumps = np.where(usual > 0, updates / usual, np.nan)
            most = np.maximum(np.nan_to_num(usual), updates) * 3 * np.maximum(gaps, 0)
            alone = jumps > LIMITS["jump"] * np.maximum(1, np.median(np.nan_to_num(jumps), axis=1, keepdims=True))
            written = np.where(alone | ((updates > rms / 2) & (jumps > LIMITS["jump"])), updates, 0) / rms
            written = np.nan_to_num(np.maximum(written, (between - most) / rms), posinf=1e30)
        yield from self._overwritten(written)
        jumps[(written > LIMITS["overwritten"]).any(axis=1)] = np.nan
        if (jumps > LIMITS["jump"]).any():
            yield self._jump(jumps)
        still, moves = updates == 0, (updates > 0) & (record.weights["changed"] > 0.5)
        lasts = np.flip(np.minimum.accumulate(np.flip(still, 0), 0), 0)  # to the end
        for layer in np.flatnonzero(lasts[-FEW:].all(axis=0) & (len(still) >= FEW)):
            at = int(lasts[:, layer].argmax())
            if moves[at:].mean() > 0.5:
                remedy = "requires_grad, and a group of the optimizer: the weight has both or does not train"
                text, where = "does not train, while other layers do", (record.layers[layer], "weight")
                yield self._found("frozen", self.steps[at], 3.0, text, remedy, where=where)

    def _overwritten(self, written: Any) -> Iterator[Finding]:
        np, record, over = self.np, self.record, written > LIMITS["overwritten"]
        if not over.any():
            return
        at = int(over.any(axis=1).argmax())
        places, layer = np.flatnonzero(over[at]), int(written[at].argmax())
        most = float(written[at].max())
        severity = severity_of("overwritten", most / LIMITS["overwritten"])
        if len(places) > len(record.layers) / 2:
            rms = np.stack([self._measure("rms", name, "weight") for name in record.layers], 1)
            alike = np.abs(rms[at] / rms[max(0, at - 1)] - 1) < 0.1
            kind, what = "overwritten", "new numbers"
            if alike.mean() > 0.5:
                kind, what = "ranks", "the same numbers in other places, as if ranks had loaded each other's shards"
            text = f"{len(places)} of {len(record.layers)} weights have {what}, not by the optimizer"
            yield self._found(kind, self.steps[at], severity, text, WRITTEN, changed=most)
            return
        amax = self._measure("amax", record.layers[layer], "weight")
        amaxes = f"from {amax[max(0, at - 1)]:.3g} to {amax[at]:.3g}"
        text = f"has a weight that the optimizer did not write: its amax went {amaxes}"
        where = record.layers[layer], "weight"
        yield self._found("overwritten", self.steps[at], severity, text, WRITTEN, where=where, changed=most)

    def _jump(self, jumps: Any) -> Finding:
        np, record, over = self.np, self.record, jumps > LIMITS["jump"]
        layer = int(np.where(over, jumps, -1).max(axis=0).argmax())
        worst = begins = int(np.where(over, jumps, -1)[:, layer].argmax())
        while begins > 0 and over[begins - 1, layer]:
            begins -= 1
        value, count = float(jumps[worst, layer]), int(over[worst].sum())
        many = f"in {count} of {len(record.layers)} layers"
        text = f"the step changes weights {value:.3g} times as much as those before, {many}"
        severity = severity_of("jump", value / LIMITS["jump"])
        numbers = {name: float(of[worst, layer]) for name, of in record.weights.items()}
        steps, values = record.scalars.get("grad_norm", ([], []))
        norms = {step: norm for step, norm in zip(steps, values, strict=True) if math.isfinite(norm)}
        then = norms.get(self.steps[begins - 1], math.inf)
        now = max(norms.get(step, 0.0) for step in self.steps[begins : worst + 1])
        if now > 2 * then:
            kind, advice = "gradients", "clip their norm"
            text = f"the gradients' norm rose from {then:.3g} to {now:.3g}, and {text}"
            remedy = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {2 * then:.3g})"
            expected = "before each optimizer.step(): no more than twice the last record's"
        else:
            kind, advice = "jump", "leave out such steps"
            missing = ["lr"] * (not self.rate[0]) + ["grad_norm"] * (not steps)
            seen = f"record {' and '.join(missing)} to see what rose" if missing else "neither lr nor grad_norm rose"
            remedy = "octavo.schedule.Recovery(octavo.schedule.Phase(octavo.recipes.high_precision()))"
            expected = f"leaves out the steps after it whose loss jumps; {seen}"
        what = kind, self.steps[begins], severity, text, remedy, expected
        return replace(self._found(*what, worst=self.steps[worst], advice=advice), numbers=numbers)

    # --- layers

    def _dead(self) -> Iterator[Finding]:
        for kind, role, what in (("dead rows", "weight", "weight"), ("dead units", "input", "input")):
            found = []
            for layer in self.record.layers:
                zeros = self.np.nan_to_num(self._measure("zeros", layer, role))
                over = zeros > LIMITS[kind] + 2 * (zeros[0] if role == "weight" else 0)
                if over.any() and (role == "weight" or zeros.max() > zeros[0] + 0.05 or zeros[0] > 0.97):
                    found.append((int(over.argmax()), -float(zeros.max()), layer))
            for at, share, layer in found[: len(found) if len(found) <= len(self.record.layers) / 2 else 0]:
                text = f"has 0 in {called(-share)} of its {what}"
                remedy = "give these units their initial weights anew; look for what masks them, and at the bias before"
                severity = severity_of(kind, 4 if role == "weight" else 0.1 / max(1 + share, 1e-3))
                yield self._found(kind, self.steps[at], severity, text, remedy, where=(layer, role), zeros=-share)

    def _idle(self) -> Iterator[Finding]:
        seen: list[Any] = []
        for layer, tokens in self.record.experts.tokens.items() if self.record.experts is not None else ():
            counted = ~self.np.isnan(tokens).any(axis=1)
            by_step, steps = tokens[counted], [s for s, is_there in zip(self.steps, counted, strict=True) if is_there]
            if any(other.shape == by_step.shape and (other == by_step).all() for other in seen):
                continue
            seen.append(by_step)
            for expert in range(by_step.shape[1]) if len(by_step) else ():
                busy = self.np.flatnonzero(by_step[:, expert])
                begins = int(busy[-1]) + 1 if len(busy) else 0
                if len(steps) - begins >= FEW and by_step[-1].sum() >= 16 * by_step.shape[1]:
                    text = f"gives no tokens to expert {expert} of {by_step.shape[1]}"
                    remedy = "balance the router: a bias for each expert, or a loss for balance; look at its scores"
                    where = layer, "input"
                    yield self._found("idle expert", steps[begins], 3.0, text, remedy, where=where, expert=expert)

    def _logits(self) -> Iterator[Finding]:
        """Queries and keys so large that the softmax is saturated, from the norms of their layer's input and weight."""
        for layer in filter(PROJECTION.search, self.record.layers):
            size = {role: self._measure("elements", layer, role) for role in ("input", "weight", "grad_output")}
            with self.np.errstate(divide="ignore", invalid="ignore"):
                features = self.np.sqrt(size["input"] * size["weight"] / size["grad_output"])
                deviation = (
                    features * (self._measure("rms", layer, "input") * self._measure("rms", layer, "weight")) ** 2
                )
            over = self.np.nan_to_num(deviation, posinf=0) > LIMITS["logits"]
            if over.any():
                at, most = int(over.argmax()), float(self.np.nanmax(deviation))
                text = f"makes queries and keys so large that attention's logits deviate by about {most:.2g}"
                remedy = "norm queries and keys before they are multiplied (QK norm)"
                severity = severity_of("logits", most / LIMITS["logits"])
                yield self._found("logits", self.steps[at], severity, text, remedy, where=(layer, "weight"))


ONCE = ("learning rate", "state", "batch", "overwritten", "ranks", "gradients", "jump", "untied", "labels")


def of_training(record: Record) -> Sequence[Finding]:
    """What is wrong with the training as a whole."""
    return [*Training(record).findings()]
