"""The sharded weights of a model under FSDP2: how each is gathered, and the casts and scales that ranks agree on.

In FP8 all shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight
is missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send
the same codes again. A gathered weight's codes and scales are always written together, also into what a forward saved.

Under Delayed a weight keeps its scale while micro-batches share it, as an unsharded one does (nn/weight_cache.py).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo.autograd.casts import WEIGHT
from octavo.granularity import ALL, scale_shape
from octavo.kernels.layouts import is_small_block
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.optimizer_steps import OPTIMIZER_STEPS
from octavo.scaling.recipe import Cast, Delayed
from octavo.tensor.sharded_weight import local_part, rows_on_each_rank, version_of
from octavo.tensor.stored_weight import stored_part

if TYPE_CHECKING:
    from octavo.nn.recipe_module import RecipeModule

IN_FP8, CAST_AFTER, AS_IT_IS, AS_STORED = "in FP8", "cast after", "as it is", "as stored"


class Gather:
    """What one module keeps for its weight's gathers.

    Args:
        group: whose weights find their scales together; None: this one's is cast after its gather.
        shared: whether a module of another kind has the same weight.
    """

    def __init__(self, group: GatherGroup | None = None, shared: bool = False) -> None:
        self.group, self.shared = group, shared
        self.parameter: Any = None  # the sharded one
        self.for_training = True  # whether the forward that it was gathered for last was in training
        self.unsharded: Any = None  # a weak reference to what it is between unshard and reshard
        self.generation = 0  # of parameters and loads: a 0-row shard has no address that would tell them
        self.casts = [0]  # the number of the cast that is current; one list for all modules that share the parameter
        self.rolled = -1  # the cast whose amax a forward in training was given to roll
        self.used: tuple[Any, ...] | None = None  # how FSDP2 has gathered it
        self.no_amax: Tensor | None = None
        self.forget()

    def adopt(self, parameter: Any) -> None:
        """Take a parameter that was just sharded."""
        self.parameter, self.unsharded, self.rolled = parameter, None, -1
        self.casts = parameter.__dict__.setdefault("_octavo_casts", [0])
        self.forget()

    def forget(self) -> None:
        """Drop what was cast, of another recipe or parameter."""
        self.codes: Tensor | None = None
        self.way: Way | None = None
        self.scale = self.amax = self.scale_inv = torch.empty(0)
        self.seen: tuple[Any, ...] = ()  # the key of the weight that a forward in training read last
        self.ready: tuple[Any, ...] | None = None  # what has to be the same for the codes to serve one more forward
        self.delayed_scale: Tensor | None = None  # [3], of this forward; None: the weight's own amax gives its scale
        self.step_scale: Tensor | None = None  # [3], of all micro-batches of this step
        self.generation += 1

    def join(self, group: GatherGroup, module: RecipeModule) -> None:
        """Find scales together with this group from now on."""
        self.group, self.way = group, None
        if self.parameter is not None:
            group.add(module)

    def key(self, module: RecipeModule) -> tuple[Any, ...]:
        """What moves when the weight is known to have been written, on every rank alike."""
        parameter = self.parameter
        versions = parameter._version, version_of(parameter)
        return OPTIMIZER_STEPS.of(parameter), versions, self.generation, id(module.recipe)

    def accumulates(self) -> bool:
        """Whether the weight has a gradient already, which this micro-batch adds to; without sync it is unsharded."""
        unsharded = None if self.unsharded is None else self.unsharded()
        return self.parameter.grad is not None or (unsharded is not None and unsharded.grad is not None)

    def begin(self, module: RecipeModule) -> None:
        """Note that a forward is about to read the weight.

        If this is its step's first in training, Delayed takes its scale anew and its backward rolls the amax.
        """
        self.for_training = module.training
        if not module.training:
            self.delayed_scale = None  # as an unsharded layer: evaluation takes the weight's own amax
            return
        key = self.key(module)
        if self.seen == key and self.accumulates():
            self.delayed_scale = self.step_scale
            return
        self.seen, self.casts[0] = key, self.casts[0] + 1
        if module.recipe.delayed is not None:
            module.notice_writes(self.parameter, local_part(self.parameter), key[1:3])
            assert module.delayed_scale is not None
            self.delayed_scale = self.step_scale = module.delayed_scale.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gather:
        return Gather(None if self.group is None else self.group.copied(memo), self.shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return Gather, (self.group, self.shared)


class GatherGroup:
    """The sharded weights of one ``octavo.convert``: their scales are found together, in one collective."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[RecipeModule]] = []
        self.backwards = 0  # how often a weight was gathered for backward

    def add(self, module: RecipeModule) -> None:
        """Take in a module whose weight was sharded; ranks do it in one order."""
        if all(reference() is not module for reference in self._members):
            self._members.append(weakref.ref(module))

    def ready(self, module: RecipeModule) -> tuple[Any, ...]:
        """What has to be the same for codes to serve a forward; every rank finds it alike, never by values."""
        return self.backwards, module.training, module.gather.key(module)

    def refresh(self, module: RecipeModule, mesh: Any) -> None:
        """Find scales anew and cast all shards that lie on this one's mesh."""
        own = module.gather.parameter.device_mesh
        together: dict[tuple[Any, ...], list[RecipeModule]] = {}
        for reference in self._members:
            member = reference()
            if member is None or member.gather.parameter is None or member.gather.parameter.device_mesh != own:
                continue
            if way(member).kind != IN_FP8:
                continue
            member.gather.begin(member)
            member.gather.ready = self.ready(member)
            cast = member.recipe.weight_casts.as_is
            assert cast is not None
            shard = local_part(member.gather.parameter)
            together.setdefault((cast, shard.dtype, shard.device), []).append(member)
        per_tensor = [m for (cast, *_), found in together.items() if cast.tile == (ALL, ALL) for m in found]
        if per_tensor:
            _find_scales(per_tensor, mesh)
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


