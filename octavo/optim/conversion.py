"""Convert moments, masters and the storage of weights in the middle of a training, one tensor at a time.

A master is read in float32, which holds every kind, and written as the new kind, rounded to nearest: exactly where the
new kind has enough bits. In addition to the old state, memory holds one tensor's new state and its float32 values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.formats import E4M3
from octavo.granularity import ALL, BLOCK, Granularity
from octavo.kernels import amax
from octavo.kernels.reference.optimizer_state import Fp8Weight, Master, pieces
from octavo.optim import state as states
from octavo.optim.base import CompactOptimizer
from octavo.optim.gradients import refuse_ddp
from octavo.optim.layout import fp8_shards, is_fp8_experts
from octavo.optim.masters import MasterForm
from octavo.optim.state import Settings, WeightState, for_kernel, new_master
from octavo.private import is_dtensor
from octavo.tensor.stored_gradient import StoredGradient
from octavo.weights.fsdp2 import like_sharded, maximum_over_shards, on_this_rank, take_shard
from octavo.weights.storable import why_cut_blocks
from octavo.weights.stored import StoredWeight, put_into, store

WeightStorage = Granularity | None  # of a weight's codes; None: it is a plain tensor
NewStorage = Mapping[nn.Parameter, WeightStorage]  # of the weights whose storage changes


def blank(weight: Tensor, storage: WeightStorage, device: Any = None) -> Tensor:
    """Return zeros in place of a weight, or of this rank's shard of it, in this storage, on its device or another."""
    shard = on_this_rank(weight)
    device = shard.device if device is None else device
    if storage is None:
        return torch.zeros(shard.shape, dtype=weight.dtype, device=device)
    codes = torch.zeros(shard.shape, dtype=E4M3.dtype, device=device)
    shape = storage.of_matrices(shard.shape).scale_shape(shard.shape)
    scale_inv = torch.ones(shape, device=device, dtype=torch.float32)
    return StoredWeight(codes, scale_inv, weight.dtype, storage, is_shard=is_dtensor(weight))


class BytesKept(NamedTuple):
    """The number of weights' elements, and the bytes that weights, masters, moments and gradients take on this rank."""

    parameters: int
    weights: int
    masters: int
    moments: int
    gradients: int


