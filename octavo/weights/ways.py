"""The ways to send a weight under FSDP2 (fully_shard): what ranks send of it, and what they make of it.

    in FP8      the shard is cast, codes are sent: half of bf16's bytes. Per tensor the scale is that of the whole
                weight, or of each whole expert: one collective finds the amax of all weights of the model together.
                Blocks that each lie on one rank need no collective; their scales are sent beside the codes. A weight
                whose two layouts are scaled differently (rows, 1 x 32) is sent as two pairs, as many bytes as bf16.
    cast after  the shard is sent in the parameter's dtype (or the mixed-precision policy's), and cast once an unshard.
    as it is    a weight that a product reads in high precision, or that another kind of module shares.
    as stored   a weight that lives in FP8: its codes as they are, and the scales of blocks and of experts. Per tensor
                every rank has the whole weight's scale already (octavo.optim keeps it so): no other collective runs.

Each is a class below, a Way, of one weight. Its ``send`` returns what FSDP2's first hook returns: the tensors to send,
and the second hook, a MakeWeight. ``cast_shards`` writes the codes that several ways "in FP8" send. Nothing here knows
which way is a weight's, or when its shard is cast: weights/gathered.py decides that, and calls what is here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.autograd.cast_together import MatrixToCast, cast_together
from octavo.autograd.casts import CastRequest, cast_role, operands_of_codes
from octavo.numerics import scale_inv_from_scale
from octavo.private import DisableTorchFunctionSubclass, local_tensor
from octavo.scaling.recipe import WEIGHT, Cast
from octavo.step_count import SeenWrites
from octavo.tensor.collectives import maximum_over_ranks
from octavo.tensor.pair import Operands
from octavo.weights.fsdp2 import (
    FirstHookResult,
    GatheredWeight,
    Unshard,
    UnshardedWeight,
    gather_as_it_is,
    groups_of,
    on_this_rank,
    padded_rows,
    without_padding,
)
from octavo.weights.reader import WeightReader
from octavo.weights.shard_cast import ShardCast, ShardCodes, WeightScales
from octavo.weights.stored import StoredWeight, agree_on_scale

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

    Attributes:
        parameter: the sharded weight, a DTensor; None for experts that expert_parallel has spread over ranks.
        why: the reason why it is not "in FP8", if it is not.
        delayed_scale: [3], of the forward that is under way, for its backward too; None: the scale comes from the
            weight's amax. ``Gather.begin`` writes it.
    """

    kind = "as it is"

    def __init__(self, parameter: Any, why: str = "") -> None:
        self.parameter, self.why = parameter, why
        self.delayed_scale: Tensor | None = None

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
            agree_on_scale(self.parameter)
            shard = local_tensor(self.parameter).moved(lambda tensor: tensor.to(shard.device))
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
        recipe = module.fp8.recipe
        # one rank sends nothing: a weight that several would send in FP8 is cast from its own dtype, as they would
        casts_own_dtype = mesh.size() == 1 and recipe.weight_casts.coincide
        dtype = shard.dtype if casts_own_dtype else mp_policy.param_dtype or shard.dtype

        def read(received: Sequence[Tensor]) -> Operands:
            weight, state = without_padding(received[0], shape), module.fp8.state
            if state is not None:
                scale = torch.zeros_like(state.scale) if self.delayed_scale is None else self.delayed_scale
                state = state._replace(scale=scale, before=torch.zeros_like(state.before)).on(weight.device)
            weight_NK = weight.mT if module.stores_transposed else weight
            return cast_role(weight_NK, CastRequest(recipe, WEIGHT, as_is=True, transposed=True), state)

        return (padded_rows(shard, shape, mesh.size()).to(dtype),), MakeWeight(shape, recipe.weight_key, read)


