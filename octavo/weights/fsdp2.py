"""A weight under FSDP2: the shard with FSDP2's hooks, and the gathered weight.

    ShardHooks       FSDP2's two hooks, which ask the module that owns the weight (``before_gather``).
    ShardedWeight    the local tensor of a sharded parameter: an ordinary tensor whose class has the hooks. It holds
                     nothing of its own, so none of torch's ways to make a new local tensor (padding, moving, loading)
                     can lose anything. Of a weight that lives in FP8 it is a StoredWeight.
    GatheredWeight   the unsharded parameter: pairs behind the facade of a high-precision matrix, to which gradients
                     flow. FSDP2 frees and refills their storage.

Functions that say whether and how a tensor is sharded:

    is_dtensor      whether it is a DTensor, sharded or whole on each rank (octavo/private.py)
    sharded_dims    its dimensions that are sharded, each with the dimension of the mesh that it is sharded over
    is_sharded      whether there are any
    groups_of       the process groups between whose ranks it is sharded
    own_slices      this rank's part of it, as slices

Functions that return a part, or the whole, of a tensor that may be sharded; any other tensor comes back as it is:

    function          of a DTensor of plain shards        of a DTensor of StoredWeights     of a StoredWeight alone
    local_tensor      its shard, with FSDP2's hooks       its StoredWeight                  itself
    on_this_rank      its shard, without hooks            its StoredWeight                  itself
    local_stored      None, as of any plain tensor        its StoredWeight                  itself
    without_hooks     a DTensor of shards without hooks   itself                            itself
    whole             the whole tensor; collective        refused: whole_pair (files.py)    itself

What octavo reads of FSDP2 beyond its documented extension hooks is in octavo/private.py.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from octavo import private
from octavo.private import (
    DisableTorchFunctionSubclass,
    fsdp_modules,
    fsdp_params,
    is_dtensor,
    local_tensor,
    preserve_version_counter,
    set_local_tensor,
)
from octavo.tensor.collectives import gathered_parts, maximum_over_ranks
from octavo.tensor.pair import MOVES, PLAIN_LIKE, Operands, OperandsFacade, moves
from octavo.tensor.scaled_tensor import ScaledTensor
from octavo.weights.reader import WeightReader
from octavo.weights.storable import granularity_of_scales

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

aten = torch.ops.aten
T = TypeVar("T")

# the work of ``fsdp_post_all_gather`` on (the received tensors, the parameter's dtype, a weight to refill or None)
UnshardedWeight = tuple[Tensor, tuple[Tensor, ...]] | None  # (the weight, what FSDP2 frees besides); None: refilled
SecondHook = Callable[[tuple[Tensor, ...], torch.dtype, Tensor | None], UnshardedWeight]
FirstHookResult = tuple[tuple[Tensor, ...], SecondHook]  # (tensors to send, each of as many rows on every rank, ...)


class Unshard(NamedTuple):
    """A call of FSDP2's first hook for a weight."""

    shard: Tensor  # this rank's, without hooks
    mesh: DeviceMesh  # over which FSDP2 sends
    shape: torch.Size  # of the tensor that FSDP2 shards
    mp_policy: MixedPrecisionPolicy


class ShardHooks(Tensor):
    """FSDP2's two hooks: the local tensor of a sharded parameter that has them asks its module how it is gathered.

    Of a class with the name of a ``part`` it asks that part of the module, of which FSDP2 knows nothing.
    """

    part = ""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> FirstHookResult:
        """Return (tensors to send, each of as many rows as other ranks', the function that the second hook calls)."""
        before_gather = getattr(module._modules.get(self.part, module), "before_gather", None)
        # None for an embedding that shares its weight with a linear layer, and for experts that were restored
        unshard = Unshard(on_this_rank(self), mesh, outer_size, mp_policy)
        return self.gather_without_recipe(unshard, module) if before_gather is None else before_gather(unshard)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: SecondHook, param_dtype: torch.dtype, *, out: Any = None
    ) -> UnshardedWeight:
        """Return the unsharded weight and the tensors whose storage FSDP2 frees; None where ``out`` is refilled."""
        return metadata(all_gather_outputs, param_dtype, out)

    def gather_without_recipe(self, unshard: Unshard, module: nn.Module) -> FirstHookResult:
        """Return the first hook's result where the module is none of octavo's: FSDP2's way without hooks."""
        return gather_as_it_is(unshard)