def _find_scales(members: list[RecipeModule], mesh: Any) -> None:
    """The scale and global amax of every weight cast per tensor: one collective."""
    import torch.distributed as dist

    shards = [local_part(member.gather.parameter) for member in members]
    amax = torch.cat([kernels.amax(shard, (ALL, ALL)).reshape(1) for shard in shards])
    home, amax = amax.device, amax.to(mesh.device_type)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
    amax, start = amax.to(home), 0
    while start < len(members):  # members of one cast lie together
        cast, stop = members[start].recipe.weight_casts.as_is, start + 1
        assert cast is not None
        while stop < len(members) and members[stop].recipe.weight_casts.as_is == cast:
            stop += 1
        _take_scales(members[start:stop], amax[start:stop], cast)
        start = stop


def _take_scales(members: list[RecipeModule], amax: Tensor, cast: Cast) -> None:
    """Give members of one cast their scales."""
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin)
    if isinstance(cast.rule, Delayed):
        states = [member.gather.delayed_scale for member in members]
        zero = amax.new_zeros(1)
        kept = torch.cat([zero if own is None else own[WEIGHT : WEIGHT + 1].to(amax.device) for own in states])
        # a weight more than twice too large was written by hand, perhaps by what moves no version (torch._foreach_*)
        written = (kept * amax > 2 * cast.format.max) & amax.isfinite()
        scale = torch.where((kept > 0) & ~written, kept, scale)
    count, scale_inv = len(members), scale_inv_from_scale(scale)
    parts = (scale.split(1), amax.view(count, 1, 1).unbind(), scale_inv.view(count, 1, 1).unbind())
    for member, *found in zip(members, *parts, strict=True):
        member.gather.scale, member.gather.amax, member.gather.scale_inv = found


def _cast_shards(members: list[RecipeModule], cast: Cast, mesh: Any) -> None:
    """Cast shards of one dtype by one cast: one launch."""
    per_tensor = cast.tile == (ALL, ALL)
    for member in members:
        gather = member.gather
        cols, rows = gather.parameter.shape[1], rows_on_each_rank(gather.parameter.shape[0], mesh.size())
        if gather.codes is None:
            device = local_part(gather.parameter).device
            gather.codes = torch.zeros(rows, cols, dtype=torch.uint8, device=device)
            if not per_tensor:
                shape = scale_shape((rows, cols), cast.tile)
                gather.scale_inv = torch.ones(shape, dtype=torch.float32, device=device)
    full = [member for member in members if local_part(member.gather.parameter).numel() > 0]
    if not full:
        return
    shards = [local_part(member.gather.parameter) for member in full]
    codes = [
        codes_of(member)[: shard.shape[0]].view(cast.format.dtype) for member, shard in zip(full, shards, strict=True)
    ]
    if per_tensor:
        scale_inv = [shard.new_empty(1, 1, dtype=torch.float32) for shard in shards]
    else:  # of whole blocks; rows that a last rank has not are zeros, and their scale 1
        scale_inv = [
            member.gather.scale_inv[: -(-shard.shape[0] // cast.tile[0])]
            for member, shard in zip(full, shards, strict=True)
        ]
    kernels.multi_tensor_cast(
        shards,
        codes,
        [],
        scale_inv,
        [torch.empty_like(part) for part in scale_inv],
        [member.gather.scale for member in full] if per_tensor else [],
        0,
        cast.tile,
        cast.power_of_two,
        cast.margin,
        None,
    )


def codes_of(member: RecipeModule) -> Tensor:
    """What a member's shard was cast into."""
    assert member.gather.codes is not None
    return member.gather.codes


class Way(NamedTuple):
    """How a weight is gathered, and why not in FP8 where it is not."""

    kind: str
    why: str = ""


def way(module: RecipeModule) -> Way:
    """How a module's sharded weight is gathered."""
    gather = module.gather
    if gather.way is None:
        gather.way = _choose_way(module)
    return gather.way


def _choose_way(module: RecipeModule) -> Way:
    gather, parameter = module.gather, module.gather.parameter
    casts, mesh = module.recipe.weight_casts, parameter.device_mesh
    ranks = mesh.size(mesh.ndim - 1)
    if stored_part(parameter) is not None:
        return Way(AS_STORED)
    if casts.as_is is None or casts.transposed is None:
        return Way(AS_IT_IS, "a product reads it in high precision")
    if gather.shared:
        return Way(AS_IT_IS, "another module shares it")
    if not hasattr(module, "in_features"):
        return Way(AS_IT_IS, f"{type(module).__name__} stores it transposed")
    if not casts.once:
        return Way(CAST_AFTER, "its two layouts have different scales, and codes of both are bf16's bytes")
    if ranks == 1:
        return Way(CAST_AFTER, "one rank gathers nothing")
    if gather.group is None:
        return Way(CAST_AFTER, "octavo.convert(model, recipe) before fully_shard lets weights find scales together")
    if parameter.placements[-1].dim != 0:
        return Way(CAST_AFTER, "it is not sharded by rows")
    block = casts.as_is.tile
    if block == (ALL, ALL):
        return Way(IN_FP8)
    rows = parameter.shape[0]
    if rows % ranks or (rows // ranks) % block[0]:
        return Way(CAST_AFTER, f"blocks of {block[0]} rows reach over several ranks' shards")
    if block[0] != block[1] or not is_small_block(block):
        return Way(CAST_AFTER, f"blocks of {block[0]} x {block[1]} are cast one weight at a time")
    return Way(IN_FP8)