class Conversion(NamedTuple):
    """A change of the form in which a model's weights and their optimizer's state are kept.

    Attributes:
        settings: of moments and masters after the change; None with an optimizer of torch's.
        storage: {weight: its storage after the change}, of the weights whose storage changes.
    """

    settings: Settings | None
    storage: NewStorage

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if ``apply`` would fail."""
        if not isinstance(optimizer, CompactOptimizer) or self.settings is None:
            if self.storage:
                raise ValueError("weights change their storage with an optimizer of octavo.optim only")
            return
        for param, granularity in self.storage.items():
            if granularity is not None and (why := why_cut_blocks(param, granularity)) is not None:
                raise ValueError(why)
        for group in optimizer.param_groups:
            for param in group["params"]:
                target = blank(param, self.storage[param], "meta") if param in self.storage else param
                optimizer.check_weight(target, group, self.settings)

    def refuse_ddp(self) -> None:
        """Raise RuntimeError if DistributedDataParallel has a weight whose storage is to change."""
        if self.storage:
            refuse_ddp(
                self.storage,
                "DistributedDataParallel keeps the tensors that it was built with, so the storage of weights can't "
                "change under it; use fully_shard (FSDP2), or phases with the same weight_storage",
            )

    def apply(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Convert a model's weights, and their optimizer's state; FSDP2 is given the new shards of weights.

        Each parameter stays the same object. ValueError if a weight can't be kept so; nothing is changed then.
        """
        if not isinstance(optimizer, CompactOptimizer) or self.settings is None:
            return
        params = dict.fromkeys(optimizer.all_params())
        if self.storage or self.settings != optimizer.settings:
            self.check(optimizer)
            optimizer.forget_prepared()
            for param in params:
                _convert_param(optimizer, param, self.settings, self.storage)
                if param in self.storage:
                    take_shard(model, param)
            optimizer.adopt(self.settings)
        for weight, granularity in self.storage.items():
            if weight not in params:  # such as a frozen weight, which no optimizer has
                store(weight, granularity)
                take_shard(model, weight)

    def put_blanks(self) -> None:
        """Put zeros in their new storage in the place of the weights: for a model whose tensors have no data."""
        for weight, granularity in self.storage.items():
            put_into(weight, blank(weight, granularity))

    def bytes_kept(self, params: Iterable[nn.Parameter], optimizer: Optimizer) -> BytesKept:
        """Return the bytes that a model's parameters, with their optimizer, take after the change.

        TypeError for an optimizer of others whose state is known after its first step only.
        """
        group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        of_params = [BytesKept(0, 0, 0, 0, 0), *(self._bytes_of(p, optimizer, group_of.get(p)) for p in params)]
        total = BytesKept(*map(sum, zip(*of_params, strict=True)))
        if (waiting := getattr(getattr(optimizer, "in_backward", None), "threshold", None)) is None:
            return total
        most = waiting + max(each.gradients for each in of_params)  # gradients that wait for their update, and one more
        return total._replace(gradients=min(total.gradients, most))

    def _bytes_of(self, param: nn.Parameter, optimizer: Optimizer, group: dict[str, Any] | None) -> BytesKept:
        """Return the bytes of one parameter after the change; ``group``: the optimizer's that has it, or None."""
        shard = on_this_rank(param.detach())
        changes = param in self.storage
        stored = blank(shard, self.storage[param], "meta") if changes else torch.empty_like(shard, device="meta")
        pair_or_tensor = [stored.qdata, stored.scale_inv] if isinstance(stored, StoredWeight) else [stored]
        masters = moments = gradients = 0
        if not isinstance(optimizer, CompactOptimizer):
            moments = 0 if group is None else _torch_moments(optimizer, param, group)
        elif group is not None and self.settings is not None and param.requires_grad:
            settings = self.settings.only(optimizer.names_of(group))
            masters = states.bytes_of(MasterForm.of(stored, settings.master).new_state(stored).values())
            moments = states.bytes_of(states.new_moments(settings.moments_by_name(param), stored).values())
        if param.requires_grad:
            gradients = _gradient_bytes(param, is_coded=getattr(optimizer, "gradient_storage", None) is not None)
        return BytesKept(shard.numel(), states.bytes_of(pair_or_tensor), masters, moments, gradients)


def _gradient_bytes(param: nn.Parameter, is_coded: bool) -> int:
    """Return the bytes of a parameter's gradient; ``is_coded``: it is kept in FP8, where its shape allows that."""
    gradient = torch.empty_like(on_this_rank(param.detach()), dtype=param.dtype, device="meta")
    stored = StoredGradient.cast(gradient, param.dtype, is_fp8_experts(param)) if is_coded else None
    return states.bytes_of([gradient] if stored is None else [stored.qdata, stored.scale_inv])


def _torch_moments(optimizer: Optimizer, param: nn.Parameter, group: dict[str, Any]) -> int:
    """Return the bytes that an optimizer of torch's keeps for a parameter of this group."""
    if state := optimizer.state.get(param):
        return states.bytes_of(value for value in state.values() if isinstance(value, Tensor))
    if isinstance(optimizer, torch.optim.Adam):
        count = 2 + group["amsgrad"]
    elif isinstance(optimizer, torch.optim.SGD):
        count = int(group["momentum"] != 0)
    else:
        remedy = "plan with torch's Adam, AdamW or SGD, or octavo.optim"
        raise TypeError(f"what {type(optimizer).__name__} keeps is known after its first step only; {remedy}")
    return count * states.bytes_of([on_this_rank(param.detach())])


