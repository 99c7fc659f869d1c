"""The rules of the ops that torch may apply to a StoredWeight, which takes them as its ``RULES``: any other op raises.

Each rule takes the op and its arguments; it returns the op's result, or NotImplemented for arguments that it refuses.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.errors import UnsupportedOpError
from octavo.formats import E4M3
from octavo.granularity import PerTensor, tiles_along
from octavo.kernels.layouts import multiply_tiles_
from octavo.kernels.moment_codes import encode_moment
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.private import pytree
from octavo.tensor.pair import COPIES, MOVES, PLAIN_LIKE, AtenRule
from octavo.weights.bucket import FLATTENED, BroadcastBucket, join
from octavo.weights.storable import uneven_experts, why_not_shardable

aten = torch.ops.aten


def _view(func: Any, weight: Any, size: Any) -> Any:
    size = tuple(size)
    if size == (-1,) and weight.is_shard:  # by FSDP2: a shard's codes in a row, over the same storage
        return weight.with_tensors(weight.qdata.view(-1), weight.scale_inv)
    if size in ((-1,), (weight.numel(),)):
        return BroadcastBucket([weight.alias()])
    return weight.alias() if size == tuple(weight.shape) else NotImplemented  # so torch asks for a gradient's node


def _transpose(func: Any, weight: Any, *dims: int) -> Any:
    """Transpose experts that are stored [E, K, N], by ``weight.mT``, for products; their codes stay as they lie."""
    swaps = weight.ndim == 3 and {dim % 3 for dim in dims} == {1, 2}
    return weight.with_tensors(weight.qdata.mT, weight.scale_inv.mT) if swaps else NotImplemented


def _add(func: Any, weight: Any, other: Any, *, alpha: float = 1) -> Any:
    if weight.is_shard or not weight.facts.is_frozen or not isinstance(other, Tensor):
        return NotImplemented
    if func is aten.add_.Tensor:
        return add_adapter(weight, other, alpha)
    raise UnsupportedOpError(
        "an adapter can't be taken out of a weight that is stored in FP8, which was rounded when it was merged: load "
        "the weights again, or merge into a copy of the model"
    )


def _empty_like(func: Any, weight: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Apply the rule of empty_like, for Module.to_empty."""
    scale_inv = torch.ones_like(weight.scale_inv, device=device)  # FSDP2 copies even what is empty
    zeros = partial(torch.zeros_like, device=device)
    return weight.with_tensors(torch.empty_like(weight.qdata, device=device), scale_inv, zeros, dtype)


def _initialize(func: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply the rule of torch.nn.init's writes: to a plain weight, which is then cast."""
    return weight.write(func(torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), *args, **kwargs))


def _split(func: Any, weight: Any, size: int, dim: int = 0) -> list[Any]:
    total, dim = weight.shape[dim], dim % weight.ndim
    if weight.ndim == 3 and (dim or total % size):
        raise UnsupportedOpError(uneven_experts(weight))
    if weight.ndim == 2 and (why := why_not_shardable(weight.shape, weight.granularity, tiles_along(total, size), dim)):
        raise UnsupportedOpError(why)
    return [weight.shard(start, min(start + size, total), dim) for start in range(0, total, size)]


