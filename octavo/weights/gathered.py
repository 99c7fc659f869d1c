"""Gathers of converted modules' weights under FSDP2 (fully_shard): what ranks send, and what they make of it.

    in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
                weight, or of each whole expert: one collective finds the amax of all weights of the model together.
                Blocks that each lie on one rank need no collective; their scales are sent beside the codes. A weight
                whose two layouts are scaled differently (rows, 1 x 32) is sent as two pairs, as many bytes as bf16.
    cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard.
    as it is    a weight that a product reads in high precision, or that another kind of module shares.
    as stored   a weight that lives in FP8: its codes as they are, and the scales of blocks and of experts. Per tensor
                every rank has the whole weight's scale already (octavo.optim keeps it so): no other collective runs.

All shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight is
missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send the
same codes again. A gathered weight's codes and scales are always written together, also into what a forward saved.

Under Delayed a weight that anything but its optimizer wrote takes the scale of its own amax.

Weights whose two layouts are scaled differently, and weights with blocks that reach over several ranks' rows, are cast
one by one (ShardCast). Ranks first take the maximum of each such block's amax. Each rank appends to its rows one row of
these amaxes, so that its cast finds the scale of the whole block; the codes of the appended row are not sent. Other
scales are sent beside the codes, unless ranks have different numbers of rows: FSDP2 then takes tensors of the shard's
shape alone, and ranks take the maximum for all scales.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo import kernels
from octavo.autograd.casts import CastRequest, cast_role, operands_of_codes
from octavo.granularity import ALL, Tile, scale_shape
from octavo.kernels.arguments import lie_by_columns
from octavo.kernels.backward_pass import is_running
from octavo.kernels.layouts import contraction_multiple, is_small_block, with_padding
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.scaling.recipe import WEIGHT, Cast, Recipe, RoleCasts
from octavo.step_count import OPTIMIZER_STEPS, SeenWrites
from octavo.tensor.collectives import bytes_of, check_ranks_agree, maximum_over_ranks, scales_from
from octavo.tensor.pair import Operands, operands_of, transposed_pair
from octavo.weights.fsdp2 import (
    After,
    GatheredWeight,
    attach,
    gather_as_it_is,
    gathered_whole,
    groups_of,
    on_this_rank,
    padded_rows,
    rows_of_rank,
    rows_on_each_rank,
)
from octavo.weights.plain import notice_writes, weight_of
from octavo.weights.reader import WeightReader
from octavo.weights.stored import StoredWeight, agree_on_scale, local_stored, stored_as, with_agreed_scale

IN_FP8, CAST_AFTER, AS_IT_IS, AS_STORED = "in FP8", "cast after", "as it is", "as stored"


class Unshard(NamedTuple):
    """A call of FSDP2's first hook for a module's weight: see ShardHooks."""

    module: WeightReader
    shard: Tensor
    mesh: Any  # over which FSDP2 sends
    shape: torch.Size  # shape of the tensor that FSDP2 shards
    mp_policy: Any


Sent = tuple[tuple[Tensor, ...], After]  # what FSDP2's first hook returns: the tensors, and the second hook's work


class Way:
    """One of the four ways to gather a weight: this one as it is, without octavo's part.

    ``why``: the reason, if it is not "in FP8".
    """

    kind = AS_IT_IS

    def __init__(self, why: str = "") -> None:
        self.why = why

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" if self.why else self.kind

    def send(self, gather: Gather, unshard: Unshard) -> Sent:
        """Return the tensors that FSDP2 sends of the shard, and its second hook."""
        return gather_as_it_is(unshard.shard, unshard.mesh, unshard.shape, unshard.mp_policy)


class AsStored(Way):
    """The way of a weight that lives in FP8: its codes, and the scales of blocks and of experts."""

    kind = AS_STORED

    def send(self, gather: Gather, unshard: Unshard) -> Sent:
        """Return the codes, with scales if ranks have different ones, and FSDP2's second hook."""
        module, shard, mesh, shape, _ = unshard
        assert isinstance(shard, StoredWeight)
        if gather.parameter is not None:
            shard = with_agreed_scale(shard, gather.parameter)
        codes, recipe = padded_rows(shard.qdata.view(torch.uint8), shape, mesh.size()), module.fp8.recipe
        scale_inv = shard.scale_inv.clone()  # of these codes, even if the next step writes before they are read
        if shard.ndim == 3:
            scales_shape = torch.Size(shard.granularity.of_matrices(shape).scale_shape(shape))
            scale_inv = padded_rows(scale_inv, scales_shape, mesh.size())
        # on one rank FSDP2 passes on the first tensor only
        sent = (codes,) if shard.has_one_scale or mesh.size() == 1 else (codes, scale_inv)
        code_dtype = shard.qdata.dtype

        def read(outputs: Sequence[Tensor]) -> Operands:
            q = outputs[0][: shape[0]].view(code_dtype)
            scales = scale_inv if len(sent) == 1 else outputs[1] if q.ndim == 2 else outputs[1][: shape[0]]
            if recipe.is_high_precision:
                return Operands((q, scales), (q.mT, scales.mT))
            return operands_of_codes((q, scales), recipe, WEIGHT, True, None)

        return sent, _reading(read, [scale_inv], recipe, shape, module.stores_transposed)


