"""ScaledTensor, the pair (qdata, scale_inv) as one torch.Tensor, and quantize, which makes it.

Both have gradients here, and not in autograd/: the pair must be differentiable wherever it goes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.errors import UnsupportedOpError
from octavo.formats import CAST_FORMATS, HIGH_PRECISION, Format, format_of
from octavo.granularity import (
    ALL,
    NV,
    Granularity,
    PerBlock,
    PerRow,
    PerTensor,
    Tile,
    check_packed,
    scale_shape,
    tiles_along,
)
from octavo.kernels.layouts import unpacked_shape
from octavo.numerics import E8M0, check_scale_options, scale_inv_dtype
from octavo.tensor.pair import COPIES, MOVES, Pair, moves


class ScaledTensor(Pair):
    """An FP8 tensor: value = qdata x scale_inv.

    Invariant, checked by ``validate`` and kept by every operation:

    - ``qdata`` is float8_e4m3fn or float8_e5m2 and has this tensor's shape and strides; or it is float4_e2m1fn_x2, of
      which the last dimension is half as long, as two codes lie in a byte;
    - ``scale_inv`` is float32, or powers of two in E8M0 (torch.float8_e8m0fnu), or of NVFP4 bfloat16, on the same
      device, of shape ``granularity.scale_shape(shape)``;
    - whatever writes the codes writes their scale_inv, and nothing changes the one without the other.

    ``dtype`` is what it reads back to, not what it is stored in. Operations that move data (views, copies, devices)
    move both tensors; any other raises ``octavo.UnsupportedOpError`` by name. Nothing dequantises silently: call
    ``dequantize()``.

    Made by ``octavo.quantize``, or from its two tensors.

    Args:
        qdata: float8 codes, any shape.
        scale_inv: float32 or float8_e8m0fnu.
        granularity: which elements share a scale.
        dtype: bfloat16, float16 or float32.

    Raises:
        TypeError, ValueError: if the two don't fit, with what they are.

    Example:
        >>> import torch
        >>> from octavo import E4M3, PerRow, quantize
        >>> quantize(torch.tensor([[1.0, 2.0], [3.0, 12.0]]), E4M3, PerRow())
        ScaledTensor(E4M3, PerRow(), shape=(2, 2), dtype=torch.float32, amax 2 to 12)
    """

    granularity: Granularity
    REMEDY = "is not defined for a ScaledTensor and nothing dequantises silently; call .dequantize() on it first"

    @staticmethod
    def __new__(
        cls, qdata: Tensor, scale_inv: Tensor, granularity: Granularity, dtype: torch.dtype = torch.bfloat16
    ) -> ScaledTensor:
        layout: Any = {"strides": qdata.stride(), "storage_offset": qdata.storage_offset()}
        if (shape := unpacked_shape(qdata.shape, qdata.dtype)) != qdata.shape:
            layout = {}
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device, **layout)
        self.qdata, self.scale_inv, self.granularity = qdata, scale_inv, granularity
        self.validate()
        return self

    def validate(self) -> None:
        """Check the invariant; TypeError or ValueError names both values."""
        format_of(self.qdata.dtype)
        if not isinstance(self.granularity, Granularity):
            raise TypeError(f"granularity={self.granularity!r} is none; use PerTensor(), PerRow() or PerBlock(r, c)")
        dtypes = (torch.float32, torch.bfloat16) if self.format.is_packed else (torch.float32, E8M0)
        if self.scale_inv.dtype not in dtypes:
            raise TypeError(f"scale_inv is {self.scale_inv.dtype}; of {self.format} it is {dtypes[0]} or {dtypes[1]}")
        if self.dtype not in HIGH_PRECISION:
            raise TypeError(f"a ScaledTensor reads back to bfloat16, float16 or float32, not {self.dtype}")
        shape, qdata_shape = tuple(self.scale_inv.shape), tuple(self.qdata.shape)
        if shape != (expected := self.granularity.scale_shape(self.shape)):
            raise ValueError(f"scale_inv has shape {shape}; {self.granularity} of qdata {qdata_shape} needs {expected}")
        if self.scale_inv.device != self.qdata.device:
            raise ValueError(f"qdata is on {self.qdata.device}, scale_inv on {self.scale_inv.device}; move one")

    def dequantize(self) -> Tensor:
        """Return qdata x scale_inv as a plain tensor of the same dtype and shape; gradients pass straight through."""
        return dequantized(self)

    def other_arguments(self, dtype: torch.dtype) -> tuple[Granularity, torch.dtype]:
        return self.granularity, dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        description = f"{self.format}, {self.granularity}, shape={tuple(self.shape)}, dtype={self.dtype}"
        if self.device.type != "cpu":
            description += f", device={self.device}"
        if self.requires_grad:
            description += ", requires_grad=True"
        return f"ScaledTensor({description}, {_amax_range(self)})"


def _amax_range(pair: ScaledTensor) -> str:
    """Return a text of the smallest and largest amax over the granularity's tiles, as stored."""
    if pair.qdata.is_meta or type(pair.qdata) is not torch.Tensor:
        return "amax unknown"
    if pair.numel() == 0:
        return "empty"
    tile = pair.granularity.tile
    amaxes = [kernels.amax(kernels.dequantize(q, s, tile, torch.float32), tile) for q, s in _matrices(pair)]
    low, high = float(min(amax.min() for amax in amaxes)), float(max(amax.max() for amax in amaxes))
    return f"amax {high:g}" if low == high else f"amax {low:g} to {high:g}"


