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
from octavo.granularity import Granularity, PerTensor
from octavo.kernels.reference.adam import Master
from octavo.kernels.reference.fp8_weights import Fp8Weight, largest_in_squares
from octavo.kernels.reference.optimizer_state import BLOCK, Piece, blocks_of, finite_amax, pieces
from octavo.optim import state as states
from octavo.optim.base import CompactOptimizer
from octavo.optim.masters import master_of
from octavo.optim.weight_state import Settings, for_kernel
from octavo.optim.weight_state import new_master as begun_master
from octavo.tensor.parameters import put_into
from octavo.tensor.sharded_weight import largest_of_ranks, like_sharded, local_shard, on_this_rank
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
    before = optimizer.settings
    check_change(optimizer, settings, storage)
    optimizer.forget_kept()
    for group in optimizer.param_groups:
        for param in group["params"]:
            _change(param, optimizer.state.get(param, {}), before, settings, storage, optimizer)
            if param in storage:
                stored(param)
    optimizer.adopt(settings)


def store_anew(param: nn.Parameter, storage: Storage) -> None:
    """Store a weight without a master, frozen or not trained yet, otherwise; of a sharded one all ranks call it."""
    shard = local_stored(param)
    if on_this_rank(param) is param:
        values = (param if shard is None else shard.dequantize()).detach()
        keep_rest = param.requires_grad
        put_into(param, values if storage is None else StoredWeight.cast(values, storage, keep_rest))
        return
    values = (local_shard(param) if shard is None else shard.dequantize()).detach()
    _put_shard(param, values if storage is None else cast_shard(values, param, storage, param.dtype))


def _put_shard(param: nn.Parameter, shard: Tensor) -> None:
    """Give a sharded parameter another shard."""
    param._local_tensor = shard  # type: ignore[attr-defined]


def check_change(optimizer: CompactOptimizer, settings: Settings, storage: Mapping[nn.Parameter, Storage]) -> None:
    """Raise ValueError if the optimizer's weights can't be kept so; arguments as ``change``'s."""
    for param, granularity in storage.items():
        _check_blocks(param, granularity)
    targets = [
        (blank(param, storage[param], "meta") if param in storage else param, group)
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    bounds = optimizer.will_bound(settings, any(local_stored(target) is not None for target, _ in targets))
    for target, group in targets:
        optimizer.check(target, group, settings, bounds)


def _check_blocks(param: nn.Parameter, storage: Storage) -> None:
    """Raise ValueError if blocks would reach over several ranks' shards."""
    if on_this_rank(param) is param or storage in (None, PerTensor()):
        return
    ranks = param.device_mesh.size(param.device_mesh.ndim - 1)  # type: ignore[attr-defined]
    if param.shape[0] % (ranks * BLOCK) and ranks > 1:
        raise ValueError(
            f"a weight {tuple(param.shape)} can't be stored in blocks of 128 x 128 on {ranks} ranks: each needs the "
            "same multiple of 128 rows; use a recipe with one scale a weight (dynamic, delayed)"
        )


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
    param: nn.Parameter,
    state: dict[str, Any],
    before: Settings,
    after: Settings,
    storage: Mapping[nn.Parameter, Storage],
    optimizer: CompactOptimizer,
) -> None:
    """Change a weight and its state."""
    moves, is_sharded = param in storage, on_this_rank(param) is not param
    if not state:
        if moves:
            store_anew(param, storage[param])
        return
    weight = states.local(param.detach())
    before, after = before.in_state(state), after.in_state(state)
    old = for_kernel(param, weight, state, before)
    new_param: Any = param
    if moves:
        made = blank(param, storage[param])
        new_param = like_sharded(made, param, param.shape) if is_sharded else nn.Parameter(made, param.requires_grad)
    new_weight = states.local(new_param.detach())
    found = {"step": state["step"]} | _moments(param, state, before, after)
    old_master, new_master = master_of(param, before.master), master_of(new_param, after.master)
    if moves or old_master is not new_master:
        found |= begun_master(new_param, new_weight, after.master)
        new = for_kernel(new_param, new_weight, found, after)
        keeps_codes = not moves and new.master.kind in ("fp8_fp16", "fp8_fp32")  # whose ties go the other way
        codes = new.master.weight.clone() if keeps_codes else None
        _rewrite(old.master, new.master, new.amax, param if is_sharded else None, same_storage=not moves)
        if codes is not None:
            new.master.weight.copy_(codes)
    else:
        found |= {name: value for name, value in state.items() if name.startswith("master_")}
    if moves:
        (_put_shard if is_sharded else put_into)(param, new_weight)
    optimizer.state[param] = found


def _moments(param: nn.Parameter, state: dict[str, Any], before: Settings, after: Settings) -> dict[str, Any]:
    """The tensors of all moments; those that stay as they are are the same ones."""
    found: dict[str, Any] = {}
    pairs = zip(*(states.moments_for(param, settings.moments) for settings in (before, after)), strict=True)
    for name, (old, new) in zip(after.names, pairs, strict=True):
        if old == new:
            found |= {key: value for key, value in state.items() if key in _names_of(name)}
            continue
        values = states.as_fp32(name, old, state)
        own = new.new_state(name, values.shape, values.device)
        states.write_moment(values, new, name, own)
        found |= {key: states.like_param(value, param) for key, value in own.items()}
    return found


def _names_of(name: str) -> tuple[str, ...]:
    return name, f"{name}_codes", f"{name}_scale_inv", f"{name}_amax"


@torch.no_grad()
def _rewrite(old: Master, new: Master, amax: Tensor | None, sharded: Tensor | None, same_storage: bool) -> None:
    """Write a master as another kind, to nearest. Where the weight's storage stays, so does its scale.

    Args:
        old, new: over the weight's old and new tensors.
        amax: the new one's, where it is scaled.
        sharded: the DTensor whose shard this is, or None: one scale is for all ranks.
        same_storage: whether the weight stays as it is stored.
    """
    rows, cols = new.weight.shape
    scale = found = None
    if new.needs_bound:
        if same_storage and isinstance(new, Fp8Weight):
            bound = new.scale_inv * E4M3.max
        else:
            bound = amax_of(old, new.scale_inv.shape)  # type: ignore[union-attr]
            if sharded is not None and bound.numel() == 1:
                bound = largest_of_ranks(bound, sharded)
        scale, found = new.begin(bound)
    if old.weight.shape != new.weight.shape:
        rows = 0  # a shard without rows, for which a row stands in on one side
    for piece in pieces(rows, cols):
        wide = _read(old, piece)
        half = torch.full_like(wide, 1 << 15, dtype=torch.int32)  # bits that round to nearest
        new.write(piece, wide, half, scale, found)
    if scale is not None and found is not None and amax is not None:
        new.end(scale, found, amax)


def _read(master: Master, piece: Piece) -> Tensor:
    wide = master.read(piece)
    return wide.clone() if wide.data_ptr() == piece.of(master.weight).data_ptr() else wide


def amax_of(master: Master, shape: torch.Size) -> Tensor:
    """The largest absolute finite value of a master: of all, [1, 1], or of blocks of 128 x 128."""
    rows, cols = master.weight.shape
    found = torch.zeros(rows, blocks_of(cols), dtype=torch.float32, device=master.weight.device)
    for piece in pieces(rows, cols):
        piece_found = finite_amax(_read(master, piece))[..., 0]
        first = piece.cols.start // BLOCK
        found[piece.rows, first : first + piece_found.shape[1]] = piece_found
    if shape == (1, 1):
        return found.amax().reshape(1, 1) if found.numel() else found.new_zeros(1, 1)
    return largest_in_squares(found)