# FSDP2 asks for the first hook's signature before each call of it
ShardHooks.fsdp_pre_all_gather.__signature__ = inspect.signature(ShardHooks.fsdp_pre_all_gather)  # type: ignore[attr-defined]


class ShardedWeight(ShardHooks):
    """The local tensor of a sharded weight; views and copies of it are of this class, all else is plain."""

    @classmethod
    @functools.cache
    def of(cls, part: str) -> type[ShardedWeight]:
        """Return the class for the weight of a module's part; "": for the module's own."""
        return type("ShardedWeight", (cls,), {"part": part}) if part else cls

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and getattr(func, "__name__", "") in _KEEPS and isinstance(args[0], ShardedWeight):
            return result.as_subclass(cls)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # files hold plain tensors


# names of torch functions and aten overloads whose results are of the class too
_KEEPS = {
    name + suffix
    for name in "detach alias view narrow slice clone new_zeros to _to_copy cpu cuda pin_memory _pin_memory".split()
    for suffix in ("", ".default", ".Tensor", ".int", ".dtype")
}


def gather_as_it_is(unshard: Unshard) -> FirstHookResult:
    """Gather a shard as FSDP2 does without hooks; returns what the first hook returns."""
    shard, mesh, shape, mp_policy = unshard
    sent = padded_rows(shard, shape, mesh.size()).to(mp_policy.param_dtype or shard.dtype)

    # where FSDP2 refills a weight, it refills the gathered storage itself
    return (sent,), lambda outputs, _, out: (without_padding(outputs[0], shape), ()) if out is None else None


class GatheredWeight(OperandsFacade):
    """An unsharded weight, of which FSDP2 frees and refills the tensors of both pairs.

    The transposed codes may be a view of the others. ``casts`` is text, as a compiled graph can hold no Cast of a
    tensor that it has taken out of a DTensor.
    """

    REMEDY = (
        "of a gathered FP8 weight: between unshard and reshard it exists in FP8 only. Read the sharded parameter, or "
        "keep the layer out of FP8 with octavo.recipes.high_precision()"
    )

    def write(self, operands: Operands) -> None:
        """Take others of the same shapes: written into the storage that is there, codes and scales together.

        A forward that saved these tensors for its backward so reads a pair that belongs together, whichever it is.
        """
        written: set[int] = set()
        self.operands_amax = operands.amax
        for old, new in zip(_pairs(self.read()), _pairs(operands), strict=True):
            address = old.untyped_storage().data_ptr()
            if address == new.untyped_storage().data_ptr() or address in written:
                continue
            written.add(address)
            if old.itemsize == 1:
                old, new = old.view(torch.uint8), new.view(torch.uint8)
            with torch.inference_mode() if old.is_inference() else preserve_version_counter(old):
                old.copy_(new)

    def operands(self, module: WeightReader, transposed: bool) -> Operands:
        """Return both pairs, as they were gathered; the module's gather notes that it reads them."""
        module.fp8.gather.read(self, module)
        return self.read()

    def pair(self) -> ScaledTensor:
        """Return the pair as it lies, where its codes are a stored weight's."""
        granularity = granularity_of_scales(self.shape, self.scale_inv.shape)
        assert granularity is not None
        return ScaledTensor(self.qdata, self.scale_inv, granularity.of_matrices(self.shape), self.dtype)


def _pairs(operands: Operands) -> list[Tensor]:
    """Return the tensors of both pairs."""
    return [*operands.as_is, *operands.transposed]  # type: ignore[misc]


def _transposed(func: Any, weight: GatheredWeight, *dims: int) -> Any:
    """Return a facade of the swapped shape, for gradients only: its pairs still lie as the parameter's.

    Products read the parameter.
    """
    *outer, rows, cols = weight.shape
    if {dim % weight.ndim for dim in dims} != {weight.ndim - 2, weight.ndim - 1}:
        return NotImplemented
    return weight.with_shape((*outer, cols, rows))