def _slice(func: Any, weight: Any, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    if not weight.is_shard or step != 1:
        return NotImplemented
    start, stop, _ = slice(start, stop).indices(weight.shape[dim])
    return weight.shard(start, stop, dim % weight.ndim)


def _pad(func: Any, weight: Any, pad: list[int], value: float = 0) -> Any:
    """Pad a shard that is smaller than others by rows or columns of zeros: torch sends shards of one size."""
    if value != 0 or weight.granularity != PerTensor():
        return NotImplemented
    codes = F.pad(weight.qdata.view(torch.uint8), pad).view(weight.qdata.dtype)
    return weight.with_tensors(codes, weight.scale_inv, lambda extra_bits: F.pad(extra_bits, pad))


def _send(func: Any, outputs: list[Any], *arguments: Any) -> Any:
    """Fill ``outputs`` by collectives: of codes, of scales and, where the weight may be trained, of ``extra_bits``."""
    kind, received = type(outputs[0]), [output.clone() for output in outputs]
    names = ["qdata", "scale_inv"]
    if not outputs[0].facts.is_frozen:
        names.append("extra_bits")
        for weight in filter(lambda leaf: isinstance(leaf, kind), pytree.tree_leaves((received, *arguments))):
            if weight.extra_bits is None:  # another rank may have one
                weight.extra_bits = torch.zeros_like(weight.qdata, dtype=torch.int8)
    for name in names:
        as_bytes = partial(lambda name, weight: getattr(weight, name).view(torch.uint8), name)  # gloo sends no E8M0
        *_, work = func(*pytree.tree_map_only(kind, as_bytes, (received, *arguments)))
        work.wait()
    for output, received_weight in zip(outputs, received, strict=True):
        output.write(received_weight)
    return outputs, work


def _new_zeros(func: Any, weight: Any, size: Any, **options: Any) -> Any:
    """Return a shard of zeros with the whole weight's scale, which it keeps on a rank without rows."""
    if tuple(size[1:]) != tuple(weight.shape[1:]):
        raise UnsupportedOpError("weights that are stored in FP8 are sharded by rows: fully_shard with Shard(0)")
    if options.get("dtype") not in (None, weight.dtype):
        return NotImplemented
    codes = torch.zeros(size, dtype=torch.uint8, device=weight.device).view(weight.qdata.dtype)
    scale_inv = weight.scale_inv
    scales = scale_inv.clone() if weight.has_one_scale else scale_inv.new_ones(weight.scales_shape(size))
    return weight.with_tensors(codes, scales, lambda extra_bits: extra_bits.new_zeros(size), is_shard=True)


def _new_empty(func: Any, weight: Any, size: Any, **_: Any) -> Any:
    """Return a plain tensor that stands for the shard of a rank without rows."""
    if weight.ndim == 3:
        raise UnsupportedOpError(uneven_experts(weight))
    if weight.is_shard and weight.granularity != PerTensor():
        raise UnsupportedOpError(
            f"blocks of 128 x 128 can't be sharded over so many ranks that the first get {tuple(weight.shape)} and the "
            "last nothing: shard over fewer (HSDP), or use a recipe with one scale a weight (dynamic, delayed)"
        )
    return torch.empty(size, dtype=weight.dtype, device=weight.device) if 0 in size else NotImplemented


def _refuse_bytes(func: Any, weight: Any, dtype: torch.dtype) -> Any:
    """Raise UnsupportedOpError: DeepSpeed, for one, broadcasts weights as bytes, without their scales."""
    raise UnsupportedOpError(f"{weight.layer_name or 'weight'}.view({dtype}) {weight.REMEDY}. {FLATTENED}")


def add_adapter(weight: Any, delta: Tensor, alpha: float = 1) -> Any:
    """Add to a whole, frozen StoredWeight in place: in float32, then rounded to codes of a new scale, with a warning.

    Rounded stochastically (Gupta et al., arXiv 1502.02551, section 4), by torch's seed: an adapter moves most elements
    by less than half a code's step, and to nearest these would not move at all: of a delta of 1 % of the weight, rms,
    less than half would be left.
    """
    warnings.warn(
        "an adapter is merged into weights that are stored in FP8, which rounds them once more (stochastically, as "
        "torch's seed has it); octavo.restore(model) before merging keeps what the weights' own dtype can hold",
        stacklevel=2,
    )
    tile, tensors = weight.granularity.tile, (weight.qdata, weight.scale_inv, delta.expand(weight.shape))
    for codes, scale_inv, change in zip(*tensors, strict=True) if weight.ndim == 3 else [tensors]:
        values = kernels.dequantize(codes, scale_inv, tile, torch.float32).add_(change, alpha=alpha)
        scale = scale_from_amax(kernels.amax(values, tile), E4M3.max, power_of_two=True, margin=0)
        bits = torch.randint(-(1 << 31), 1 << 31, values.shape, dtype=torch.int32, device=values.device)
        codes.view(torch.uint8).copy_(encode_moment(multiply_tiles_(values, scale, tile), E4M3, bits))
        scale_inv.copy_(scale_inv_from_scale(scale))
    if weight.extra_bits is not None:  # an optimizer waits for it
        weight.extra_bits.zero_()
    torch.autograd.graph.increment_version([weight.qdata])
    return weight


RULES: dict[Any, AtenRule] = {
    **dict.fromkeys(MOVES, lambda func, weight: weight.alias()),
    **COPIES,
    **PLAIN_LIKE,
    aten.view.default: _view,
    aten.view.dtype: _refuse_bytes,
    aten.transpose.int: _transpose,
    **dict.fromkeys((aten.add_.Tensor, aten.sub_.Tensor), _add),
    aten.empty_like.default: _empty_like,
    **dict.fromkeys((aten.uniform_.default, aten.normal_.default, aten.fill_.Scalar, aten.zero_.default), _initialize),
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.cat.default: join,
    aten.new_zeros.default: _new_zeros,
    aten.new_empty.default: _new_empty,
    aten.constant_pad_nd.default: _pad,
    aten.is_pinned.default: lambda func, weight, device=None: weight.qdata.is_pinned(),
    aten._pin_memory.default: lambda func, weight, device=None: weight.moved(torch.Tensor.pin_memory),
}

if torch.distributed.is_available():  # some builds of torch have none
    c10d = torch.ops.c10d
    RULES |= dict.fromkeys((c10d.scatter_.default, c10d.broadcast_.default), _send)
