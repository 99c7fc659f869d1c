"""Change moments, masters and the storage of weights in the middle of a training, one tensor at a time.

A master is read in float32, which holds every kind, and written as the new kind, rounded to nearest: exactly where the
new kind has enough bits. In addition to the old state, memory holds one tensor's new state and its float32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.granularity import ALL, Granularity
from octavo.kernels import amax
from octavo.kernels.layouts import BLOCK
from octavo.kernels.reference.optimizer_state import Fp8Weight, Master, pieces
from octavo.optim import state as states
from octavo.optim.base import CompactOptimizer
from octavo.optim.layout import is_fp8_experts
from octavo.optim.masters import master_of
from octavo.optim.state import Settings, for_kernel, new_master
from octavo.weights.fsdp2 import like_sharded, maximum_over_shards, on_this_rank
from octavo.weights.stored import StoredWeight, local_stored, put_into, store, why_cut

WeightStorage = Granularity | None  # of a weight's codes; None: it is a plain tensor


def change(
    optimizer: CompactOptimizer,
    settings: Settings,
    storage: Mapping[nn.Parameter, WeightStorage],
    stored: Callable[[nn.Parameter], None] = lambda param: None,
) -> None:
    """Change how an optimizer keeps its weights, in place: each parameter stays the same object.

    ``storage``: {weight whose storage changes: its new storage}; ``stored`` is called with each of them as soon as it
    has that. ValueError if a weight can't be kept so; nothing is changed then.
    """
    check_change(optimizer, settings, storage)
    optimizer.forget_kept()
    for param in optimizer.all_params():
        _change(optimizer, param, settings, storage)
        if param in storage:
            stored(param)
    optimizer.adopt(settings)


def check_change(
    optimizer: CompactOptimizer, settings: Settings, storage: Mapping[nn.Parameter, WeightStorage]
) -> None:
    """Raise ValueError if ``change`` would refuse these arguments."""
    for param, granularity in storage.items():
        if granularity is not None and (why := why_cut(param, granularity)) is not None:
            raise ValueError(why)
    targets = [
        (blank(param, storage[param], "meta") if param in storage else param, group)
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    bounds = optimizer.will_bound(settings, any(local_stored(target) is not None for target, _ in targets))
    for target, group in targets:
        optimizer.check(target, group, settings, bounds)


def blank(weight: Tensor, storage: WeightStorage, device: Any = None) -> Tensor:
    """Return zeros in place of a weight, or of this rank's shard of it, in this storage, on its device or another."""
    shard = on_this_rank(weight)
    device = shard.device if device is None else device
    if storage is None:
        return torch.zeros(shard.shape, dtype=weight.dtype, device=device)
    codes = torch.zeros(shard.shape, dtype=E4M3.dtype, device=device)
    shape = storage.of_matrices(shard.shape).scale_shape(shard.shape)
    scale_inv = torch.ones(shape, device=device, dtype=torch.float32)
    return StoredWeight(codes, scale_inv, weight.dtype, storage, is_shard=shard is not weight)


def _change(
    optimizer: CompactOptimizer,
    param: nn.Parameter,
    settings: Settings,
    storage: Mapping[nn.Parameter, WeightStorage],
) -> None:
    """Change a weight and its state, as ``change`` does for all."""
    storage_changes, is_sharded = param in storage, on_this_rank(param) is not param
    if not (state := optimizer.state.get(param)):
        if storage_changes:
            store(param, storage[param])
            if (shard := local_stored(param)) is not None:
                shard.known.awaited = True
        return
    old_settings, new_settings = optimizer.settings.in_state(state), settings.in_state(state)
    old, _ = for_kernel(param, states.local(param.detach()), state, old_settings)
    new_param: Any = param
    if storage_changes:
        zeros = blank(param, storage[param])
        new_param = like_sharded(zeros, param, param.shape) if is_sharded else nn.Parameter(zeros, param.requires_grad)
    new_weight = states.local(new_param.detach())
    new_state = {"step": state["step"]} | _moments(param, new_param, state, old_settings, new_settings)
    if storage_changes or master_of(param, old_settings.master) is not master_of(new_param, new_settings.master):
        new_state |= new_master(new_param, new_settings.master)
        new, _ = for_kernel(new_param, new_weight, new_state, new_settings)
        keeps_codes = not storage_changes and new.kind in ("fp8_fp16", "fp8_fp32")  # splits round ties another way
        codes = new.weight.clone() if keeps_codes else None
        _rewrite(old, new, param if is_sharded else None, not storage_changes)
        if codes is not None:
            new.weight.copy_(codes)
    else:
        new_state |= {name: value for name, value in state.items() if name.startswith("master_")}
    if storage_changes:
        put_into(param, new_weight)
    optimizer.state[param] = new_state


def _moments(
    param: Tensor, new_param: Tensor, state: dict[str, Any], old_settings: Settings, new_settings: Settings
) -> dict[str, Any]:
    """Return the tensors of all moments; those whose storage does not change are not copied."""
    tensors: dict[str, Any] = {}
    old_moments = old_settings.moments_of(param)
    for name, new in new_settings.moments_of(param).items():
        empty_tensors = new.new_state(name, states.local(param).shape, "meta", is_fp8_experts(new_param))
        if new == old_moments[name] and all(
            key in state and states.local(state[key]).shape == value.shape for key, value in empty_tensors.items()
        ):
            tensors |= {key: state[key] for key in empty_tensors}
        else:
            tensors |= states.converted(new_param, name, old_moments[name], new, state)
    return tensors


@torch.no_grad()
def _rewrite(old: Master, new: Master, sharded: Tensor | None, same_storage: bool) -> None:
    """Write a master as another kind, rounded to nearest. Where the weight's storage stays, so does its scale.

    ``sharded``: the DTensor whose shard this is, or None; ranks share its scale where it has one for all elements.
    """
    values = old.read_all(old.weight)
    # old or new, but not both, may be a row that stands in for a shard without rows: nothing is written then
    stands_in = old.weight.numel() != new.weight.numel()
    for index in range(new.matrices):
        matrix = new.matrix(index) if isinstance(new, Fp8Weight) else new
        rows = matrix.weight.shape[0]
        wide = values if stands_in else values.view(new.weight.shape)[index * rows : (index + 1) * rows]
        if isinstance(matrix, Fp8Weight):
            by_expert = isinstance(new, Fp8Weight) and new.scale_inv.ndim == 3  # each lies whole on one rank
            if same_storage:
                bound = matrix.scale_inv * E4M3.max
            else:
                bound = amax(wide, (BLOCK, BLOCK) if matrix.has_blocks else (ALL, ALL))
                if sharded is not None and not by_expert and not matrix.has_blocks:
                    bound = maximum_over_shards(bound, sharded)
            matrix.begin(bound)
        for piece in () if stands_in else pieces(*wide.shape):
            part = piece.of(wide)
            half = torch.full_like(part, -(1 << 31), dtype=torch.int32)  # random bits that round to nearest
            matrix.write(piece, part, half)
        matrix.end()
