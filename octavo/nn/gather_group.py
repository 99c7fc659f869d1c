"""The sharded weights that FSDP2 gathers in FP8: the casts and scales that ranks agree on.

All shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight is
missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send the
same codes again. A gathered weight's codes and scales are always written together, also into what a forward saved.

Under Delayed a weight keeps its scale while micro-batches share it, as an unsharded one does (nn/weight_cache.py).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import WEIGHT
from octavo.granularity import ALL, scale_shape
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.scaling.recipe import Cast
from octavo.tensor.sharded_weight import local_shard, rows_on_each_rank

Gathers = list[Any]  # of octavo.nn.gather.Gather


class GatherGroup:
    """The sharded weights of one ``octavo.convert``: their scales are found together, in one collective."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Any]] = []  # those whose weights they are
        self.backwards = 0  # how often a weight was gathered for backward
        self._cast: Any = None  # a CUDA event: the last casts are done

    def add(self, module: Any) -> None:
        """Take in a module whose weight was sharded; ranks do it in one order."""
        if all(reference() is not module for reference in self._modules):
            self._modules.append(weakref.ref(module))

    def refresh(self, gather: Any, mesh: Any) -> None:
        """Find scales anew and cast all shards that lie on this one's mesh; ``mesh``: that of its gather."""
        own = gather.parameter.device_mesh
        together: dict[tuple[Any, ...], Gathers] = {}
        for reference in self._modules:
            module: Any = reference()
            other = getattr(module, "gather", None)  # of a module that octavo.restore took none
            if other is None or other.group is not self or not other.begin_in_fp8(module, own):
                continue
            shard, cast = local_shard(other.parameter), module.recipe.weight_casts.as_is
            together.setdefault((cast, shard.dtype, shard.device), []).append(other)
        if per_tensor := [(cast, found) for (cast, *_), found in together.items() if cast.tile == (ALL, ALL)]:
            _find_scales(per_tensor, mesh)
        for (cast, *_), found in together.items():
            _cast_shards(found, cast, mesh)
        self._cast = torch.cuda.current_stream().record_event() if mesh.device_type == "cuda" else None

    def wait(self) -> None:
        """Let the current stream read what another one may have cast: FSDP2 gathers on its own and on the user's."""
        if self._cast is not None:
            torch.cuda.current_stream().wait_event(self._cast)

    def __reduce__(self) -> tuple[Any, ...]:  # copies are empty, and the same for all modules copied together
        return GatherGroup, ()


def _find_scales(groups: list[tuple[Cast, Gathers]], mesh: Any) -> None:
    """The scale and global amax of every weight cast per tensor: one collective."""
    import torch.distributed as dist

    shards = [local_shard(gather.parameter) for _, gathers in groups for gather in gathers]
    amax = torch.cat([kernels.amax(shard, (ALL, ALL)).reshape(1) for shard in shards])
    home, amax = amax.device, amax.to(mesh.device_type)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    found = amax.to(home).split([len(gathers) for _, gathers in groups])
    for (cast, gathers), own in zip(groups, found, strict=True):
        _take_scales(gathers, own, cast)


def _take_scales(gathers: Gathers, amax: Tensor, cast: Cast) -> None:
    """Give gathers of one cast their scales."""
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin)
    if cast.is_delayed:
        states = [gather.delayed_scale for gather in gathers]
        zero = amax.new_zeros(1)
        kept = torch.cat([zero if own is None else own[WEIGHT : WEIGHT + 1].to(amax.device) for own in states])
        # a weight more than twice too large was written by hand, perhaps by what moves no version (torch._foreach_*)
        written = (kept * amax > 2 * cast.format.max) & amax.isfinite()
        scale = torch.where((kept > 0) & ~written, kept, scale)
    count, scale_inv = len(gathers), scale_inv_from_scale(scale)
    split = (scale.split(1), amax.view(count, 1, 1).unbind(), scale_inv.view(count, 1, 1).unbind())
    for gather, *found in zip(gathers, *split, strict=True):
        gather.scale, gather.amax, gather.scale_inv = found


def _cast_shards(gathers: Gathers, cast: Cast, mesh: Any) -> None:
    """Cast shards of one dtype by one cast: one launch."""
    per_tensor = cast.tile == (ALL, ALL)
    shards, codes, scale_inv, scales = [], [], [], []
    for gather in gathers:
        shard = local_shard(gather.parameter)
        rows, cols = rows_on_each_rank(gather.parameter.shape[0], mesh.size()), gather.parameter.shape[1]
        if gather.codes is None:
            gather.codes = torch.zeros(rows, cols, dtype=torch.uint8, device=shard.device)
            if not per_tensor:
                gather.scale_inv = shard.new_ones(scale_shape((rows, cols), cast.tile), dtype=torch.float32)
        if shard.numel() == 0:
            continue
        shards.append(shard)
        codes.append(gather.codes[: shard.shape[0]].view(cast.format.dtype))
        scales.append(gather.scale)
        # of whole blocks; rows that a last rank has not are zeros, and their scale 1
        blocks = shard.new_empty(1, 1, dtype=torch.float32) if per_tensor else gather.scale_inv
        scale_inv.append(blocks if per_tensor else blocks[: -(-shard.shape[0] // cast.tile[0])])
    if shards:
        amax = [torch.empty_like(one) for one in scale_inv]
        how = cast.tile, cast.power_of_two, cast.margin
        kernels.multi_tensor_cast(shards, codes, [], scale_inv, amax, scales if per_tensor else [], 0, *how, None)
