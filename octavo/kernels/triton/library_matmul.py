"""torch's own product of two pairs (cuBLAS), and whether a device computes it rightly, which the device is asked once.

What torch's product supports, and the layout that it wants scales in, differ between GPUs and between releases of
torch, and a wrong layout is a wrong result and no error. So before a kind of product is given to torch for the first
time, a small one, whose scales differ by row, column and block, must be what the reference computes. The answer holds
for the process; ``octavo info`` shows it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from octavo.granularity import ALL, Tile, granularity_of, scale_shape
from octavo.kernels.arguments import OperandPair, ProductArguments
from octavo.kernels.reference.matmul import matmul as reference_matmul
from octavo.kernels.triton.launch import LIBRARY, is_capturing

_logger = logging.getLogger("octavo")
_TENSOR, _ROW, _BLOCK = (ALL, ALL), (1, ALL), (1, 128)

# What torch's product calls a tile; those of blocks are for Hopper.
_SCALINGS = {
    _TENSOR: ScalingType.TensorWise,
    _ROW: ScalingType.RowWise,
    _BLOCK: ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
}
_ERROR = 0.02  # of any row or column: bfloat16 rounds by 0.002, Hopper's short accumulator by some 0.005
_known: dict[tuple[Any, ...], bool] = {}


def is_right(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> bool:
    """Whether torch's product takes these operands, and computes such ones rightly on their device."""
    if not takes(operands, out_dtype):
        return False
    a, b, bias = operands
    kind = a.codes.device, a.tile, b.tile, a.codes.dtype, b.codes.dtype, out_dtype, bias is not None, fast_accum
    found = _known.get(kind)
    if found is None:
        if is_capturing():  # a graph can't look at results
            return False
        found = _known[kind] = _agrees(*kind)
        verdict = "torch's" if found else "octavo's Triton kernel, for torch's is not right here"
        _logger.info("%s . %s on %s: %s", granularity_of(a.tile), granularity_of(b.tile), a.codes.device, verdict)
    return found


def _agrees(
    device: torch.device,
    a_tile: Tile,
    b_tile: Tile,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    out_dtype: torch.dtype,
    has_bias: bool,
    fast_accum: bool,
) -> bool:
    """Whether torch's product of a small case is the reference's, in every row and column."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = 144, 272  # two blocks of rows and three of columns, the last not whole
    terms = 384 if a_tile[1] != ALL or b_tile[1] != ALL else 272  # an odd number of blocks, or none

    def pair(count: int, tile: Tile, dtype: torch.dtype) -> OperandPair:
        codes = torch.randn(count, terms, generator=generator).to(dtype)
        scale_inv = torch.exp2(4 * torch.rand(scale_shape(codes.shape, tile), generator=generator))
        return OperandPair(codes, scale_inv, tile)

    bias = torch.randn(cols, generator=generator) * 100 if has_bias else None
    case = ProductArguments(pair(rows, a_tile, a_dtype), pair(cols, b_tile, b_dtype), bias)
    a, b = (OperandPair(codes.to(device), scale_inv.to(device), tile) for codes, scale_inv, tile in case[:2])
    there = ProductArguments(a, b, None if bias is None else bias.to(device))
    true = reference_matmul(case, torch.float32, False)
    try:
        found = library_matmul(there, out_dtype, fast_accum).to("cpu", torch.float32)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        _logger.info("torch's product: %s", str(error).partition("\n")[0])
        return False
    miss = found - true
    return all(bool((miss.norm(dim=dim) <= _ERROR * true.norm(dim=dim)).all()) for dim in (0, 1))


def library_kinds(device: torch.device) -> dict[str, bool]:
    """For each kind of product that configs.json gives to torch, whether the device computes it rightly."""
    found = {}
    for a_tile, b_tile, fast_accum in sorted(LIBRARY):
        name = f"{granularity_of(a_tile)} . {granularity_of(b_tile)}{', fast accumulation' * fast_accum}"
        dtypes = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16
        found[name] = _agrees(device, a_tile, b_tile, *dtypes, False, fast_accum)
    return found


def takes(operands: ProductArguments, out_dtype: torch.dtype) -> bool:
    """Whether torch's product has this case: what its checks and cuBLAS ask for."""
    (a, _, a_tile), (b, _, b_tile), bias = operands
    (M, K), N = a.shape, b.shape[0]
    if not (
        K % 16 == 0
        and N % 16 == 0
        and a.stride() == b.stride() == (K, 1)
        and M * N * K > 0
        and not (a.dtype is torch.float8_e5m2 and b.dtype is torch.float8_e5m2)
    ):
        return False
    if a_tile == b_tile == _TENSOR:
        return out_dtype is torch.bfloat16 or bias is None
    if out_dtype is not torch.bfloat16:
        return False
    # the scales of 1x128 blocks lie row by row, in sixteens of bytes
    aligned = all(tile != _BLOCK or rows % 4 == 0 for tile, rows in ((a_tile, M), (b_tile, N)))
    return (a_tile == b_tile == _ROW) or (aligned and K % 128 == 0)


def library_matmul(operands: ProductArguments, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """torch's product, for what ``takes``."""
    a, b, bias = operands
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        laid_scale_inv(a.scale_inv, a.tile, 1),
        _SCALINGS[a.tile],
        laid_scale_inv(b.scale_inv, b.tile, 0),
        _SCALINGS[b.tile],
        bias=None if bias is None else bias.to(out_dtype).contiguous(),
        output_dtype=out_dtype,
        use_fast_accum=fast_accum and a.tile[1] == ALL,  # blocks have none
    )


def laid_scale_inv(scale_inv: Tensor, tile: Tile, dim: int) -> Tensor:
    """scale_inv laid as torch's product wants it.

    Args:
        scale_inv: [1, 1], [rows, 1] for rows, [row blocks, blocks along K] for blocks.
        tile: of the operand, the contraction last.
        dim: which dimension of a single column's result has size 1.
    """
    if tile == _TENSOR:
        return scale_inv
    if tile[1] == ALL:
        return scale_inv.reshape(-1).unsqueeze(dim)  # even a size of 1 must have the stride of a contiguous tensor
    if tile == _BLOCK:
        return scale_inv.t().contiguous().t()  # as casts write it
    # without the padding to a multiple of 4 cuBLAS reads the wrong ones
    return F.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous().t()
