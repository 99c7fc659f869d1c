"""Parts of a weight that lives in FP8: the rules of the ops that torch makes a rank's part of a sharded weight with.

FSDP2 cuts it by rows, tensor parallelism by rows or columns. Per tensor a part has the scale of the whole; blocks have
to lie in one part each. Experts are cut between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.errors import UnsupportedOpError
from octavo.granularity import Granularity, PerTensor
from octavo.private import pytree
from octavo.tensor.fsdp2 import GatheredWeight
from octavo.tensor.pair import AtenRule, Facade, operands_of

aten = torch.ops.aten

BLOCK = 128


def why_not_cut(shape: torch.Size, granularity: Granularity, ranks: int, dim: int = 0) -> str | None:
    """Why a weight [N, K] that is stored so can't be sharded over ranks by its rows (columns: ``dim`` 1); or None."""
    size, part = shape[dim], -(-shape[dim] // ranks)
    if granularity == PerTensor() or part == size or not (part % BLOCK or size % part):
        return None
    what = "rows" if dim == 0 else "columns"
    return (
        f"a weight {tuple(shape)} stored in blocks of 128 x 128 can't be sharded over {ranks} ranks: {part} {what} "
        "each are no whole blocks, or the last rank has fewer. Shard over ranks that each get the same multiple of "
        f"128 {what} (HSDP), or use a recipe with one scale a weight (dynamic, delayed)"
    )


def why_cut(weight: Any, granularity: Granularity) -> str | None:
    """Why a DTensor can't be stored so on the ranks that it is sharded over: what may not be cut would be; or None."""
    ranks = [1] * max(weight.ndim, 2)
    for at, placement in enumerate(getattr(weight, "placements", ())):
        if (dim := getattr(placement, "dim", None)) is not None:
            ranks[dim] *= weight.device_mesh.size(at)
    if weight.ndim == 3:
        return uneven(weight) if weight.shape[0] % ranks[0] or max(ranks[1:]) > 1 else None
    found = [why_not_cut(weight.shape, granularity, of_dim, dim) for dim, of_dim in enumerate(ranks)]
    return found[0] or found[1]


def part_of(weight: Any, start: int, stop: int, dim: int = 0) -> Any:
    """Rows (columns: ``dim`` 1) start to stop as a part, with the same scale per tensor; of rows over the same codes.

    Raises:
        UnsupportedOpError: if a block reaches beyond them.
    """

    def own(tensor: Tensor, first: int = start, last: int = stop) -> Tensor:
        return tensor.narrow(dim, first, last - first).contiguous()

    scale_inv, rest = weight.scale_inv, None if weight.rest is None else own(weight.rest)
    if weight.ndim == 3:
        scale_inv = own(scale_inv)
    elif weight.granularity != PerTensor():
        if start % BLOCK or (stop % BLOCK and stop != weight.shape[dim]):
            what = "rows" if dim == 0 else "columns"
            raise UnsupportedOpError(f"{what} {start} to {stop} of {weight} are no whole blocks")
        scale_inv = own(scale_inv, start // BLOCK, -(-stop // BLOCK))
    return weight._like(own(weight.qdata), scale_inv, rest, is_shard=True)


@dataclass(eq=False)
class Known:
    """What is known of a weight in FP8 besides its pair. Its aliases, ``.data`` say, have the same one.

    Attributes:
        rest: int8 [N, K]: what the values that were cast are besides the codes.
        awaited: whether there is an optimizer that will take it, which a copy is not known to.
        is_frozen: whether it is of a parameter that is not trained.
        alone: whether the scale is this rank's, of a part whose ranks have to have one and same.
    """

    rest: Tensor | None = None
    awaited: bool = False
    is_frozen: bool = False
    alone: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Known, (self.rest, False, self.is_frozen, self.alone)


class OneScale:
    """What weights have in common of which a product reads all rows with one scale: an optimizer gives them one.

    Attributes:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count


def parts_of_one_scale(weight: Any, sizes: Sequence[int]) -> list[Any]:
    """Parts of so many rows, which keep one scale per tensor."""
    ends, common = list(itertools.accumulate(sizes)), OneScale(len(sizes))
    parts = [part_of(weight, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    for part in parts:
        part.common = common if weight.granularity == PerTensor() else None
    return parts


def _cat(func: Any, parts: list[Any], dim: int = 0) -> Any:
    """Parts of one weight by rows, for a product; its rest is an optimizer's alone."""
    first = parts[0]
    if any(isinstance(part, FlatWeights) for part in parts):
        return flat_cat(func, parts, dim)
    if dim != 0 or any(type(part) is not type(first) for part in parts):
        return NotImplemented
    codes = torch.cat([part.qdata.view(torch.uint8) for part in parts]).view(first.qdata.dtype)
    one = first.granularity == PerTensor()
    return first._like(codes, first.scale_inv if one else torch.cat([part.scale_inv for part in parts]))


def uneven(weight: Any) -> str:
    """Why these experts can't be sharded in other ways than as many on each rank."""
    return (
        f"{weight.shape[0]} experts that are stored in FP8 are sent with their scales, which FSDP2 takes of ranks that "
        "have as many each: shard by experts, Shard(0), over a number of ranks that divides them (HSDP)"
    )


def _split(func: Any, weight: Any, part: int, dim: int = 0) -> list[Any]:
    total, dim = weight.shape[dim], dim % weight.ndim
    if weight.ndim == 3 and (dim or total % part):
        raise UnsupportedOpError(uneven(weight))
    if weight.ndim == 2 and (why := why_not_cut(weight.shape, weight.granularity, -(-total // part), dim)):
        raise UnsupportedOpError(why)
    return [part_of(weight, start, min(start + part, total), dim) for start in range(0, total, part)]


def _slice(func: Any, weight: Any, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    if not weight.is_shard or step != 1:
        return NotImplemented
    start, stop, _ = slice(start, stop).indices(weight.shape[dim])
    return part_of(weight, start, stop, dim % weight.ndim)


def _pad(func: Any, weight: Any, pad: list[int], value: float = 0) -> Any:
    """Rows or columns of zeros behind a part that is smaller than the others: torch sends parts of one size."""
    if value != 0 or weight.granularity != PerTensor():
        return NotImplemented
    codes = F.pad(weight.qdata.view(torch.uint8), pad).view(weight.qdata.dtype)
    return weight._like(codes, weight.scale_inv, None if weight.rest is None else F.pad(weight.rest, pad))


def _send(func: Any, outputs: list[Any], *arguments: Any) -> Any:
    """A collective that fills ``outputs``: of codes, of scales and, where it may be trained, of the rest."""
    kind, received = type(outputs[0]), [output.clone() for output in outputs]
    of: list[Callable[[Any], Tensor]] = [lambda weight: weight.qdata.view(torch.uint8), lambda weight: weight.scale_inv]
    if not outputs[0].known.is_frozen:
        for weight in filter(lambda one: isinstance(one, kind), pytree.tree_leaves((received, *arguments))):
            if weight.rest is None:  # another rank may have one
                weight.rest = torch.zeros_like(weight.qdata, dtype=torch.int8)
        of.append(lambda weight: weight.rest)
    for tensor in of:
        *_, work = func(*pytree.tree_map_only(kind, tensor, (received, *arguments)))
        work.wait()
    for output, found in zip(outputs, received, strict=True):
        output.take(found)
    return outputs, work


def _new_zeros(func: Any, weight: Any, size: Any, **options: Any) -> Any:
    """A shard of zeros, with the whole one's scale: of a rank without rows it stays that."""
    if tuple(size[1:]) != tuple(weight.shape[1:]):
        raise UnsupportedOpError("weights that are stored in FP8 are sharded by rows: fully_shard with Shard(0)")
    if options.get("dtype") not in (None, weight.dtype):
        return NotImplemented
    codes = torch.zeros(size, dtype=torch.uint8, device=weight.device).view(weight.qdata.dtype)
    rest = None if weight.rest is None else weight.rest.new_zeros(size)
    scale_inv = weight.scale_inv.clone()
    if weight.granularity != PerTensor() or weight.ndim == 3:
        scale_inv = scale_inv.new_ones(weight.granularity.of_matrices(size).scale_shape(size))
    return weight._like(codes, scale_inv, rest, is_shard=True)


def _new_empty(func: Any, weight: Any, size: Any, **_: Any) -> Any:
    """What stands for the shard of a rank without rows."""
    if weight.ndim == 3:
        raise UnsupportedOpError(uneven(weight))
    if weight.is_shard and weight.granularity != PerTensor():
        raise UnsupportedOpError(
            f"blocks of 128 x 128 can't be sharded over so many ranks that the first get {tuple(weight.shape)} and the "
            "last nothing: shard over fewer (HSDP), or use a recipe with one scale a weight (dynamic, delayed)"
        )
    return torch.empty(size, dtype=weight.dtype, device=weight.device) if 0 in size else NotImplemented


def _cat_gathered(func: Any, parts: list[GatheredWeight], dim: int = 0) -> Any:
    """The same of parts that FSDP2 has gathered."""
    first = parts[0]
    if dim != 0:
        return NotImplemented
    q = torch.cat([part.qdata.view(torch.uint8) for part in parts]).view(first.qdata.dtype)
    scales = first.scale_inv if first.scale_inv.shape == (1, 1) else torch.cat([part.scale_inv for part in parts])
    rows, columns = sum(part.shape[0] for part in parts), first.shape[1]
    padded = q.shape[1] != columns or any(part.transposed_qdata.shape[1] != part.shape[0] for part in parts)  # type: ignore[union-attr]
    operands = operands_of(q[:, :columns], scales, padded)._replace(amax=first.found_amax)
    return GatheredWeight(operands, (rows, columns), first.dtype, first.casts)


GatheredWeight.RULES[aten.cat.default] = _cat_gathered
PARTS: dict[Any, AtenRule] = {
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.new_zeros.default: _new_zeros,
    aten.new_empty.default: _new_empty,
    aten.constant_pad_nd.default: _pad,
}
if torch.distributed.is_available():  # some builds of torch have none
    c10d = torch.ops.c10d
    PARTS |= dict.fromkeys((c10d.scatter_.default, c10d.broadcast_.default), _send)


class FlatWeights(Facade):
    """A vector [sum of elements] over ``parts``, of any shapes.

    One part is the weight itself, to which writes go; several are copies, as torch.cat's result is.
    """

    REMEDY = "of a vector of parameters, of which some are stored in FP8: read it with .dequantize()"
    parts: list[Any]

    @staticmethod
    def __new__(cls, parts: list[Any]) -> FlatWeights:
        """Make the facade."""
        size, first = sum(part.numel() for part in parts), parts[0]
        self = torch.Tensor._make_wrapper_subclass(cls, (size,), dtype=first.dtype, device=first.device)
        self.parts = parts
        return self

    def dequantize(self) -> Tensor:
        """Its values as a plain vector."""
        plain = [part.dequantize() if isinstance(part, Facade) else part for part in self.parts]
        return torch.cat([part.detach().reshape(-1) for part in plain])


def flat_cat(func: Any, tensors: list[Tensor], dim: int = 0) -> Any:
    """The rule of torch.cat of vectors."""
    parts = [part for one in tensors for part in getattr(one, "parts", [one])]
    return FlatWeights([part.clone() for part in parts]) if all(one.ndim == 1 for one in tensors) else NotImplemented


def _view(func: Any, flat: FlatWeights, size: Any) -> Any:
    if tuple(size) in ((-1,), tuple(flat.shape)):
        return FlatWeights(flat.parts)
    return func(flat.parts[0], size) if len(flat.parts) == 1 else NotImplemented


def _slice_flat(func: Any, flat: FlatWeights, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    """Of whole parts."""
    at, found = 0, []
    start, stop, _ = slice(start, stop).indices(flat.numel())
    for part in flat.parts:
        if start <= at and at + part.numel() <= stop:
            found.append(part)
        at += part.numel()
    if not found or step != 1 or sum(part.numel() for part in found) != stop - start:
        return NotImplemented
    return FlatWeights(found) if len(found) > 1 or isinstance(found[0], Facade) else found[0]


def _broadcast(func: Any, tensors: list[FlatWeights], *arguments: Any) -> Any:
    work = None
    for part in tensors[0].parts:
        if work is not None:
            work.wait()
        _, work = func([part], *arguments)
    return tensors, work


def _write(func: Any, flat: Any, *arguments: Any) -> Any:
    """The rule of writes: of values, a scalar's or another vector's, which its one part takes."""
    if not isinstance(flat, FlatWeights) or len(flat.parts) > 1:
        return NotImplemented
    func(flat.parts[0], *(one.view(flat.parts[0].shape) if isinstance(one, Tensor) else one for one in arguments))
    return flat


WRITES = (aten.uniform_.default, aten.normal_.default, aten.fill_.Scalar, aten.zero_.default)
FlatWeights.RULES = {
    **dict.fromkeys((aten.detach.default, aten.alias.default), lambda func, flat: FlatWeights(flat.parts)),
    aten.view.default: _view,
    aten.slice.Tensor: _slice_flat,
    aten.cat.default: flat_cat,
    **dict.fromkeys((aten.copy_.default, *WRITES), _write),
}
if torch.distributed.is_available():  # some builds of torch have none
    FlatWeights.RULES[torch.ops.c10d.broadcast_.default] = _broadcast
