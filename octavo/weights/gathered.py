"""Gathers of converted modules' weights under FSDP2 (fully_shard): what ranks send, and what they make of it.

    in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
                weight, or of each whole expert: one collective finds the amax of all weights of the model together.
                Blocks that each lie on one rank need no collective; their scales are sent beside the codes. A weight
                whose two layouts are scaled differently (rows, 1 x 32) is sent as two pairs, as many bytes as bf16.
    cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard.
    as it is    a weight that a product reads in high precision, or that another kind of module shares.
    as stored   a weight that lives in FP8: its codes as they are, and the scales of blocks and of experts. Per tensor
                every rank has the whole weight's scale already (octavo.optim keeps it so): no other collective runs.

Each is a class below, a Way: its ``send`` returns what FSDP2's first hook returns, the tensors to send and the second
hook, which makes a GatheredWeight of all ranks' tensors. Who holds whom:

    module.fp8.gather: a Gather, one a module       chooses the way, keeps the scale of the forward that is under way
        .group: a GatherGroup, one a model          casts the shards of all its weights that are sent in FP8
            ._modules: weakly, those modules
        ._way: a Way                                what it sends
            .gather: that Gather
            .shard_cast: a ShardCast, of an InFP8   how one shard is cast (weights/shard_cast.py); it holds no weight
            .codes: ShardCodes, of an InFP8         what the last cast wrote
            .fresh_key: values, of an InFP8         whether these codes serve the next forward
    FSDP2's second hook, until the weight is there: a MakeWeight

All shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight is
missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send the
same codes again: see InFP8. A gathered weight's codes and scales are always written together, also into what a
forward saved.

Under Delayed a weight that anything but its optimizer wrote takes the scale of its own amax.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.autograd.cast_together import MatrixToCast, cast_together
from octavo.autograd.casts import CastRequest, cast_role, operands_of_codes
from octavo.kernels import backward_pass
from octavo.numerics import scale_inv_from_scale
from octavo.private import DisableTorchFunctionSubclass, is_dtensor, local_tensor
from octavo.scaling.recipe import WEIGHT, Cast, RoleCasts
from octavo.step_count import OPTIMIZER_STEPS, SeenWrites
from octavo.tensor.collectives import check_ranks_agree, maximum_over_ranks
from octavo.tensor.pair import Operands, OperandsFacade
from octavo.weights.fsdp2 import (
    FirstHookResult,
    GatheredWeight,
    Unshard,
    UnshardedWeight,
    attach,
    gather_as_it_is,
    groups_of,
    on_this_rank,
    padded_rows,
    without_padding,
)
from octavo.weights.operands import forget_if_written, weight_of
from octavo.weights.reader import WeightReader
from octavo.weights.shard_cast import ShardCast, ShardCodes, WeightScales, is_cast_in_one_launch, is_square
from octavo.weights.storable import first_reason
from octavo.weights.stored import StoredWeight, agree_on_scale, local_stored, stored_as

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class MakeWeight:
    """FSDP2's second hook: makes a GatheredWeight of the tensors that all ranks sent, or writes them into one.

    Attributes:
        shape: the weight's.
        casts: the casts that the codes were made by, as text.
        read: makes the weight's operands of the received tensors.
        local_tensors: this rank's tensors that ``read`` uses besides.
        swaps: whether the codes lie as a parameter does that products read transposed.
    """

    shape: torch.Size
    casts: str
    read: Callable[[Sequence[Tensor]], Operands]
    local_tensors: Sequence[Tensor] = ()
    swaps: bool = False

    def __call__(self, received: tuple[Tensor, ...], dtype: torch.dtype, out: Tensor | None) -> UnshardedWeight:
        """Return (the weight, what FSDP2 frees besides the received tensors); None after writing into ``out``."""
        for tensor in self.local_tensors:  # allocated on FSDP2's stream, they must outlive this stream's reads
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        operands = self.read(received).swapped() if self.swaps else self.read(received)
        if out is not None:
            return on_this_rank(out).write(operands)  # type: ignore[attr-defined]
        codes = operands.as_is[0], operands.transposed[0]  # type: ignore[index]
        storages = {q.untyped_storage().data_ptr(): _whole_storage(q) for q in codes}
        for tensor in received:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        return GatheredWeight(operands, self.shape, dtype, self.casts), tuple(storages.values())


class Way:
    """One of the four ways to gather a weight: this one as it is, without octavo's part.

    ``gather``: the module's, which chose it; ``why``: the reason why it is not "in FP8", if it is not.
    """

    kind = "as it is"

    def __init__(self, gather: Gather, why: str = "") -> None:
        self.gather, self.why = gather, why

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" if self.why else self.kind

    def send(self, module: WeightReader, unshard: Unshard) -> FirstHookResult:
        """Return the tensors that FSDP2 sends of the shard, and its second hook."""
        return gather_as_it_is(unshard)


class AsStored(Way):
    """The way of a weight that lives in FP8: its codes, and the scales of blocks and of experts."""

    kind = "as stored"

    def send(self, module: WeightReader, unshard: Unshard) -> FirstHookResult:
        """Return the codes, with scales if ranks have different ones, and FSDP2's second hook."""
        shard, mesh, shape, _ = unshard
        assert isinstance(shard, StoredWeight)
        if shard.facts.scale_is_local:
            agree_on_scale(self.gather.parameter)
            shard = local_tensor(self.gather.parameter).moved(lambda tensor: tensor.to(shard.device))
        recipe, code_dtype = module.fp8.recipe, shard.qdata.dtype
        codes = padded_rows(shard.qdata.view(torch.uint8), shape, mesh.size())
        scale_inv = shard.scale_inv.clone()  # of these codes, even if the next step writes before they are read
        if shard.ndim == 3:
            scale_inv = padded_rows(scale_inv, shard.scales_shape(shape), mesh.size())
        # on one rank FSDP2 passes on the first tensor only
        sends_scales = not shard.has_one_scale and mesh.size() > 1

        def read(received: Sequence[Tensor]) -> Operands:
            q = received[0][: shape[0]].view(code_dtype)
            scales = received[1][: shape[0]] if sends_scales else scale_inv
            if recipe.is_high_precision:
                return Operands((q, scales), (q.mT, scales.mT))
            return operands_of_codes((q, scales), recipe, WEIGHT, transposed=True, amax=None)

        sent = (codes, scale_inv) if sends_scales else (codes,)
        return sent, MakeWeight(shape, recipe.weight_key, read, [scale_inv], module.stores_transposed)


