"""A weight's state as the kernels take it: begun, and seen as master and moments over its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.granularity import PerTensor
from octavo.kernels.reference.fp8_weights import Master
from octavo.kernels.reference.optimizer_state import MomentTensors
from octavo.optim import state as states
from octavo.optim.masters import KINDS, MasterForm, master_of
from octavo.optim.moment import Moment
from octavo.optim.state import Settings
from octavo.tensor.sharded_weight import like_sharded
from octavo.tensor.stored_weight import StoredWeight, local_stored


def new_state(param: nn.Parameter, settings: Settings) -> dict[str, Any]:
    """An empty state; of a sharded weight its tensors are sharded alike."""
    weight = states.local(param.detach())
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    own = new_moments(settings.moments_of(param), weight)
    return {"step": step} | sharded_like(own, param) | new_master(param, settings.master)


def new_moments(moments: dict[str, Moment], weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a weight's moments, all zeros."""
    own: dict[str, Tensor] = {}
    for name, moment in moments.items():
        own |= moment.new_state(name, weight.shape, weight.device)
    return own


def new_master(param: nn.Parameter, master: str | None) -> dict[str, Tensor]:
    """What a weight's master keeps in its state, and which of KINDS it is: names and dtypes of several are the same."""
    chosen = master_of(param, master)
    own = chosen.new_state(states.local(param.detach()))
    kind = {"master_kind": torch.tensor(KINDS.index(chosen.kind), dtype=torch.uint8)} if own else {}
    return sharded_like(own, param) | kind


def sharded_like(own: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """This rank's tensors of a state, sharded as the weight is: so that checkpoints can reshard them."""
    return {
        name: _amax_like(value, param) if name == "master_amax" else states.like_param(value, param)
        for name, value in own.items()
    }


def _amax_like(amax: Tensor, param: Tensor) -> Tensor:
    """A stored weight's amax as its scale_inv: plain, where it is one for all ranks; of blocks a sharded one."""
    shard = local_stored(param)
    if shard is None or shard is param or shard.granularity == PerTensor():
        return amax
    return like_sharded(amax, param, torch.Size(shard.granularity.scale_shape(tuple(param.shape))))


def bytes_of(param: nn.Parameter, weight: Tensor, settings: Settings | None) -> tuple[int, int, int]:
    """Bytes on this rank of a weight with its scales, of its master's rest, of its moments.

    ``weight`` is what it is to be, this rank's shard on the meta device; no settings: it is frozen.
    """
    own = [weight.qdata, weight.scale_inv] if isinstance(weight, StoredWeight) else [weight]
    master: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    if settings is not None:
        master = master_of(nn.Parameter(weight, False), settings.master).new_state(weight)
        moments = new_moments(settings.moments_of(param), weight)
    return states.bytes_of(own), states.bytes_of(master.values()), states.bytes_of(moments.values())


def _stand_in(
    shard: StoredWeight, master: MasterForm, moments: dict[str, Moment], kept: dict[str, Tensor]
) -> tuple[StoredWeight, dict[str, Tensor]]:
    """A row of zeros for a shard [0, K] with one scale, and its state.

    The row shares the shard's scale_inv and ``master_amax``: updated as other ranks' rows are, it keeps their scale.
    """
    codes = torch.zeros(1, shard.shape[1], dtype=torch.uint8, device=shard.device).view(shard.qdata.dtype)
    row = StoredWeight(codes, shard.scale_inv, shard.dtype, shard.granularity, is_shard=True)
    return row, new_moments(moments, row) | master.new_state(row) | {"master_amax": kept["master_amax"]}


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


def for_kernel(
    param: nn.Parameter, weight: Tensor, state: dict[str, Any], settings: Settings
) -> tuple[Master, tuple[MomentTensors, ...]]:
    """Master and moments of a weight, this rank's shard ``weight``, as the kernels take them, over its state's tensors.

    Raises:
        RuntimeError: if the state was made while the weight was stored otherwise.
    """
    kept = {name: states.local(value) for name, value in state.items() if isinstance(value, Tensor)}
    _check_storage(weight, kept)
    master, moments = master_of(param, settings.master), settings.moments_of(param)
    if isinstance(weight, StoredWeight) and weight.is_shard and weight.shape[0] == 0:
        weight, kept = _stand_in(weight, master, moments, kept)
    matrix = states.matrix_of(weight)
    if states.is_sharded_vector(param):  # a row an element, so that its index is that of the whole vector
        kept |= {name: value.view(-1, 1) for name, value in kept.items() if name in moments}
        matrix = matrix.view(-1, 1)
    scale_inv = weight.scale_inv if isinstance(weight, StoredWeight) else None
    stored = tuple(moment.for_kernel(name, kept) for name, moment in moments.items())
    return master.for_kernel(matrix, kept, scale_inv), stored