GatheredWeight.RULES = MOVES | PLAIN_LIKE | dict.fromkeys((aten.as_strided.default, aten.view.default), moves)
GatheredWeight.RULES |= {aten.transpose.int: _transposed}


def attach(param: Any, mesh_dim: int, part: str = "") -> bool:
    """Give hooks to the local tensor of a DTensor that FSDP2 has just sharded; return whether it has them now.

    ``mesh_dim``: the dimension of its mesh that it is sharded over; a parameter that is not is left as it is.
    """
    if mesh_dim not in [sharded_mesh_dim for _, sharded_mesh_dim in sharded_dims(param)]:
        return False
    if type(local := local_tensor(param)) is Tensor:
        local = local.as_subclass(ShardedWeight.of(part))
        set_local_tensor(param, local)
    elif part and isinstance(local, ShardHooks):
        local.part = part
    return isinstance(local, ShardHooks)


def sharded_dims(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (tensor dimension, mesh dimension) of each sharding; none for a plain or replicated tensor.

    Where ranks have terms of a sum the tensor dimension is 0.
    """
    for mesh_dim, placement in enumerate(getattr(tensor, "placements", ())):
        if not placement.is_replicate():
            yield getattr(placement, "dim", 0) % max(tensor.ndim, 1), mesh_dim


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks have shards of a tensor, or terms of its sum."""
    return any(True for _ in sharded_dims(tensor))


def groups_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the process groups of ranks that share a tensor, one for each mesh dimension that shards it."""
    return tuple(tensor.device_mesh.get_group(mesh_dim) for _, mesh_dim in sharded_dims(tensor))  # type: ignore[attr-defined]


def on_this_rank(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, without FSDP2's hooks where it is plain; any other tensor as it is."""
    if type(tensor) in (Tensor, nn.Parameter):  # sooner, as optimizers ask it for each tensor of each step
        return tensor
    shard: Tensor = local_tensor(tensor)
    return shard.as_subclass(Tensor) if isinstance(shard, ShardedWeight) else shard


def without_hooks(param: Any) -> Tensor:
    """Return a DTensor whose local tensor is plain, over the same storage; anything else as it is."""
    has_hooks = isinstance(local_tensor(param), ShardedWeight)
    return like_sharded(on_this_rank(param), param, param.shape) if has_hooks else param


def like_sharded(local: Tensor, param: Tensor, shape: torch.Size, columns_dim: int | None = None) -> Tensor:
    """Return a DTensor of this shape, sharded as ``param``, with this rank's shard ``local``; that, if it is plain.

    ``columns_dim``: the dimension of the new tensor that is sharded where ``param``'s last one is; None: the same one.
    """
    if not is_dtensor(param):
        return local
    from torch.distributed.tensor import DTensor, Shard

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    if columns_dim is not None:
        placements = [Shard(columns_dim) if one == Shard(param.ndim - 1) else one for one in placements]
    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def own_slices(shape: Sequence[int], param: Tensor) -> tuple[slice, ...]:
    """Return this rank's slices of a tensor of this shape that is sharded as ``param`` is: all, if it is whole."""
    sizes, begins = shape, [0] * len(shape)
    if is_dtensor(param):
        sizes, begins = private.local_shape_and_offset(torch.Size(shape), param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def maximum_over_shards(values: Tensor, param: Tensor) -> Tensor:
    """Return the largest of each of ``values`` over the ranks that share a weight; all call it if it is sharded."""
    if not is_dtensor(param):
        return values
    return maximum_over_ranks(values, *groups_of(param), device=param.device_mesh.device_type)  # type: ignore[attr-defined]


def whole(value: T) -> T:
    """Return a sharded tensor, or norm, as a whole on its mesh's device: all ranks call it; else ``value``."""
    if not is_dtensor(value):
        return value
    sharded: Any = without_hooks(value)
    return sharded.to(sharded.device_mesh.device_type).full_tensor()  # it may be offloaded


def gather_alone(param: Tensor, module: nn.Module, mp_policy: MixedPrecisionPolicy) -> Tensor:
    """Return a sharded weight as the next forward's gather makes it, outside of FSDP2's buffers; all ranks call it.

    ``module``: whose parameter it is; ``mp_policy``: that of its group. Shards without hooks, or
    over more than one dimension of a mesh, are gathered as they are.
    """
    local, meshes = local_tensor(param), param.device_mesh  # type: ignore[attr-defined]
    if not isinstance(local, ShardHooks) or len(groups_of(param)) > 1:
        return whole(param)
    mesh = meshes if meshes.ndim == 1 else meshes[meshes.mesh_dim_names[-1]]
    local = cast(ShardHooks, local.to(mesh.device_type))  # it may be offloaded
    inputs, hook = local.fsdp_pre_all_gather(mesh, param.shape, param.stride(), module, mp_policy)
    group = mesh.get_group().group_name
    outputs = tuple(gathered_parts(sent.contiguous(), mesh.size(), group) for sent in inputs)
    weight, _ = local.fsdp_post_all_gather(outputs, hook, mp_policy.param_dtype or param.dtype)  # type: ignore[misc]
    return weight


def mp_policies(model: nn.Module) -> dict[int, MixedPrecisionPolicy]:
    """Return FSDP2's mixed-precision policy of each sharded parameter, by its id; {} where nothing is sharded."""
    return {id(param.sharded): param.mp_policy for param in fsdp_params(model)}


def forget_gathered(model: nn.Module) -> list[nn.Module]:
    """Make FSDP2 forget how it gathered weights with hooks of ours, as that may change; return their modules."""
    gathered = [param for param in fsdp_params(model) if isinstance(param.shard, ShardHooks) and param.was_gathered]
    for param in gathered:
        param.forget_gathered()
    return [param.owner for param in gathered]


def forget_failed_pass(model: nn.Module) -> bool:
    """Make FSDP2 forget a forward or backward that failed, so that another can follow; return False if it can't.

    Shards keep their gradients. Torch has ``reset_iter_state`` from 2.13 on, which from 2.15 on drops these too.
    """
    gradients = [(param.sharded, param.sharded.grad) for param in fsdp_params(model)]
    inner: set[nn.Module] = set()
    for module in fsdp_modules(model):
        if module not in inner:
            if not hasattr(module, "reset_iter_state"):
                return False
            module.reset_iter_state()
            inner.update(module.modules())
    for shard, gradient in gradients:
        shard.grad = gradient
    return True


def take_shard(model: nn.Module, weight: Tensor) -> None:
    """Make FSDP2 take the shard that a weight was given, after ``forget_gathered``, if it shards the weight."""
    for param in fsdp_params(model) if is_dtensor(weight) else ():
        if param.sharded is weight:
            attach(param.sharded, param.mesh_dim, getattr(param.shard, "part", ""))
            param.take_shard()


# --- Rows of a tensor that FSDP2 shards: how many each rank has, and which are sent.


def rows_on_each_rank(rows: int, ranks: int) -> int:
    """Return the number of rows to which FSDP2 pads every rank's shard of a matrix."""
    return -(-rows // ranks)


def rows_of_rank(rows: int, ranks: int, rank: int) -> slice:
    """Return the slice of so many rows that this rank has; the last ranks may have fewer than others, or none."""
    each = rows_on_each_rank(rows, ranks)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def padded_rows(shard: Tensor, shape: torch.Size, ranks: int) -> Tensor:
    """Return a shard of a tensor of this shape, contiguous, with rows of zeros up to as many as each rank's.

    FSDP2 pads no other dimension.
    """
    rows = rows_on_each_rank(shape[0], ranks)
    if shard.shape[0] == rows or shard.shape[1:] != shape[1:]:
        return shard.contiguous()
    padded = shard.new_zeros(rows, *shard.shape[1:])
    padded[: shard.shape[0]] = shard
    return padded


def without_padding(received: Tensor, shape: torch.Size) -> Tensor:
    """Return all ranks' shards as one tensor, without their padding, whichever dimension is sharded."""
    return received.view(-1)[: math.prod(shape)].view(shape)