class CastAfter(Way):
    """The way of a weight that is sent in high precision, and that every rank casts whole, once an unshard."""

    kind = "cast after"

    def send(self, module: WeightReader, unshard: Unshard) -> FirstHookResult:
        """Return the shard in the dtype that is cast, and FSDP2's second hook."""
        shard, mesh, shape, mp_policy = unshard
        gather, recipe = self.gather, module.fp8.recipe
        if not backward_pass.is_running():
            gather.begin(module)
        # one rank sends nothing: a weight that several would send in FP8 is cast from its own dtype, as they would
        casts_own_dtype = mesh.size() == 1 and recipe.weight_casts.coincide
        dtype = shard.dtype if casts_own_dtype else mp_policy.param_dtype or shard.dtype

        def read(received: Sequence[Tensor]) -> Operands:
            weight, state = without_padding(received[0], shape), module.fp8.state
            if state is not None:
                scale = torch.zeros_like(state.scale) if gather.delayed_scale is None else gather.delayed_scale
                state = state._replace(scale=scale, before=torch.zeros_like(state.before)).on(weight.device)
            weight_NK = weight.mT if module.stores_transposed else weight
            return cast_role(weight_NK, CastRequest(recipe, WEIGHT, as_is=True, transposed=True), state)

        return (padded_rows(shard, shape, mesh.size()).to(dtype),), MakeWeight(shape, recipe.weight_key, read)


