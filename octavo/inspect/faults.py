"""Tracing the first inf or NaN of a training: its layer, role and step, and numbers of the steps before it.

A product carries an inf or a NaN of its operand to the whole row of its result. So one element of each row of a layer's
output shows whether its input has a fault, and one of each row of the input's gradient whether grad_output has one. The
op note_faults reads these elements, in one launch for each product, and the operand itself only where they are not
finite. The first launch that finds a fault writes its layer's number to a cell on the device. Weights change only
between steps: then their first and last rows are read.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.cost.text import columns
from octavo.distributed.ranks import Ranks
from octavo.errors import OctavoError
from octavo.in_flight import InFlight
from octavo.inspect.rows import first_here, observe, require_whole
from octavo.inspect.weight_updates import first_expert
from octavo.kernels.arguments import Counted
from octavo.nn.candidates import sizes_of
from octavo.nn.recipe_module import RecipeModule
from octavo.scaling.recipe import ROLES
from octavo.weights.fsdp2 import on_this_rank, whole
from octavo.weights.operands import weight_of
from octavo.weights.stored import StoredWeight

STEPS_BEFORE = 10  # steps whose numbers Fault.before has, besides the fault's own step
LATE = 2  # the host reads an accelerator's step this many steps later, when it has been computed, or nearly
WATCHED = (ROLES[0], ROLES[2])  # the roles that are watched by their products: input and grad_output
SIGNALS = ("weight", "input", "loss", "grad_output", "grad_norm")  # in the order in which a step computes them


@dataclass(frozen=True)
class Fault:
    """The place and step of a training's first inf or NaN.

    Attributes:
        step: the step in which it appeared.
        role: "input", "weight" (before the step) or "grad_output" of the layer; else "loss" or "grad_norm".
        layer: the module's name; None for "loss" and "grad_norm".
        rank: the lowest rank that had it; all tensor-parallel ranks have a fault of a tensor that they gather or sum.
        share: the share of that input's or grad_output's rows that were faulty.
        before: a row for that step and each of up to ten before it, oldest first: step, loss, grad_norm, and amax and
            scale_inv of the layer's input and grad_output; if no layer is named, of the layer whose numbers grew most.
        expert: the expert whose rows or matrix had it; None if the layer has no experts.

    Example:
        >>> Fault(7, "input", "mlp.fc2", rank=0, share=0.25, before=[]).where
        'an inf or a NaN in the input of `mlp.fc2` at step 7, on rank 0, in 25 % of its rows'
    """

    step: int
    role: str
    layer: str | None
    rank: int
    share: float | None
    before: list[dict[str, float]]
    expert: int | None = None

    @property
    def where(self) -> str:
        """The fault's place and step in a line."""
        expert = "" if self.expert is None else f"expert {self.expert} of "
        layer = "" if self.layer is None else f" of {expert}{f'`{self.layer}`' if self.layer else 'the model'}"
        rows = "" if self.share is None else f", in {100 * self.share:.3g} % of its rows"
        return f"an inf or a NaN in the {self.role}{layer} at step {self.step}, on rank {self.rank}{rows}"

    def __str__(self) -> str:
        rows = [[f"{value:.4g}" for value in row.values()] for row in self.before]
        return "\n".join([self.where, *([columns([list(self.before[0]), *rows])] if rows else [])])


