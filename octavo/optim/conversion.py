"""Other moments, another master, another storage for weights in training: one tensor at a time, values as they are.

A master is read in float32, which holds each kind, and written as the new one, to nearest: exactly where the new one
has room for it. Beside the old state there is never more than one tensor's new one and float32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.granularity import ALL, Granularity, PerTensor
from octavo.kernels import amax
from octavo.kernels.reference.master_weights import Fp8Weight, Master
from octavo.kernels.reference.optimizer_state import BLOCK, pieces
from octavo.optim import state as states
from octavo.optim.base import CompactOptimizer
from octavo.optim.masters import master_of
from octavo.optim.state import Settings, for_kernel, new_master
from octavo.tensor.parameters import put_into
from octavo.tensor.sharded_weight import largest_of_ranks, like_sharded, on_this_rank
from octavo.tensor.stored_weight import StoredWeight, cast_shard, local_stored

Storage = Granularity | None  # of a weight's codes; None: it is a plain tensor


def change(
    optimizer: CompactOptimizer,
    settings: Settings,
    storage: Mapping[nn.Parameter, Storage],
    stored: Callable[[nn.Parameter], None] = lambda param: None,
) -> None:
    """Keep an optimizer's weights otherwise from now on, in place: each parameter stays the same object.

    Args:
        optimizer: its state follows.
        settings: its new moments and master.
        storage: weights that are to be stored otherwise.
        stored: called with each of these weights as soon as it is stored so.

    Raises:
        ValueError: if a weight can't be kept so; nothing is changed then.
    """
    check_change(optimizer, settings, storage)
    optimizer.forget_kept()
    for param in optimizer.all_params():
        _change(optimizer, param, settings, storage)
        if param in storage:
            stored(param)
    optimizer.adopt(settings)


def store_anew(param: nn.Parameter, storage: Storage) -> None:
    """Store a weight without a master, frozen or not trained yet, otherwise; of a sharded one all ranks call it."""
    shard = local_stored(param)
    values = (on_this_rank(param).as_subclass(Tensor) if shard is None else shard.dequantize()).detach()
    if storage is not None and on_this_rank(param) is param:
        values = StoredWeight.cast(values, storage, keep_rest=param.requires_grad)
    elif storage is not None:
        values = cast_shard(values, param, storage, param.dtype)
    _put(param, values)


def _put(param: nn.Parameter, local: Tensor) -> None:
    """Give a parameter other values on this rank, which the object keeps."""
    if on_this_rank(param) is param:
        put_into(param, local)
    else:
        param._local_tensor = local  # type: ignore[attr-defined]


def check_change(optimizer: CompactOptimizer, settings: Settings, storage: Mapping[nn.Parameter, Storage]) -> None:
    """Raise ValueError if the optimizer's weights can't be kept so; arguments as ``change``'s."""
    for param, granularity in storage.items():
        ranks = 1
        if on_this_rank(param) is not param and granularity not in (None, PerTensor()):
            ranks = param.device_mesh.size(param.device_mesh.ndim - 1)  # type: ignore[attr-defined]
        if ranks > 1 and param.shape[0] % (ranks * BLOCK):
            raise ValueError(
                f"a weight {tuple(param.shape)} can't be stored in blocks of 128 x 128 on {ranks} ranks: each needs "
                "the same multiple of 128 rows; use a recipe with one scale a weight (dynamic, delayed)"
            )
    targets = [
        (blank(param, storage[param], "meta") if param in storage else param, group)
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    bounds = optimizer.will_bound(settings, any(local_stored(target) is not None for target, _ in targets))
    for target, group in targets:
        optimizer.check(target, group, settings, bounds)


def blank(weight: Tensor, storage: Storage, device: Any = None) -> Tensor:
    """Zeros in place of a weight, or of this rank's shard of it, stored as asked, on its device or another."""
    shard = on_this_rank(weight)
    device = shard.device if device is None else device
    if storage is None:
        return torch.zeros(shard.shape, dtype=weight.dtype, device=device)
    codes = torch.zeros(shard.shape, dtype=E4M3.dtype, device=device)
    scale_inv = torch.ones(storage.scale_shape(tuple(shard.shape)), device=device)
    return StoredWeight(codes, scale_inv, weight.dtype, storage, is_shard=shard is not weight)


def _change(
    optimizer: CompactOptimizer, param: nn.Parameter, settings: Settings, storage: Mapping[nn.Parameter, Storage]
) -> None:
    """Change a weight and its state."""
    moves, is_sharded = param in storage, on_this_rank(param) is not param
    if not (state := optimizer.state.get(param)):
        if moves:
            store_anew(param, storage[param])
        return
    before, after = optimizer.settings.in_state(state), settings.in_state(state)
    old, _ = for_kernel(param, states.local(param.detach()), state, before)
    new_param: Any = param
    if moves:
        made = blank(param, storage[param])
        new_param = like_sharded(made, param, param.shape) if is_sharded else nn.Parameter(made, param.requires_grad)
    new_weight = states.local(new_param.detach())
    found = {"step": state["step"]} | _moments(param, state, before, after)
    if moves or master_of(param, before.master) is not master_of(new_param, after.master):
        found |= new_master(new_param, after.master)
        new, _ = for_kernel(new_param, new_weight, found, after)
        keeps_codes = not moves and new.kind in ("fp8_fp16", "fp8_fp32")  # these round ties otherwise than splits
        codes = new.weight.clone() if keeps_codes else None
        _rewrite(old, new, param if is_sharded else None, same_storage=not moves)
        if codes is not None:
            new.weight.copy_(codes)
    else:
        found |= {name: value for name, value in state.items() if name.startswith("master_")}
    if moves:
        _put(param, new_weight)
    optimizer.state[param] = found


def _moments(param: nn.Parameter, state: dict[str, Any], before: Settings, after: Settings) -> dict[str, Any]:
    """The tensors of all moments; those that stay as they are are the same ones."""
    found: dict[str, Any] = {}
    were = before.moments_of(param)
    for name, new in after.moments_of(param).items():
        if new == were[name]:
            names = name, f"{name}_codes", f"{name}_scale_inv", f"{name}_amax"
            found |= {key: state[key] for key in names if key in state}
        else:
            found |= states.converted(param, name, were[name], new, state)
    return found


@torch.no_grad()
def _rewrite(old: Master, new: Master, sharded: Tensor | None, same_storage: bool) -> None:
    """Write a master as another kind, to nearest. Where the weight's storage stays, so does its scale.

    ``sharded`` is the DTensor whose shard this is, or None: one scale is for all ranks.
    """
    values = old.read_all(old.weight)
    if new.amax is not None and new.scale_inv is not None:
        if same_storage and isinstance(new, Fp8Weight):
            bound = new.scale_inv * E4M3.max
        else:
            is_one = new.scale_inv.numel() == 1
            bound = amax(values, (ALL, ALL) if is_one else (BLOCK, BLOCK))
            if sharded is not None and is_one:
                bound = largest_of_ranks(bound, sharded)
        new.begin(bound)
    if old.weight.shape == new.weight.shape:  # else a row stands in on one side for a shard without rows
        for piece in pieces(*values.shape):
            wide = piece.of(values)
            half = torch.full_like(wide, 1 << 15, dtype=torch.int32)  # bits that round to nearest
            new.write(piece, wide, half)
    new.end()
