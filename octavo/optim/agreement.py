"""What ranks agree on of weights that live in FP8 and are sharded with one scale: the amax of the whole master.

The next scale comes from that amax and the most that a step can add, before the update. Each rank finds the amax of its
shard; one collective finds the largest for all weights, begun at the end of a step and waited for at the beginning of
the next, so that it runs beside the next forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.granularity import PerTensor
from octavo.tensor.sharded_weight import group_of
from octavo.tensor.stored_weight import local_stored


def needs_agreement(param: Tensor) -> bool:
    """Whether ranks hold shards of a weight in FP8 with one scale."""
    shard = local_stored(param)
    if shard is None or shard is param or shard.granularity != PerTensor():
        return False
    mesh = param.device_mesh  # type: ignore[attr-defined]
    return bool(mesh.size(mesh.ndim - 1) > 1)


class Agreement:
    """The collectives under way for an optimizer's sharded weights: one for each process group, of 4 bytes a weight.

    All of these weights take part, in their order, whichever had gradients: so ranks never disagree on a collective.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Tensor, list[Tensor]]] = []  # its work, what it writes, where that belongs

    def start(self, params: Sequence[nn.Parameter], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Begin to find the largest amaxes; all ranks call it, with all parameters that need it in the same order.

        Of each state ``master_amax`` [1, 1] takes part and is written by ``finish``; where there is none yet, 0 does.
        """
        import torch.distributed as dist

        self.finish()
        together: dict[Any, list[nn.Parameter]] = {}
        for param in params:
            together.setdefault(group_of(param), []).append(param)
        for group, some in together.items():
            device = some[0].device_mesh.device_type  # type: ignore[attr-defined]
            none_yet = torch.zeros(1, 1, device=device)
            amaxes = [states.get(param, {}).get("master_amax", none_yet) for param in some]
            largest = torch.cat([amax.to(device) for amax in amaxes])
            work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)
            self._under_way.append((work, largest, amaxes))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for what is under way, and write it. On a GPU the device waits, not the host."""
        under_way, self._under_way = self._under_way, []
        for work, largest, amaxes in under_way:
            work.wait()
            for amax, found in zip(amaxes, largest, strict=True):
                amax.copy_(found.view(1, 1))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # where another rank is gone, nothing is left to agree on
            self.finish()