class FaultError(OctavoError):
    """A training had an inf or a NaN; the message and ``fault`` say where."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class FaultTrace:
    """Finds the first inf or NaN of a training, by its layer, role and step; cheap enough to be left on.

    Each layer in FP8 takes two small launches a step to find faults. Nothing waits for the device: a GPU's steps are
    read two steps late. Compiled models are compiled once more.

    Args:
        model: with layers that octavo.convert or octavo.nn made.
        raises: whether ``step`` raises FaultError after a fault; if not, ``fault`` has it.
        gradients: whether an inf or a NaN in a gradient is a fault. Give False under a GradScaler, which causes them
            to find its scale.
        step: how many steps were done before the first one that is traced.
        group: the torch.distributed process group of the ranks that train together; all ranks, by default.

    Attributes:
        fault: the first fault, once the host has read it; else None.

    Raises:
        ValueError: for a model without FP8 layers, and for ``step`` below 0.

    Example:
        >>> import torch, octavo
        >>> model = torch.nn.Sequential(octavo.nn.Linear(32, 32), torch.nn.ReLU(), octavo.nn.Linear(32, 16))
        >>> with octavo.inspect.trace_faults(model, raises=False) as trace:
        ...     for size in (1.0, 2.0, float("inf")):
        ...         loss = (size * model(torch.randn(8, 32))).square().mean()
        ...         loss.backward()
        ...         trace.step(loss)
        >>> trace.fault.step, trace.fault.role, len(trace.fault.before)
        (2, 'loss', 3)
    """

    def __init__(
        self, model: nn.Module, *, raises: bool = True, gradients: bool = True, step: int = 0, group: Any = None
    ) -> None:
        self._layers = RecipeModule.named_in(model)
        if not self._layers:
            raise ValueError("the model has no layer in FP8 to watch: octavo.convert it first")
        require_whole("step", step, 0)
        self.fault: Fault | None = None
        self._is_closed = False
        self._raises, self._gradients, self._step = raises, gradients, step
        self._ranks = Ranks.of_process() if group is None else Ranks(group)
        self._device = self._layers[0][1].parameters_device
        self._late = 0 if self._device.type == "cpu" else LATE
        self._readings: list[tuple[int, InFlight]] = []  # steps, and _send's signals on their way to the host
        self._read: deque[tuple[int, float, float]] = deque(maxlen=STEPS_BEFORE + 1)  # (step, loss, grad_norm)
        # on the device: of this step [watched roles of layers, Counted.faults], of the last steps, and the number of
        # the first faulty role in forward and in backward
        roles = [module for _, module in self._layers for _ in WATCHED]
        self._statistics = torch.zeros(len(roles), len(Counted.faults), device=self._device, dtype=torch.float32)
        self._ring = self._statistics.new_zeros(STEPS_BEFORE + 1 + self._late, *self._statistics.shape)
        self._first = [torch.zeros(1, dtype=torch.int32, device=self._device) for _ in WATCHED]
        # these roles, or experts of a role, are numbered from 1 on; a number ends where the next role's begin
        self._begins = [0, *itertools.accumulate(max(1, sizes_of(module)[0]) for module in roles)]
        numbers = [begin + 1 + first_here(module) for begin, module in zip(self._begins, roles, strict=False)]
        on_device = torch.tensor(numbers, dtype=torch.int32, device=self._device).unsqueeze(1)
        notes = zip(on_device, self._statistics, itertools.cycle(self._first), strict=False)
        for _, module in self._layers:
            observe(module, notes=(next(notes), next(notes)))
        self._weight_signal = self._faulty_weight()

    def step(self, loss: float | Tensor | None = None, grad_norm: float | Tensor | None = None) -> None:
        """End a step; to be called after the optimizer's step.

        Args:
            loss, grad_norm: of this step, numbers or tensors on any device.

        Raises:
            FaultError: if there was a fault in this step, or on a GPU two steps ago.
            RuntimeError: after ``close``.
        """
        if self._is_closed:
            raise RuntimeError(f"step {self._step} was not watched, as close() was called: make a FaultTrace anew")
        if self.fault is None:
            self._send(loss, grad_norm)
            self._receive(self._late, collective=True)
        self._step += 1
        if self.fault is not None and self._raises:
            raise FaultError(self.fault)

    def close(self) -> None:
        """Read the steps that are on their way to the host, and stop watching the model; no step can follow."""
        self._is_closed = True
        for _, module in self._layers:
            observe(module, notes=None)
        self._receive(0, collective=False)

    def __enter__(self) -> FaultTrace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if self.fault is not None and not isinstance(error, FaultError):
            if error is not None:
                error.add_note(str(self.fault))
            elif self._raises:
                raise FaultError(self.fault)

    @torch.no_grad()
    def _send(self, loss: float | Tensor | None, grad_norm: float | Tensor | None) -> None:
        """Store the step's statistics on the device; send the host [ranks, 7]: SIGNALS, the loss and the grad_norm."""
        self._ring[self._step % len(self._ring)].copy_(self._statistics)
        scalars, scalar_signals = [], []
        for number in (loss, grad_norm):
            value = torch.as_tensor(math.nan if number is None else whole(number), dtype=torch.float32).detach()
            scalars.append(value.to(self._device, non_blocking=True).reshape(()))
            scalar_signals.append((~scalars[-1].isfinite() & (number is not None)).float())
        forward, backward = (first[0].float() for first in self._first)
        in_loss, in_norm = scalar_signals
        signals = torch.stack([self._weight_signal, forward, in_loss, backward, in_norm, *scalars])
        self._readings.append((self._step, InFlight(self._ranks.gather(signals))))
        self._statistics.zero_()
        for first in self._first:
            first.zero_()
        self._weight_signal = self._faulty_weight()

    def _faulty_weight(self) -> Tensor:
        """Return 1 + the index of the first layer whose weight's first or last row has inf or NaN; 0 without one."""
        rows = [row.flatten() for _, module in self._layers for row in _first_and_last_rows(module, self._device)]
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(rows, math.inf)])
        faulty = ~norms.view(-1, 2).isfinite().all(1)
        return torch.where(faulty.any(), faulty.int().argmax() + 1, 0).float()

    def _receive(self, late: int, collective: bool) -> None:
        """Read the steps that ended more than ``late`` steps ago; ``collective``: all ranks call this together."""
        while len(self._readings) > late and self.fault is None:
            step, signals = self._readings.pop(0)
            by_rank = signals.wait()[0].tolist()
            self._read.append((step, *by_rank[0][len(SIGNALS) :]))
            for at, role in enumerate(SIGNALS):
                faulty_ranks = [rank for rank, signals_of_rank in enumerate(by_rank) if signals_of_rank[at]]
                if faulty_ranks and (self._gradients or not role.startswith("grad")):
                    number = int(by_rank[faulty_ranks[0]][at])
                    self.fault = self._fault_of(step, role, faulty_ranks[0], number, collective)
                    return

    def _fault_of(self, step: int, role: str, rank: int, number: int, collective: bool) -> Fault:
        """Return the Fault of a signal of value ``number``; ``collective``: its statistics are over all ranks."""
        history = self._ring[[taken % len(self._ring) for taken, *_ in self._read]]  # oldest first
        if collective:
            counts, sizes = history.split(2, -1)  # faulty and rows; scale_inv and amax
            history = torch.cat([self._ranks.sum(counts), self._ranks.largest(sizes)], -1)
        history = history.cpu()
        share = expert = None
        if role == "weight":
            at = number - 1
            expert = self._faulty_expert(self._layers[at][1], collective)
        elif role in ROLES:
            row = bisect.bisect_left(self._begins, number) - 1
            at = row // len(WATCHED)
            expert = number - 1 - self._begins[row] if sizes_of(self._layers[at][1])[0] else None
            faulty, rows = history[-1, row, :2].tolist()
            share = faulty / rows if rows else None
        else:
            of_inputs = history[:, :: len(WATCHED), Counted.faults.index("scale_inv")]
            at = int((of_inputs[-1] / of_inputs[0]).nan_to_num(0, 0, 0).argmax())
        name, module = self._layers[at]
        statistics = history[:, len(WATCHED) * at : len(WATCHED) * (at + 1)].tolist()
        before = [
            {"step": taken, "loss": loss, "grad_norm": norm, **_sizes(module, pair)}
            for (taken, loss, norm), pair in zip(self._read, statistics, strict=True)
        ]
        return Fault(step, role, name if role in ROLES else None, rank, share, before, expert)

    def _faulty_expert(self, module: RecipeModule, collective: bool) -> int | None:
        """Return the first expert with inf or NaN in its matrix's first or last row; ``collective``: on any rank."""
        if not (experts := sizes_of(module)[0]):
            return None
        faulty = torch.zeros(experts, device=self._device, dtype=torch.float32)
        good = torch.stack(_first_and_last_rows(module, self._device)).isfinite().all(0)  # [experts here, K]
        start = first_expert(module.weight_parameter)
        faulty[start : start + len(good)] = (~good.view(len(good), -1).all(1)).float()  # zeros without experts here
        faulty = self._ranks.largest(faulty) if collective else faulty
        return int(faulty.argmax())


