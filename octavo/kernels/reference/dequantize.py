"""Read a pair back: value = qdata x scale_inv."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.reference.codes import decode


def dequantize(qdata: Tensor, scale_inv: Tensor, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``octavo::dequantize``."""
    return decode(qdata, dtype, scale_inv, tile).contiguous()
