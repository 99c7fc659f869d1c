"""The bytes that each phase of a schedule takes, counted before anything is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from octavo.errors import OctavoError
from octavo.nn.convert import set_recipe
from octavo.nn.saved import predicted_by_kind
from octavo.optim.base import CompactOptimizer
from octavo.optim.conversion import Conversion
from octavo.schedule.phase import Phase, Target, phase_targets


class BudgetError(OctavoError, ValueError):
    """A phase takes more than the budget; the message names the phase and the cheapest way to fit."""


@dataclass(frozen=True)
class PhasePlan:
    """Bytes of a phase, on this rank.

    Attributes:
        name: the name of its recipe.
        parameters: how many elements all weights have.
        weights: of all weights, including the scales of weights in FP8.
        masters: of masters, without the bits that the weights themselves hold.
        moments: of the optimizer's moving averages.
        gradients: the most that backward holds at a time.
        saved: of all tensors that the model's forward saves for backward, by the kinds of nn/saved.py; None without
            example inputs.

    Example:
        >>> PhasePlan("delayed", parameters=1000, weights=1000, masters=1000, moments=2000, gradients=2000).total
        6000
    """

    name: str
    parameters: int
    weights: int
    masters: int
    moments: int
    gradients: int
    saved: Mapping[str, int] | None = None

    @property
    def activations(self) -> int | None:
        """Bytes of all tensors that the model's forward saves for backward; None without example inputs."""
        return None if self.saved is None else sum(self.saved.values())

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of weights, masters and moments together, divided by the number of parameters."""
        return (self.weights + self.masters + self.moments) / max(self.parameters, 1)

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.weights + self.masters + self.moments + self.gradients + (self.activations or 0)


@dataclass(frozen=True)
class Plan:
    """The bytes of each phase of a schedule; ``str()`` of it is a table. A recovery's phase is the last.

    Attributes:
        phases: a PhasePlan of each phase, in order.

    Example:
        >>> import torch
        >>> from octavo import nn, optim, recipes, schedule
        >>> model = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
        >>> optimizer = optim.AdamW(model.parameters(), master="split24")
        >>> high = schedule.Phase(recipes.high_precision(), moments="fp32", master="split32", from_step=9000)
        >>> schedule.PrecisionSchedule(model, optimizer, [schedule.Phase(recipes.dynamic()), high]).plan()
        phase          recipe   weights   masters   moments  gradients  bytes a parameter     total
            0         dynamic  0.50 MiB  0.25 MiB  0.52 MiB   0.50 MiB               5.06  1.77 MiB
            1  high_precision  0.50 MiB  0.50 MiB  2.00 MiB   0.50 MiB              12.00  3.50 MiB
    """

    phases: tuple[PhasePlan, ...]

    def __str__(self) -> str:
        columns = ["weights", "masters", "moments", "gradients"]
        columns += ["activations"] if any(phase.activations is not None for phase in self.phases) else []
        lines = [["phase", "recipe", *columns, "bytes a parameter", "total"]]
        for index, phase in enumerate(self.phases):
            sizes = [_mib(getattr(phase, name) or 0) for name in columns]
            lines.append([str(index), phase.name, *sizes, f"{phase.bytes_per_parameter:.2f}", _mib(phase.total)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)

    __repr__ = __str__


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def plan_of(model: nn.Module, optimizer: Optimizer, targets: Sequence[Target], budget: int | None, inputs: Any) -> Plan:
    """Return PrecisionSchedule.plan of these phases; BudgetError if one takes more than ``budget`` bytes.

    ``inputs``: a tuple of the model's arguments, or None.
    """
    plans: list[PhasePlan] = []
    for index, target in enumerate(targets):
        saved = None if inputs is None else predicted_by_kind(model, inputs, change=partial(_put_into, target))
        phase = _phase_plan(model, optimizer, target, saved)
        if budget is not None and phase.total > budget:
            remedy = _cheapest(model, optimizer, target, targets[index - 1] if index else None, phase, budget)
            raise BudgetError(
                f"phase {index}, {target.phase}, takes {_mib(phase.total)}, {_mib(phase.total - budget)} more than the "
                f"budget of {_mib(budget)}; {remedy}"
            )
        plans.append(phase)
    return Plan(tuple(plans))


def _put_into(target: Target, twin: nn.Module) -> None:
    """Put a model without data into a phase."""
    target.conversion(twin).put_blanks()
    set_recipe(twin, target.phase.recipe)


def _phase_plan(model: nn.Module, optimizer: Optimizer, target: Target, saved: Mapping[str, int] | None) -> PhasePlan:
    of_all_weights = Conversion(target.settings, target.storage_of(model))
    return PhasePlan(target.phase.name, *of_all_weights.bytes_kept(model.parameters(), optimizer), saved)


def _cheapest(
    model: nn.Module, optimizer: Optimizer, target: Target, previous: Target | None, phase: PhasePlan, budget: int
) -> str:
    """Return a sentence on the change to a phase that fits the budget and gives up least."""
    if (wanted := target.settings) is None or not isinstance(optimizer, CompactOptimizer):
        return "nothing but its recipe is the schedule's to change: train on smaller batches, or with octavo.optim"
    if previous is not None and previous.settings is not None:
        last, storage = previous.settings, target.storage
        new_master, new_moments = last._replace(master=wanted.master), last._replace(moments=wanted.moments)
        ways = {
            "leave moments as they were, and promote the master alone": (new_master, storage),
            "leave masters as they were, and promote the moments alone": (new_moments, storage),
            "leave moments and masters as they were": (last, storage),
            f"only compute in {phase.name}, which takes no memory for parameters": (last, previous.storage),
        }
        targets = {name: replace(target, settings=way, storage=form) for name, (way, form) in ways.items()}
    else:
        targets = _with_other_options(model, optimizer, target)
    totals = {name: _phase_plan(model, optimizer, each, phase.saved).total for name, each in targets.items()}
    totals = {name: total for name, total in totals.items() if total < phase.total}
    if fitting := [name for name, total in totals.items() if total <= budget]:
        name = max(fitting, key=totals.__getitem__)
        return f"cheapest way to fit: {name} ({_mib(totals[name])})"
    smallest = min(totals, key=totals.__getitem__, default="")
    size = f"; the smallest takes {_mib(totals[smallest])} ({smallest})" if totals else ""
    return (
        f"none of the ways tried fits{size}: train on smaller micro-batches, checkpoint activations, or use "
        "gradient_storage='fp8' or update_in_backward"
    )


def _with_other_options(model: nn.Module, optimizer: Optimizer, target: Target) -> dict[str, Target]:
    """Return {options: the Target of a phase that has them}, of options that take less memory and are possible."""
    moments: list[dict[str, Any]] = [{"moments": "bf16"}, {"moments": "fp8"}, {"moments": "fp8", "master": "split16"}]
    targets = {}
    for options in (*moments, {"master": None}, {"weight_storage": "fp8"}):
        with contextlib.suppress(TypeError, ValueError):  # the model, or its optimizer, can't have them
            (changed,) = phase_targets(model, optimizer, [Phase(target.phase.recipe, **options)], target)
            targets[", ".join(f"{name}={value!r}" for name, value in options.items())] = changed
    return targets
