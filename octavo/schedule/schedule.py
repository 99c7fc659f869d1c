"""PrecisionSchedule: phases that begin while a model trains, and recovery from faults.

A fault is a step whose gradients are not finite or whose loss is a spike. It is found on the device before the
optimizer's step, which then changes neither weights nor state. The host learns of it when it reads the flags.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.distributed.ranks import Ranks
from octavo.nn.recipe_module import RecipeModule
from octavo.optim.base import CompactOptimizer
from octavo.optim.conversion import Conversion
from octavo.optim.state import largest_gradient
from octavo.recipes import as_recipe, to_json
from octavo.schedule.phase import Phase, Target, fp8_weights, phase_targets, switch
from octavo.schedule.plan import Plan, plan_of

NOT_FINITE, SPIKE = 1, 2
FAULTS = {NOT_FINITE: "a gradient or the loss is not finite", SPIKE: "the loss is a spike"}
DEVIATIONS = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
LEAST_DEVIATION = 1e-3  # the least deviation, as a share of the median: a loss that hardly moves has no spikes


@dataclass(frozen=True)
class Recovery:
    """A policy against faults.

    Args:
        phase: a phase of higher precision, without a trigger, to run after a fault. Its moments and master should be
            "same" or of more bits than in the phases around it, or else bits are lost.
        steps: how long to stay in it.
        spike: a loss is a spike if it is so many robust standard deviations (1.4826 median absolute deviations) above
            the median of the last losses; None: only what is not finite is a fault.
        window: the number of last losses.
        attempts: after so many recoveries training stays in the phase; None: it always returns.
        check_every: how often, in steps, the host reads whether there was a fault, for which it waits for the device.
            Faulty steps do nothing in any case.

    Raises:
        TypeError, ValueError: for fields out of range.

    Example:
        >>> from octavo import recipes
        >>> Recovery(Phase(recipes.high_precision()), steps=100, spike=8.0).window
        64
    """

    phase: Phase
    steps: int = 50
    spike: float | None = 6.0
    window: int = 64
    attempts: int | None = 3
    check_every: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.phase, Phase):
            raise TypeError(f"Recovery: phase={self.phase!r} is no octavo.schedule.Phase")
        if self.phase.trigger is not None:
            raise ValueError(f"Recovery: {self.phase}: it begins by a fault, not by {self.phase.trigger}")
        for name, lowest in (("steps", 1), ("window", 8), ("attempts", 1), ("check_every", 1)):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not ((is_whole and value >= lowest) or (name == "attempts" and value is None)):
                raise ValueError(f"Recovery: {name}={value!r} must be a whole number of at least {lowest}")
        if self.spike is not None and not 0 < self.spike < math.inf:
            raise ValueError(f"Recovery: spike={self.spike!r} must be a number above 0, or None")


class LossWatch:
    """The losses and faults by which a Recovery decides, on the device of the losses."""

    def __init__(self, policy: Recovery) -> None:
        self.policy = policy
        self.losses = torch.full((policy.window,), math.nan, dtype=torch.float32, device="cpu")
        self.seen = torch.zeros((), dtype=torch.int64, device="cpu")  # how many losses were not faulty
        self.faults = torch.zeros((), dtype=torch.int32, device="cpu")  # bits of FAULTS, since the last reading
        self._step: tuple[Tensor, Tensor, Tensor] | None = None  # (loss, its bits of FAULTS, those of the gradients)

    def look(self, loss: Tensor, largest: Tensor, spikes: bool) -> Tensor:
        """Return whether a step is faulty, 1.0 or 0.0, as a float32 on the device, without waiting for it.

        ``loss``: the same on all ranks; ``largest``: the largest absolute value of all gradients, NaN if one is NaN;
        ``spikes``: whether a loss that is a spike is a fault.
        """
        loss = loss.detach().float().reshape(())
        self.losses, self.seen, self.faults = (x.to(loss.device) for x in (self.losses, self.seen, self.faults))
        loss_faults = torch.where(torch.isfinite(loss), 0, NOT_FINITE)
        if spikes and self.policy.spike is not None:
            loss_faults = loss_faults | torch.where(self._score(loss) > self.policy.spike, SPIKE, 0)
        gradient_faults = torch.where(torch.isfinite(largest.to(loss)), 0, NOT_FINITE)
        self._step = loss, loss_faults.to(torch.int32), gradient_faults.to(torch.int32)
        return ((loss_faults | gradient_faults) != 0).float()

    def count(self, is_scaled: bool) -> None:
        """Add the faults that ``look`` saw in the step, or its loss if there are none, once the step is over.

        ``is_scaled``: a GradScaler has scaled the gradients. Then an overflow is no fault: the scaler lowers its scale.
        """
        if self._step is None:
            raise RuntimeError("with a recovery, observe(loss) belongs before each optimizer.step()")
        (loss, faults, gradient_faults), self._step = self._step, None
        faults = faults if is_scaled else faults | gradient_faults
        self.faults |= faults
        is_good = faults == 0
        place = torch.arange(self.policy.window, device=loss.device) == self.seen % self.policy.window
        self.losses = torch.where(place & is_good, loss, self.losses)
        self.seen = self.seen + is_good

    def read(self) -> int:
        """Return the faults since the last reading, as bits of FAULTS; waits for the device."""
        faults = int(self.faults)
        self.faults.zero_()
        return faults

    def state(self) -> dict[str, Any]:
        """Return the losses and counts that a checkpoint saves."""
        return {"losses": self.losses.cpu(), "seen": int(self.seen), "faults": int(self.faults)}

    def check_window_of(self, state: dict[str, Any]) -> None:
        """Raise ValueError if a dict that ``state`` returned is of another window than this policy's."""
        if (window := len(state["losses"])) != self.policy.window:
            raise ValueError(f"the state is of window={window}, not {self.policy.window}")

    def load(self, state: dict[str, Any]) -> None:
        """Load a dict that ``state`` returned, of the same window."""
        self.losses = state["losses"].clone()
        self.seen = torch.tensor(state["seen"], device="cpu")
        self.faults = torch.tensor(state["faults"], dtype=torch.int32, device="cpu")

    def _score(self, loss: Tensor) -> Tensor:
        """Return by how many robust standard deviations a loss exceeds the median; 0 until half a window is filled."""
        median = self.losses.nanmedian()
        deviation = DEVIATIONS * (self.losses - median).abs().nanmedian()
        deviation = torch.maximum(deviation, LEAST_DEVIATION * median.abs())
        return torch.where(self.seen * 2 >= self.policy.window, (loss - median) / deviation, 0.0)


