"""A weight's state as the kernels take it: begun, and seen as master and moments over its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.granularity import PerTensor
from octavo.kernels.reference.adam import Master
from octavo.kernels.reference.optimizer_state import MomentTensors
from octavo.optim import state as states
from octavo.optim.masters import KINDS, master_of
from octavo.optim.moment import Moment
from octavo.tensor.sharded_weight import like_sharded
from octavo.tensor.stored_weight import StoredWeight, local_stored


class Settings(NamedTuple):
    """How an optimizer keeps weights: its moments with their names, and the ``master`` argument."""

    moments: tuple[Moment, ...]
    names: tuple[str, ...]
    master: str | None

    def in_state(self, state: dict[str, Any]) -> Settings:
        """The same of those moments alone that a state has: SGD's has none before its group has a momentum."""
        kept = [pair for pair in zip(self.moments, self.names, strict=True) if states.holds(state, pair[1])]
        return Settings(tuple(moment for moment, _ in kept), tuple(name for _, name in kept), self.master)


class KernelState(NamedTuple):
    """A weight and its state as the kernels read and write them.

    Attributes:
        master: the weight [R, C], of one that lives in FP8 its codes, and its master.
        moments: all [R, C].
        amax: float32, of a scaled master; else None.
    """

    master: Master
    moments: tuple[MomentTensors, ...]
    amax: Tensor | None


def new_state(param: nn.Parameter, settings: Settings) -> dict[str, Any]:
    """An empty state; of a sharded weight its tensors are sharded alike.

    Args:
        param: the weight.
        settings: how it is kept.
    """
    weight = states.local(param.detach())
    own: dict[str, Tensor] = {}
    for moment, name in zip(states.moments_for(param, settings.moments), settings.names, strict=True):
        own |= moment.new_state(name, weight.shape, weight.device)
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    return {"step": step} | sharded_like(own, param) | new_master(param, weight, settings.master)


def new_master(param: nn.Parameter, weight: Tensor, master: str | None) -> dict[str, Tensor]:
    """What a weight's master keeps in its state, and which of KINDS it is: names and dtypes of several are the same.

    Args:
        param: the weight.
        weight: this rank's shard of it.
        master: the optimizer's argument.
    """
    chosen = master_of(param, master)
    own = chosen.new_state(weight)
    kind = {"master_kind": torch.tensor(KINDS.index(chosen.kind), dtype=torch.uint8)} if own else {}
    return sharded_like(own, param) | kind


def sharded_like(own: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """This rank's tensors of a state, sharded as the weight is: so that checkpoints can reshard them."""
    return {
        name: _amax_like(value, param) if name == "master_amax" else states.like_param(value, param)  # type: ignore[arg-type]
        for name, value in own.items()
    }


def _amax_like(amax: Tensor, param: Tensor) -> Tensor:
    """A stored weight's amax as its scale_inv: plain, where it is one for all ranks; of blocks a sharded one."""
    shard = local_stored(param)
    if shard is None or shard is param or shard.granularity == PerTensor():
        return amax
    return like_sharded(amax, param, torch.Size(shard.granularity.scale_shape(tuple(param.shape))))


class StateBytes(NamedTuple):
    """What a weight takes on this rank: itself with its scales, its master's rest, its moments."""

    weight: int
    master: int
    moments: int


def bytes_of(param: nn.Parameter, weight: Tensor, settings: Settings | None) -> StateBytes:
    """Bytes of a weight and its state.

    Args:
        param: the parameter that has it now.
        weight: what it is to be, on the meta device, this rank's shard.
        settings: how it is kept; None: it is frozen.
    """
    own = [weight.qdata, weight.scale_inv] if isinstance(weight, StoredWeight) else [weight]
    master: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    if settings is not None:
        master = master_of(nn.Parameter(weight, False), settings.master).new_state(weight)
        for moment, name in zip(states.moments_for(param, settings.moments), settings.names, strict=True):
            moments |= moment.new_state(name, weight.shape, weight.device)
    parts = own, master.values(), moments.values()
    return StateBytes(*(sum(part.numel() * part.element_size() for part in some) for some in parts))


def _stand_in(
    shard: StoredWeight, master: Any, moments: tuple[Moment, ...], names: tuple[str, ...], kept: dict[str, Tensor]
) -> tuple[StoredWeight, dict[str, Tensor]]:
    """A row of zeros for a shard without rows, and its state: updated with the others, it keeps the scale theirs.

    Args:
        shard: [0, K] with one scale, which the row shares.
        master: of it.
        moments, names: of its optimizer.
        kept: its state; the row shares ``master_amax``.
    """
    codes = torch.zeros(1, shard.shape[1], dtype=torch.uint8, device=shard.device).view(shard.qdata.dtype)
    row = StoredWeight(codes, shard.scale_inv, shard.dtype, shard.granularity, is_shard=True)
    own: dict[str, Tensor] = {}
    for moment, name in zip(moments, names, strict=True):
        own |= moment.new_state(name, row.shape, row.device)
    return row, own | master.new_state(row) | {"master_amax": kept["master_amax"]}


def _check_storage(weight: Tensor, state: dict[str, Any]) -> None:
    """Raise RuntimeError for a weight that was stored in FP8, widened, or scaled otherwise since its state was made."""
    amax = None if "master_scale_inv" in state else state.get("master_amax")  # which weights in FP8 have, one a scale
    now = weight.scale_inv.shape if isinstance(weight, StoredWeight) else None
    if now != (None if amax is None else amax.shape):
        raise RuntimeError(
            f"a weight {tuple(weight.shape)} is not stored as it was when the optimizer's state of it was made: "
            "octavo.convert(..., weight_storage=...) or octavo.restore came between two steps. Let an "
            "octavo.schedule.PrecisionSchedule change the storage: the state follows; or make the optimizer anew"
        )


def for_kernel(param: nn.Parameter, weight: Tensor, state: dict[str, Any], settings: Settings) -> KernelState:
    """Master and moments over the tensors of a state.

    Args:
        param: the weight.
        weight: this rank's shard of it.
        state: its state.
        settings: how it is kept.

    Raises:
        RuntimeError: if the state was made while the weight was stored otherwise.
    """
    kept = {name: states.local(value) for name, value in state.items() if isinstance(value, Tensor)}
    _check_storage(weight, kept)
    master, chosen = master_of(param, settings.master), states.moments_for(param, settings.moments)
    if isinstance(weight, StoredWeight) and weight.is_shard and weight.shape[0] == 0:
        weight, kept = _stand_in(weight, master, chosen, settings.names, kept)
    matrix = states.matrix_of(weight)
    if states.is_sharded_vector(param):  # a row an element, so that its index is that of the whole vector
        own = [name for name, value in kept.items() if value.ndim and not name.startswith("master_")]
        kept |= {name: kept[name].view(-1, 1) for name in own}
        matrix = matrix.view(-1, 1)
    moments = tuple(moment.for_kernel(name, kept) for moment, name in zip(chosen, settings.names, strict=True))
    scale_inv = (weight.scale_inv,) if isinstance(weight, StoredWeight) else ()
    return KernelState(master.for_kernel(matrix, kept, *scale_inv), moments, kept.get("master_amax"))