class CastAfter(Way):
    """The way of a weight that is sent in high precision, and that every rank casts whole, once an unshard."""

    kind = CAST_AFTER

    def send(self, gather: Gather, unshard: Unshard) -> Sent:
        """Return the shard in the dtype that is cast, and FSDP2's second hook."""
        module, shard, mesh, shape, mp_policy = unshard
        recipe = module.fp8.recipe
        if not is_running():
            gather.begin(module)
        # one rank sends nothing: a weight that several would send in FP8 is cast from its own dtype, as they would
        casts_own_dtype = mesh.size() == 1 and recipe.weight_casts.once
        dtype = shard.dtype if casts_own_dtype else mp_policy.param_dtype or shard.dtype

        def read(outputs: Sequence[Tensor]) -> Operands:
            wide, state = gathered_whole(outputs[0], shape), None
            if (delayed_state := module.fp8.state) is not None:
                scale = torch.zeros_like(delayed_state.scale) if gather.delayed_scale is None else gather.delayed_scale
                state = delayed_state._replace(scale=scale, before=torch.zeros_like(delayed_state.before)).on(
                    wide.device
                )
            weight_NK = wide.mT if module.stores_transposed else wide
            return cast_role(weight_NK, CastRequest(recipe, WEIGHT, True, True), state)

        return (padded_rows(shard, shape, mesh.size()).to(dtype),), _reading(read, [], recipe, shape)


class InFP8(Way):
    """The way of a weight whose shards are cast, with those of its group's other weights, and sent as codes."""

    kind = IN_FP8

    def __init__(self, gather: Gather, shard_cast: ShardCast) -> None:
        super().__init__()
        self.gather, self.shard_cast = gather, shard_cast
        self.sent: list[Tensor] = []  # the codes, and scales perhaps, that the last cast wrote
        self.shared_scales: list[Tensor] = []  # scale_inv (and amax) that all ranks have in common, of ``sent``
        self.steps = -1  # steps that the optimizer of the weight had done at the last cast
        self.cast_key: tuple[Any, ...] | None = None  # ``codes_key`` at the group's last cast; equal: don't cast again

    @property
    def shard(self) -> Tensor:
        """This rank's shard."""
        return on_this_rank(self.gather.parameter)

    def send(self, gather: Gather, unshard: Unshard) -> Sent:
        """Return the codes, with scales that ranks don't share, and FSDP2's second hook."""
        module, shard, mesh, shape, _ = unshard
        group, for_backward = gather.group, is_running()  # true in a forward that a checkpoint computes again, too
        assert group is not None
        # cast all shards of the group, unless the gather of another weight for the same forward has done so
        if for_backward and self.sent:
            group.backwards += 1
        else:
            if self.cast_key != gather.codes_key(module):
                group.refresh(gather.parameter.device_mesh, mesh)
            self.cast_key = None
        group.wait()
        sent = tuple(tensor.to(shard.device, non_blocking=True) for tensor in self.sent)
        shared_scales = [tensor.to(shard.device, non_blocking=True) for tensor in self.shared_scales]
        read = functools.partial(self.shard_cast.read, shared_scales=shared_scales, pads=module.fp8.recipe.pads)
        return sent, _reading(read, shared_scales, module.fp8.recipe, shape, module.stores_transposed)