def dequantized(facade: Any) -> Tensor:
    """Return the values of a ScaledTensor, or of that which ``facade.pair()`` returns; gradients flow to the facade."""
    return _Dequantize.apply(facade)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, facade: Any) -> Tensor:
        pair = facade if isinstance(facade, ScaledTensor) else facade.pair()
        if pair.numel() == 0:
            return pair.qdata.new_empty(pair.shape, dtype=pair.dtype)
        values = [kernels.dequantize(q, s, pair.granularity.tile, pair.dtype) for q, s in _matrices(pair)]
        return (values[0] if len(values) == 1 else torch.stack(values)).view(pair.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _matrices(pair: ScaledTensor) -> list[tuple[Tensor, Tensor]]:
    """Return the pair, of at least one element, as 2-D pairs of codes and scale_inv."""
    matrices, scale_inv = matrices_of(pair.qdata, pair.granularity.tile), pair.scale_inv
    scales = scale_inv.reshape(len(matrices), -1, scale_inv.shape[-1] if scale_inv.ndim else 1)
    return list(zip(matrices, scales.unbind(0), strict=True))


def matrices_of(x: Tensor, tile: Tile) -> list[Tensor]:
    """Return x, of at least one element, as 2-D tensors that no tile crosses.

    One, unless the tiles of the leading dimensions would run together.
    """
    if x.ndim < 2:
        return [x.reshape(1, -1)]
    rows, cols = x.shape[-2:]
    if x.ndim == 2 or tile == (ALL, ALL) or tile[0] == 1 or (tile[0] != ALL and rows % tile[0] == 0):
        return [x.reshape(-1, cols)]
    return list(x.reshape(-1, rows, cols).unbind(0))


def quantize(
    x: Tensor, format: Format, granularity: Granularity, power_of_two: bool = False, margin: int = 0
) -> ScaledTensor:
    """Round ``x`` to FP8 with scales from its own amax.

    The gradient is straight-through: that of the result where the scaled value is within the format's range, 0 where
    it was clipped (which takes a NaN or infinite element: a scale from the tensor's own amax clips no finite one; of
    E2M1, whose blocks' scales are rounded, elements saturate, and keep their gradient).

    Args:
        x: bfloat16, float16 or float32, any shape.
        format: octavo.E4M3 or octavo.E5M2; or octavo.E2M1, which is NVFP4.
        granularity: PerTensor(), PerRow() or PerBlock(rows, cols), over the last two dimensions; of E2M1
            PerBlock(1, 16) or (16, 16).
        power_of_two: round scales down to powers of two; of E2M1 that of the tensor, which always is one.
        margin: divide scales by 2^margin.

    Returns:
        a ScaledTensor of x's shape and dtype; qdata is contiguous.

    Raises:
        TypeError: for another dtype, or arguments of the wrong kind.
        ValueError: for E2M1 in other blocks, or of another tensor than a matrix whose rows are multiples of 16.

    Example:
        >>> import torch, octavo
        >>> q = octavo.quantize(torch.randn(300, 256), octavo.E4M3, octavo.PerBlock(128, 128), power_of_two=True)
        >>> q.qdata.dtype, q.scale_inv.shape
        (torch.float8_e4m3fn, torch.Size([3, 2]))
    """
    if isinstance(x, ScaledTensor):
        raise TypeError("x is a ScaledTensor already; quantize x.dequantize() to change its granularity")
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"octavo casts bfloat16, float16 and float32 tensors to FP8, not {kind}")
    if not isinstance(format, Format) or format not in CAST_FORMATS.values():
        raise TypeError(f"format={format!r}: use octavo.E4M3, octavo.E5M2 or octavo.E2M1")
    if not isinstance(granularity, Granularity):
        raise TypeError(f"granularity={granularity!r}: use octavo.PerTensor(), PerRow() or PerBlock(rows, cols)")
    check_scale_options(power_of_two, margin)
    if format.is_packed:
        check_packed(granularity, power_of_two)
        if x.ndim != 2 or x.shape[1] % NV[1]:
            raise ValueError(f"E2M1 of shape {list(x.shape)}: give a matrix [R, C] whose C is a multiple of 16")
    return _Quantize.apply(x, format, granularity, power_of_two, margin)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, format: Format, granularity: Granularity, power_of_two: bool, margin: int
    ) -> ScaledTensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None)
        tile = granularity.tile
        if x.numel() == 0:
            dtype = scale_inv_dtype(tile, power_of_two, format.is_packed)
            scale_inv = x.new_ones(granularity.scale_shape(x.shape), dtype=dtype)
            codes_shape = (x.shape[0], x.shape[1] // 2) if format.is_packed else x.shape
            return ScaledTensor(x.new_empty(codes_shape, dtype=format.dtype), scale_inv, granularity, x.dtype)
        arguments = None, 0, format.dtype, tile, power_of_two, margin, False, NV[1] if format.is_packed else 1
        results = [kernels.cast(matrix, *arguments) for matrix in matrices_of(x, tile)]
        codes, _, scales, *_ = zip(*results, strict=True)
        qdata = codes[0] if len(codes) == 1 else torch.stack([q.view(torch.uint8) for q in codes]).view(format.dtype)
        scale_inv = scales[0] if len(scales) == 1 else torch.stack(scales)
        qdata = qdata if format.is_packed else qdata.view(x.shape)
        return ScaledTensor(qdata, scale_inv.view(granularity.scale_shape(x.shape)), granularity, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return torch.where(torch.isfinite(x), grads[0], 0), None, None, None, None


torch.serialization.add_safe_globals([ScaledTensor, PerTensor, PerRow, PerBlock])


# --- How aten ops move a ScaledTensor: its ``RULES``. Views cut only between tiles.

aten = torch.ops.aten


def _like(pair: ScaledTensor, qdata: Tensor, scale_inv: Tensor, granularity: Granularity | None = None) -> ScaledTensor:
    return ScaledTensor(qdata, scale_inv, granularity or pair.granularity, pair.dtype)


def _cuts_tiles(what: str, pair: ScaledTensor, remedy: str) -> UnsupportedOpError:
    """Return the error of a view that would have a part of a tile."""
    tiles = f"the tiles of {pair.granularity}"
    return UnsupportedOpError(f"{what} would cut through {tiles}; {remedy}, or call .dequantize() first")


def _permute(func: Any, pair: ScaledTensor, *dims: Any) -> ScaledTensor:
    if pair.format.is_packed:  # codes of which two share a byte lie along one dimension
        return NotImplemented
    qdata, scale_inv = func(pair.qdata, *dims), func(pair.scale_inv, *dims)
    ndim, (rows, cols) = pair.ndim, pair.granularity.tile
    # a tensor of sizes 0, 1, 2, ... tells which dimension comes to stand at each place
    order = list(func(torch.empty(tuple(range(ndim)), device="meta"), *dims).shape)
    last, second_last = ndim - 1, ndim - 2
    if ndim < 2 or rows == cols == ALL or order[-2:] == [second_last, last] or (rows == 1 and order[-1] == last):
        return _like(pair, qdata, scale_inv)  # tiles lie as before
    if order[-2:] == [last, second_last]:
        return _like(pair, qdata, scale_inv, pair.granularity.transposed())
    remedy = "exchange the last two dimensions, or call .dequantize() first"
    raise UnsupportedOpError(f"{func} of {tuple(dims)} would mix the tiles of {pair.granularity}; {remedy}")


def _view(func: Any, pair: ScaledTensor, shape: Sequence[int]) -> ScaledTensor:
    if pair.format.is_packed:
        return moves(func, pair, shape)
    qdata = func(pair.qdata, shape)
    new, old, tile = qdata.shape, pair.shape, pair.granularity.tile
    tiled = 0 if tile == (ALL, ALL) else 1 if tile[0] == 1 else 2  # so many of the last dimensions are cut into tiles
    keeps_tiled = min(len(new), len(old)) >= tiled and new[len(new) - tiled :] == old[len(old) - tiled :]
    if new != old and not keeps_tiled:
        raise _cuts_tiles(f"{func} from {tuple(old)} to {tuple(new)}", pair, f"keep the last {tiled} dimension(s)")
    grid = scale_shape(new, tile)
    if pair.numel() == 0 and pair.scale_inv.numel() != math.prod(grid):  # of tiles, which hold no element
        return _like(pair, qdata, pair.scale_inv.new_ones(grid))
    return _like(pair, qdata, pair.scale_inv.view(grid))


def _slice(
    func: Any, pair: ScaledTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ScaledTensor:
    dim %= pair.ndim
    if pair.format.is_packed and dim == pair.ndim - 1:
        return NotImplemented
    start, stop, _ = slice(start, end).indices(pair.shape[dim])
    if stop <= start:  # nothing, which cuts no tile
        start = stop = 0
    qdata = func(pair.qdata, dim, start, stop, step)
    rows, cols = pair.granularity.tile
    # a tile's length along the dimension that is sliced
    length = ALL if rows == cols == ALL else {pair.ndim - 1: cols, pair.ndim - 2: rows}.get(dim, 1)
    if length == ALL:
        return _like(pair, qdata, pair.scale_inv)
    if length != 1 and (start % length or step != 1):
        sliced = f"slice [{start}:{stop}:{step}] of dimension {dim}"
        raise _cuts_tiles(sliced, pair, f"start at a multiple of {length} with step 1")
    return _like(pair, qdata, func(pair.scale_inv, dim, start // length, tiles_along(stop, length), step))


def _split(func: Any, pair: ScaledTensor, sizes: Any, dim: int = 0) -> tuple[ScaledTensor, ...]:
    if pair.format.is_packed and dim % pair.ndim == pair.ndim - 1:
        return NotImplemented
    lengths = [codes.shape[dim] for codes in func(pair.qdata, sizes, dim)]  # torch checks the sizes
    ends = zip(lengths, itertools.accumulate(lengths), strict=True)
    return tuple(_slice(aten.slice.Tensor, pair, dim, end - length, end) for length, end in ends)


def _as_strided(
    func: Any, pair: ScaledTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> ScaledTensor:
    layout = tuple(size), tuple(stride), pair.storage_offset() if offset is None else offset
    if layout == (tuple(pair.shape), pair.stride(), pair.storage_offset()):
        return _like(pair, pair.qdata, pair.scale_inv)
    if pair.granularity.tile == (ALL, ALL):
        qdata = func(pair.qdata, *layout)
        return _like(pair, qdata, pair.scale_inv.view(scale_shape(qdata.shape, (ALL, ALL))))
    raise _cuts_tiles(f"{func} with another layout than its own", pair, "use view, slice or transpose")


def _copy(func: Any, target: Tensor, source: Tensor, *non_blocking: bool) -> Tensor:
    if not (isinstance(target, ScaledTensor) and isinstance(source, ScaledTensor)):
        remedy = "octavo.quantize(source, ...)" if isinstance(target, ScaledTensor) else "source.dequantize()"
        raise UnsupportedOpError(f"copy_ between a ScaledTensor and a plain tensor converts silently; copy {remedy}")
    for name in ("shape", "granularity", "format", "scale_inv.dtype"):
        here, there = map(attrgetter(name), (target, source))
        if here != there:
            raise ValueError(f"copy_: {name} is {here} here and {there} in the source")
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