class InFP8(Way):
    """The way of a weight whose shards are cast, with those of its group's other weights, and sent as codes.

    Codes are fresh if the next gather for a forward sends them as they are, without a cast. A cast of the group makes
    the codes of all its weights fresh, for one gather each. Codes that are no longer fresh stay, for backward, until
    the next cast. Of two micro-batches of a model with the weights A and B:

        gather        is it fresh?      is cast       is sent             are fresh then
        forward 1  A  no: nothing cast  A and B       A's codes           B's
                   B  yes               nothing       B's codes           none
        backward   B  is not asked      nothing       B's codes again     none
                   A  is not asked      nothing       A's codes again     none
        forward 2  A  no: it was sent   A and B anew  A's new codes       B's
                   B  yes               nothing       B's new codes       none

    A checkpoint's gathers, for a forward that it computes again in backward, are gathers for backward. If forward 1 had
    not read B, B's codes would be fresh after it. They would not outlast any gather for backward, as an optimizer may
    write after it; nor a write to B, a load, or another mode or recipe of its module.

    Attributes:
        codes: the last cast's.
        step_at_cast: the last step of the weight's optimizer before that cast.
        fresh_key: ``key_now`` at that cast; None since a gather for a forward has sent the codes, or a write that no
            counter shows outdated them.
    """

    kind = "in FP8"

    def __init__(self, gather: Gather, shard_cast: ShardCast) -> None:
        super().__init__(gather)
        self.shard_cast = shard_cast
        self.codes: ShardCodes | None = None
        self.step_at_cast = -1
        self.fresh_key: tuple[Any, ...] | None = None

    @property
    def shard(self) -> Tensor:
        """This rank's shard."""
        return on_this_rank(self.gather.parameter)

    def key_now(self, module: WeightReader) -> tuple[Any, ...]:
        """Return a key that differs from the last cast's if the codes are outdated.

        It depends on no value of a weight, so all ranks decide alike.
        """
        gather = self.gather
        with DisableTorchFunctionSubclass():  # ShardedWeight's would be called for a version
            writes = gather.writes.last_step, gather.parameter._version, local_tensor(gather.parameter)._version
        return gather.group.backwards, module.training, *writes, id(module.fp8.recipe)  # type: ignore[union-attr]

    def send(self, module: WeightReader, unshard: Unshard) -> FirstHookResult:
        """Return the codes, with scales that ranks don't share, and FSDP2's second hook."""
        group = self.gather.group
        assert group is not None
        # for backward: also for a forward that a checkpoint computes again
        if backward_pass.is_running() and self.codes is not None:
            group.backwards += 1
        else:
            # cast all shards of the group, unless the gather of another weight for the same forward has done so
            if self.fresh_key != self.key_now(module):
                group.cast_shards(self.gather.parameter.device_mesh, unshard.mesh)
            self.fresh_key = None
        group.wait_for_casts()
        codes, recipe = self.codes.on(unshard.shard.device), module.fp8.recipe  # type: ignore[union-attr]
        read = functools.partial(self.shard_cast.read, codes=codes, may_pad=recipe.may_pad)
        local_tensors = [tensor for tensor in (*codes.shared_scales, codes.amax) if tensor is not None]
        return codes.sent, MakeWeight(unshard.shape, recipe.weight_key, read, local_tensors, module.stores_transposed)