FOR_GOOD = -1  # the steps left of a recovery without an end
RESOLUTION_EVERY = 10  # steps whose updates are summed; the host reads their ratio as many steps later, without waiting
_logger = logging.getLogger("octavo")


@dataclass
class _ScheduleProgress:
    """The part of a schedule's state that its users do not see.

    Attributes:
        recovering: steps left of a recovery; 0: there is none; FOR_GOOD: it has no end.
        recoveries: how many recoveries there were.
        rescued: the index of the phase that the last recovery interrupted.
        highest_lr: the highest learning rate so far, while a later phase waits for it to fall.
        highest_ratio: the highest ratio of updates to the weights' resolution so far.
    """

    recovering: int = 0
    recoveries: int = 0
    rescued: int = 0
    highest_lr: float = 0.0
    highest_ratio: float = 0.0


@dataclass(frozen=True)
class Switch:
    """A change of phase that happened.

    Attributes:
        step: optimizer steps done before it.
        phase: index of the phase that began; -1 for a recovery's.
        name: the name of its recipe.
        reason: why it began.

    Example:
        >>> Switch(step=2, phase=1, name="high_precision", reason="step 2").name
        'high_precision'
    """

    step: int
    phase: int
    name: str
    reason: str


class PrecisionSchedule:
    """Switches a training from phase to phase, in place.

    The first phase begins at once. Call ``step()`` after every ``optimizer.step()``. A switch changes the recipe, and
    where the phases say so the storage of weights, their masters and the moments. It does so one tensor after the
    other: memory never holds more than the larger of both forms and one more tensor. A switch to more bits changes no
    value. Parameters stay the same objects, with their hooks.

    To resume, load the schedule's state first: it puts model and optimizer into the form that their state was saved in.

    Args:
        model: a converted model.
        optimizer: of the model's parameters. With one of torch's only recipes can change.
        phases: the first without a trigger, all others with one; they begin in this order.
        recovery: what to do about faults; with it, call ``observe(loss)`` before every ``optimizer.step()``.

    Attributes:
        steps: how many optimizer steps were counted.
        tokens: how many tokens were counted.
        index: the present phase's; during a recovery that of the phase to which training returns.
        switches: all Switches so far.

    Raises:
        TypeError, ValueError: naming the phase that is not possible, with the reason.

    Example:
        >>> import torch, octavo
        >>> model = octavo.nn.Linear(64, 64)
        >>> optimizer = octavo.optim.AdamW(model.parameters())
        >>> low, high = octavo.recipes.delayed(), octavo.recipes.high_precision()
        >>> phases = [Phase(low), Phase(high, moments="fp32", from_step=2)]
        >>> schedule = PrecisionSchedule(model, optimizer, phases)
        >>> for _ in range(3):
        ...     model(torch.ones(8, 64)).sum().backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> model.recipe.name, schedule.switches[-1].step
        ('high_precision', 2)
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, phases: Sequence[Phase], recovery: Recovery | None = None
    ) -> None:
        self.model, self.optimizer, self.phases, self.recovery = model, optimizer, tuple(phases), recovery
        _check_order(self.phases)
        self.steps = self.tokens = self.index = 0
        self.switches: list[Switch] = []
        self._progress = _ScheduleProgress()
        self._watch: LossWatch | None = None
        self.skip_flag: Tensor | None = None  # on the device; not 0 if the step last observed is skipped
        self._must_skip = False  # whether an optimizer of torch's must skip this step
        self._scaler_may_skip = False  # whether a GradScaler skips this step, or may: _before_step hasn't run yet
        self.targets = phase_targets(model, optimizer, self.phases)  # of each phase
        self._recovery_targets: list[Target] = []  # the recovery's Target after each phase
        if recovery is not None:
            self._refuse_updates_in_backward()
            self._watch = LossWatch(recovery)
            weak = weakref.WeakMethod(self._before_step)
            hook = optimizer.register_step_pre_hook(lambda *_: None if (method := weak()) is None else method())
            weakref.finalize(self, hook.remove).atexit = False
            for target in self.targets:
                self._recovery_targets += phase_targets(model, optimizer, [recovery.phase], target)
        self._refuse_ddp()
        self._enter(self.targets[0], 0, "the first phase")

    def _refuse_updates_in_backward(self) -> None:
        if getattr(self.optimizer, "in_backward", None) is not None:
            raise ValueError("a recovery decides by the loss and all gradients; remove() update_in_backward")

    def _refuse_ddp(self) -> None:
        """Raise RuntimeError if a later phase changes the storage of weights that DistributedDataParallel has."""
        later_targets = *self.targets[self.index :], *self._recovery_targets
        conversions = [target.conversion(self.model) for target in later_targets]
        Conversion(None, dict(pair for each in conversions for pair in each.storage.items())).refuse_ddp()

    def _before_step(self) -> None:
        """Clear a faulty step's gradients; runs before each optimizer step that no GradScaler skips."""
        self._scaler_may_skip = getattr(self.optimizer, "found_inf", None) is not None  # by the optimizer itself
        if self._must_skip:
            self.optimizer.zero_grad()

    @property
    def phase(self) -> Phase:
        """The present phase; during a recovery the recovery's."""
        return self.recovery.phase if self.recovery and self._progress.recovering else self.phases[self.index]

    def observe(self, loss: Tensor) -> None:
        """Look for a fault before the optimizer's step, which changes nothing if there is one.

        This does not wait for the device, except with an optimizer of torch's, which can't leave a step out by itself.
        Gradients that a GradScaler has scaled may overflow: that is no fault, and the scaler handles it.

        Args:
            loss: the step's loss, over all its micro-batches; under torch.distributed this rank's.
        """
        if self._watch is None:
            raise RuntimeError("the schedule has no recovery: PrecisionSchedule(..., recovery=Recovery(...))")
        self._refuse_updates_in_backward()  # which may have begun since __init__
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        if not (gradients := [param.grad for param in params if param.grad is not None]):
            raise RuntimeError("observe(loss) belongs between backward and optimizer.step(): there are no gradients")
        mean_loss = Ranks.of_process().mean(loss.detach().float())
        # in a recovery the loss may stay at the height of its spike
        largest = largest_gradient(gradients)
        self.skip_flag = is_faulty = self._watch.look(mean_loss, largest, spikes=not self._progress.recovering)
        self._scaler_may_skip = True
        if isinstance(self.optimizer, CompactOptimizer):
            self.optimizer.skip = is_faulty
        else:
            self._must_skip = bool(is_faulty)

    def step(self, tokens: int = 0) -> None:
        """Count an optimizer step, and begin the next phase if it is time.

        Args:
            tokens: how many were trained on in this step, on all ranks.

        Raises:
            ValueError: for fewer than 0 tokens; nothing is counted then.
            RuntimeError: if the next phase begins by tokens and there are none, or ``observe`` was not called.
        """
        if not 0 <= tokens < math.inf:
            raise ValueError(f"tokens={tokens!r} must be a number of at least 0")
        next_phases = self.phases[self.index + 1 :]
        if next_phases and next_phases[0].trigger == "from_tokens" and not self.tokens + tokens:
            raise RuntimeError(f"{next_phases[0]} begins by tokens: schedule.step(tokens) counts those of each step")
        if self._watch is not None:
            self._watch.count(is_scaled=self._scaler_may_skip)
        if not self.steps:
            self._refuse_ddp()  # DistributedDataParallel may have wrapped the model since __init__
        self.steps += 1
        self.tokens += tokens
        self._must_skip = False
        if isinstance(self.optimizer, CompactOptimizer):
            self.optimizer.skip = None
        self._begin_due_phases()
        self._recover()

    def _begin_due_phases(self) -> None:
        """Begin the next phases if it is time; in a recovery only note to which phase training returns."""
        progress, waits_for_rate = self._progress, self._awaits("when_lr_below")
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups) if waits_for_rate else 0.0
        progress.highest_lr = max(progress.highest_lr, rate)
        resolution = getattr(self.optimizer, "resolution", None)
        ratio = None if resolution is None or self.steps % RESOLUTION_EVERY else resolution.next_ratio()
        progress.highest_ratio = max(progress.highest_ratio, ratio or 0.0)
        while self.index + 1 < len(self.phases) and (reason := self._reason(self.phases[self.index + 1], rate, ratio)):
            self.index += 1
            ratio = None  # a later phase begins by a ratio of its own
            if not progress.recovering:
                self._enter(self.targets[self.index], self.index, reason)

    def _reason(self, phase: Phase, rate: float, ratio: float | None) -> str:
        """Return why a phase begins now; "" if it does not.

        ``rate``: the learning rate; ``ratio``: of updates to the weights' resolution; None: there is no new one.
        """
        assert phase.trigger is not None
        limit = getattr(phase, phase.trigger)
        match phase.trigger:
            case "from_step" if self.steps >= limit:
                return f"step {limit}"
            case "from_tokens" if self.tokens >= limit:
                return f"{self.tokens} tokens"
            case "when_lr_below" if rate < limit and rate < self._progress.highest_lr:
                return f"the learning rate fell to {rate:.3g}"
            case "when_update_below_resolution" if ratio is not None and ratio < limit <= self._progress.highest_ratio:
                return f"updates fell to {ratio:.3g} of the weights' resolution"
        return ""

    def _awaits(self, trigger: str) -> bool:
        """Whether a later phase begins by this trigger."""
        return any(phase.trigger == trigger for phase in self.phases[self.index + 1 :])

    def _recover(self) -> None:
        """Begin a recovery if there was a fault, or end the one that runs if its steps are done."""
        if self._watch is None:
            return
        policy, progress = self._watch.policy, self._progress
        faults = self._watch.read() if self.steps % policy.check_every == 0 else 0
        if faults and not progress.recovering:
            progress.recoveries += 1
            for_good = policy.attempts is not None and progress.recoveries > policy.attempts
            progress.recovering = FOR_GOOD if for_good else policy.steps
            progress.rescued = self.index
            for _, module in RecipeModule.named_in(self.model):
                module.reset_delayed_state()  # it may hold amaxes of a faulty step
            reason = " and ".join(text for bit, text in FAULTS.items() if faults & bit)
            again = f", after {policy.attempts} recoveries" if for_good else ""
            self._enter(self._recovery_targets[self.index], -1, reason + again)
        elif progress.recovering > 0:
            progress.recovering -= 1
            if not progress.recovering:
                self._enter(self.targets[self.index], self.index, f"{policy.steps} steps of recovery are done")

    def _enter(self, target: Target, index: int, reason: str) -> None:
        switch(self.model, self.optimizer, target)
        self.switches.append(Switch(self.steps, index, target.phase.name, reason))
        _logger.info("step %d: %s, since %s", self.steps, target.phase, reason)
        self._measure()

    def _measure(self) -> None:
        """Measure updates against the weights' resolution for as long as a later phase waits for it."""
        waits = self._awaits("when_update_below_resolution")
        if isinstance(self.optimizer, CompactOptimizer) and waits != (self.optimizer.resolution is not None):
            self.optimizer.measure(fp8_weights(self.model) if waits else None)

    def plan(self, budget_bytes: int | None = None, example_inputs: Tensor | Iterable[Any] | None = None) -> Plan:
        """Return the bytes of each phase: of weights, masters, moments, gradients and tensors that forward saves.

        Nothing is computed and no memory is taken: the model runs on tensors without data.

        Args:
            budget_bytes: the most that a phase may take in all.
            example_inputs: the model's arguments, of one micro-batch, or its only one, a tensor; without them saved
                activations are not counted.

        Raises:
            BudgetError: if a phase takes more than the budget, with the cheapest way to fit.
        """
        example_inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
        inputs = None if example_inputs is None else tuple(example_inputs)
        return plan_of(self.model, self.optimizer, (*self.targets, *self._recovery_targets[:1]), budget_bytes, inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state as numbers, strings and small tensors, for a checkpoint."""
        resolution = getattr(self.optimizer, "resolution", None)
        return {
            **{name: getattr(self, name) for name in ("steps", "tokens", "index")},
            **asdict(self._progress),
            "phases": [repr(phase) for phase in self.phases],
            "recipes": [to_json(phase.recipe) for phase in self.phases],
            "switches": [asdict(switch) for switch in self.switches],
            "watch": None if self._watch is None else self._watch.state(),
            "resolution": None if resolution is None else resolution.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and put model and optimizer into its phase; load their states afterwards.

        Raises:
            ValueError: if it is no state of a schedule, or one of other phases or of a recovery with another window;
                nothing is changed then.
        """
        target = self.target_of(state_dict)
        progress = _ScheduleProgress(**{field.name: state_dict[field.name] for field in fields(_ScheduleProgress)})
        switches = [Switch(**each) for each in state_dict["switches"]]
        switch(self.model, self.optimizer, target)
        self.steps, self.tokens, self.index = (state_dict[name] for name in ("steps", "tokens", "index"))
        self._progress, self.switches = progress, switches
        if self._watch is not None:
            self._watch.load(state_dict["watch"])
        self._measure()
        if (resolution := getattr(self.optimizer, "resolution", None)) is not None:
            resolution.load(state_dict["resolution"])

    def target_of(self, state_dict: dict[str, Any]) -> Target:
        """Return the Target that ``load_state_dict`` switches to; it raises what that raises, and changes nothing."""
        now = self.state_dict()
        recipes = now.pop("recipes")  # "phases" has their names alone; a state from before they were saved has no more
        if missing := now.keys() - state_dict.keys():
            raise ValueError(f"this is no state that PrecisionSchedule.state_dict returned: it has no {min(missing)!r}")
        if state_dict["phases"] != now["phases"]:
            raise ValueError(f"the state is of the phases {state_dict['phases']}, not {now['phases']}")
        for phase, saved, recipe in zip(self.phases, state_dict.get("recipes", recipes), recipes, strict=True):
            if saved != recipe and as_recipe(json.loads(saved)) != as_recipe(json.loads(recipe)):  # not in names alone
                raise ValueError(f"the state's recipe in {phase} is {saved}, not {recipe}".replace("\n", ""))
        if (state_dict["watch"] is None) != (self._watch is None):
            raise ValueError("the state was saved with a recovery and the schedule has none, or the other way round")
        if self._watch is not None:
            self._watch.check_window_of(state_dict["watch"])
        if state_dict["recovering"]:
            return self._recovery_targets[state_dict["rescued"]]
        return self.targets[state_dict["index"]]


def _check_order(phases: Sequence[Phase]) -> None:
    if not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise TypeError("phases: a list of octavo.schedule.Phase, at least one")
    if phases[0].trigger is not None:
        raise ValueError(f"phase 0, {phases[0]}: the first begins at once, so it takes no {phases[0].trigger}")
    for name in ("from_step", "from_tokens"):
        values = [getattr(phase, name) for phase in phases if getattr(phase, name) is not None]
        if any(later <= earlier for earlier, later in itertools.pairwise(values)):
            raise ValueError(f"phases begin one after the other, but {name} is {', '.join(map(str, values))}")
    for index, phase in enumerate(phases[1:], 1):
        if phase.trigger is None:
            raise ValueError(f"phase {index}, {phase}: needs from_step, from_tokens or another trigger")
