"""Sums that compare updates with the steps of E4M3's grid at the updated weights; optimizer steps add to them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.in_flight import InFlight
from octavo.weights.fsdp2 import groups_of, on_this_rank


class Resolution:
    """Sums over steps and the weights ``params``, on each device; nothing waits for them."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.params = dict.fromkeys(params)  # in one order on all ranks
        self._loaded: Tensor | None = None
        self._in_flight: InFlight | None = None
        self._sums: dict[torch.device, Tensor] = {}

    @functools.cached_property
    def _process_groups(self) -> dict[str, Any]:
        """Return the process groups of the ranks that have shards of any of the weights, by name."""
        groups = itertools.chain.from_iterable(map(groups_of, self.params))
        return {group.group_name: group for group in groups}

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank's shard of a weight counts; of ranks that have the same shard, one rank's does."""
        if param not in self.params:
            return False
        sharded_over = {group.group_name for group in groups_of(param)}
        return all(name in sharded_over or group.rank() == 0 for name, group in self._process_groups.items())

    def on(self, device: torch.device) -> Tensor:
        """Return the sums that steps on a device add to: float64 [2], see kernels/reference/optimizer_step.py."""
        if device not in self._sums:
            self._sums[device] = torch.zeros(2, dtype=torch.float64, device=device)
        return self._sums[device]

    def take(self) -> InFlight:
        """Return the sums over all devices and ranks since the last call, on their way to the host; begin new ones."""
        if not self._sums:
            return InFlight(torch.zeros(2, dtype=torch.float64, device="cpu"))
        by_device = list(self._sums.values())
        total = torch.stack([sums.to(by_device[0].device) for sums in by_device]).sum(0)
        for group in self._process_groups.values():
            torch.distributed.all_reduce(total, group=group)
        for sums in by_device:
            sums.zero_()
        return InFlight(total)

    def next_ratio(self) -> float | None:
        """End an interval of steps; return the ratio of the interval before, whose sums have reached the host."""
        last, self._in_flight = self._in_flight, self.take()
        return None if last is None else ratio_of(*last.wait())

    def state(self) -> dict[str, Tensor | None]:
        """Return this rank's sums, and those on their way to the host, on the CPU."""
        sums = [torch.zeros(2, dtype=torch.float64, device="cpu"), *(each.cpu() for each in self._sums.values())]
        reading = None if self._in_flight is None else self._in_flight.wait()[0].cpu()
        return {"sums": torch.stack(sums).sum(0), "reading": reading}

    def load(self, state: dict[str, Any]) -> None:
        """Load a state that ``state`` returned, and go on from it."""
        self._in_flight = None if state["reading"] is None else InFlight(state["reading"])
        self.restart(state["sums"])
        self._loaded = state["sums"]

    def restart(self, sums: Tensor | None = None) -> None:
        """Load the last loaded sums again: loading an optimizer's state may run an empty step (torch does so)."""
        sums, self._loaded = self._loaded if sums is None else sums, None
        if sums is not None and self.params:
            self._sums = {}
            self.on(on_this_rank(next(iter(self.params)).detach()).device).copy_(sums)


def ratio_of(sums: Tensor) -> float:
    """Return updates' root mean square over that of the grid's rounding noise, step / sqrt(12); nan without any."""
    moved, grid = sums.tolist()
    return math.sqrt(12 * moved / grid) if grid > 0 else math.nan