class Gather:
    """State that one module keeps for its weight's gathers. Its methods take that module, a RecipeModule.

    Written by octavo.convert (``join``, ``share``) until the next one; a copy of the module takes these alone:
        group: the weights that find their scales together; None: this weight is cast after its gather.
        name: the module's, in the model that octavo.convert was called with.
        is_shared: whether a module of another kind has the same weight.

    Written by ``adopt``, when fully_shard or a move gives the module a DTensor, until another takes its place:
        parameter: that DTensor. None before fully_shard, and for experts that expert_parallel has spread over ranks: of
            these FSDP2 gathers with hooks only those in FP8, "as stored".
        writes: to it.
        shape: of the tensor that FSDP2 shards: tensor parallelism has left this rank a part.
        mesh_dim: the mesh dimension that FSDP2 shards over; those of tensor parallelism follow.

    Written by ``begin``, before each cast for a forward; the gather for backward leaves them as they are:
        for_training: whether the module was in training.
        delayed_scale: [3], for this forward; None: the scale comes from the weight's amax. ``forget`` drops it.

    Written by ``send``; ``gather_anew`` (nn/convert.py), which follows a change of recipes, drops them:
        sent_as: (kind, casts) of its gathers so far, which may not change between them.
        settings_agree: whether ranks have compared the module's settings since these last changed; so does ``forget``,
            after a new recipe or parameter.

    _way: how the weight is gathered; chosen when ``way`` is asked, and again after ``forget``, ``join`` and ``share``.
    """

    def __init__(self, group: GatherGroup | None = None, is_shared: bool = False, name: str = "") -> None:
        self.group, self.is_shared, self.name = group, is_shared, name
        self.parameter: Any = None
        self.writes: SeenWrites
        self.shape, self.mesh_dim = torch.Size(), 0
        self.for_training = True
        self.sent_as: tuple[str, RoleCasts] | None = None
        self.forget()

    def adopt(self, parameter: Any, replaced: Any, module: WeightReader) -> None:
        """Gather the module's ``parameter`` from now on, if FSDP2 has just sharded it; collective then.

        ``replaced``: what the module had in its place: the whole weight, this rank's of tensor parallelism, or another
        shard; ``parameter`` itself, if that was moved to another device.
        """
        mesh_dim = self.mesh_dim if replaced is parameter else _mesh_dim_of(parameter, replaced)
        if not attach(parameter, mesh_dim, module.part_name) or self.parameter is parameter:
            return
        _refuse_second_shard(parameter, replaced)
        if replaced is not parameter:
            self.mesh_dim, self.shape = mesh_dim, on_this_rank(replaced).shape
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
        self.delayed_scale: Tensor | None = None
        self.settings_agree = False

    def was_written(self) -> None:
        """Note a write that may move no counter: through ``.data``, or a load's to a shard without rows."""
        if isinstance(self._way, InFP8):
            self._way.fresh_key = None

    def join(self, group: GatherGroup, module: WeightReader, name: str) -> None:
        """Find scales together with this group's weights from now on."""
        self.group, self._way, self.name = group, None, name
        if self.parameter is not None:
            group.add(module)

    def share(self, is_shared: bool) -> None:
        """Note whether a module of another kind has the same weight."""
        if is_shared != self.is_shared:
            self.is_shared, self._way = is_shared, None

    def way(self, module: WeightReader) -> Way:
        """Return how the module's sharded weight is gathered."""
        if self._way is None:
            self._way = self._choose_way(module)
        return self._way

    def _choose_way(self, module: WeightReader) -> Way:
        if self.parameter is None or local_stored(self.parameter) is not None:
            return AsStored(self)
        casts, mesh = module.fp8.recipe.weight_casts, self.parameter.device_mesh
        ranks, is_parallel = mesh.size(self.mesh_dim), self.mesh_dim + 1 < mesh.ndim
        lies_transposed = module.stores_transposed and self.parameter.ndim != 3
        why = first_reason(
            (casts.as_is is None or casts.transposed is None, "a product reads it in high precision"),
            (self.is_shared, "another module shares it"),
            (lies_transposed, f"{type(module).__name__} stores it transposed"),
        )
        if why is not None:
            return Way(self, why)
        if why := self._why_cast_after(casts, ranks, is_parallel):
            # under tensor parallelism each forward casts it, with amaxes that are maxima over ranks
            return Way(self, why) if is_parallel else CastAfter(self, why)
        return InFP8(self, ShardCast(casts, self.shape, ranks, mesh.get_local_rank(self.mesh_dim)))

    def _why_cast_after(self, casts: RoleCasts, ranks: int, is_parallel: bool) -> str | None:
        """Return why each rank casts the whole weight, or None."""
        as_is, transposed, coincide = casts
        assert as_is is not None and transposed is not None
        rows, has_experts = self.shape[0], self.parameter.ndim == 3
        sharded_dim = self.parameter.placements[self.mesh_dim].dim
        why = first_reason(
            (ranks == 1, "one rank gathers nothing"),
            (as_is.is_packed or transposed.is_packed, "codes of which two share a byte are not sent"),
            (not self.group, "octavo.convert(model, recipe) before fully_shard lets weights find scales together"),
            (sharded_dim != 0, f"it is not sharded by {'experts' if has_experts else 'rows'}"),
        )
        if why is not None or is_cast_in_one_launch(casts.shared_tile, self.shape, ranks):
            return why
        has_uneven_experts = has_experts and rows % ranks != 0 and is_square(casts.shared_tile)
        has_scales_of_rows = 1 in (as_is.tile[0], transposed.tile[1])  # which are one rank's each
        shares_two_scales = as_is.is_delayed or transposed.is_delayed or not (coincide or has_scales_of_rows)
        return first_reason(
            (has_uneven_experts, f"of {rows} experts {ranks} ranks do not have as many each, as scales sent need it"),
            (has_experts, f"experts are cast one matrix at a time by {as_is} and {transposed}"),
            (shares_two_scales, "its two layouts have different scales, and ranks would have to agree on both"),
            (is_parallel, "tensor parallelism shards it too"),
        )

    def begin(self, module: WeightReader) -> None:
        """Note that a forward of the module is about to read the weight."""
        self.for_training, self.delayed_scale = module.training, None
        if module.training and (state := module.fp8.state) is not None:  # evaluation takes the weight's own amax
            forget_if_written(module, self.parameter)
            self.delayed_scale = state.scale.clone()

    def read(self, weight: OperandsFacade, module: WeightReader) -> None:
        """Note that the module computes with its gathered weight; raise RuntimeError if other casts gathered it."""
        if weight.casts != module.fp8.recipe.weight_key:
            raise RuntimeError(
                "the weight was gathered by other casts than this layer's recipe has: layers that share a weight need "
                "one recipe, and octavo.set_recipe waits until no forward is under way"
            )
        # the weight stayed gathered after a forward in evaluation
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled() and not self.for_training:
            self.begin(module)

    def send(self, module: WeightReader, unshard: Unshard) -> FirstHookResult:
        """Return the tensors that FSDP2 sends of the weight, and its second hook: see ShardHooks."""
        if not self.settings_agree:
            weight_mesh = unshard.mesh if self.parameter is None else self.parameter.device_mesh
            others = [] if self.group is None else [other for other, _ in self.group.gathers_on(weight_mesh)]
            check_layers_agree(others or [module], weight_mesh)
        way = self.way(module)
        sent_as = way.kind, module.fp8.recipe.weight_casts
        if self.sent_as not in (None, sent_as):
            raise RuntimeError(
                "a weight under FSDP2 took another recipe than it was gathered by; call octavo.set_recipe on the "
                "module that fully_shard was applied to, or one that holds it"
            )
        self.sent_as = sent_as
        return way.send(module, unshard)

    def __reduce__(self) -> tuple[Any, ...]:
        return Gather, (self.group, self.is_shared, self.name)


