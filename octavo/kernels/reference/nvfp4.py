"""NVFP4: casts to E2M1 in blocks of 16, whose scales are E4M3 times a power of two of the tensor; and reading back.

A matrix is laid with the contraction last, which blocks, rotations and packed codes run along. numerics.py says how
scales are made. A cast whose elements are rotated takes an outer scale a quarter as large: a rotation makes a block's
amax up to four times as large, and so both casts of a role come from the amax of the same, unrotated, tensor.

E2M1 has no NaN: a block that holds NaN or inf has the scale_inv NaN, so that its 16 elements read NaN. A value beyond
the largest code saturates; so does all of a block whose scale has, where a delayed outer scale is too large.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.formats import E2M1
from octavo.granularity import NV, Tile, scale_shape
from octavo.kernels.arguments import CastTarget
from octavo.kernels.layouts import as_tiles, multiply_tiles_, pack_pairs, unpack_pairs
from octavo.kernels.step_numbers import mixed_
from octavo.numerics import nvfp4_scale, nvfp4_scale_inv

NV_BLOCK = NV[1]
_RANDOM_BITS = 8
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def write_packed(values: Tensor, target: CastTarget) -> None:
    """Write codes and scale_inv of a matrix [R, C], whose amax is written, by one scaling to E2M1; see ``cast.py``."""
    scaling, codes, transposed, scale_inv, amax = target
    tile, outer = scaling.tile, scaling.scale_of(amax)
    place, laid = scaling.place, values.to(torch.float32)
    if by_columns := tile[1] == 1:
        laid, place, scale_inv, tile = laid.t(), place[::-1], scale_inv.t(), tile[::-1]
    if scaling.rotation is not None:
        laid, outer = rotated(laid, scaling.rotation), outer * 0.25
    block_scale_inv = _scale_inv(laid, tile, outer)
    scale_inv.copy_(block_scale_inv)
    bits = None if scaling.seed is None else random_bits(laid, scaling.seed, place)
    four_bits = encode_packed(laid, nvfp4_scale(block_scale_inv), tile, bits)
    first, second = (transposed, codes) if by_columns else (codes, transposed)
    for out, raw in ((first, four_bits), (second, four_bits.t())):
        if out.numel():
            out.view(torch.uint8).copy_(pack_pairs(F.pad(raw, (0, 2 * out.shape[1] - raw.shape[1]))))


def _scale_inv(laid: Tensor, tile: Tile, outer: Tensor) -> Tensor:
    """Return the blocks' scale_inv, float32; NaN of a block that holds NaN or inf."""
    if laid.numel() == 0:
        return laid.new_zeros(scale_shape(laid.shape, tile))
    amax = as_tiles(laid.abs(), tile).amax(dim=(1, 3))  # NaN is the largest
    is_faulty = ~amax.isfinite()
    return nvfp4_scale_inv(amax.masked_fill(is_faulty, 0.0), outer).masked_fill_(is_faulty, torch.nan)


def encode_packed(laid: Tensor, scale: Tensor, tile: Sequence[int], bits: Tensor | None) -> Tensor:
    """Round float32 [R, C] times its blocks' scales to E2M1: codes of 4 bits, uint8 [R, C].

    ``bits``: 8 random ones for each element, by which it is rounded up or down; None: to nearest, ties to even.
    """
    scaled = multiply_tiles_(laid.clone(memory_format=torch.contiguous_format), scale, tile)
    scaled = torch.nan_to_num(scaled, nan=E2M1.max)  # of a block that reads NaN all codes are 7, whatever NaN's sign
    magnitude = scaled.abs().clamp_(max=E2M1.max)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    steps = magnitude / step  # exact; an even number of steps is an even code
    if bits is None:
        steps = torch.round(steps)
    else:
        whole = torch.floor(steps)
        part = ((steps - whole) * (1 << _RANDOM_BITS)).to(torch.int32)
        steps = whole + (part + bits >= 1 << _RANDOM_BITS)
    value = steps * step
    # a float32's exponent and first bit of mantissa, less those of 0.5, are the code from 1 on
    code = torch.where(value >= 1.0, (value.view(torch.int32) >> 22) - (126 << 1), (value * 2.0).to(torch.int32))
    return (code | torch.signbit(scaled).to(torch.int32) << 3).to(torch.uint8)


def values_of_packed(qdata: Tensor) -> Tensor:
    """Return the numbers that E2M1's packed codes [..., C / 2] stand for, float32 [..., C]."""
    codes = unpack_pairs(qdata)
    magnitudes = torch.tensor(_VALUES, dtype=torch.float32, device=qdata.device)[(codes & 7).to(torch.int32)]
    return torch.where(codes >= 8, -magnitudes, magnitudes)


def rotated(laid: Tensor, signs: int) -> Tensor:
    """Return [R, C'] of [R, C], float32: each 16 elements of a row times Hadamard's matrix / 4, rounded to bfloat16.

    The matrix's row i is negated where bit i of ``signs`` is set. Rows are padded with zeros to a multiple of 16; what
    lies there is not zero afterwards.
    """
    if laid.numel() == 0:
        return laid
    blocks = F.pad(laid, (0, -laid.shape[1] % NV_BLOCK)).unflatten(1, (-1, NV_BLOCK))
    # by sums of pairs, in this order, so that every implementation rounds alike
    row_signs = [-1.0 if signs >> row & 1 else 1.0 for row in range(NV_BLOCK)]
    turned = blocks * torch.tensor(row_signs, dtype=torch.float32, device=laid.device)
    for width in (1, 2, 4, 8):
        halves = turned.unflatten(2, (-1, 2, width))
        low, high = halves[:, :, :, 0], halves[:, :, :, 1]
        turned = torch.stack((low + high, low - high), 3).flatten(2)
    return (turned * 0.25).to(torch.bfloat16).to(torch.float32).flatten(1)


def random_bits(laid: Tensor, seed: int, place: Sequence[int]) -> Tensor:
    """Return 8 random bits for each element, int32 [R, C]: of the seed, its block's 16 numbers, and its place.

    Args:
        laid: float32 [R, C], contraction last.
        place: the number of the first row, and of the first element of a row, in the whole matrix as it is laid.
    """
    rows, cols = laid.shape
    # -0 is 0: which of them a gradient has depends on who computes it
    padded = F.pad(laid, (0, -cols % NV_BLOCK)) + 0.0
    numbers = padded.contiguous().view(torch.int32).unflatten(1, (-1, NV_BLOCK))
    lanes = torch.arange(NV_BLOCK, dtype=torch.int32, device=laid.device)
    content = mixed_(numbers + lanes * _ODD).sum(2, dtype=torch.int32)  # modulo 2^32
    row = torch.arange(rows, dtype=torch.int32, device=laid.device)[:, None] + place[0]
    block = torch.arange(numbers.shape[1], dtype=torch.int32, device=laid.device) + place[1] // NV_BLOCK
    key = mixed_(mixed_(content ^ seed) + row * _ODD) ^ block
    words = mixed_(key[:, :, None] + lanes[: NV_BLOCK // 4] * _ODD)  # one for four elements, a byte for each
    return torch.stack([words >> shift & 255 for shift in (0, 8, 16, 24)], 3).flatten(1)[:, :cols]


_ODD = 0x9E3779B1 - (1 << 32)