class Gather:
    """State that one module keeps for its weight's gathers. Its methods take that module, a RecipeModule."""

    def __init__(self, group: GatherGroup | None = None, shared: bool = False, name: str = "") -> None:
        self.group = group  # weights that find their scales together; None: this weight is cast after its gather
        self.shared = shared  # whether a module of another kind has the same weight
        self.name = name  # the module's name in the model that octavo.convert was called with
        self.parameter: Any = None  # the module's sharded parameter
        self.writes: SeenWrites  # to the parameter, once there is one
        self.shape = torch.Size()  # shape of the tensor that FSDP2 shards: tensor parallelism has left this rank a part
        self.at = 0  # the mesh dimension that FSDP2 shards over; those of tensor parallelism follow
        self.for_training = True  # whether the weight was last gathered for a forward in training
        self.generation = 0  # counts new parameters and loads, which the address of a shard without rows does not show
        self.used: tuple[Any, ...] | None = None  # (kind, casts) of its gathers so far
        self.forget()

    def adopt(self, parameter: Any, whole: Any, module: WeightReader) -> None:
        """Gather ``parameter`` of the module from now on, if FSDP2 has just sharded it; it replaces ``whole``."""
        if (mesh := getattr(parameter, "device_mesh", None)) is None:
            return
        at, shape = self.at, self.shape
        if whole is not parameter:  # else the same parameter was moved to another device
            inner = getattr(whole, "device_mesh", None)
            at, shape = mesh.ndim - 1 - (0 if inner is None else inner.ndim), on_this_rank(whole).shape
            if inner is not None and parameter.ndim == 3:
                return  # expert_parallel has spread its experts over ranks
        if not attach(parameter, at, module.part_name) or self.parameter is parameter:
            return
        self.at, self.shape = at, shape
        # torch 2.13 refuses this only when it first runs; with 2.11 the two shards drift apart silently
        if on_this_rank(whole) is whole and whole.__dict__.setdefault("_sharded", parameter) is not parameter:
            raise ValueError(
                "fully_shard was applied to two modules that share a weight, each of which would train its own; "
                "apply it to a module that holds both"
            )
        OPTIMIZER_STEPS.watch()
        self.parameter, self.writes = parameter, OPTIMIZER_STEPS.writes_to(parameter)
        if self.group is not None:
            self.group.check_ranks_agree(parameter.device_mesh)
            self.group.add(module)
        agree_on_scale(parameter, just_cut=True)
        self.forget()

    def forget(self) -> None:
        """Drop codes and scales that were cast by another recipe or from another parameter."""
        self._way: Way | None = None
        self.delayed_scale: Tensor | None = None  # [3], for this forward; None: the scale comes from the weight's amax
        self.settings_agree = False  # whether ranks have compared the module's settings since these last changed
        self.generation += 1

    def join(self, group: GatherGroup, module: WeightReader, name: str) -> None:
        """Find scales together with this group's weights from now on."""
        self.group, self._way, self.name = group, None, name
        if self.parameter is not None:
            group.add(module)

    def share(self, shared: bool) -> None:
        """Note whether a module of another kind has the same weight."""
        if shared != self.shared:
            self.shared, self._way = shared, None

    def way(self, module: WeightReader) -> Way:
        """Return how the module's sharded weight is gathered."""
        if self._way is None:
            self._way = self._choose_way(module)
        return self._way

    def _choose_way(self, module: WeightReader) -> Way:
        if local_stored(self.parameter) is not None:
            return AsStored()
        if why := self._why_as_it_is(module):
            return Way(why)
        casts, mesh = module.fp8.recipe.weight_casts, self.parameter.device_mesh
        ranks, rank = mesh.size(self.at), mesh.get_local_rank(self.at)
        together = _cast_in_one_launch(casts.block, self.shape, ranks)
        if why := self._why_cast_after(casts, ranks, together):
            # under tensor parallelism each forward casts it, with amaxes that are maxima over ranks
            return Way(why) if self.at + 1 < mesh.ndim else CastAfter(why)
        return InFP8(self, ShardCast(casts, self.shape, ranks, rank, together))

    def _why_as_it_is(self, module: WeightReader) -> str | None:
        """Return why the weight is gathered in high precision for products to read or cast it so, or None."""
        casts = module.fp8.recipe.weight_casts
        if casts.as_is is None or casts.transposed is None:
            return "a product reads it in high precision"
        if self.shared:
            return "another module shares it"
        if module.stores_transposed and self.parameter.ndim != 3:
            return f"{type(module).__name__} stores it transposed"
        return None

    def _why_cast_after(self, casts: RoleCasts, ranks: int, together: bool) -> str | None:
        """Return why each rank casts the whole weight, or None; ``together``: see ShardCast."""
        assert casts.as_is is not None and casts.transposed is not None
        rows, experts = self.shape[0], self.parameter.ndim == 3
        if ranks == 1:
            return "one rank gathers nothing"
        if casts.as_is.is_packed or casts.transposed.is_packed:
            return "codes of which two share a byte are not sent"
        if self.group is None:
            return "octavo.convert(model, recipe) before fully_shard lets weights find scales together"
        if self.parameter.placements[self.at].dim != 0:
            return f"it is not sharded by {'experts' if experts else 'rows'}"
        if together:
            return None
        if experts and rows % ranks and _is_square(casts.block):
            return f"of {rows} experts {ranks} ranks do not have as many each, as scales sent need it"
        if experts:
            return f"experts are cast one matrix at a time by {casts.as_is} and {casts.transposed}"
        delayed = casts.as_is.is_delayed or casts.transposed.is_delayed
        if delayed or not (casts.once or 1 in (casts.as_is.tile[0], casts.transposed.tile[1])):
            return "its two layouts have different scales, and ranks would have to agree on both"
        return "tensor parallelism shards it too" if self.at + 1 < self.parameter.device_mesh.ndim else None

    def codes_key(self, module: WeightReader) -> tuple[Any, ...]:
        """Return a key of the weight's codes: they serve forwards while it stays the same.

        It depends on no value of a weight, so all ranks decide alike.
        """
        assert self.group is not None
        parameter = self.parameter
        writes = self.writes.step, parameter._version, on_this_rank(parameter)._version, self.generation
        return self.group.backwards, module.training, *writes, id(module.fp8.recipe)

    def begin(self, module: WeightReader) -> None:
        """Note that a forward of the module is about to read the weight."""
        self.for_training, self.delayed_scale = module.training, None
        if module.training and (state := module.fp8.state) is not None:  # evaluation takes the weight's own amax
            notice_writes(module, self.parameter)
            self.delayed_scale = state.scale.clone()

    def read(self, weight: GatheredWeight, module: WeightReader) -> None:
        """Note that the module computes with its gathered weight; raise RuntimeError if other casts gathered it."""
        if weight.casts != module.fp8.recipe.weight_key:
            raise RuntimeError(
                "the weight was gathered by other casts than this layer's recipe has: layers that share a weight need "
                "one recipe, and octavo.set_recipe waits until no forward is under way"
            )
        # the weight stayed gathered after a forward in evaluation
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled() and not self.for_training:
            self.begin(module)

    def send(self, module: WeightReader, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any) -> Sent:
        """Return the tensors that FSDP2 sends of the weight, and its second hook: see ShardHooks."""
        if not self.settings_agree:
            whole = mesh if self.parameter is None else self.parameter.device_mesh
            others = [] if self.group is None else [other for other, _ in self.group.gathers_on(whole)]
            check_layers_agree(others or [module], whole)
        way = AsStored() if isinstance(shard, StoredWeight) else self.way(module)
        used = way.kind, module.fp8.recipe.weight_casts
        if self.used is not None and self.used != used:
            raise RuntimeError(
                "a weight under FSDP2 took another recipe than it was gathered by; call octavo.set_recipe on the "
                "module that fully_shard was applied to, or one that holds it"
            )
        self.used = used
        return way.send(self, Unshard(module, shard, mesh, outer_size, mp_policy))

    def __reduce__(self) -> tuple[Any, ...]:
        return Gather, (self.group, self.shared, self.name)


