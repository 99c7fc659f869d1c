"""How a converted module's weight is gathered under FSDP2 (fully_shard): what is sent, and what is made of it.

in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
            weight: one collective finds the amax of all weights of the model together (nn/gather_group.py).
            Blocks of which each lies on one rank need none; their scales are sent beside the codes.
cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard:
            recipes whose two layouts are scaled differently (rows, 1 x 32), where codes would be sent twice.
as it is    a weight that a product reads in high precision, or that another kind of module shares.
as stored   a weight that lives in FP8: its codes as they are, and the scales of blocks. Per tensor every rank has
            the whole weight's scale already (octavo.optim keeps it so), so that no other collective runs.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.autograd.casts import WEIGHT, Operands, State, cast_role
from octavo.granularity import ALL, PerTensor
from octavo.kernels.layouts import is_small_block
from octavo.nn.gather_group import GatherGroup
from octavo.nn.stored_weights import lay_out
from octavo.scaling.recipe import Cast, Delayed, Recipe
from octavo.step_count import OPTIMIZER_STEPS
from octavo.tensor.sharded_weight import (
    After,
    GatheredTensors,
    GatheredWeight,
    gather_as_it_is,
    local_shard,
    padded_rows,
    rows_on_each_rank,
    version_of,
)
from octavo.tensor.stored_weight import StoredWeight, local_stored

IN_FP8, CAST_AFTER, AS_IT_IS, AS_STORED = "in FP8", "cast after", "as it is", "as stored"


class Way(NamedTuple):
    """How a weight is gathered, and why not in FP8 where it is not."""

    kind: str
    why: str = ""


class Reader(Protocol):
    """What gathers know of the module whose weight it is (a RecipeModule)."""

    recipe: Recipe
    training: bool
    delayed_scale: Tensor | None
    delayed_amax_history: Tensor | None

    def notice_writes(self, weight: Tensor, local: Tensor) -> None:
        """See RecipeModule."""


class Gather:
    """What one module keeps for its weight's gathers.

    Args:
        group: whose weights find their scales together; None: this one's is cast after its gather.
        shared: whether a module of another kind has the same weight.
    """

    _reader: weakref.ref[Any]

    def __init__(self, group: GatherGroup | None = None, shared: bool = False) -> None:
        self.group, self.shared = group, shared
        self.parameter: Any = None  # the sharded one
        self.for_training = True  # whether the forward that it was gathered for last was in training
        self.unsharded: Any = None  # a weak reference to what it is between unshard and reshard
        self.generation = 0  # of parameters and loads: a 0-row shard has no address that would tell them
        self.casts = [0]  # the number of the cast that is current; one list for all modules that share the parameter
        self.rolled = -1  # the cast whose amax a forward in training was given to roll
        self.used: tuple[Any, ...] | None = None  # how FSDP2 has gathered it
        self._no_amax: Tensor | None = None
        self.forget()

    def adopt(self, parameter: Any, reader: Any) -> None:
        """Take a parameter of a module that was just sharded."""
        self.parameter, self.unsharded, self.rolled, self._reader = parameter, None, -1, weakref.ref(reader)
        self.casts = parameter.__dict__.setdefault("_octavo_casts", [0])
        self.forget()
        if self.group is not None:
            self.group.add(self)

    def forget(self) -> None:
        """Drop what was cast, of another recipe or parameter."""
        self.codes: Tensor | None = None
        self._way: Way | None = None
        self.scale = self.amax = self.scale_inv = torch.empty(0)
        self._seen: tuple[Any, ...] = ()  # the key of the weight that a forward in training read last
        self._ready: tuple[Any, ...] | None = None  # what has to be the same for the codes to serve one more forward
        self.delayed_scale: Tensor | None = None  # [3], of this forward; None: the weight's own amax gives its scale
        self._step_scale: Tensor | None = None  # [3], of all micro-batches of this step
        self.generation += 1

    def join(self, group: GatherGroup) -> None:
        """Find scales together with this group from now on."""
        self.group, self._way = group, None
        if self.parameter is not None:
            group.add(self)

    def share(self, shared: bool) -> None:
        """Note whether a module of another kind has the same weight."""
        self.shared, self._way = shared, None

    @property
    def reader(self) -> Reader:
        """The module."""
        found: Reader | None = self._reader()
        assert found is not None
        return found

    @property
    def way(self) -> Way:
        """How the sharded weight is gathered."""
        if self._way is None:
            self._way = self._choose_way()
        return self._way

    def _choose_way(self) -> Way:
        reader, parameter = self.reader, self.parameter
        casts, mesh = reader.recipe.weight_casts, parameter.device_mesh
        ranks = mesh.size(mesh.ndim - 1)
        if local_stored(parameter) is not None:
            return Way(AS_STORED)
        if casts.as_is is None or casts.transposed is None:
            return Way(AS_IT_IS, "a product reads it in high precision")
        if self.shared:
            return Way(AS_IT_IS, "another module shares it")
        if not hasattr(reader, "in_features"):
            return Way(AS_IT_IS, f"{type(reader).__name__} stores it transposed")
        if not casts.once:
            return Way(CAST_AFTER, "its two layouts have different scales, and codes of both are bf16's bytes")
        if ranks == 1:
            return Way(CAST_AFTER, "one rank gathers nothing")
        if self.group is None:
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

    # --- when a forward reads the weight ------------------------------------------------------------------------------

    def _key(self) -> tuple[Any, ...]:
        """What moves when the weight is known to have been written, on every rank alike."""
        parameter = self.parameter
        versions = parameter._version, version_of(parameter)
        return OPTIMIZER_STEPS.of(parameter), versions, self.generation, id(self.reader.recipe)

    def _current(self) -> tuple[Any, ...]:
        """What has to be the same for codes to serve a forward; every rank finds it alike, never by values."""
        assert self.group is not None
        return self.group.backwards, self.reader.training, self._key()

    def _accumulates(self) -> bool:
        """Whether the weight has a gradient already, which this micro-batch adds to; without sync it is unsharded."""
        unsharded = None if self.unsharded is None else self.unsharded()
        return self.parameter.grad is not None or (unsharded is not None and unsharded.grad is not None)

    def begin(self) -> None:
        """Note that a forward is about to read the weight.

        If this is its step's first in training, Delayed takes its scale anew and its backward rolls the amax.
        """
        reader = self.reader
        self.for_training = reader.training
        if not reader.training:
            self.delayed_scale = None  # as an unsharded layer: evaluation takes the weight's own amax
            return
        key = self._key()
        if self._seen == key and self._accumulates():
            self.delayed_scale = self._step_scale
            return
        self._seen, self.casts[0] = key, self.casts[0] + 1
        if reader.recipe.delayed is not None:
            reader.notice_writes(self.parameter, local_shard(self.parameter))
            assert reader.delayed_scale is not None
            self.delayed_scale = self._step_scale = reader.delayed_scale.clone()

    def begin_in_fp8(self, mesh: Any) -> Cast | None:
        """For GatherGroup.refresh: see its Member."""
        if self.parameter is None or self._reader() is None or self.parameter.device_mesh != mesh:
            return None
        if self.way.kind != IN_FP8:
            return None
        self.begin()
        self._ready = self._current()
        return self.reader.recipe.weight_casts.as_is

    # --- FSDP2's hooks ------------------------------------------------------------------------------------------------

    def before(
        self, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], After]:
        """What FSDP2's first hook does: see ShardHooks.fsdp_pre_all_gather."""
        kind = AS_STORED if isinstance(shard, StoredWeight) else self.way.kind
        self._note_use(kind)
        rows = rows_on_each_rank(outer_size[0], mesh.size())
        if isinstance(shard, StoredWeight):
            codes = padded_rows(shard.qdata.view(torch.uint8), rows)
            scale_inv = shard.scale_inv.clone()  # what belongs to these codes, whenever the next step writes
            if shard.granularity == PerTensor() or mesh.size() == 1:  # on one rank FSDP2 hands on the first tensor only
                return (codes,), self._take_codes(outer_size, shard.qdata.dtype, scale_inv)
            return (codes, scale_inv), self._take_codes(outer_size, shard.qdata.dtype)
        if kind == AS_IT_IS:
            return gather_as_it_is(shard, mesh, outer_size, mp_policy)
        for_backward = torch._C._current_graph_task_id() != -1  # also of a forward that a checkpoint computes again
        if kind == CAST_AFTER:
            if not for_backward:
                self.begin()
            # where nothing is sent, what several ranks would send in FP8 is cast from its own dtype, as there
            alone = mesh.size() == 1 and self.reader.recipe.weight_casts.once
            dtype = shard.dtype if alone else mp_policy.param_dtype or shard.dtype
            return (padded_rows(shard, rows).to(dtype),), self._cast_after(outer_size)
        return self._send_codes(shard, mesh, outer_size, for_backward)

    def _note_use(self, kind: str) -> None:
        """Note how the weight is gathered.

        Raises:
            RuntimeError: if FSDP2 has gathered it otherwise before.
        """
        used = kind, self.reader.recipe.weight_casts
        if self.used is not None and self.used != used:
            raise RuntimeError(
                "a weight under FSDP2 took another recipe than it was gathered by; call octavo.set_recipe on the "
                "module that fully_shard was applied to, or one that holds it"
            )
        self.used = used

    def _send_codes(
        self, shard: Tensor, mesh: Any, outer_size: torch.Size, for_backward: bool
    ) -> tuple[tuple[Tensor, ...], After]:
        group, cast = self.group, self.reader.recipe.weight_casts.as_is
        assert group is not None and cast is not None
        if for_backward and self.codes is not None:
            group.backwards += 1
        else:
            if self._ready != self._current():
                group.refresh(self, mesh)
            self._ready = None
        assert self.codes is not None
        codes = self.codes.to(shard.device, non_blocking=True)
        if self.scale_inv.numel() == 1 and cast.tile == (ALL, ALL):
            amax = self.amax if isinstance(cast.rule, Delayed) else None
            return (codes,), self._take_codes(outer_size, cast.format.dtype, self.scale_inv.to(shard.device), amax)
        scale_inv = self.scale_inv.to(shard.device, non_blocking=True)
        return (codes, scale_inv), self._take_codes(outer_size, cast.format.dtype)

    def _take_codes(
        self, shape: torch.Size, code_dtype: torch.dtype, scale_inv: Tensor | None = None, amax: Tensor | None = None
    ) -> After:
        """The second hook, of codes; without ``scale_inv`` of scales too."""
        recipe = self.reader.recipe

        def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
            q = outputs[0][: shape[0]].view(code_dtype)
            scales = outputs[1] if scale_inv is None else scale_inv
            found = self._amax_or_none(q) if amax is None else amax.to(q.device)
            laid, transposed = (q, q.t()) if recipe.is_high_precision else lay_out(q, recipe)
            parts = GatheredTensors(laid, scales, transposed, scales.t(), found)
            if out is not None:
                return out.refill(parts)
            return GatheredWeight(parts, shape, dtype, recipe.weight_casts), besides(q, laid, transposed)

        return after

    def _cast_after(self, shape: torch.Size) -> After:
        """The second hook, of a weight that is cast when it is whole."""
        recipe, reader = self.reader.recipe, self.reader

        def after(outputs: tuple[Tensor, ...], dtype: torch.dtype, out: Any) -> Any:
            wide, state = outputs[0][: shape[0]], None
            if recipe.delayed is not None:
                assert reader.delayed_scale is not None and reader.delayed_amax_history is not None
                scale = torch.zeros_like(reader.delayed_scale) if self.delayed_scale is None else self.delayed_scale
                state = State(scale, reader.delayed_amax_history)
            operands = cast_role(wide, recipe, WEIGHT, True, True, state)
            assert operands.as_is is not None and operands.transposed is not None
            amax = operands.amax if operands.amax is not None else self._amax_or_none(wide)
            parts = GatheredTensors(*operands.as_is, *operands.transposed, amax)
            if out is not None:
                return out.refill(parts)
            inner = {part.untyped_storage().data_ptr(): part for part in (parts.qdata, parts.transposed_qdata)}
            return GatheredWeight(parts, shape, dtype, recipe.weight_casts), tuple(inner.values())

        return after

    def _amax_or_none(self, like: Tensor) -> Tensor:
        """What stands for an amax where no rule asks for one: an empty tensor."""
        if self._no_amax is None or self._no_amax.device != like.device:
            self._no_amax = like.new_empty(0, dtype=torch.float32)
        return self._no_amax

    # --- what products read -------------------------------------------------------------------------------------------

    def operands(self, weight: GatheredWeight, recipe: Recipe, rolls: bool) -> Operands:
        """The operands of a gathered weight; ``rolls``: this forward's backward may roll the weight's history."""
        if weight.casts is not recipe.weight_casts and weight.casts != recipe.weight_casts:
            raise RuntimeError(
                "the weight was gathered by other casts than this layer's recipe has: layers that share a weight need "
                "one recipe, and octavo.set_recipe waits until no forward is under way"
            )
        amax = weight.found_amax if weight.found_amax.numel() else None
        fresh = True
        if not torch.compiler.is_compiling():  # a graph would keep the answer of the forward that it was traced in
            self.unsharded = weakref.ref(weight)
            if rolls and not self.for_training:  # it stayed gathered after evaluation
                self.begin()
            fresh = self.rolled != self.casts[0]
            if rolls:
                self.rolled = self.casts[0]
        as_is, transposed = (weight.qdata, weight.scale_inv), (weight.transposed_qdata, weight.transposed_scale_inv)
        return Operands(as_is, transposed, amax, None, fresh, refilled=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gather:
        return Gather(None if self.group is None else self.group.copied(memo), self.shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return Gather, (self.group, self.shared)


def besides(given: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Those of ``parts`` that lie in other storage than ``given``."""
    own = given.untyped_storage().data_ptr()
    return tuple(part for part in parts if part.untyped_storage().data_ptr() != own)
