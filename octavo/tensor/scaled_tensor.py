"""ScaledTensor: the pair (qdata, scale_inv) as one torch.Tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.formats import HIGH_PRECISION, format_of
from octavo.granularity import ALL, Granularity, PerBlock, PerRow, PerTensor, Tile
from octavo.tensor.pair import Pair


class ScaledTensor(Pair):
    """An FP8 tensor: value = qdata x scale_inv.

    Invariant, checked by ``validate`` and kept by every operation:

    - ``qdata`` is float8_e4m3fn or float8_e5m2 and has this tensor's shape and strides;
    - ``scale_inv`` is float32 on the same device, of shape ``granularity.scale_shape(shape)``;
    - whatever writes the codes writes their scale_inv, and nothing changes the one without the other.

    ``dtype`` is what it reads back to, not what it is stored in. Operations that move data (views, copies, devices)
    move both tensors; any other raises ``octavo.UnsupportedOpError`` by name. Nothing dequantises silently: call
    ``dequantize()``.

    Made by ``octavo.quantize``, or from its two tensors.

    Args:
        qdata: float8 codes, any shape.
        scale_inv: float32.
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
        """Make the facade."""
        layout: Any = {"strides": qdata.stride(), "storage_offset": qdata.storage_offset()}
        self = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device, **layout)
        self.qdata, self.scale_inv, self.granularity = qdata, scale_inv, granularity
        self.validate()
        return self

    def validate(self) -> None:
        """Check the invariant.

        Raises:
            TypeError, ValueError: naming both values.
        """
        format_of(self.qdata.dtype)
        if not isinstance(self.granularity, Granularity):
            raise TypeError(
                f"granularity={self.granularity!r} is none; use octavo.PerTensor(), PerRow() or PerBlock(r, c)"
            )
        if self.scale_inv.dtype != torch.float32:
            raise TypeError(f"scale_inv is {self.scale_inv.dtype}; it must be torch.float32")
        if self.dtype not in HIGH_PRECISION:
            raise TypeError(f"a ScaledTensor reads back to bfloat16, float16 or float32, not {self.dtype}")
        expected = self.granularity.scale_shape(self.qdata.shape)
        if tuple(self.scale_inv.shape) != expected:
            raise ValueError(
                f"scale_inv has shape {tuple(self.scale_inv.shape)}; {self.granularity} of qdata "
                f"{tuple(self.qdata.shape)} needs {expected}"
            )
        if self.scale_inv.device != self.qdata.device:
            raise ValueError(f"qdata is on {self.qdata.device}, scale_inv on {self.scale_inv.device}; move one")

    def dequantize(self) -> Tensor:
        """qdata x scale_inv as a plain tensor of this one's dtype and shape; gradients pass straight through."""
        return dequantized(self)

    def tile_amax(self) -> Tensor:
        """The amax of each tile of the values as stored: float32, shape of scale_inv."""
        if self.numel() == 0:
            return torch.zeros_like(self.scale_inv)
        tile = self.granularity.tile
        found = [kernels.amax(kernels.dequantize(q, s, tile, torch.float32), tile) for q, s in _matrices(self)]
        return torch.cat([amax.reshape(-1) for amax in found]).view(self.scale_inv.shape)

    def other_arguments(self, dtype: torch.dtype) -> tuple[Granularity, torch.dtype]:
        """See Pair."""
        return self.granularity, dtype

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func not in cls.RULES:  # composites (mT, chunk, to) arrive whole in inference mode
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        description = f"{self.format}, {self.granularity}, shape={tuple(self.shape)}, dtype={self.dtype}"
        if self.device.type != "cpu":
            description += f", device={self.device}"
        if self.requires_grad:
            description += ", requires_grad=True"
        return f"ScaledTensor({description}, {_amax_range(self)})"


def _amax_range(pair: ScaledTensor) -> str:
    """The smallest and largest amax over the granularity's tiles, as stored."""
    if pair.qdata.is_meta or type(pair.qdata) is not torch.Tensor:
        return "amax unknown"
    if pair.numel() == 0:
        return "empty"
    amax = pair.tile_amax()
    low, high = float(amax.min()), float(amax.max())
    return f"amax {high:g}" if low == high else f"amax {low:g} to {high:g}"


def dequantized(facade: Any) -> Tensor:
    """The values of a ScaledTensor, or of the one that ``facade.pair()`` gives; gradients flow to the facade."""
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
    """The pair, of at least one element, as 2-D pairs of codes and scale_inv."""
    matrices, scale_inv = matrices_of(pair.qdata, pair.granularity.tile), pair.scale_inv
    scales = scale_inv.reshape(len(matrices), -1, scale_inv.shape[-1] if scale_inv.ndim else 1)
    return list(zip(matrices, scales.unbind(0), strict=True))


def matrices_of(x: Tensor, tile: Tile) -> list[Tensor]:
    """x, of at least one element, as 2-D tensors that no tile crosses.

    One, unless the tiles of the leading dimensions would run together.
    """
    if x.ndim < 2:
        return [x.reshape(1, -1)]
    rows, cols = x.shape[-2:]
    if x.ndim == 2 or tile == (ALL, ALL) or tile[0] == 1 or (tile[0] != ALL and rows % tile[0] == 0):
        return [x.reshape(-1, cols)]
    return list(x.reshape(-1, rows, cols).unbind(0))


torch.serialization.add_safe_globals([ScaledTensor, PerTensor, PerRow, PerBlock])
