"""quantize, and its gradient.

It stands here and not in autograd/ as dequantize() does, the pair's method, which has to be differentiable wherever a
ScaledTensor goes: imports point down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.formats import HIGH_PRECISION, Format
from octavo.granularity import Granularity
from octavo.tensor.scaled_tensor import ScaledTensor, matrices_of


def quantize(
    x: Tensor, format: Format, granularity: Granularity, power_of_two: bool = False, margin: int = 0
) -> ScaledTensor:
    """Round ``x`` to FP8 with scales from its own amax.

    The gradient is straight-through: that of the result where the scaled value is within the format's range, 0 where
    it was clipped (which takes a NaN or infinite element: a scale from the tensor's own amax clips no finite one).

    Args:
        x: bfloat16, float16 or float32, any shape.
        format: octavo.E4M3 or octavo.E5M2.
        granularity: PerTensor(), PerRow() or PerBlock(rows, cols), over the last two dimensions.
        power_of_two: round scales down to powers of two.
        margin: divide scales by 2^margin.

    Returns:
        a ScaledTensor of x's shape and dtype; qdata is contiguous.

    Raises:
        TypeError: for another dtype, or arguments of the wrong kind.

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
    if not isinstance(format, Format):
        raise TypeError(f"format={format!r}: use octavo.E4M3 or octavo.E5M2")
    if not isinstance(granularity, Granularity):
        raise TypeError(f"granularity={granularity!r}: use octavo.PerTensor(), PerRow() or PerBlock(rows, cols)")
    if not isinstance(margin, int) or not 0 <= margin <= 64:
        raise ValueError(f"margin={margin!r} must be an integer from 0 to 64")
    return _Quantize.apply(x, format, granularity, power_of_two, margin)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, format: Format, granularity: Granularity, power_of_two: bool, margin: int
    ) -> ScaledTensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None)
        tile = granularity.tile
        if x.numel() == 0:
            scale_inv = x.new_ones(granularity.scale_shape(x.shape), dtype=torch.float32)
            return ScaledTensor(x.new_empty(x.shape, dtype=format.dtype), scale_inv, granularity, x.dtype)
        codes, scales = [], []
        for matrix in matrices_of(x, tile):
            q, _, s, *_ = kernels.cast(matrix, None, 0, format.dtype, tile, power_of_two, margin)
            codes.append(q)
            scales.append(s)
        qdata = codes[0] if len(codes) == 1 else torch.stack([q.view(torch.uint8) for q in codes]).view(format.dtype)
        scale_inv = scales[0] if len(scales) == 1 else torch.stack(scales)
        return ScaledTensor(qdata.view(x.shape), scale_inv.view(granularity.scale_shape(x.shape)), granularity, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return torch.where(torch.isfinite(x), grads[0], 0), None, None, None, None