def _mesh_dim_of(parameter: Any, replaced: Any) -> int:
    """Return the mesh dimension over which FSDP2 shards a parameter that replaces another; negative: no Gather's."""
    ndim, inner_ndim = (one.device_mesh.ndim if is_dtensor(one) else 0 for one in (parameter, replaced))
    # FSDP2's dimension is before those of tensor parallelism; experts that are spread over ranks are gathered as stored
    return -1 if inner_ndim and parameter.ndim == 3 else ndim - 1 - inner_ndim


def _refuse_second_shard(parameter: Any, replaced: Any) -> None:
    """Raise ValueError if another DTensor than ``parameter`` has replaced this plain parameter, which notes the first.

    Torch 2.13 refuses this only when it first runs; with 2.11 the two shards drift apart silently.
    """
    if not is_dtensor(replaced) and replaced.__dict__.setdefault("_sharded", parameter) is not parameter:
        raise ValueError("fully_shard was applied to two modules that share a weight: apply it to one that holds both")


def _whole_storage(codes: Tensor) -> Tensor:
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
    weight = weight_of(module) if (sharded := module.fp8.gather.parameter) is None else sharded
    if weight is not None:
        granularity = stored_as(weight)
        settings["weight_storage"] = weight.dtype if granularity is None else f"fp8 {granularity}"
    return {f"{name}: {setting}": value for setting, value in (settings | module.settings()).items()}


