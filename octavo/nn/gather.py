"""How a converted module's weight is gathered under FSDP2 (fully_shard), and the scales that its ranks share.

Three ways, chosen for each weight by ``way``:

    in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
                weight: one collective finds the amax of all weights of the model together. Blocks of which each lies on
                one rank need none; their scales are sent beside the codes.
    cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard:
                recipes whose two layouts are scaled differently (rows, 1 x 32), where codes would be sent twice.
    as it is    a weight that a product reads in high precision, or that another kind of module shares.

A weight that lives in FP8 is gathered as stored, whatever the recipe: see nn/stored_shards.py.

In FP8 all shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight
is missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send
the same codes again. A gathered weight's codes and scales are always written together, also into what a forward saved.

Under Delayed a weight keeps its scale while micro-batches share it, as an unsharded one does (nn/weight_cache.py).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.autograd.casts import WEIGHT, Operands, State, cast_role
from octavo.granularity import ALL, scale_shape
from octavo.kernels.layouts import is_small_block, needs_transposed_codes, padded
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.optimizer_steps import OPTIMIZER_STEPS
from octavo.scaling.recipe import Cast, Delayed, Recipe
from octavo.tensor.sharded_weight import (
    After,
    GatheredWeight,
    Parts,
    gather_as_it_is,
    local_part,
    padded_rows,
    rows_on_each_rank,
    version_of,
)
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
            module.notice_writes(self.parameter, key[1:3])
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
        _codes(member)[: shard.shape[0]].view(cast.format.dtype) for member, shard in zip(full, shards, strict=True)
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


def _codes(member: RecipeModule) -> Tensor:
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


def note_use(module: RecipeModule, kind: str) -> None:
    """Note how a weight is gathered.

    Raises:
        RuntimeError: if FSDP2 has gathered it otherwise before.
    """
    gather, used = module.gather, (kind, module.recipe.weight_casts)
    if gather.used is not None and gather.used != used:
        raise RuntimeError(
            "a weight under FSDP2 took another recipe than it was gathered by; call octavo.set_recipe on the module "
            "that fully_shard was applied to, or one that holds it"
        )
    gather.used = used


def before_gather(
    module: RecipeModule, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any
) -> tuple[tuple[Tensor, ...], After]:
    """What FSDP2's first hook does: see ShardedWeight.fsdp_pre_all_gather."""
    gather, recipe = module.gather, module.recipe
    chosen = way(module).kind
    note_use(module, chosen)
    if chosen == AS_IT_IS:
        return gather_as_it_is(shard, mesh, outer_size, mp_policy)
    for_backward = torch._C._current_graph_task_id() != -1  # also of a forward that a checkpoint computes again
    if chosen == CAST_AFTER:
        if not for_backward:
            gather.begin(module)
        sent = padded_rows(shard, rows_on_each_rank(outer_size[0], mesh.size()))
        # where nothing is sent, what several ranks would send in FP8 is cast from its own dtype, as there
        alone = mesh.size() == 1 and recipe.weight_casts.once
        dtype = shard.dtype if alone else mp_policy.param_dtype or shard.dtype
        return (sent.to(dtype),), _cast_after(module, outer_size)
    group = gather.group
    assert group is not None
    if for_backward and gather.codes is not None:
        group.backwards += 1
    else:
        if gather.ready != group.ready(module):
            group.refresh(module, mesh)
        gather.ready = None
    codes = _codes(module).to(shard.device, non_blocking=True)
    if gather.scale_inv.numel() == 1 and recipe.weight_casts.as_is.tile == (ALL, ALL):  # type: ignore[union-attr]
        return (codes,), _take_codes(module, outer_size, gather.scale_inv.to(shard.device), gather.amax)
    return (codes, gather.scale_inv.to(shard.device, non_blocking=True)), _take_codes(module, outer_size, None, None)