def _is_square(block: Tile | None) -> bool:
    """Whether a cast that serves both layouts of a weight has small blocks of as many rows as columns."""
    return block is not None and block[0] == block[1] and is_small_block(block)


def _cast_in_one_launch(block: Tile | None, shape: torch.Size, ranks: int) -> bool:
    """Whether shards are cast with other weights: by one cast, per tensor or in blocks that lie on one rank each."""
    if block is None or block == (ALL, ALL):
        return block is not None
    whole_blocks = shape[0] % ranks == 0 and (len(shape) == 3 or shape[0] // ranks % block[0] == 0)
    return whole_blocks and _is_square(block)


def _reading(
    read: Callable[[Sequence[Tensor]], Operands],
    local_tensors: Sequence[Tensor],
    recipe: Recipe,
    shape: torch.Size,
    swaps: bool = False,
) -> After:
    """Return FSDP2's second hook, which makes operands of the received tensors by ``read``.

    The hook returns the weight, and the tensors that FSDP2 has to free besides the received ones. ``local_tensors``:
    those of this rank that ``read`` uses; ``swaps``: whether the operands that it returns are transposed.
    """

    def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
        for tensor in local_tensors:  # allocated on FSDP2's stream, they must outlive this stream's reads
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        operands = read(outputs)
        if swaps:
            operands = operands._replace(as_is=operands.transposed, transposed=operands.as_is)
        if out is not None:
            return on_this_rank(out).write(operands)  # type: ignore[attr-defined]
        assert operands.as_is is not None and operands.transposed is not None
        codes = operands.as_is[0], operands.transposed[0]
        storages = {q.untyped_storage().data_ptr(): _all_of(q) for q in codes}
        for tensor in outputs:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        return GatheredWeight(operands, shape, dtype, recipe.weight_key), tuple(storages.values())

    return after


def _all_of(codes: Tensor) -> Tensor:
    """Return codes, or all of their storage if they view a part of it: FSDP2 allocates what it is shown."""
    raw = codes.view(torch.uint8)
    storage = raw.untyped_storage()
    return codes if storage.nbytes() == raw.numel() else raw.new_empty(0).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


# --- the weights of one model together --------------------------------------------------------------------------------


def settings_of(module: WeightReader, name: str) -> dict[str, object]:
    """Return a RecipeModule's settings that must be equal on all ranks, by names that begin with this one.

    They are its recipe, how its weight is stored, and how it sends tokens.
    """
    recipe = module.fp8.recipe
    settings = {f"recipe.{field.name}": getattr(recipe, field.name) for field in fields(recipe) if field.compare}
    weight = module.fp8.gather.parameter
    if (weight := weight_of(module) if weight is None else weight) is not None:
        granularity = stored_as(weight)
        settings["weight_storage"] = weight.dtype if granularity is None else f"fp8 {granularity}"
    return {f"{name}: {setting}": value for setting, value in (settings | module.settings()).items()}


def check_layers_agree(modules: Sequence[WeightReader], mesh: Any, **settings: object) -> None:
    """Raise RanksDifferError if ranks of a mesh have different settings of these RecipeModules; collective.

    Once after each change of any of them. All ranks call it with the same modules; ``settings``: others that must be
    equal. A compiled graph compares nothing.
    """
    if torch.compiler.is_compiling() or all(module.fp8.gather.settings_agree for module in modules):
        return
    for number, module in enumerate(modules):
        settings |= settings_of(module, module.fp8.gather.name or f"{type(module).__name__} {number}")
    check_ranks_agree(settings, mesh.get_all_groups())
    for module in modules:
        module.fp8.gather.settings_agree = True


class GatherGroup:
    """The sharded weights of one ``octavo.convert``, whose scales one collective finds together."""

    def __init__(self, settings: dict[str, object] | None = None) -> None:
        # of all layers at convert; ranks compare them when the first is sharded
        self.settings = {} if settings is None else settings
        self._checked_meshes: set[Any] = set()  # those whose ranks have compared the settings
        self._modules: list[weakref.ref[Any]] = []  # that multiply by the weights
        self.backwards = 0  # how often a weight was gathered for backward
        self._cast: Any = None  # a CUDA event after the last casts

    def add(self, module: WeightReader) -> None:
        """Add a module whose weight was sharded; all ranks add them in one order."""
        if all(reference() is not module for reference in self._modules):
            self._modules.append(weakref.ref(module))

    def check_ranks_agree(self, mesh: Any) -> None:
        """Raise RanksDifferError, once for each mesh, if its ranks have converted the model by different settings."""
        if mesh not in self._checked_meshes:
            check_ranks_agree(self.settings, mesh.get_all_groups())
            self._checked_meshes.add(mesh)

    def gathers_on(self, mesh: Any) -> list[tuple[Any, Gather]]:
        """Return the modules whose weights are sharded over a mesh, in one order on all ranks, with their gathers."""
        # octavo.restore leaves none of it
        modules: list[Any] = [module for reference in self._modules if hasattr(module := reference(), "fp8")]
        gathers: list[tuple[Any, Gather]] = [(module, module.fp8.gather) for module in modules]
        return [(module, one) for module, one in gathers if one.group is self and one.parameter.device_mesh == mesh]

    def refresh(self, whole: Any, mesh: Any) -> None:
        """Find scales anew and cast all shards that lie on the mesh ``whole``; ``mesh``: the one that sends them."""
        together: dict[Any, list[InFP8]] = {}
        for module, gather in self.gathers_on(whole):
            if isinstance(way := gather.way(module), InFP8):
                gather.begin(module)
                way.cast_key, shard = gather.codes_key(module), way.shard
                as_is = module.fp8.recipe.weight_casts.as_is
                key = (as_is, shard.dtype, shard.device) if way.shard_cast.together else way
                together.setdefault(key, []).append(way)
        _cast_shards(list(together.values()), mesh)
        self._cast = torch.cuda.current_stream().record_event() if mesh.device_type == "cuda" else None

    def wait(self) -> None:
        """Make the current stream wait for the last casts: FSDP2 gathers on its own stream and on the user's."""
        if self._cast is not None:
            torch.cuda.current_stream().wait_event(self._cast)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy is empty; modules that are copied together share one
        return GatherGroup, (self.settings,)


def _cast_shards(groups: Sequence[list[InFP8]], mesh: Any) -> None:
    """Cast shards that lie on one mesh, in one launch for each group: shards of one dtype and cast, or a single one.

    One collective, under tensor parallelism two, takes the maximum over ranks of all amaxes that need it.
    """
    sharing = [way for ways in groups for way in ways if way.shard_cast.needs_maximum]
    amax_of: dict[InFP8, Tensor] = {}
    if sharing:
        local_amaxes = [way.shard_cast.amax(way.shard) for way in sharing]
        ranks = dict.fromkeys(group for way in sharing for group in groups_of(way.gather.parameter))
        amax = maximum_over_ranks(torch.cat(local_amaxes), *ranks, device=mesh.device_type)
        amax_of = dict(zip(sharing, amax.split([len(amaxes) for amaxes in local_amaxes]), strict=True))
    for ways in groups:
        first = ways[0]
        if first.shard_cast.together:
            _cast_together(ways, [amax_of[way] for way in ways if way in amax_of])
        else:
            amax = amax_of.get(first, first.shard.new_zeros(0))
            first.sent, first.shared_scales = first.shard_cast.cast(first.shard, amax)


def _take_scales(ways: list[InFP8], maxima: list[Tensor], cast: Cast) -> list[Tensor]:
    """Set the shared scales of shards of one cast: scale_inv and, under Delayed, the amax of the whole weight.

    ``maxima``: for each the amaxes of its weight's matrices. Returns their scales.
    """
    amax, counts, delayed_scales = torch.cat(maxima), [len(one) for one in maxima], None
    whole = amax if len(amax) == len(counts) else torch.stack([one.amax() for one in maxima])
    if cast.is_delayed:
        scales_by_role = [way.gather.delayed_scale for way in ways]
        zero = amax.new_zeros(1)
        delayed_scales = torch.cat(
            [zero if scales is None else scales[WEIGHT : WEIGHT + 1].to(amax.device) for scales in scales_by_role]
        )
        # Writes that move no version are recognised by this: a weight's amax changed without a step of its
        # optimizer, or is more than twice what its scale can represent.
        steps = [way.gather.writes.step for way in ways]
        unstepped = [float(way.steps == now) for way, now in zip(ways, steps, strict=True)]
        last_amax = torch.cat([way.shared_scales[1].view(1) if way.shared_scales else zero for way in ways])
        moved = (whole.new_tensor(unstepped) > 0) & (whole != last_amax)
        written = (moved | (delayed_scales * whole > 2 * cast.format.max)) & whole.isfinite()
        for way, now in zip(ways, steps, strict=True):
            way.steps = now
        delayed_scales = torch.where(written, 0, delayed_scales)
        if whole is not amax:
            delayed_scales = torch.cat(
                [scale.expand(size) for scale, size in zip(delayed_scales.split(1), counts, strict=True)]
            )
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin, delayed_scales)
    inverses = scale_inv_from_scale(scale).split(counts)
    for way, scale_inv, amax_of_weight in zip(ways, inverses, whole.view(-1, 1, 1).unbind(), strict=True):
        way.shared_scales = [scale_inv.view((-1, 1, 1) if len(way.gather.shape) == 3 else (1, 1))]
        way.shared_scales += [amax_of_weight] * cast.is_delayed
    return list(scale.split(counts))