def check_layers_agree(modules: Sequence[WeightReader], mesh: DeviceMesh, **settings: object) -> None:
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
    """The sharded weights of one ``octavo.convert``, whose scales one collective finds together.

    Attributes:
        settings: of all layers at convert; ranks compare them when the first is sharded.
        backwards: how often a weight was gathered for backward, which ends the freshness of all codes: an optimizer's
            step may follow.
    """

    def __init__(self, settings: dict[str, object] | None = None) -> None:
        self.settings = {} if settings is None else settings
        self.backwards = 0
        self._checked_meshes: set[DeviceMesh] = set()  # those whose ranks have compared the settings
        self._modules = weakref.WeakKeyDictionary[Any, None]()  # in order; each multiplies by one of the weights
        self._last_casts: torch.cuda.Event | None = None  # after them

    def add(self, module: WeightReader) -> None:
        """Add a module whose weight was sharded; all ranks add them in one order."""
        self._modules[module] = None

    def check_ranks_agree(self, mesh: DeviceMesh) -> None:
        """Raise RanksDifferError, once for each mesh, if its ranks have converted the model by different settings."""
        if mesh not in self._checked_meshes:
            check_ranks_agree(self.settings, mesh.get_all_groups())
            self._checked_meshes.add(mesh)

    def gathers_on(self, mesh: DeviceMesh) -> list[tuple[WeightReader, Gather]]:
        """Return the modules whose weights are sharded over a mesh, in one order on all ranks, with their gathers."""
        with_state = [module for module in self._modules if hasattr(module, "fp8")]  # octavo.restore takes it
        gathers = [(module, module.fp8.gather) for module in with_state]
        return [(module, one) for module, one in gathers if one.group is self and one.parameter.device_mesh == mesh]

    def cast_shards(self, weight_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
        """Cast all shards that lie on ``weight_mesh``, by new scales; ``mesh``: the one over which FSDP2 sends them.

        One collective, under tensor parallelism two, takes the maximum over ranks of all amaxes that need it. Shards of
        one dtype and cast take one launch, others one each.
        """
        launches: dict[object, list[InFP8]] = {}
        for module, gather in self.gathers_on(weight_mesh):
            if isinstance(way := gather.way(module), InFP8):
                gather.begin(module)
                way.fresh_key = way.key_now(module)
                shard, as_is = on_this_rank(gather.parameter), module.fp8.recipe.weight_casts.as_is
                key = (as_is, shard.dtype, shard.device) if way.shard_cast.in_one_launch else way  # way: alone
                launches.setdefault(key, []).append(way)
        amaxes = _amaxes_over_ranks([way for ways in launches.values() for way in ways], mesh)
        for ways in launches.values():
            first = ways[0]
            if first.shard_cast.in_one_launch:
                _cast_in_one_launch(ways, amaxes)
            else:
                first.codes = first.shard_cast.cast(first.shard, amaxes.get(first, first.shard.new_zeros(0)))
        self._last_casts = torch.cuda.current_stream().record_event() if mesh.device_type == "cuda" else None

    def wait_for_casts(self) -> None:
        """Make the current stream wait for the last casts: FSDP2 gathers on its own stream and on the user's."""
        if self._last_casts is not None:
            torch.cuda.current_stream().wait_event(self._last_casts)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy is empty; modules that are copied together share one
        return GatherGroup, (self.settings,)


def _amaxes_over_ranks(ways: Sequence[InFP8], mesh: DeviceMesh) -> dict[InFP8, Tensor]:
    """Return the maximum over ranks of the amaxes that shards share, of those that share some; collective."""
    if not (sharing := [way for way in ways if way.shard_cast.needs_maximum]):
        return {}
    local_amaxes = [way.shard_cast.amax(way.shard) for way in sharing]
    ranks = dict.fromkeys(group for way in sharing for group in groups_of(way.gather.parameter))
    amax = maximum_over_ranks(torch.cat(local_amaxes), *ranks, device=mesh.device_type)
    return dict(zip(sharing, amax.split([len(amaxes) for amaxes in local_amaxes]), strict=True))


def _cast_in_one_launch(ways: Sequence[InFP8], amaxes: dict[InFP8, Tensor]) -> None:
    """Cast shards of one dtype by one cast; ``amaxes``: those of each weight's matrices, where it is per tensor."""
    cast = ways[0].shard_cast.cast_as_is
    scales = _scales_of(ways, [amaxes[way] for way in ways], cast) if cast.has_one_scale else [None] * len(ways)
    matrices: list[MatrixToCast] = []
    for way, scales_of_weight in zip(ways, scales, strict=True):
        way.codes, matrices_of_shard = way.shard_cast.prepare(way.shard, way.codes, scales_of_weight)
        way.step_at_cast = way.gather.writes.last_step
        matrices += matrices_of_shard
    cast_together(matrices, cast)


def _scales_of(ways: Sequence[InFP8], amaxes: list[Tensor], cast: Cast) -> list[WeightScales]:
    """Return the scales of weights that one cast scales per tensor, by the amaxes of each one's matrices."""
    amax, counts = torch.cat(amaxes), [len(one) for one in amaxes]
    delayed_scales, has_experts = None, len(amax) > len(counts)
    weight_amax = torch.stack([one.amax() for one in amaxes]) if has_experts else amax
    if cast.is_delayed:
        delayed_scales = _delayed_scales_of(ways, weight_amax, cast)
        if has_experts:
            of_weights = zip(delayed_scales.split(1), counts, strict=True)
            delayed_scales = torch.cat([scale.expand(count) for scale, count in of_weights])
    scale = cast.scale_of(amax, delayed_scales)
    inverses = scale_inv_from_scale(scale).split(counts)
    weight_amaxes = weight_amax.view(-1, 1, 1).unbind() if cast.is_delayed else [None] * len(ways)
    return [WeightScales(*row) for row in zip(scale.split(counts), inverses, weight_amaxes, strict=True)]


def _delayed_scales_of(ways: Sequence[InFP8], amax: Tensor, cast: Cast) -> Tensor:
    """Return the delayed scale of each weight; 0, for that of its ``amax``, where the weight was written.

    Writes that move no version are recognised by this: a weight's amax changed without a step of its optimizer, or is
    more than twice what its scale can represent.
    """
    zero = amax.new_zeros(1)
    of_roles = [way.gather.delayed_scale for way in ways]
    scales = torch.cat([zero if one is None else one[WEIGHT : WEIGHT + 1].to(amax.device) for one in of_roles])
    last_amaxes = [None if way.codes is None else way.codes.amax for way in ways]
    last_amax = torch.cat([zero if one is None else one.view(1) for one in last_amaxes])
    had_no_step = amax.new_tensor([float(way.step_at_cast == way.gather.writes.last_step) for way in ways]) > 0
    written = ((had_no_step & (amax != last_amax)) | (scales * amax > 2 * cast.format.max)) & amax.isfinite()
    return torch.where(written, 0, scales)
