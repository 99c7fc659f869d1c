"""Pairs, and their product in float64."""

import torch
from torch import Tensor

from octavo import kernels
from octavo.granularity import Granularity
from tests.support import definitions

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Pair = tuple[Tensor, Tensor]


def pair(x: Tensor, granularity: Granularity, fmt: torch.dtype = E4M3, power_of_two: bool = False) -> Pair:
    qdata, _, scale_inv, _, _ = kernels.cast(x, None, 0, fmt, granularity.tile, power_of_two, 0)
    return qdata, scale_inv


def exact_product(a: Pair, a_g: Granularity, b: Pair, b_g: Granularity) -> Tensor:
    return definitions.dequantize(*a, a_g.tile) @ definitions.dequantize(*b, b_g.tile).t()


def product(
    a: Pair, a_g: Granularity, b: Pair, b_g: Granularity, out: torch.dtype = torch.float32, bias: Tensor | None = None
) -> Tensor:
    result = kernels.matmul(*a, a_g.tile, *b, b_g.tile, bias, out, False)
    assert result.dtype == out and result.is_contiguous()
    return result


def uneven(rows: int, cols: int) -> Tensor:
    """Normal values whose rows and columns differ in size, so that a scale from the wrong tile is seen."""
    return torch.randn(rows, cols) * (1 + torch.arange(cols) // 3 % 4) * (1 + torch.arange(rows) // 5 % 3)[:, None]
