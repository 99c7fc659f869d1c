"""How a converted module's weight is gathered under FSDP2 (fully_shard): what is sent, and what is made of it.

    in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
                weight, of experts one each: one collective finds the amax of all weights of the model together.
                Blocks of which each lies on one rank need none; their scales are sent beside the codes. A weight whose
                two layouts are scaled differently (rows, 1 x 32) is sent as two pairs, which are bf16's bytes.
    cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard.
    as it is    a weight that a product reads in high precision, or that another kind of module shares.
    as stored   a weight that lives in FP8: its codes as they are, and the scales of blocks and of experts. Per tensor
                every rank has the whole weight's scale already (octavo.optim keeps it so): no other collective runs.

All shards of the model are cast in one launch by the first gather of each forward, so that no write to a weight is
missed: torch moves no counter for ``p.data`` and ``torch._foreach_*`` of a DTensor. The gathers for backward send the
same codes again. A gathered weight's codes and scales are always written together, also into what a forward saved.

Under Delayed a weight that was written by other than its optimizer takes the scale of its own amax.

Weights whose two layouts are scaled differently, and blocks that reach over several ranks' rows, are cast each for
itself (ShardCast). There ranks first agree on the amax of each block. Each casts its rows with a row of such amaxes
beside them, which makes a block's scale that of the whole block; that row's codes are not sent. Other scales are sent
beside the codes, unless ranks have different numbers of rows: FSDP2 then takes tensors of the shard's shape alone, and
ranks agree on all.
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
from octavo.autograd.casts import WEIGHT, cast_role, operands_of_codes
from octavo.granularity import ALL, Tile, scale_shape
from octavo.kernels.arguments import lie_by_columns
from octavo.kernels.backward_pass import is_running
from octavo.kernels.layouts import contraction_multiple, is_small_block, with_padding
from octavo.nn.tensor_parallel import sending_of
from octavo.nn.weight import notice_writes
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.scaling.delayed import state_of
from octavo.scaling.recipe import Cast, Recipe, RoleCasts
from octavo.step_count import OPTIMIZER_STEPS
from octavo.tensor.collectives import agree, bytes_of, largest, scales_from
from octavo.tensor.fsdp2 import (
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
from octavo.tensor.pair import Operands, operands_of, transposed_pair
from octavo.tensor.stored_weight import StoredWeight, agree_on_scale, agreed, local_stored, stored_as

IN_FP8, CAST_AFTER, AS_IT_IS, AS_STORED = "in FP8", "cast after", "as it is", "as stored"


class Way(NamedTuple):
    """How a weight is gathered, and why not in FP8 where it is not."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" if self.why else self.kind


