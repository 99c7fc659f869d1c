"""How a converted module's weight is gathered under FSDP2 (fully_shard): what is sent, and what is made of it.

in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
            weight, of experts one each: one collective finds the amax of all weights of the model together
            (nn/gather_group.py). Blocks of which each lies on one rank need none; their scales are sent beside the
            codes. A weight whose two layouts are scaled differently (rows, 1 x 32) is sent as two pairs, which are
            bf16's bytes.
cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard.
as it is    a weight that a product reads in high precision, or that another kind of module shares.
as stored   a weight that lives in FP8: its codes as they are, and the scales of blocks and of experts. Per tensor
            every rank has the whole weight's scale already (octavo.optim keeps it so): no other collective runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.autograd.casts import WEIGHT, State, cast_role, operands_of_codes
from octavo.granularity import ALL
from octavo.kernels.backward_pass import is_running
from octavo.kernels.layouts import is_small_block
from octavo.nn.gather_group import GatherGroup, ShardCast, ask
from octavo.nn.weight import notice_writes
from octavo.scaling.delayed import state_of
from octavo.step_count import OPTIMIZER_STEPS
from octavo.tensor.fsdp2 import (
    After,
    GatheredWeight,
    attach,
    gather_as_it_is,
    gathered_whole,
    on_this_rank,
    padded_rows,
)
from octavo.tensor.pair import Operands
from octavo.tensor.stored_weight import StoredWeight, agree_on_scale, agreed, local_stored

IN_FP8, CAST_AFTER, AS_IT_IS, AS_STORED = "in FP8", "cast after", "as it is", "as stored"


class Way(NamedTuple):
    """How a weight is gathered, and why not in FP8 where it is not."""

    kind: str
    why: str = ""


class Gather:
    """What one module keeps for its weight's gathers. The module, a RecipeModule, comes with each call.

    Args:
        group: whose weights find their scales together; None: this one's is cast after its gather.
        shared: whether a module of another kind has the same weight.
        name: the module's in the model that octavo.convert was given.
    """

    def __init__(self, group: GatherGroup | None = None, shared: bool = False, name: str = "") -> None:
        self.group, self.shared, self.name = group, shared, name
        self.parameter: Any = None  # the sharded one
        self.shape = torch.Size()  # of what its shards are of: under tensor parallelism this rank's shard of the weight
        self.at = 0  # the dimension of its mesh that FSDP2 shards it over; tensor parallelism has those behind
        self.for_training = True  # whether the forward that it was gathered for last was in training
        self.generation = 0  # of parameters and loads: a 0-row shard has no address that would tell them
        self.used: tuple[Any, ...] | None = None  # how FSDP2 has gathered it
        self.forget()

    def adopt(self, parameter: Any, whole: Any, module: Any, part: str = "") -> None:
        """Gather this parameter of the module from now on, if FSDP2 has just sharded it; before it was ``whole``.

        ``part``: the module's name as a part of the one that owns the parameter, if it does not itself.

        Raises:
            ValueError: for a second shard of a parameter.
        """
        if (mesh := getattr(parameter, "device_mesh", None)) is None:
            return
        at, shape = self.at, self.shape
        if whole is not parameter:  # else it was moved
            inner = getattr(whole, "device_mesh", None)
            at, shape = mesh.ndim - 1 - (0 if inner is None else inner.ndim), on_this_rank(whole).shape
            if inner is not None and parameter.ndim == 3:
                return  # experts on several ranks
        if not attach(parameter, at, part) or self.parameter is parameter:
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
        agree_on_scale(parameter, just_cut=True)
        self.forget()
        if self.group is not None:
            self.group.add(module)

    def forget(self) -> None:
        """Drop codes and scales that were cast by another recipe, or from another parameter."""
        self.codes: Tensor | None = None  # uint8 [rows on each rank, K]: what the shard was cast into
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        self.scale = self.amax = none  # of the whole weight, [1] and [1, 1], if it is cast per tensor
        self.scale_inv = none  # [1, 1], or of the shard's blocks
        self.shard_cast: ShardCast | None = None  # where it is cast with no other weight
        self.cast_alone: tuple[list[Tensor], list[Tensor]] = [], []  # what that gave
        self._way: Way | None = None
        self.steps = -1  # of the optimizer that owns the weight, when ``amax`` was found
        self._ready: tuple[Any, ...] | None = None  # the codes' key when another weight's gather has just cast them
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
        if casts.once and block == (ALL, ALL):
            return Way(IN_FP8)
        square = casts.once and block[0] == block[1] and is_small_block(block)
        if experts and not square:
            return Way(CAST_AFTER, f"experts are cast one matrix at a time by {casts.as_is} and {casts.transposed}")
        if experts and rows % ranks:
            return Way(CAST_AFTER, f"of {rows} experts {ranks} ranks do not have as many each, as scales sent need it")
        if experts or (square and rows % ranks == 0 and rows // ranks % block[0] == 0):
            return Way(IN_FP8)
        delayed = casts.as_is.is_delayed or casts.transposed.is_delayed
        if delayed or not (casts.once or 1 in (block[0], casts.transposed.tile[1])):
            return Way(CAST_AFTER, "its two layouts have different scales, of which ranks would have to agree on both")
        if self.at + 1 < parameter.device_mesh.ndim:
            return Way(CAST_AFTER, "tensor parallelism shards it too")
        self.shard_cast = ShardCast(casts, self.shape, ranks, parameter.device_mesh.get_local_rank(self.at))
        return Way(IN_FP8)

    def _codes_key(self, module: Any) -> tuple[Any, ...]:
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

    def begin_in_fp8(self, module: Any) -> bool:
        """Whether the sharded weight is gathered in FP8; if so, ``begin``."""
        if self.way(module).kind != IN_FP8:
            return False
        self.begin(module)
        self._ready = self._codes_key(module)
        return True

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
            shard = shard if self.parameter is None else agreed(shard, self.parameter)
            codes = padded_rows(shard.qdata.view(torch.uint8), outer_size, mesh.size())
            scale_inv = shard.scale_inv.clone()  # what belongs to these codes, whenever the next step writes
            # on one rank FSDP2 hands on the first tensor only
            has_scale = shard.has_one_scale or mesh.size() == 1
            if shard.ndim == 3:
                scales = shard.granularity.of_matrices(outer_size).scale_shape(outer_size)
                scale_inv = padded_rows(scale_inv, torch.Size(scales), mesh.size())
            return _send_codes(codes, scale_inv, has_scale, None, module, outer_size, shard.qdata.dtype)
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
        self._refresh(module, mesh, for_backward)
        cast, device = casts.as_is, shard.device
        if self.shard_cast is not None:
            own, known = ([one.to(device, non_blocking=True) for one in tensors] for tensors in self.cast_alone)
            read = functools.partial(self.shard_cast.read, known=known, pads=module.recipe.pads)
            return tuple(own), _reading(read, known, module.recipe, outer_size)
        assert self.codes is not None
        amax = self.amax if cast.is_delayed else None
        sent, scale_inv = self.codes.to(device, non_blocking=True), self.scale_inv.to(device, non_blocking=True)
        has_scale = cast.tile == (ALL, ALL)
        return _send_codes(sent, scale_inv, has_scale, amax, module, outer_size, cast.format.dtype)

    def _refresh(self, module: Any, mesh: Any, for_backward: bool) -> None:
        """Cast all shards of the group, unless the gather of another weight for the same forward has done so."""
        assert self.group is not None
        if for_backward and (self.codes is not None or self.cast_alone[0]):
            self.group.backwards += 1
        else:
            if self._ready != self._codes_key(module):
                self.group.refresh(self, mesh)
            self._ready = None
        self.group.wait()

    def _cast_after(self, module: Any, shape: torch.Size) -> After:
        """The second hook where every rank casts the whole weight."""
        recipe = module.recipe

        def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
            wide, state = gathered_whole(outputs[0], shape), None
            if (known := state_of(module)) is not None:
                scale = torch.zeros_like(known.scale) if self.delayed_scale is None else self.delayed_scale
                state = State(
                    *(tensor.to(wide.device) for tensor in (scale, known.amax_history, torch.zeros_like(known.before)))
                )
            read = wide.mT if module.stores_transposed else wide
            operands = cast_role(read, recipe, WEIGHT, True, True, state)
            return _gathered(operands, recipe, shape, dtype, outputs, out)

        return after

    def __reduce__(self) -> tuple[Any, ...]:
        return Gather, (self.group, self.shared, self.name)


def _send_codes(
    codes: Tensor,
    scale_inv: Tensor,
    has_scale: bool,
    amax: Tensor | None,
    module: Any,
    shape: torch.Size,
    code_dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], After]:
    """(What this rank sends, the second hook). ``has_scale``: all ranks have the whole weight's scale_inv already."""
    recipe = module.recipe

    def read(outputs: Sequence[Tensor]) -> Operands:
        q = outputs[0][: shape[0]].view(code_dtype)
        scales = scale_inv if has_scale else outputs[1] if q.ndim == 2 else outputs[1][: shape[0]]
        operands = Operands((q, scales), (q.mT, scales.mT))
        if not recipe.is_high_precision:
            operands = operands_of_codes((q, scales), recipe, WEIGHT, True, None)
        if module.stores_transposed:
            operands = Operands(operands.transposed, operands.as_is)
        return operands._replace(amax=None if amax is None else amax.to(q.device))

    sent = (codes,) if has_scale else (codes, scale_inv)
    return sent, _reading(read, [scale_inv] if amax is None else [scale_inv, amax], recipe, shape)


