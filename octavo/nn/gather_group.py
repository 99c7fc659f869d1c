"""The sharded weights that FSDP2 gathers in FP8: the casts and scales that ranks agree on.

All shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight is
missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send the
same codes again. A gathered weight's codes and scales are always written together, also into what a forward saved.

Under Delayed a weight keeps its scale while micro-batches share it, as an unsharded one does (nn/weight_cache.py).
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import WEIGHT
from octavo.granularity import ALL, scale_shape
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.scaling.recipe import Cast, Delayed
from octavo.tensor.sharded_weight import local_shard, rows_on_each_rank


class Member(Protocol):
    """What a group knows of one weight's gathers (octavo.nn.gather.Gather)."""

    parameter: Any  # the sharded one, or None as yet
    codes: Tensor | None  # uint8 [rows on each rank, K]: what the shard was cast into
    scale: Tensor  # [1], of the whole weight, if it is cast per tensor; so is amax, [1, 1]
    amax: Tensor
    scale_inv: Tensor  # [1, 1], or of the shard's blocks
    delayed_scale: Tensor | None  # [3], of this forward; None: the weight's own amax gives its scale

    def begin_in_fp8(self, mesh: Any) -> Cast | None:
        """Note that a forward is about to read the weight; how to cast it, where it is gathered so on this mesh."""


class GatherGroup:
    """The sharded weights of one ``octavo.convert``: their scales are found together, in one collective."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Member]] = []
        self.backwards = 0  # how often a weight was gathered for backward

    def add(self, member: Member) -> None:
        """Take in a weight that was sharded; ranks do it in one order."""
        if all(reference() is not member for reference in self._members):
            self._members.append(weakref.ref(member))

    def refresh(self, member: Member, mesh: Any) -> None:
        """Find scales anew and cast all shards that lie on this one's mesh; ``mesh``: that of its gather."""
        own = member.parameter.device_mesh
        together: dict[tuple[Any, ...], list[Member]] = {}
        for reference in self._members:
            other = reference()
            cast = None if other is None else other.begin_in_fp8(own)
            if other is None or cast is None:
                continue
            shard = local_shard(other.parameter)
            together.setdefault((cast, shard.dtype, shard.device), []).append(other)
        if any(cast.tile == (ALL, ALL) for cast, *_ in together):
            _find_scales([(cast, members) for (cast, *_), members in together.items() if cast.tile == (ALL, ALL)], mesh)
        for (cast, *_), members in together.items():
            _cast_shards(members, cast, mesh)

    def copied(self, memo: dict[int, Any]) -> GatherGroup:
        """An empty one, the same for all modules copied together."""
        copy: GatherGroup = memo.setdefault(id(self), GatherGroup())
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherGroup:
        return self.copied(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return GatherGroup, ()


def _find_scales(groups: list[tuple[Cast, list[Member]]], mesh: Any) -> None:
    """The scale and global amax of every weight cast per tensor: one collective."""
    import torch.distributed as dist

    shards = [local_shard(member.parameter) for _, members in groups for member in members]
    amax = torch.cat([kernels.amax(shard, (ALL, ALL)).reshape(1) for shard in shards])
    home, amax = amax.device, amax.to(mesh.device_type)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    found = amax.to(home).split([len(members) for _, members in groups])
    for (cast, members), own in zip(groups, found, strict=True):
        _take_scales(members, own, cast)


def _take_scales(members: list[Member], amax: Tensor, cast: Cast) -> None:
    """Give members of one cast their scales."""
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin)
    if isinstance(cast.rule, Delayed):
        states = [member.delayed_scale for member in members]
        zero = amax.new_zeros(1)
        kept = torch.cat([zero if own is None else own[WEIGHT : WEIGHT + 1].to(amax.device) for own in states])
        # a weight more than twice too large was written by hand, perhaps by what moves no version (torch._foreach_*)
        written = (kept * amax > 2 * cast.format.max) & amax.isfinite()
        scale = torch.where((kept > 0) & ~written, kept, scale)
    count, scale_inv = len(members), scale_inv_from_scale(scale)
    parts = (scale.split(1), amax.view(count, 1, 1).unbind(), scale_inv.view(count, 1, 1).unbind())
    for member, *found in zip(members, *parts, strict=True):
        member.scale, member.amax, member.scale_inv = found


def _cast_shards(members: list[Member], cast: Cast, mesh: Any) -> None:
    """Cast shards of one dtype by one cast: one launch."""
    per_tensor = cast.tile == (ALL, ALL)
    shards, codes, scale_inv, scales = [], [], [], []
    for member in members:
        shard = local_shard(member.parameter)
        rows, cols = rows_on_each_rank(member.parameter.shape[0], mesh.size()), member.parameter.shape[1]
        if member.codes is None:
            member.codes = torch.zeros(rows, cols, dtype=torch.uint8, device=shard.device)
            if not per_tensor:
                member.scale_inv = shard.new_ones(scale_shape((rows, cols), cast.tile), dtype=torch.float32)
        if shard.numel() == 0:
            continue
        shards.append(shard)
        codes.append(member.codes[: shard.shape[0]].view(cast.format.dtype))
        scales.append(member.scale)
        # of whole blocks; rows that a last rank has not are zeros, and their scale 1
        blocks = shard.new_empty(1, 1, dtype=torch.float32) if per_tensor else member.scale_inv
        scale_inv.append(blocks if per_tensor else blocks[: -(-shard.shape[0] // cast.tile[0])])
    if shards:
        amax = [torch.empty_like(part) for part in scale_inv]
        how = cast.tile, cast.power_of_two, cast.margin
        kernels.multi_tensor_cast(shards, codes, [], scale_inv, amax, scales if per_tensor else [], 0, *how, None)
