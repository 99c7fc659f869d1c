"""Recovery: what to do about a step whose gradients are not finite or whose loss is a spike.

The finding is made on the device before the optimizer's step, which it turns into nothing: neither weights nor state
are touched. The host learns of it when it reads the flags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.schedule.phase import Phase

FAULTS = {1: "a gradient or the loss is not finite", 2: "the loss is a spike"}
FINITE, SPIKE = FAULTS
SPREAD = 1.4826  # of a normal distribution's standard deviation against the median absolute deviation
LEAST = 1e-3  # a spread of less than this part of the median is taken for it: a loss that hardly moves has no spikes


@dataclass(frozen=True)
class Recovery:
    """A policy against faults.

    Args:
        phase: a phase of higher precision, without a trigger, to run after a fault. Its moments and master must keep
            all that those of the phases around it have, if nothing is to be lost: leave them, or raise them.
        steps: how long to stay in it.
        spike: how many robust standard deviations (1.4826 median absolute deviations) above the median of the last
            losses is a spike; None: only what is not finite is a fault.
        window: how many losses that median is of.
        attempts: after so many recoveries training stays in the phase; None: never.
        check_every: steps after which the host reads whether there was a fault; it waits for the device then. Faulty
            steps do nothing in any case.

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
            if name == "attempts" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"Recovery: {name}={value!r} must be a whole number of at least {lowest}")
        if self.spike is not None and not 0 < self.spike < math.inf:
            raise ValueError(f"Recovery: spike={self.spike!r} must be a number above 0, or None")


class Watch:
    """The losses and faults that a Recovery decides by, kept on the device of the losses."""

    def __init__(self, policy: Recovery) -> None:
        self.policy = policy
        self.losses = torch.full((policy.window,), math.nan)
        self.seen = torch.zeros((), dtype=torch.int64)  # losses that were no faults
        self.faults = torch.zeros((), dtype=torch.int32)  # since the last reading, bits of FAULTS
        self._step: tuple[Tensor, Tensor, Tensor] | None = None  # its loss, and the bits of that and of its gradients

    def look(self, loss: Tensor, largest: Tensor, spikes: bool) -> Tensor:
        """Whether a step is faulty, as one float32 on the device; without waiting for it.

        The loss is the same on all ranks; ``largest``: the largest absolute value of all gradients, NaN where one is.
        """
        loss = loss.detach().float().reshape(())
        self.losses, self.seen, self.faults = (x.to(loss.device) for x in (self.losses, self.seen, self.faults))
        of_loss = torch.where(torch.isfinite(loss), 0, FINITE)
        if spikes and self.policy.spike is not None:
            of_loss = of_loss | torch.where(self._score(loss) > self.policy.spike, SPIKE, 0)
        of_gradients = torch.where(torch.isfinite(largest.to(loss)), 0, FINITE)
        self._step = loss, of_loss.to(torch.int32), of_gradients.to(torch.int32)
        return ((of_loss | of_gradients) != 0).float()

    def count(self, is_scaled: bool) -> None:
        """Count what ``look`` found of the step, which is over.

        Where a GradScaler scaled its gradients (``is_scaled``), that these overflow is how it works, and no fault.
        """
        assert self._step is not None
        loss, found, of_gradients = self._step
        self._step = None
        found = found if is_scaled else found | of_gradients
        self.faults |= found
        is_good = found == 0
        place = torch.arange(self.policy.window, device=loss.device) == self.seen % self.policy.window
        self.losses = torch.where(place & is_good, loss, self.losses)
        self.seen = self.seen + is_good

    def read(self) -> int:
        """The faults since the last reading; waits for the device."""
        found = int(self.faults)
        self.faults.zero_()
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"losses": self.losses.cpu(), "seen": int(self.seen), "faults": int(self.faults)}

    def load(self, state: dict[str, Any]) -> None:
        """Load what ``state`` returned."""
        if state["losses"].shape != self.losses.shape:
            raise ValueError(f"the state is of window={len(state['losses'])}, not {len(self.losses)}")
        self.losses = state["losses"].clone()
        self.seen = torch.tensor(state["seen"])
        self.faults = torch.tensor(state["faults"], dtype=torch.int32)

    def _score(self, loss: Tensor) -> Tensor:
        """Robust standard deviations above the median; 0 before half a window was seen."""
        median = self.losses.nanmedian()
        spread = SPREAD * (self.losses - median).abs().nanmedian()
        spread = torch.maximum(spread, LEAST * median.abs())
        return torch.where(self.seen * 2 >= self.policy.window, (loss - median) / spread, 0.0)


def said(faults: int) -> str:
    """Faults in words."""
    return " and ".join(text for bit, text in FAULTS.items() if faults & bit)