class Gather:
    """What one module keeps for its weight's gathers. The module, a RecipeModule, comes with each call."""

    def __init__(self, group: GatherGroup | None = None, shared: bool = False, name: str = "") -> None:
        self.group = group  # whose weights find their scales together; None: this one's is cast after its gather
        self.shared = shared  # whether a module of another kind has the same weight
        self.name = name  # the module's in the model that octavo.convert was given
        self.parameter: Any = None  # the sharded one
        self.shape = torch.Size()  # of what its shards are of: under tensor parallelism this rank's shard of the weight
        self.at = 0  # the dimension of its mesh that FSDP2 shards it over; tensor parallelism has those behind
        self.for_training = True  # whether the forward that it was gathered for last was in training
        self.generation = 0  # of parameters and loads: a 0-row shard has no address that would tell them
        self.used: tuple[Any, ...] | None = None  # how FSDP2 has gathered it
        self.forget()

    def adopt(self, parameter: Any, whole: Any, module: Any) -> None:
        """Gather this parameter of the module from now on, if FSDP2 has just sharded it; before it was ``whole``."""
        if (mesh := getattr(parameter, "device_mesh", None)) is None:
            return
        at, shape = self.at, self.shape
        if whole is not parameter:  # else it was moved
            inner = getattr(whole, "device_mesh", None)
            at, shape = mesh.ndim - 1 - (0 if inner is None else inner.ndim), on_this_rank(whole).shape
            if inner is not None and parameter.ndim == 3:
                return  # experts on several ranks
        if not attach(parameter, at, module.part_name) or self.parameter is parameter:
            return
        self.at, self.shape = at, shape
        # torch 2.13 refuses this only when it first runs; with 2.11 the two shards part ways silently
        if on_this_rank(whole) is whole and whole.__dict__.setdefault("_sharded", parameter) is not parameter:
            raise ValueError(
                "fully_shard was applied to two modules that share a weight, each of which would train its own; "
                "apply it to a module that holds both"
            )
        OPTIMIZER_STEPS.watch()
        self.parameter = parameter
        if self.group is not None:
            self.group.ask(parameter.device_mesh)
            self.group.add(module)
        agree_on_scale(parameter, just_cut=True)
        self.forget()

    def forget(self) -> None:
        """Drop codes and scales that were cast by another recipe, or from another parameter."""
        self.shard_cast: ShardCast | None = None  # how the shard is cast, if it is sent in FP8
        self.sent: list[Tensor] = []  # what it was cast into
        self.known: list[Tensor] = []  # what ranks have agreed on for that
        self._way: Way | None = None
        self.steps = -1  # of the optimizer that owns the weight, when it was cast
        self.ready: tuple[Any, ...] | None = None  # the codes' key when another weight's gather has just cast them
        self.delayed_scale: Tensor | None = None  # [3], of this forward; None: the weight's own amax gives its scale
        self.agreed = False  # whether ranks know that they were told the same of the module
        self.generation += 1

    def join(self, group: GatherGroup, module: Any, name: str) -> None:
        """Find scales together with this group from now on."""
        self.group, self._way, self.name = group, None, name
        if self.parameter is not None:
            group.add(module)

    def share(self, shared: bool) -> None:
        """Note whether a module of another kind has the same weight."""
        self.shared, self._way = shared, None

    def way(self, module: Any) -> Way:
        """How the module's sharded weight is gathered."""
        if self._way is None:
            found = self._choose_way(module)
            if found.kind == CAST_AFTER and self.at + 1 < self.parameter.device_mesh.ndim:
                found = Way(AS_IT_IS, found.why)  # and cast at each forward, for which ranks agree on scales
            self._way = found
        return self._way

    def _choose_way(self, module: Any) -> Way:
        casts, parameter = module.recipe.weight_casts, self.parameter
        ranks = parameter.device_mesh.size(self.at)
        if local_stored(parameter) is not None:
            return Way(AS_STORED)
        if casts.as_is is None or casts.transposed is None:
            return Way(AS_IT_IS, "a product reads it in high precision")
        if self.shared:
            return Way(AS_IT_IS, "another module shares it")
        experts = parameter.ndim == 3
        if not experts and module.stores_transposed:
            return Way(AS_IT_IS, f"{type(module).__name__} stores it transposed")
        if ranks == 1:
            return Way(CAST_AFTER, "one rank gathers nothing")
        if self.group is None:
            return Way(CAST_AFTER, "octavo.convert(model, recipe) before fully_shard lets weights find scales together")
        if parameter.placements[self.at].dim != 0:
            return Way(CAST_AFTER, f"it is not sharded by {'experts' if experts else 'rows'}")
        block, rows = casts.as_is.tile, self.shape[0]
        square = casts.once and block[0] == block[1] and is_small_block(block)
        together = casts.once and block == (ALL, ALL)
        if not together and experts and not square:
            return Way(CAST_AFTER, f"experts are cast one matrix at a time by {casts.as_is} and {casts.transposed}")
        if not together and experts and rows % ranks:
            return Way(CAST_AFTER, f"of {rows} experts {ranks} ranks do not have as many each, as scales sent need it")
        together |= square and (experts or (rows % ranks == 0 and rows // ranks % block[0] == 0))
        if not together:
            delayed = casts.as_is.is_delayed or casts.transposed.is_delayed
            if delayed or not (casts.once or 1 in (block[0], casts.transposed.tile[1])):
                return Way(CAST_AFTER, "its two layouts have different scales, and ranks would have to agree on both")
            if self.at + 1 < parameter.device_mesh.ndim:
                return Way(CAST_AFTER, "tensor parallelism shards it too")
        self.shard_cast = ShardCast(casts, self.shape, ranks, parameter.device_mesh.get_local_rank(self.at), together)
        return Way(IN_FP8)

    def codes_key(self, module: Any) -> tuple[Any, ...]:
        """The codes serve forwards until this changes. No value of a weight is in it, so all ranks decide alike."""
        assert self.group is not None
        parameter = self.parameter
        writes = OPTIMIZER_STEPS.of(parameter), parameter._version, on_this_rank(parameter)._version, self.generation
        return self.group.backwards, module.training, *writes, id(module.recipe)

    def begin(self, module: Any) -> None:
        """Note that a forward of the module is about to read the weight."""
        self.for_training, self.delayed_scale = module.training, None
        if module.training and (state := state_of(module)) is not None:  # evaluation takes the weight's own amax
            notice_writes(module, self.parameter)
            self.delayed_scale = state.scale.clone()

    def read(self, weight: GatheredWeight, module: Any) -> None:
        """Note that the module computes with its gathered weight; raise RuntimeError if other casts gathered it."""
        if weight.casts != module.recipe.weight_key:
            raise RuntimeError(
                "the weight was gathered by other casts than this layer's recipe has: layers that share a weight need "
                "one recipe, and octavo.set_recipe waits until no forward is under way"
            )
        # it stayed gathered after evaluation
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled() and not self.for_training:
            self.begin(module)

    def before(
        self, module: Any, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], After]:
        """What FSDP2's first hook does: see ShardHooks.fsdp_pre_all_gather."""
        if not self.agreed:
            whole = mesh if self.parameter is None else self.parameter.device_mesh
            ask((self.group and self.group.modules_on(whole)) or [module], whole)
        casts = module.recipe.weight_casts
        kind = AS_STORED if isinstance(shard, StoredWeight) else self.way(module).kind
        if self.used is not None and self.used != (kind, casts):
            raise RuntimeError(
                "a weight under FSDP2 took another recipe than it was gathered by; call octavo.set_recipe on the "
                "module that fully_shard was applied to, or one that holds it"
            )
        self.used = kind, casts
        if isinstance(shard, StoredWeight):
            return _send_stored(
                shard if self.parameter is None else agreed(shard, self.parameter), module, mesh, outer_size
            )
        if kind == AS_IT_IS:
            return gather_as_it_is(shard, mesh, outer_size, mp_policy)
        for_backward = is_running()  # also of a forward that a checkpoint computes again
        if kind == CAST_AFTER:
            if not for_backward:
                self.begin(module)
            # where nothing is sent, what several ranks would send in FP8 is cast from its own dtype, as there
            alone = mesh.size() == 1 and casts.once
            dtype = shard.dtype if alone else mp_policy.param_dtype or shard.dtype
            return (padded_rows(shard, outer_size, mesh.size()).to(dtype),), self._cast_after(module, outer_size)
        # cast all shards of the group, unless the gather of another weight for the same forward has done so
        assert self.group is not None
        if for_backward and self.sent:
            self.group.backwards += 1
        else:
            if self.ready != self.codes_key(module):
                self.group.refresh(self, mesh)
            self.ready = None
        self.group.wait()
        assert self.shard_cast is not None
        sent, known = ([one.to(shard.device, non_blocking=True) for one in each] for each in (self.sent, self.known))
        read = functools.partial(self.shard_cast.read, known=known, pads=module.recipe.pads)
        return tuple(sent), _reading(read, known, module.recipe, outer_size, module.stores_transposed)

    def _cast_after(self, module: Any, shape: torch.Size) -> After:
        """The second hook where every rank casts the whole weight."""
        recipe = module.recipe

        def read(outputs: Sequence[Tensor]) -> Operands:
            wide, state = gathered_whole(outputs[0], shape), None
            if (known := state_of(module)) is not None:
                scale = torch.zeros_like(known.scale) if self.delayed_scale is None else self.delayed_scale
                state = known._replace(scale=scale, before=torch.zeros_like(known.before)).on(wide.device)
            return cast_role(wide.mT if module.stores_transposed else wide, recipe, WEIGHT, True, True, state)

        return _reading(read, [], recipe, shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return Gather, (self.group, self.shared, self.name)


def _send_stored(shard: StoredWeight, module: Any, mesh: Any, shape: torch.Size) -> tuple[tuple[Tensor, ...], After]:
    """(What is sent of a weight of this shape that lives in FP8, the second hook)."""
    codes, recipe = padded_rows(shard.qdata.view(torch.uint8), shape, mesh.size()), module.recipe
    scale_inv = shard.scale_inv.clone()  # what belongs to these codes, whenever the next step writes
    if shard.ndim == 3:
        scale_inv = padded_rows(
            scale_inv, torch.Size(shard.granularity.of_matrices(shape).scale_shape(shape)), mesh.size()
        )
    # on one rank FSDP2 hands on the first tensor only
    sent = (codes,) if shard.has_one_scale or mesh.size() == 1 else (codes, scale_inv)

    def read(outputs: Sequence[Tensor]) -> Operands:
        q = outputs[0][: shape[0]].view(shard.qdata.dtype)
        scales = scale_inv if len(sent) == 1 else outputs[1] if q.ndim == 2 else outputs[1][: shape[0]]
        if recipe.is_high_precision:
            return Operands((q, scales), (q.mT, scales.mT))
        return operands_of_codes((q, scales), recipe, WEIGHT, True, None)

    return sent, _reading(read, [scale_inv], recipe, shape, module.stores_transposed)


def _reading(
    read: Callable[[Sequence[Tensor]], Operands],
    known: Sequence[Tensor],
    recipe: Recipe,
    shape: torch.Size,
    swaps: bool = False,
) -> After:
    """The second hook: it makes operands of what was received, by tensors that this rank has ``known`` before.

    It returns the weight, and the tensors that FSDP2 has to free besides what was received. ``swaps``: whether what
    ``read`` gives is transposed.
    """

    def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
        for tensor in known:  # made on FSDP2's own stream, and freed before this one has read them
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        operands = read(outputs)
        if swaps:
            operands = operands._replace(as_is=operands.transposed, transposed=operands.as_is)
        if out is not None:
            return on_this_rank(out).refill(operands)  # type: ignore[attr-defined]
        assert operands.as_is is not None and operands.transposed is not None
        codes = operands.as_is[0], operands.transposed[0]
        storages = {one.untyped_storage().data_ptr(): _all_of(one) for one in codes}
        for tensor in outputs:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        return GatheredWeight(operands, shape, dtype, recipe.weight_key), tuple(storages.values())

    return after


def _all_of(codes: Tensor) -> Tensor:
    """Codes, or where they are a view of a part of their storage, all of it: FSDP2 makes room for what it is shown."""
    raw = codes.view(torch.uint8)
    storage = raw.untyped_storage()
    return codes if storage.nbytes() == raw.numel() else raw.new_empty(0).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


# --- the weights of one model together --------------------------------------------------------------------------------


def told_of(module: Any, name: str) -> dict[str, object]:
    """What a RecipeModule was told, by this name: its recipe, how its weight is stored, how it sends tokens."""
    recipe, sending, exchange = module.recipe, sending_of(module), module.exchange
    told = {f"recipe.{field.name}": getattr(recipe, field.name) for field in fields(recipe) if field.compare}
    weight = next((one for one in (module.gather.parameter, *module.weights) if one is not None), None)
    if weight is not None:
        granularity = stored_as(weight)
        told["weight_storage"] = weight.dtype if granularity is None else f"fp8 {granularity}"
    if sending is not None:
        told |= {"exact": sending.exact, "reduction in FP8": sending.reduce is not None}
    if exchange is not None:
        told |= {"exact": exchange.exact, "average": exchange.average}
    return {f"{name}: {what}": value for what, value in told.items()}


def ask(modules: Sequence[Any], mesh: Any, **told: object) -> None:
    """Ask the ranks of a mesh about these RecipeModules, unless they have agreed since the last change of any.

    All of them call it with the same modules; ``told``: what else is to be alike. A compiled graph does not ask.
    """
    if torch.compiler.is_compiling() or all(module.gather.agreed for module in modules):
        return
    for number, module in enumerate(modules):
        told |= told_of(module, module.gather.name or f"{type(module).__name__} {number}")
    agree(told, mesh.get_all_groups())
    for module in modules:
        module.gather.agreed = True


class GatherGroup:
    """The sharded weights of one ``octavo.convert``: their scales are found together, in one collective."""

    def __init__(self, told: dict[str, object] | None = None) -> None:
        self.told = {} if told is None else told  # of all layers then; ranks are asked when the first is sharded
        self._asked: set[Any] = set()  # meshes
        self._modules: list[weakref.ref[Any]] = []  # those whose weights they are
        self.backwards = 0  # how often a weight was gathered for backward
        self._cast: Any = None  # a CUDA event: the last casts are done

    def add(self, module: Any) -> None:
        """Take in a module whose weight was sharded; ranks do it in one order."""
        if all(reference() is not module for reference in self._modules):
            self._modules.append(weakref.ref(module))

    def ask(self, mesh: Any) -> None:
        """Ask the ranks of a mesh, once, whether they have converted one model alike."""
        if mesh not in self._asked:
            agree(self.told, mesh.get_all_groups())
            self._asked.add(mesh)

    def modules_on(self, mesh: Any) -> list[Any]:
        """The modules whose weights are sharded over a mesh, in one order on all ranks."""
        found: list[Any] = [module for reference in self._modules if hasattr(module := reference(), "gather")]
        return [one for one in found if one.gather.group is self and one.gather.parameter.device_mesh == mesh]

    def refresh(self, gather: Any, mesh: Any) -> None:
        """Find scales anew and cast all shards that lie on this one's mesh; ``mesh``: that of its gather."""
        together: dict[Any, list[Gather]] = {}
        for module in self.modules_on(gather.parameter.device_mesh):
            other = module.gather
            if other.way(module).kind != IN_FP8:
                continue
            other.begin(module)
            other.ready = other.codes_key(module)
            shard = on_this_rank(other.parameter)
            key = (module.recipe.weight_casts.as_is, shard.dtype, shard.device) if other.shard_cast.together else other
            together.setdefault(key, []).append(other)
        _cast_shards(list(together.values()), mesh)
        self._cast = torch.cuda.current_stream().record_event() if mesh.device_type == "cuda" else None

    def wait(self) -> None:
        """Let the current stream read what another one may have cast: FSDP2 gathers on its own and on the user's."""
        if self._cast is not None:
            torch.cuda.current_stream().wait_event(self._cast)

    def __reduce__(self) -> tuple[Any, ...]:  # copies are empty, and the same for all modules copied together
        return GatherGroup, (self.told,)


def _cast_shards(groups: Sequence[list[Gather]], mesh: Any) -> None:
    """Cast shards that lie on one mesh, a group in one launch: of one dtype and cast, or one that is cast alone.

    One collective, under tensor parallelism two, finds all amaxes that ranks have to agree on.
    """
    asking = [gather for some in groups for gather in some if gather.shard_cast.agrees]  # type: ignore[union-attr]
    found: dict[Gather, Tensor] = {}
    if asking:
        own = [gather.shard_cast.amax(on_this_rank(gather.parameter)) for gather in asking]  # type: ignore[union-attr]
        ranks = dict.fromkeys(group for gather in asking for group in groups_of(gather.parameter))
        amax = largest(torch.cat(own), *ranks, device=mesh.device_type)
        found = dict(zip(asking, amax.split([len(one) for one in own]), strict=True))
    for some in groups:
        shard_cast = some[0].shard_cast
        assert shard_cast is not None
        if shard_cast.together:
            _cast_together(some, [found[gather] for gather in some if gather in found])
        else:
            shard = on_this_rank(some[0].parameter)
            some[0].sent, some[0].known = shard_cast.cast(shard, found.get(some[0], shard.new_zeros(0)))


def _take_scales(gathers: list[Gather], maxima: list[Tensor], cast: Cast) -> list[Tensor]:
    """Give gathers of one cast what ranks have agreed on: scale_inv and, under Delayed, the amax of the whole weight.

    ``maxima``: the amax of each one's matrices. Returns their scales.
    """
    amax, counts, kept = torch.cat(maxima), [len(one) for one in maxima], None
    whole = amax if len(amax) == len(counts) else torch.stack([one.amax() for one in maxima])
    if cast.is_delayed:
        states = [gather.delayed_scale for gather in gathers]
        zero = amax.new_zeros(1)
        kept = torch.cat([zero if scales is None else scales[WEIGHT : WEIGHT + 1].to(amax.device) for scales in states])
        # Such writes move no version: without a step of its optimizer a weight's amax has changed, or it is more than
        # twice too large.
        steps = [OPTIMIZER_STEPS.of(gather.parameter) for gather in gathers]
        unstepped = [float(gather.steps == now) for gather, now in zip(gathers, steps, strict=True)]
        before = torch.cat([gather.known[1].view(1) if gather.known else zero for gather in gathers])
        moved = (whole.new_tensor(unstepped) > 0) & (whole != before)
        written = (moved | (kept * whole > 2 * cast.format.max)) & whole.isfinite()
        for gather, now in zip(gathers, steps, strict=True):
            gather.steps = now
        kept = torch.where(written, 0, kept)
        if whole is not amax:
            kept = torch.cat([scale.expand(size) for scale, size in zip(kept.split(1), counts, strict=True)])
    scale = scale_from_amax(amax, cast.format.max, cast.power_of_two, cast.margin, kept)
    inverses = scale_inv_from_scale(scale).split(counts)
    for gather, own_inv, own_amax in zip(gathers, inverses, whole.view(-1, 1, 1).unbind(), strict=True):
        gather.known = [own_inv.view((-1, 1, 1) if gather.parameter.ndim == 3 else (1, 1))]
        gather.known += [own_amax] * cast.is_delayed
    return list(scale.split(counts))


def _cast_together(gathers: list[Gather], maxima: list[Tensor]) -> None:
    """Cast shards of one dtype by one cast: one launch. ``maxima``: of scales per tensor, see ``_take_scales``."""
    cast = gathers[0].shard_cast.layouts[0].cast  # type: ignore[union-attr]
    found = _take_scales(gathers, maxima, cast) if maxima else []
    shards, codes, scale_inv, scales = (list[Tensor]() for _ in range(4))
    for number, gather in enumerate(gathers):
        shard, of_gather = on_this_rank(gather.parameter), gather.shard_cast
        shape = rows_on_each_rank(gather.shape[0], of_gather.ranks), *gather.shape[1:]  # type: ignore[union-attr]
        if not gather.sent:
            gather.sent = [torch.zeros(shape, dtype=torch.uint8, device=shard.device)]
            if not found:
                of_blocks = *shape[:-2], *scale_shape(shape[-2:], cast.tile)
                gather.sent.append(shard.new_ones(of_blocks, dtype=cast.scale_inv_dtype))
        if shard.numel() == 0:
            continue
        experts, written = shard.ndim == 3, gather.sent[0][: shard.shape[0]].view(cast.format.dtype)
        matrices = shard.unbind() if experts else [shard]
        shards += matrices
        codes += written.unbind() if experts else [written]
        if found:
            begin = of_gather.begin if experts else 0  # type: ignore[union-attr]
            scales += found[number][begin : begin + len(matrices)].split(1)
            scale_inv += [shard.new_empty(1, 1, dtype=torch.float32) for _ in matrices]
        else:
            scale_inv += gather.sent[1].unbind() if experts else [gather.sent[1]]
    if shards:
        amax = [torch.empty_like(one, dtype=torch.float32) for one in scale_inv]
        how = cast.tile, cast.power_of_two, cast.margin
        kernels.multi_tensor_cast(shards, codes, [], scale_inv, amax, scales, 0, *how, None)


class _CastLayout(NamedTuple):
    """A cast, its tile of the weight as it lies, the shape of the scales that ranks agree on; None: they are sent."""

    cast: Cast
    tile: Tile
    grid: tuple[int, ...] | None


class ShardCast:
    """How one rank casts its rows of a weight [N, K], or experts of one [E, N, K], of this shape, and reads all ranks'.

    Of the two layouts one at most has blocks of several rows. ``together``: whether it is cast in one launch with
    others, which is so of one layout per tensor or in whole blocks; else the casts are Dynamic.
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
        self.agrees = any(layout.grid is not None for layout in self.layouts)

    def amax(self, shard: Tensor) -> Tensor:
        """What this rank knows of the amax of all blocks that ranks agree on, one after the other; float32."""
        found = [self._amax_of(shard, tile, grid).view(-1) for _, tile, grid in self.layouts if grid is not None]
        return found[0] if len(found) == 1 else torch.cat([shard.new_zeros(0, dtype=torch.float32), *found])

    def _amax_of(self, shard: Tensor, tile: Tile, grid: tuple[int, ...]) -> Tensor:
        if not len(shard):
            return shard.new_zeros(grid, dtype=torch.float32)
        if shard.ndim == 3:  # per tensor
            first, of_rows = self.begin, kernels.amax(shard.flatten(0, 1), (1, ALL))
            own = of_rows.view(shard.shape[:2]).amax(1).view(-1, 1, 1)
        else:
            first, before = (0, 0) if tile[0] == ALL else divmod(self.begin, tile[0])
            own = kernels.amax(functional.pad(shard, (0, 0, before, 0)) if before else shard, tile)
        if own.shape == grid:
            return own
        blocks = shard.new_zeros(grid, dtype=torch.float32)
        blocks[first : first + len(own)] = own
        return blocks

    def cast(self, shard: Tensor, amax: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(What this rank sends, uint8 of as many rows as every rank's; the scale_inv that ranks have agreed on).

        ``amax``: the largest that ranks know, of all that ``amax`` gives.
        """
        x, before, sent, known = shard, 0, list[Tensor](), list[Tensor]()
        for cast, tile, grid in self.layouts:
            if grid is not None:
                blocks, amax = amax[: math.prod(grid)].view(grid), amax[math.prod(grid) :]
                scale = scale_from_amax(blocks, cast.format.max, cast.power_of_two, cast.margin)
                known.append(scale_inv_from_scale(scale).to(cast.scale_inv_dtype))
                if tile[0] != 1:
                    x, before = self._beside(shard, blocks, tile)
        (first, *_), *others = self.layouts
        second = others[0].cast.as_second if others else {}
        q, q2, scale_inv, scale_inv2, *_ = kernels.cast(x, None, WEIGHT, *first.arguments, **second)
        for (cast, _, grid), codes, scales in zip(self.layouts, (q, q2), (scale_inv, scale_inv2), strict=False):
            own = codes.view(torch.uint8)[before : before + len(shard)]
            sent.append(padded_rows(own, self.shape, self.ranks))
            if grid is None:  # of rows alone where others are beside them
                sent.append(bytes_of(scales[before : before + len(shard)], cast.power_of_two))
        return sent, known

    def _beside(self, shard: Tensor, blocks: Tensor, tile: Tile) -> tuple[Tensor, int]:
        """(The shard with rows of the amaxes of blocks that other ranks have rows of, how many are before it)."""
        columns, end = shard.shape[1], self.begin + len(shard)
        wide = blocks.to(shard.dtype).repeat_interleave(columns if tile[1] == ALL else tile[1], 1)[:, :columns]
        if tile[0] == ALL:
            return torch.cat([shard, wide]), 0
        if not len(shard):
            return shard, 0
        (first, before), (last, after) = divmod(self.begin, tile[0]), divmod(end if end < self.shape[0] else 0, tile[0])
        rows = wide[first : first + 1].expand(before, columns), shard, wide[last : last + 1][:after]
        return torch.cat(rows) if before or after else shard, before

    def read(self, received: Sequence[Tensor], known: Sequence[Tensor], pads: bool) -> Operands:
        """What products read, of all ranks' ``sent``, and what ranks have agreed on: scales, the amax of the whole."""
        left, agreed, pairs = iter(received), iter(known), list[tuple[Tensor, Tensor]]()
        for cast, tile, grid in self.layouts:
            q, scales = next(left)[: self.shape[0]].view(cast.format.dtype), next(left if grid is None else agreed)
            if scales.dtype == torch.uint8:
                scales = scales_from(scales, cast.power_of_two, tile)
            # with the strides that products want, see kernels/signatures.py
            pairs.append((q, scales.t().contiguous().t() if lie_by_columns(tile) else scales))
        if len(pairs) == 1:
            return operands_of(*pairs[0], pads)._replace(amax=next(agreed, None))
        (q, scale_inv), (q2, scale_inv2) = pairs
        pad = contraction_multiple(q.device) if pads else 1
        return Operands((with_padding(q, pad), scale_inv), transposed_pair(q2, scale_inv2, pads))