def _reading(
    read: Callable[[Sequence[Tensor]], Operands], known: Sequence[Tensor], recipe: Any, shape: torch.Size
) -> After:
    """The second hook that makes operands of what was received, by tensors that this rank has ``known`` before."""

    def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
        for tensor in known:  # made on FSDP2's own stream, and freed before this one has read them
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return _gathered(read(outputs), recipe, shape, dtype, outputs, out)

    return after


def _all_of(codes: Tensor) -> Tensor:
    """Codes, or where they are a view of a part of their storage, all of it: FSDP2 makes room for what it is shown."""
    raw = codes.view(torch.uint8)
    storage = raw.untyped_storage()
    return codes if storage.nbytes() == raw.numel() else raw.new_empty(0).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


def _gathered(
    operands: Operands, recipe: Any, shape: torch.Size, dtype: torch.dtype, received: Sequence[Tensor], out: Any
) -> Any:
    """What the second hook returns: the weight, and the tensors that FSDP2 has to free besides what it ``received``."""
    if out is not None:
        return on_this_rank(out).refill(operands)  # type: ignore[attr-defined]
    assert operands.as_is is not None and operands.transposed is not None
    codes = operands.as_is[0], operands.transposed[0]
    storages = {one.untyped_storage().data_ptr(): _all_of(one) for one in codes}
    for tensor in received:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return GatheredWeight(operands, shape, dtype, recipe.weight_key), tuple(storages.values())
