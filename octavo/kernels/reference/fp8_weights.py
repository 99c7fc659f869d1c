"""Masters of weights that live in FP8: the codes are the master's high part.

    split16   code + 8 bits: 4 exponent and 11 mantissa bits, rounded stochastically
    split24   code + 16 bits: 19 mantissa bits, rounded stochastically
    fp16      a float16 master of 128 times the codes' scale, rounded stochastically
    fp32      a float32 master
    None      the code alone, rounded stochastically

The code is the master rounded to nearest, so a remainder, the difference, always fits. Scales are powers of two: a new
scale changes no master but those that become subnormal. They are known before the update (bound_after), one for
the weight or one for each block of 128 x 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.moment_codes import decode_moment, encode_moment, round_to_half
from octavo.kernels.reference.optimizer_state import BLOCK, Piece, Scaled, finite_amax, pieces
from octavo.numerics import scale_from_amax, scale_inv_from_scale

_EXPONENT = 2.0 ** (E4M3.bias - 127)  # of codes against float32
_LARGEST = 0x7E
FLOAT16_FACTOR = 128.0  # of the float16 master against codes: it holds that many times as large numbers
_REST_BITS = {"fp8_split16": 8, "fp8_split24": 16}


@dataclass
class Fp8Weight(Scaled):
    """A weight in codes [R, C] and what its master has besides.

    Attributes:
        weight: uint8, of E4M3.
        kind: "fp8_split16", "fp8_split24", "fp8_fp16", "fp8_fp32" or "fp8_stochastic".
        scale_inv: float32 powers of two, [1, 1] or [ceil(R / 128), ceil(C / 128)].
        rest: int8 or int16 remainder, or the float16 or float32 master; None for the last kind.
        amax: float32 of scale_inv's shape, no less than the weight's; None for what is only read.
    """

    weight: Tensor
    kind: str
    scale_inv: Tensor
    rest: Tensor | None = None
    amax: Tensor | None = None

    @property
    def is_random(self) -> bool:
        """Whether writing takes random bits."""
        return self.kind != "fp8_fp32"

    @property
    def has_blocks(self) -> bool:
        """Whether its scales are those of blocks."""
        return self.scale_inv.shape != (1, 1)

    def scale_of(self, amax: Tensor) -> Tensor:
        """The scale for a weight up to this amax, in scale_inv's shape; of blocks one for each of a row [R, n]."""
        scale = scale_from_amax(amax, E4M3.max, True, 0)
        return scale.repeat_interleave(BLOCK, 0)[: self.weight.shape[0]] if self.has_blocks else scale

    def end(self) -> None:
        """Note the scales that were written with, and the amaxes found."""
        if self.has_blocks and self.scale is not None and self.found is not None:
            self.scale, self.found = self.scale[::BLOCK], largest_in_squares(self.found)
        super().end()

    def read(self, piece: Piece) -> Tensor:
        """The master in float32, a fresh tensor."""
        codes = piece.of(self.weight)
        if self.kind == "fp8_fp32":
            return piece.of(self._rest()).clone()
        scale_inv = self.scale_inv_of(piece)
        if self.kind == "fp8_fp16":
            return piece.of(self._rest()).float().mul_(scale_inv / FLOAT16_FACTOR)
        if self.kind == "fp8_stochastic":
            return decode_moment(codes, E4M3).mul_(scale_inv)
        bits = _REST_BITS[self.kind]
        wide = codes.to(torch.int32)
        sign = (wide & 0x80) << 24
        magnitude = ((wide & 0x7F) << bits).add_(piece.of(self._rest()))
        faults = (wide & 0x7F) == E4M3.nan_code
        value = (magnitude << (20 - bits)).view(torch.float32).mul_(1 / _EXPONENT)
        value = (value.view(torch.int32) | sign).view(torch.float32).mul_(scale_inv)
        return value.masked_fill_(faults, float("nan"))

    def write(self, piece: Piece, wide: Tensor, bits16: Tensor | None) -> None:
        """Store the updated master, float32, which is overwritten, and the codes; bits16: where ``is_random``."""
        assert self.scale is not None
        scales = piece.scales_of(self.scale)
        y = wide * scales
        if self.kind in _REST_BITS:
            assert bits16 is not None
            largest = self._write_split(piece, y, bits16)
        elif self.kind == "fp8_stochastic":
            codes = encode_moment(y, E4M3, bits16)
            piece.of(self.weight).copy_(codes)
            largest = finite_amax(decode_moment(codes, E4M3))
        else:
            piece.of(self.weight).copy_(encode_moment(y.clone(), E4M3, None))
            if self.kind == "fp8_fp16":
                assert bits16 is not None
                wide = round_to_half(y.mul_(FLOAT16_FACTOR), bits16)
                largest = finite_amax(wide.float()) / FLOAT16_FACTOR
            else:
                largest = finite_amax(wide) * scales
            piece.of(self._rest()).copy_(wide)
        amax = largest * scale_inv_from_scale(scales)
        if self.has_blocks and self.found is not None:
            piece.scales_of(self.found).copy_(amax)
        else:
            self.raise_found(amax)

    def _write_split(self, piece: Piece, y: Tensor, bits16: Tensor) -> Tensor:
        """Write codes and remainders; the amax of each block, scaled."""
        bits = _REST_BITS[self.kind]
        dropped = 20 - bits
        sign = (y.view(torch.int32) >> 24).bitwise_and_(0x80)
        faults = ~torch.isfinite(y)
        magnitude = y.abs_().mul_(_EXPONENT).view(torch.int32).add_(bits16 >> (16 - dropped))
        magnitude.bitwise_right_shift_(dropped).clamp_(0, _LARGEST << bits).masked_fill_(faults, 0)
        largest = magnitude.amax(-1, keepdim=True)
        codes = (magnitude + (1 << (bits - 1))) >> bits
        piece.of(self._rest()).copy_(magnitude.sub_(codes << bits))
        codes.bitwise_or_(sign).masked_fill_(faults, E4M3.nan_code)  # whatever a NaN's sign: devices differ in it
        piece.of(self.weight).copy_(codes)
        return (largest << dropped).view(torch.float32) * (1 / _EXPONENT)

    def _rest(self) -> Tensor:
        assert self.rest is not None
        return self.rest

    def scale_inv_of(self, piece: Piece) -> Tensor:
        """The piece's scale_inv [rows, blocks, 1], or [1, 1, 1]."""
        if not self.has_blocks:
            return self.scale_inv.view(1, 1, 1)
        top, left = piece.rows.start // BLOCK, piece.cols.start // BLOCK
        squares = self.scale_inv[top : -(-piece.rows.stop // BLOCK), left : -(-piece.cols.stop // BLOCK)]
        rows = squares.repeat_interleave(BLOCK, 0)[piece.rows.start - top * BLOCK :]
        return rows[: piece.rows.stop - piece.rows.start, :, None]


Master = MasterWeight | Fp8Weight


def largest_in_squares(amax: Tensor) -> Tensor:
    """Of the amaxes of rows' blocks [R, n], those of squares: [ceil(R / 128), n]."""
    rows, cols = amax.shape
    whole = amax.new_zeros(-(-rows // BLOCK) * BLOCK, cols)
    whole[:rows] = amax
    return whole.view(-1, BLOCK, cols).amax(1)


def remainder_of(values: Tensor, codes: Tensor, scale_inv: Tensor) -> Tensor:
    """What split16 adds to codes of values, so that they read 12 bits of these: int8 [R, C].

    Args:
        values: [R, C] of any float dtype, whose cast to nearest the codes are.
        codes: uint8 [R, C].
        scale_inv: as Fp8Weight's.
    """
    rests = torch.empty_like(codes, dtype=torch.int8)
    cast = Fp8Weight(codes, "fp8_split16", scale_inv, rests)
    bits = _REST_BITS[cast.kind]
    for piece in pieces(*codes.shape):
        wide = piece.of(values).float() / cast.scale_inv_of(piece)
        code = piece.of(codes).to(torch.int32).bitwise_and_(0x7F)
        magnitude = wide.abs_().mul_(_EXPONENT).view(torch.int32)
        rest = (magnitude + (1 << (19 - bits))).bitwise_right_shift_(20 - bits).sub_(code << bits)
        # of ties half round the other way here: 1 of 4096 parts is lost
        rest.clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).masked_fill_(code == E4M3.nan_code, 0)
        piece.of(rests).copy_(rest)
    return rests


def values_with(codes: Tensor, scale_inv: Tensor, rest: Tensor) -> Tensor:
    """What codes and such a remainder read, float32 [R, C]; arguments as ``remainder_of``'s and its result."""
    return Fp8Weight(codes, "fp8_split16", scale_inv, rest).read_all(codes)