def _convert_param(optimizer: CompactOptimizer, param: nn.Parameter, settings: Settings, storage: NewStorage) -> None:
    """Convert one weight of an optimizer, and its state, to these settings, and to its new storage if there is one."""
    same_storage = param not in storage
    state = optimizer.state.get(param)
    if not state:
        if not same_storage:
            store(param, storage[param])
            for shard in fp8_shards([param]):
                shard.facts.awaited = True
        return
    old_settings, new_settings = optimizer.settings.in_state(state), settings.in_state(state)
    old, _ = for_kernel(param, on_this_rank(param.detach()), state, old_settings)
    new_param: Any = param if same_storage else like_sharded(blank(param, storage[param]), param, param.shape)
    new_weight = on_this_rank(new_param.detach())
    new_state = {"step": state["step"]} | _convert_moments(param, new_param, state, old_settings, new_settings)
    if same_storage and MasterForm.of(param, old_settings.master) is MasterForm.of(param, new_settings.master):
        new_state |= {name: value for name, value in state.items() if name.startswith("master_")}
    else:
        new_state |= new_master(new_param, new_settings.master)
        new, _ = for_kernel(new_param, new_weight, new_state, new_settings)
        _convert_master(old, new, param, same_storage)
    if not same_storage:
        put_into(param, new_weight)
    optimizer.state[param] = new_state


def _convert_moments(param: Tensor, new_param: Tensor, state: WeightState, old: Settings, new: Settings) -> WeightState:
    """Return the tensors of all moments of ``state`` in the form of the settings ``new``, not copied if they have it.

    ``new_param``: zeros of the parameter's shape, in the storage that it will have.
    """
    tensors: WeightState = {}
    old_moments = old.moments_by_name(param)
    for name, moment in new.moments_by_name(param).items():
        empty_tensors = moment.new_state(name, on_this_rank(param).shape, "meta", is_fp8_experts(new_param))
        if moment == old_moments[name] and all(
            key in state and on_this_rank(state[key]).shape == value.shape for key, value in empty_tensors.items()
        ):
            tensors |= {key: state[key] for key in empty_tensors}
        else:
            tensors |= states.convert_moment(new_param, name, old_moments[name], moment, state)
    return tensors


@torch.no_grad()
def _convert_master(old: Master, new: Master, param: Tensor, same_storage: bool) -> None:
    """Write the values of a weight's master ``old`` to the master ``new`` of another kind, rounded to nearest.

    If the weight's storage stays, its scales do; else each new scale comes from the largest of its values, on all ranks
    if they share a scale.
    """
    values = old.read_all(old.weight)
    # splits round ties another way than float masters, by which codes could change
    is_float = new.low_bits is not None and new.low_bits.is_floating_point()
    codes = new.weight.clone() if same_storage and is_float else None
    # old or new, but not both, may be a row that stands in for a shard without rows: nothing is written then
    stands_in = old.weight.numel() != new.weight.numel()
    ranks_share_scale = isinstance(new, Fp8Weight) and new.scale_inv.ndim == 2 and not new.has_blocks
    for index in range(new.matrices):
        matrix = new.matrix(index) if isinstance(new, Fp8Weight) else new
        wide = values if stands_in else values.view(new.weight.shape).chunk(new.matrices)[index]
        if isinstance(matrix, Fp8Weight):
            if same_storage:
                bound = matrix.scale_inv * E4M3.max
            else:
                bound = amax(wide, (BLOCK, BLOCK) if matrix.has_blocks else (ALL, ALL))
                if ranks_share_scale:  # else each expert, or block, lies whole on one rank
                    bound = maximum_over_shards(bound, param)
            matrix.begin(bound)
        for piece in () if stands_in else pieces(*wide.shape):
            part = piece.of(wide)
            half = torch.full_like(part, -(1 << 31), dtype=torch.int32)  # random bits that round to nearest
            matrix.write(piece, part, half)
        matrix.end()
    if codes is not None:
        new.weight.copy_(codes)