def _take_codes(module: RecipeModule, shape: torch.Size, scale_inv: Tensor | None, amax: Tensor | None) -> After:
    recipe = module.recipe
    cast = recipe.weight_casts.as_is
    assert cast is not None

    def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
        q = outputs[0][: shape[0]].view(cast.format.dtype)
        scales = outputs[1] if scale_inv is None else scale_inv
        found = amax.to(q.device) if amax is not None and isinstance(cast.rule, Delayed) else no_amax(module, q)
        laid, transposed, inner = _laid(q, recipe, out)
        parts = Parts(laid, scales, transposed, scales.t(), found)
        if out is not None:
            return out.refill(parts)
        return GatheredWeight(parts, shape, dtype, recipe.weight_casts), inner

    return after


def no_amax(module: RecipeModule, like: Tensor) -> Tensor:
    """What stands for an amax where no rule asks for one."""
    gather = module.gather
    if gather.no_amax is None or gather.no_amax.device != like.device:
        gather.no_amax = like.new_empty(0, dtype=torch.float32)
    return gather.no_amax


def _laid(q: Tensor, recipe: Recipe, out: GatheredWeight | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Gathered codes in both layouts, and those of them that are not the gathered storage."""
    laid, transposed = lay_out(q, recipe)
    inner = [part for part in (laid, transposed) if part.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()]
    return laid, transposed, tuple(inner) if out is None else ()


def lay_out(q: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes [N, K] as the products read them: as they lie and transposed, contractions padded as the device wants."""
    if not needs_transposed_codes(q.device):
        return q, q.t()
    return with_padding(q, recipe), with_padding(q.view(torch.uint8).t().contiguous().view(q.dtype), recipe)


def with_padding(q: Tensor, recipe: Recipe) -> Tensor:
    """Codes [N, K] with zeros behind the contraction, as a device wants it that needs transposed codes."""
    padding = padded(q.shape[1], 16 if recipe.pads else 1) - q.shape[1]
    return nn.functional.pad(q.view(torch.uint8), (0, padding)).view(q.dtype) if padding else q


def _cast_after(module: RecipeModule, shape: torch.Size) -> After:
    recipe, gather = module.recipe, module.gather

    def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
        wide = outputs[0][: shape[0]]
        state = None
        if recipe.delayed is not None:
            assert module.delayed_scale is not None and module.delayed_amax_history is not None
            scale = torch.zeros_like(module.delayed_scale) if gather.delayed_scale is None else gather.delayed_scale
            state = State(scale, module.delayed_amax_history)
        operands = cast_role(wide, recipe, WEIGHT, True, True, state)
        assert operands.as_is is not None and operands.transposed is not None
        amax = operands.amax if operands.amax is not None else no_amax(module, wide)
        parts = Parts(*operands.as_is, *operands.transposed, amax)
        if out is not None:
            return out.refill(parts)
        inner = {part.untyped_storage().data_ptr(): part for part in (parts.q, parts.transposed_q)}
        return GatheredWeight(parts, shape, dtype, recipe.weight_casts), tuple(inner.values())

    return after


def gathered_operands(module: RecipeModule, weight: GatheredWeight, rolls: bool) -> Operands:
    """The operands of a gathered weight; ``rolls``: this forward's backward may roll the weight's history."""
    recipe = module.recipe
    if weight.casts is not recipe.weight_casts and weight.casts != recipe.weight_casts:
        raise RuntimeError(
            "the weight was gathered by other casts than this layer's recipe has: layers that share a weight need one "
            "recipe, and octavo.set_recipe waits until no forward is under way"
        )
    amax = weight.found_amax if weight.found_amax.numel() else None
    fresh = True
    if not torch.compiler.is_compiling():  # a graph would be bound to one of the two, as to a cast of its own
        gather = module.gather
        gather.unsharded = weakref.ref(weight)
        if rolls and not gather.for_training:  # it stayed gathered after evaluation
            gather.begin(module)
        fresh = gather.rolled != gather.casts[0]
        if rolls:
            gather.rolled = gather.casts[0]
    as_is, transposed = (weight.q, weight.scale_inv), (weight.transposed_q, weight.transposed_scale_inv)
    return Operands(as_is, transposed, amax, None, fresh, refilled=True)