def _cast_together(ways: list[InFP8], maxima: list[Tensor]) -> None:
    """Cast shards of one dtype by one cast, in one launch. ``maxima``: see ``_take_scales``; [] for blocks."""
    cast = ways[0].shard_cast.layouts[0].cast
    scales_of_ways = _take_scales(ways, maxima, cast) if maxima else []
    shards, codes, scale_inv, scales = (list[Tensor]() for _ in range(4))
    for number, way in enumerate(ways):
        shard, shape = way.shard, way.gather.shape
        shape = torch.Size((rows_on_each_rank(shape[0], way.shard_cast.ranks), *shape[1:]))
        if not way.sent:
            way.sent = [torch.zeros(shape, dtype=torch.uint8, device=shard.device)]
            if not scales_of_ways:
                of_blocks = *shape[:-2], *scale_shape(shape[-2:], cast.tile)
                way.sent.append(shard.new_ones(of_blocks, dtype=cast.scale_inv_dtype))
        if shard.numel() == 0:
            continue
        experts, codes_of_shard = shard.ndim == 3, way.sent[0][: shard.shape[0]].view(cast.format.dtype)
        matrices = shard.unbind() if experts else [shard]
        shards += matrices
        codes += codes_of_shard.unbind() if experts else [codes_of_shard]
        if scales_of_ways:
            begin = way.shard_cast.begin if experts else 0
            scales += scales_of_ways[number][begin : begin + len(matrices)].split(1)
            scale_inv += [shard.new_empty(1, 1, dtype=torch.float32) for _ in matrices]
        else:
            scale_inv += way.sent[1].unbind() if experts else [way.sent[1]]
    if shards:
        amax = [torch.empty_like(inverse, dtype=torch.float32) for inverse in scale_inv]
        options = cast.tile, cast.power_of_two, cast.margin
        kernels.multi_tensor_cast(shards, codes, [], scale_inv, amax, scales, 0, *options, None)


