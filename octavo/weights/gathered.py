"""Gathers of converted modules' weights under FSDP2 (fully_shard): which way each is sent, and when shards are cast.

The ways are the classes of weights/ways.py. A module holds one Gather (``module.fp8.gather``), a model one GatherGroup,
which knows its modules weakly and each Gather's ``group``. Calls go from left to right, and none goes back:

    FSDP2's first hook    Gather.send    check_layers_agree                       once after each change of settings
                                         Gather.way                               which way: "in FP8", "cast after", ...
                                         Gather.begin                             "cast after": the delayed scale
                                         GatherGroup.codes_of                     "in FP8": the model's shards are cast,
                                             Gather.way, Gather.begin             of all its modules
                                             cast_shards (ways.py)                by ShardCast (shard_cast.py)
                                         Way.send (ways.py)                       the tensors to send, a MakeWeight
    FSDP2's second hook   MakeWeight     a GatheredWeight (fsdp2.py)
    a product             Gather.read    GatheredWeight.operands calls it

All shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight is
missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send the
same codes again: see GatherGroup. A gathered weight's codes and scales are always written together, also into what a
forward saved.

Under Delayed a weight that anything but its optimizer wrote takes the scale of its own amax.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from octavo.kernels import backward_pass
from octavo.private import is_dtensor
from octavo.scaling.recipe import RoleCasts
from octavo.step_count import OPTIMIZER_STEPS, SeenWrites
from octavo.tensor.collectives import check_ranks_agree
from octavo.tensor.pair import OperandsFacade
from octavo.weights.fsdp2 import FirstHookResult, Unshard, attach, on_this_rank
from octavo.weights.operands import forget_if_written, weight_of
from octavo.weights.reader import WeightReader
from octavo.weights.shard_cast import ShardCast, is_cast_in_one_launch, is_square
from octavo.weights.storable import first_reason
from octavo.weights.stored import agree_on_scale, local_stored, stored_as
from octavo.weights.ways import AsStored, CastAfter, InFP8, Way, cast_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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

    Written by ``begin``, before each cast for a forward; the gather for backward leaves it, and ``delayed_scale`` of
    the way, as they are:
        for_training: whether the module was in training.

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
        """Drop codes and scales that were cast by another recipe or from another parameter: the way has them."""
        self._way: Way | None = None
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
            return AsStored(self.parameter)
        casts, mesh = module.fp8.recipe.weight_casts, self.parameter.device_mesh
        ranks, is_parallel = mesh.size(self.mesh_dim), self.mesh_dim + 1 < mesh.ndim
        lies_transposed = module.stores_transposed and self.parameter.ndim != 3
        why = first_reason(
            (casts.as_is is None or casts.transposed is None, "a product reads it in high precision"),
            (self.is_shared, "another module shares it"),
            (lies_transposed, f"{type(module).__name__} stores it transposed"),
        )
        if why is not None:
            return Way(self.parameter, why)
        if why := self._why_cast_after(casts, ranks, is_parallel):
            # under tensor parallelism each forward casts it, with amaxes that are maxima over ranks
            return Way(self.parameter, why) if is_parallel else CastAfter(self.parameter, why)
        shard_cast = ShardCast(casts, self.shape, ranks, mesh.get_local_rank(self.mesh_dim))
        return InFP8(self.parameter, self.writes, shard_cast)

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
        self.for_training, way = module.training, self.way(module)
        way.delayed_scale = None
        if module.training and (state := module.fp8.state) is not None:  # evaluation takes the weight's own amax
            forget_if_written(module, self.parameter)
            way.delayed_scale = state.scale.clone()

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
        if isinstance(way, InFP8):
            assert self.group is not None
            self.group.codes_of(way, module, unshard.mesh)
        elif isinstance(way, CastAfter) and not backward_pass.is_running():
            self.begin(module)
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

    Codes of a way "in FP8" are fresh if the next gather for a forward sends them as they are, without a cast. A cast
    of the group makes the codes of all its weights fresh, for one gather each. Codes that are no longer fresh stay, for
    backward, until the next cast. Of two micro-batches of a model with the weights A and B:

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

    def codes_of(self, way: InFP8, module: WeightReader, mesh: DeviceMesh) -> None:
        """Have the codes that a gather over ``mesh`` sends of a module's weight: for a forward, fresh ones.

        For backward, also for a forward that a checkpoint computes again, they are the last ones.
        """
        if backward_pass.is_running() and way.codes is not None:
            self.backwards += 1
        else:
            if way.fresh_key != way.key_now(module, self.backwards):
                self._cast_all(way.parameter.device_mesh, mesh)
            way.fresh_key = None
        self.wait_for_casts()

    def _cast_all(self, weight_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
        """Cast all shards that lie on ``weight_mesh`` and are sent in FP8, for the forward that begins."""
        ways = []
        for module, gather in self.gathers_on(weight_mesh):
            if isinstance(way := gather.way(module), InFP8):
                gather.begin(module)
                way.fresh_key = way.key_now(module, self.backwards)
                ways.append(way)
        cast_shards(ways, mesh)
        self._last_casts = torch.cuda.current_stream().record_event() if mesh.device_type == "cuda" else None

    def wait_for_casts(self) -> None:
        """Make the current stream wait for the last casts: FSDP2 gathers on its own stream and on the user's."""
        if self._last_casts is not None:
            torch.cuda.current_stream().wait_event(self._last_casts)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy is empty; modules that are copied together share one
        return GatherGroup, (self.settings,)
