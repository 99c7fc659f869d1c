"""How aten ops move a ScaledTensor: its ``RULES``. Views cut only between tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedOpError
from octavo.granularity import ALL, Granularity, scale_shape, tiles_along
from octavo.tensor.pair import COPIES, MOVES
from octavo.tensor.scaled_tensor import ScaledTensor

aten = torch.ops.aten


def _like(pair: ScaledTensor, qdata: Tensor, scale_inv: Tensor, granularity: Granularity | None = None) -> ScaledTensor:
    return ScaledTensor(qdata, scale_inv, granularity or pair.granularity, pair.dtype)


def _permute(func: Any, pair: ScaledTensor, *dims: Any) -> ScaledTensor:
    qdata, scale_inv = func(pair.qdata, *dims), func(pair.scale_inv, *dims)
    ndim, (rows, cols) = pair.ndim, pair.granularity.tile
    # a tensor of sizes 0, 1, 2, ... tells which dimension comes to stand at each place
    order = list(func(torch.empty(tuple(range(ndim)), device="meta"), *dims).shape)
    last, second_last = ndim - 1, ndim - 2
    if ndim < 2 or rows == cols == ALL or order[-2:] == [second_last, last] or (rows == 1 and order[-1] == last):
        return _like(pair, qdata, scale_inv)
    if order[-2:] == [last, second_last]:
        return _like(pair, qdata, scale_inv, pair.granularity.transposed())
    raise UnsupportedOpError(
        f"{func} of dimensions {tuple(dims)} would mix the tiles of {pair.granularity}; exchange the last two "
        "dimensions, or call .dequantize() first"
    )


def _view(func: Any, pair: ScaledTensor, shape: Sequence[int]) -> ScaledTensor:
    qdata = func(pair.qdata, shape)
    new, old, tile = qdata.shape, pair.shape, pair.granularity.tile
    if tile == (ALL, ALL):
        return _like(pair, qdata, pair.scale_inv.view(scale_shape(new, tile)))
    kept = 1 if tile[0] == 1 else 2  # trailing dimensions that the tiles reach over
    if new == old or (len(new) >= kept and len(old) >= kept and new[len(new) - kept :] == old[len(old) - kept :]):
        return _like(pair, qdata, pair.scale_inv.view(scale_shape(new, tile)))
    raise UnsupportedOpError(
        f"{func} from {tuple(old)} to {tuple(new)} would cut through the tiles of {pair.granularity}; keep the last "
        f"{kept} dimension(s), or call .dequantize() first"
    )


def _slice(
    func: Any, pair: ScaledTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ScaledTensor:
    dim %= pair.ndim
    size = pair.shape[dim]
    start, stop, _ = slice(start, end).indices(size)
    if stop <= start:  # nothing, which cuts no tile
        start = stop = 0
    qdata = func(pair.qdata, dim, start, stop, step)
    rows, cols = pair.granularity.tile
    tile = ALL if rows == cols == ALL else {pair.ndim - 1: cols, pair.ndim - 2: rows}.get(dim, 1)
    if tile == ALL:
        return _like(pair, qdata, pair.scale_inv)
    if tile != 1 and (start % tile or step != 1):
        raise UnsupportedOpError(
            f"slice [{start}:{stop}:{step}] of dimension {dim} would cut through the tiles of {pair.granularity}; "
            f"start at a multiple of {tile} with step 1, or call .dequantize() first"
        )
    scale_inv = func(pair.scale_inv, dim, start // tile, tiles_along(stop, tile), step)
    return _like(pair, qdata, scale_inv)


def _split(func: Any, pair: ScaledTensor, sizes: Any, dim: int = 0) -> tuple[ScaledTensor, ...]:
    pairs, start = [], 0
    for codes in func(pair.qdata, sizes, dim):  # torch checks the sizes
        stop = start + codes.shape[dim]
        pairs.append(_slice(aten.slice.Tensor, pair, dim, start, stop))
        start = stop
    return tuple(pairs)


def _as_strided(
    func: Any, pair: ScaledTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> ScaledTensor:
    same = (
        tuple(size) == tuple(pair.shape) and tuple(stride) == pair.stride() and offset in (None, pair.storage_offset())
    )
    if same:
        return _like(pair, pair.qdata, pair.scale_inv)
    if pair.granularity.tile == (ALL, ALL):
        qdata = func(pair.qdata, size, stride, pair.storage_offset() if offset is None else offset)
        return _like(pair, qdata, pair.scale_inv.view(scale_shape(qdata.shape, (ALL, ALL))))
    raise UnsupportedOpError(
        f"{func} with another layout than its own would cut through the tiles of {pair.granularity}; use view, slice "
        "or transpose, or call .dequantize() first"
    )


def _copy(func: Any, target: Tensor, source: Tensor, *non_blocking: bool) -> Tensor:
    if not (isinstance(target, ScaledTensor) and isinstance(source, ScaledTensor)):
        remedy = "octavo.quantize(source, ...)" if isinstance(target, ScaledTensor) else "source.dequantize()"
        raise UnsupportedOpError(f"copy_ between a ScaledTensor and a plain tensor converts silently; copy {remedy}")
    for name in ("shape", "granularity", "format"):
        if getattr(target, name) != getattr(source, name):
            raise ValueError(f"copy_: {name} is {getattr(target, name)} here and {getattr(source, name)} in the source")
    func(target.qdata, source.qdata, *non_blocking)
    func(target.scale_inv, source.scale_inv, *non_blocking)
    return target


ScaledTensor.RULES = {
    **MOVES,
    **COPIES,
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _permute),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    aten.slice.Tensor: _slice,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    aten.as_strided.default: _as_strided,
    aten.copy_.default: _copy,
}