class InFP8(Way):
    """The way of a weight whose shards are cast, with those of its group's other weights, and sent as codes.

    Attributes:
        writes: to the weight.
        shard_cast: how the shard is cast.
        codes: the last cast's.
        step_at_cast: the last step of the weight's optimizer before that cast.
        fresh_key: ``key_now`` at that cast; None since a gather for a forward has sent the codes, or a write that no
            counter shows outdated them. ``GatherGroup`` writes it.
    """

    kind = "in FP8"

    def __init__(self, parameter: Any, writes: SeenWrites, shard_cast: ShardCast) -> None:
        super().__init__(parameter)
        self.writes, self.shard_cast = writes, shard_cast
        self.codes: ShardCodes | None = None
        self.step_at_cast = -1
        self.fresh_key: tuple[Any, ...] | None = None

    @property
    def shard(self) -> Tensor:
        """This rank's shard."""
        return on_this_rank(self.parameter)

    def key_now(self, module: WeightReader, backwards: int) -> tuple[Any, ...]:
        """Return a key that differs from the last cast's if the codes are outdated; ``backwards``: the group's.

        It depends on no value of a weight, so all ranks decide alike.
        """
        with DisableTorchFunctionSubclass():  # ShardedWeight's would be called for a version
            versions = self.parameter._version, local_tensor(self.parameter)._version
        return backwards, module.training, self.writes.last_step, *versions, id(module.fp8.recipe)

    def send(self, module: WeightReader, unshard: Unshard) -> FirstHookResult:
        """Return the last cast's codes, with scales that ranks don't share, and FSDP2's second hook."""
        codes, recipe = self.codes.on(unshard.shard.device), module.fp8.recipe  # type: ignore[union-attr]
        read = functools.partial(self.shard_cast.read, codes=codes, may_pad=recipe.may_pad)
        local_tensors = [tensor for tensor in (*codes.shared_scales, codes.amax) if tensor is not None]
        return codes.sent, MakeWeight(unshard.shape, recipe.weight_key, read, local_tensors, module.stores_transposed)


def _whole_storage(codes: Tensor) -> Tensor:
    """Return codes, or all of their storage if they view a part of it: FSDP2 allocates what it is shown."""
    raw = codes.view(torch.uint8)
    storage = raw.untyped_storage()
    return codes if storage.nbytes() == raw.numel() else raw.new_empty(0).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


# --- casts of several weights "in FP8" together ----------------------------------------------------------------------


def cast_shards(ways: Sequence[InFP8], mesh: DeviceMesh) -> None:
    """Cast the shards of these weights by new scales; ``mesh``: the one over which FSDP2 sends them.

    One collective, under tensor parallelism two, takes the maximum over ranks of all amaxes that need it. Shards of
    one dtype and cast take one launch, others one each.
    """
    launches: dict[object, list[InFP8]] = {}
    for way in ways:
        shard = way.shard
        key = (way.shard_cast.cast_as_is, shard.dtype, shard.device) if way.shard_cast.in_one_launch else way
        launches.setdefault(key, []).append(way)
    amaxes = _amaxes_over_ranks([way for together in launches.values() for way in together], mesh)
    for first, *others in launches.values():
        if first.shard_cast.in_one_launch:
            _cast_in_one_launch([first, *others], amaxes)
        else:
            first.codes = first.shard_cast.cast(first.shard, amaxes.get(first, first.shard.new_zeros(0)))


def _amaxes_over_ranks(ways: Sequence[InFP8], mesh: DeviceMesh) -> dict[InFP8, Tensor]:
    """Return the maximum over ranks of the amaxes that shards share, of those that share some; collective."""
    if not (sharing := [way for way in ways if way.shard_cast.needs_maximum]):
        return {}
    local_amaxes = [way.shard_cast.amax(way.shard) for way in sharing]
    ranks = dict.fromkeys(group for way in sharing for group in groups_of(way.parameter))
    amax = maximum_over_ranks(torch.cat(local_amaxes), *ranks, device=mesh.device_type)
    return dict(zip(sharing, amax.split([len(amaxes) for amaxes in local_amaxes]), strict=True))


def _cast_in_one_launch(ways: Sequence[InFP8], amaxes: dict[InFP8, Tensor]) -> None:
    """Cast shards of one dtype by one cast; ``amaxes``: those of each weight's matrices, where it is per tensor."""
    cast = ways[0].shard_cast.cast_as_is
    scales = _scales_of(ways, [amaxes[way] for way in ways], cast) if cast.has_one_scale else [None] * len(ways)
    matrices: list[MatrixToCast] = []
    for way, scales_of_weight in zip(ways, scales, strict=True):
        way.codes, matrices_of_shard = way.shard_cast.prepare(way.shard, way.codes, scales_of_weight)
        way.step_at_cast = way.writes.last_step
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
    of_roles = [way.delayed_scale for way in ways]
    scales = torch.cat([zero if one is None else one[WEIGHT : WEIGHT + 1].to(amax.device) for one in of_roles])
    last_amaxes = [None if way.codes is None else way.codes.amax for way in ways]
    last_amax = torch.cat([zero if one is None else one.view(1) for one in last_amaxes])
    had_no_step = amax.new_tensor([float(way.step_at_cast == way.writes.last_step) for way in ways]) > 0
    written = ((had_no_step & (amax != last_amax)) | (scales * amax > 2 * cast.format.max)) & amax.isfinite()
    return torch.where(written, 0, scales)
