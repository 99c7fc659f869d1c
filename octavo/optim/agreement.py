"""What ranks agree on of weights that live in FP8 and are sharded with one scale: the amax of the whole master.

The next scale comes from that amax and the most that a step can add, before the update. Each rank finds the amax of its
shard; one collective finds the largest for all weights, begun at the end of a step and waited for at the beginning of
the next, so that it runs beside the next forward and backward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.optim.layout import is_sharded
from octavo.tensor.collectives import agree
from octavo.tensor.sharded_weight import groups_of
from octavo.tensor.stored_weight import local_stored


def needs_agreement(param: Tensor) -> bool:
    """Whether ranks hold shards of a weight in FP8 with one scale."""
    shard = local_stored(param)
    if shard is None or shard is param or not shard.has_one_scale:
        return False  # of experts each rank has its own whole
    return shard.common is not None or any(group.size() > 1 for group in groups_of(param))


def _with_common(amaxes: Tensor, params: Sequence[nn.Parameter]) -> Tensor:
    """Weights' amaxes [n, 1], of those that have one scale in common the largest of them."""
    owners = [getattr(local_stored(param), "common", None) or param for param in params]  # of a scale each
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    if len(numbers) == len(owners):
        return amaxes
    places = torch.tensor([numbers[owner] for owner in owners], device=amaxes.device)
    found = amaxes.new_zeros(len(numbers)).scatter_reduce_(0, places, amaxes.view(-1), "amax")
    return found[places].view(-1, 1)


def agreeing(params: Sequence[nn.Parameter], groups: Sequence[int]) -> list[nn.Parameter]:
    """Those that need it, of an optimizer's parameters with the numbers of their groups.

    Raises:
        ValueError: for some of the weights that have one scale in common, or in several groups.
    """
    found: dict[Any, list[int]] = {}
    for param, group in zip(params, groups, strict=True):
        if (common := getattr(local_stored(param), "common", None)) is not None:
            found.setdefault(common, []).append(group if param.requires_grad else -1)
    if any(len(groups) != common.count or len(set(groups)) > 1 for common, groups in found.items()):
        raise ValueError(
            "the named splits of a weight that lives in FP8 have one scale, which an optimizer finds from all of them: "
            "give it all in one group, and train all or none"
        )
    return [param for param in params if needs_agreement(param)]


class Agreement:
    """The collectives under way for an optimizer's sharded weights: one for each layout of theirs, of 4 bytes a weight.

    All of these weights take part, in their order, whichever had gradients: so ranks never disagree on a collective.

    Attributes:
        asked: whether ranks know that they have the same options.
    """

    def __init__(self) -> None:
        self.asked = False
        self._under_way: list[tuple[Any, Tensor, list[Tensor]]] = []  # its work, what it writes, where that belongs

    def start(self, params: Sequence[nn.Parameter], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Begin to find the largest amaxes; all ranks call it, with all parameters that need it in the same order.

        Of each state ``master_amax`` [1, 1] takes part and is written by ``finish``; where there is none yet, 0 does.
        """
        import torch.distributed as dist

        self.finish()
        together: dict[Any, list[nn.Parameter]] = {}
        for param in params:
            together.setdefault(groups_of(param), []).append(param)
        for (*outer, last), some in together.items():
            device = some[0].device_mesh.device_type  # type: ignore[attr-defined]
            none_yet = torch.zeros(1, 1, device=device)
            amaxes = [states.get(param, {}).get("master_amax", none_yet) for param in some]
            largest = _with_common(torch.cat([amax.to(device) for amax in amaxes]), some)
            for group in outer:  # of a mesh of two dimensions
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=last, async_op=True)
            self._under_way.append((work, largest, amaxes))

    def ask(self, optimizer: Any) -> None:
        """Ask the ranks that share an optimizer's weights, unless they know, whether they have the same options.

        Raises:
            RanksDifferError: on all of them, naming the option, where one has another.
        """
        sharded = [] if self.asked else filter(is_sharded, optimizer.all_params())
        self.asked = True
        if not (groups := dict.fromkeys(itertools.chain.from_iterable(map(groups_of, sharded)))):
            return
        names = "moments", "master", "seed", "clip_update", "skip_nonfinite", "gradient_storage"
        told = {name: getattr(optimizer, name) for name in names}
        for number, group in enumerate(optimizer.param_groups):
            options = optimizer._options(group)._replace(lr=float(group["lr"]))._asdict()
            told |= {f"{name} of group {number}": value for name, value in options.items()}
        if (handle := optimizer.in_backward) is not None:
            told |= {"update_in_backward's clip": handle.clip, "outstanding_weight_updates_bytes": handle.threshold}
        agree({f"{type(optimizer).__name__}'s {name}": value for name, value in told.items()}, groups)

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
