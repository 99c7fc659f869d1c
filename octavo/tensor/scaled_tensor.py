"""ScaledTensor: the pair (qdata, scale_inv) as one torch.Tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.formats import HIGH_PRECISION, Format, format_of
from octavo.granularity import Granularity, PerBlock, PerRow, PerTensor, granularity_of


class ScaledTensor(torch.Tensor):
    """An FP8 tensor: value = qdata x scale_inv.

    Invariant, checked by ``validate`` and kept by every operation:

    - ``qdata`` is float8_e4m3fn or float8_e5m2 and has this tensor's shape and strides;
    - ``scale_inv`` is float32 on the same device, of shape ``granularity.scale_shape(shape)``;
    - whatever writes the codes writes their scale_inv, and nothing changes the one without the other.

    ``dtype`` is what it reads back to, not what it is stored in. Operations that move data (views, copies, devices)
    move both parts; any other raises ``octavo.UnsupportedOpError`` by name. Nothing dequantises silently: call
    ``dequantize()``.

    Made by ``octavo.quantize``, or from its parts.

    Args:
        qdata: float8 codes, any shape.
        scale_inv: float32.
        granularity: which elements share a scale.
        dtype: bfloat16, float16 or float32.

    Raises:
        TypeError, ValueError: if the parts don't fit, with what they are.

    Example:
        >>> import torch
        >>> from octavo import E4M3, PerRow, quantize
        >>> quantize(torch.tensor([[1.0, 2.0], [3.0, 12.0]]), E4M3, PerRow())
        ScaledTensor(E4M3, PerRow(), shape=(2, 2), dtype=torch.float32, amax 2 to 12)
    """

    qdata: Tensor
    scale_inv: Tensor
    granularity: Granularity

    @staticmethod
    def __new__(
        cls, qdata: Tensor, scale_inv: Tensor, granularity: Granularity, dtype: torch.dtype = torch.bfloat16
    ) -> ScaledTensor:
        """Make the facade; ``__init__`` validates it."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            qdata.shape,
            strides=qdata.stride(),
            storage_offset=qdata.storage_offset(),
            dtype=dtype,
            device=qdata.device,
            requires_grad=False,
        )
        self.qdata, self.scale_inv, self.granularity = qdata, scale_inv, granularity
        return self

    def __init__(
        self, qdata: Tensor, scale_inv: Tensor, granularity: Granularity, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.validate()

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

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return format_of(self.qdata.dtype)

    def dequantize(self) -> Tensor:
        """qdata x scale_inv as a plain tensor of this one's dtype and shape; gradients pass straight through."""
        from octavo.tensor.conversions import dequantize

        return dequantize(self)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Granularity, torch.dtype]]:
        return ["qdata", "scale_inv"], (self.granularity, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Granularity, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> ScaledTensor:
        granularity, dtype = context
        return ScaledTensor(inner["qdata"], inner["scale_inv"], granularity, dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        from octavo.tensor.aten_table import dispatch

        return dispatch(func, args, kwargs or {})

    # torch functions go straight to aten: the table decides there
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., ScaledTensor], tuple[Any, ...]]:
        # as bytes: plain pickle can't load a float8 storage (torch 2.13)
        codes, code_dtype = self.qdata.view(torch.uint8), self.qdata.dtype
        return rebuild_scaled_tensor, (
            codes,
            code_dtype,
            self.scale_inv,
            self.granularity.tile,
            self.dtype,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
        )

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
    from octavo.tensor.conversions import amax_of

    amax = amax_of(pair)
    low, high = float(amax.min()), float(amax.max())
    return f"amax {high:g}" if low == high else f"amax {low:g} to {high:g}"


def rebuild_scaled_tensor(
    codes: Tensor,
    code_dtype: torch.dtype,
    scale_inv: Tensor,
    tile: tuple[int, int],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
) -> ScaledTensor:
    """Unpickle a ScaledTensor from its parts; they are validated like any."""
    pair = ScaledTensor(codes.view(code_dtype), scale_inv, granularity_of(tile), dtype)
    if is_parameter:
        return torch.nn.Parameter(pair, requires_grad)  # type: ignore[return-value]
    return pair.requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals([ScaledTensor, rebuild_scaled_tensor, PerTensor, PerRow, PerBlock])