class _CastLayout(NamedTuple):
    """A cast, its tile of the weight as it lies, the shape of the scales that ranks share; None: scales are sent."""

    cast: Cast
    tile: Tile
    grid: tuple[int, ...] | None


class ShardCast:
    """Casts one rank's rows of a weight [N, K], or its experts of [E, N, K], and makes operands of all ranks' codes.

    At most one of the two layouts has blocks of several rows. ``together``: whether the shard is cast in one launch
    with others, as single layouts per tensor or in whole blocks are; else the casts are Dynamic.
    """

    def __init__(self, casts: RoleCasts, shape: torch.Size, ranks: int, rank: int, together: bool = False) -> None:
        assert casts.as_is is not None and casts.transposed is not None
        self.shape, self.ranks, part, self.together = shape, ranks, rows_on_each_rank(shape[0], ranks), together
        self.begin = rows_of_rank(shape[0], ranks, rank).start
        layouts = [(casts.as_is, casts.as_is.tile), (casts.transposed, casts.transposed.tile[::-1])]
        self.layouts = list[_CastLayout]()
        for cast, tile in layouts[: 1 if casts.once else 2]:
            whole = shape[0] == part * ranks and tile[0] != ALL and (len(shape) == 3 or part % tile[0] == 0)
            grid = None if whole else (*shape[:-2], *scale_shape(shape[-2:], tile))
            self.layouts.append(_CastLayout(cast, tile, grid))
        self.needs_maximum = any(layout.grid is not None for layout in self.layouts)

    def amax(self, shard: Tensor) -> Tensor:
        """Return this rank's amax of each block that several ranks share, one after the other; float32."""
        amaxes = [self._amax_of(shard, tile, grid).view(-1) for _, tile, grid in self.layouts if grid is not None]
        return amaxes[0] if len(amaxes) == 1 else torch.cat([shard.new_zeros(0, dtype=torch.float32), *amaxes])

    def _amax_of(self, shard: Tensor, tile: Tile, grid: tuple[int, ...]) -> Tensor:
        if not len(shard):
            return shard.new_zeros(grid, dtype=torch.float32)
        if shard.ndim == 3:  # per tensor
            first, of_rows = self.begin, kernels.amax(shard.flatten(0, 1), (1, ALL))
            block_amaxes = of_rows.view(shard.shape[:2]).amax(1).view(-1, 1, 1)
        else:
            first, rows_above = (0, 0) if tile[0] == ALL else divmod(self.begin, tile[0])
            block_amaxes = kernels.amax(functional.pad(shard, (0, 0, rows_above, 0)) if rows_above else shard, tile)
        if block_amaxes.shape == grid:
            return block_amaxes
        blocks = shard.new_zeros(grid, dtype=torch.float32)
        blocks[first : first + len(block_amaxes)] = block_amaxes
        return blocks

    def cast(self, shard: Tensor, amax: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return (the tensors that this rank sends, uint8, of as many rows on every rank; the scale_inv of all ranks).

        ``amax``: the maximum over ranks of what the method ``amax`` returns.
        """
        x, rows_above, sent, shared_scales = shard, 0, list[Tensor](), list[Tensor]()
        for cast, tile, grid in self.layouts:
            if grid is not None:
                blocks, amax = amax[: math.prod(grid)].view(grid), amax[math.prod(grid) :]
                scale = scale_from_amax(blocks, cast.format.max, cast.power_of_two, cast.margin)
                shared_scales.append(scale_inv_from_scale(scale).to(cast.scale_inv_dtype))
                if tile[0] != 1:
                    x, rows_above = self._beside(shard, blocks, tile)
        (first, *_), *others = self.layouts
        second = others[0].cast.as_second if others else {}
        q, q2, scale_inv, scale_inv2, *_ = kernels.cast(x, None, WEIGHT, *first.arguments, **second)
        for (cast, _, grid), codes, scales in zip(self.layouts, (q, q2), (scale_inv, scale_inv2), strict=False):
            codes_of_rows = codes.view(torch.uint8)[rows_above : rows_above + len(shard)]
            sent.append(padded_rows(codes_of_rows, self.shape, self.ranks))
            if grid is None:  # of the shard's rows, without those of amaxes
                sent.append(bytes_of(scales[rows_above : rows_above + len(shard)], cast.power_of_two))
        return sent, shared_scales

    def _beside(self, shard: Tensor, blocks: Tensor, tile: Tile) -> tuple[Tensor, int]:
        """Return (the shard with rows of amaxes of the blocks that other ranks share, how many rows are above it)."""
        columns, end = shard.shape[1], self.begin + len(shard)
        wide = blocks.to(shard.dtype).repeat_interleave(columns if tile[1] == ALL else tile[1], 1)[:, :columns]
        if tile[0] == ALL:
            return torch.cat([shard, wide]), 0
        if not len(shard):
            return shard, 0
        first, rows_above = divmod(self.begin, tile[0])
        last, rows_below = divmod(end if end < self.shape[0] else 0, tile[0])
        rows = wide[first : first + 1].expand(rows_above, columns), shard, wide[last : last + 1][:rows_below]
        return torch.cat(rows) if rows_above or rows_below else shard, rows_above

    def read(self, received: Sequence[Tensor], shared_scales: Sequence[Tensor], pads: bool) -> Operands:
        """Return the operands of all ranks' ``sent`` tensors, by the scales (and the weight's amax) of all ranks."""
        tensors, shared, pairs = iter(received), iter(shared_scales), list[tuple[Tensor, Tensor]]()
        for cast, tile, grid in self.layouts:
            q = next(tensors)[: self.shape[0]].view(cast.format.dtype)
            scales = next(tensors if grid is None else shared)
            if scales.dtype == torch.uint8:
                scales = scales_from(scales, cast.power_of_two, tile)
            # with the strides that products want, see kernels/signatures.py
            pairs.append((q, scales.t().contiguous().t() if lie_by_columns(tile) else scales))
        if len(pairs) == 1:
            return operands_of(*pairs[0], pads)._replace(amax=next(shared, None))
        (q, scale_inv), (q2, scale_inv2) = pairs
        pad = contraction_multiple(q.device, pads)
        return Operands((with_padding(q, pad), scale_inv), transposed_pair(q2, scale_inv2, pads))