trace_faults = FaultTrace
"""The name under which a training calls FaultTrace: ``with octavo.inspect.trace_faults(model) as trace:``."""


def _first_and_last_rows(module: nn.Module, device: torch.device) -> list[Tensor]:
    """Return the first and the last row of this rank's shard of a weight [N, K]; of a weight in FP8 those of its codes.

    For experts [E, N, K] each of the two is [E, K]: one row of each matrix. Of a module that octavo.restore has made
    torch's meanwhile they are zeros.
    """
    weight = weight_of(module) if isinstance(module, RecipeModule) else None
    local = None if weight is None else on_this_rank(weight).detach()
    if local is None or local.numel() == 0:
        return [torch.zeros(1, device=device, dtype=torch.float32)] * 2
    rows = local.qdata if isinstance(local, StoredWeight) else local
    if rows.ndim == 3 or module.stores_transposed:
        rows = rows.transpose(0, 1)
    return [row.float() if row.itemsize == 1 else row for row in (rows[0], rows[-1])]


def _sizes(module: RecipeModule, pair: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the watched roles' amax and scale_inv; if a cast has no amax, the largest number that its scale holds."""
    sizes_by_name: dict[str, float] = {}
    for role, (_, _, scale_inv, amax) in zip(WATCHED, pair, strict=True):
        casts = module.recipe.casts[ROLES.index(role)] if isinstance(module, RecipeModule) else None
        cast = casts and (casts.as_is or casts.transposed)
        room = math.nan if cast is None else scale_inv * cast.format.max / 2**cast.margin
        sizes_by_name |= {f"{role} amax": amax or room, f"{role} scale_inv": scale_inv}
    return sizes_by_name
