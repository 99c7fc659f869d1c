"""The product of two pairs that is itself a pair: float32 results, cast."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.arguments import Operands, Output, Scaling
from octavo.kernels.reference.cast import both_layouts, known
from octavo.kernels.reference.chunked_cast import cast_values
from octavo.kernels.reference.matmul import matmul


def matmul_cast(operands: Operands, fast_accum: bool, scaling: Scaling, output: Output) -> tuple[Tensor, ...]:
    """``octavo::matmul_cast``."""
    codes, scale_inv, amax = cast_values(matmul(operands, torch.float32, fast_accum), known(scaling))
    return *both_layouts(codes, output), scale_inv, amax
