"""Masters: the float32 weight that an optimizer updates, made of the weight itself and a rest of few bytes.

    float32 weight            the master is the weight
    bf16 + 16-bit remainder   all of float32: weight and remainder add up to its bits
    bf16 + 8-bit remainder    its upper 24 bits; the lower 8 are rounded stochastically
    bf16 alone                rounded stochastically

A bf16 weight with a remainder is its master rounded to nearest, ties away from zero: so the remainder, master minus
weight in units of the last bit, always fits.

When the user writes a weight, its master follows: a remainder is added to whatever the weight is.

Where a weight lives in FP8, its codes are the master's high part:

    split16   code + 8 bits: 4 exponent and 11 mantissa bits, rounded stochastically
    split24   code + 16 bits: 19 mantissa bits, rounded stochastically
    fp16      a float16 master of 128 times the codes' scale, rounded stochastically
    fp32      a float32 master
    None      the code alone, rounded stochastically

The code is the master rounded to nearest, so a remainder, the difference, always fits. Scales are powers of two: a new
scale changes only masters that become subnormal. They are known before the update (bound_after), one for the weight or
one for each block of 128 x 128. Each expert's matrix has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.layouts import BLOCK
from octavo.kernels.moment_codes import decode_moment, encode_moment, round_to_bf16, round_to_half
from octavo.kernels.reference.optimizer_state import Piece, Scaled, finite_amax, pieces
from octavo.numerics import scale_from_amax, scale_inv_from_scale

_EXPONENT = 2.0 ** (E4M3.bias - 127)  # gives a float32 the exponent bits of an E4M3 code
_LARGEST = 0x7E
FLOAT16_FACTOR = 128.0  # a float16 master is this many times the scaled weight: float16 holds larger numbers than E4M3
_REST_BITS = {"fp8_split16": 8, "fp8_split24": 16}


@dataclass
class MasterWeight(Scaled):
    """A weight [R, C] and the rest of its master.

    Attributes:
        weight: float32, bf16 or float16.
        kind: "weight" (it is its own master), "split32", "split24" or "stochastic".
        rest: int16 or int8 remainder; None for the others.
        matrices: how many have scales of their own; a plain weight counts as one.
    """

    weight: Tensor
    kind: str
    rest: Tensor | None = None
    matrices: ClassVar[int] = 1

    @property
    def is_random(self) -> bool:
        """Whether writing takes random bits."""
        return self.kind in ("split24", "stochastic")

    def read(self, piece: Piece) -> Tensor:
        """A piece of the master in float32: the weight's memory where it is float32, else a fresh tensor."""
        weight = piece.of(self.weight)
        if self.rest is None:
            return weight.to(torch.float32)
        rest = piece.of(self.rest)
        bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        bits.add_(rest.to(torch.int32), alpha=1 if self.kind == "split32" else 1 << 8)
        return bits.view(torch.float32)

    def write(self, piece: Piece, wide: Tensor, bits16: Tensor | None) -> None:
        """Store the updated master, float32 ``wide``, which is overwritten; bits16: random bits where ``is_random``."""
        weight = piece.of(self.weight)
        if self.rest is None:
            if self.kind == "stochastic":
                assert bits16 is not None
                wide = round_to_bf16(wide, bits16)
            if weight.data_ptr() != wide.data_ptr():
                weight.copy_(wide)
            return
        bits = wide.view(torch.int32)
        finite = bool(torch.isfinite(wide.sum()))
        if self.kind == "split24":
            assert bits16 is not None
            bits = (bits + (bits16 >> 8)).bitwise_and_(-256)
        upper = (bits + 0x8000) >> 16
        rest = bits - (upper << 16)
        if not finite:  # a NaN's bits must not run over into another number's
            faults = ~torch.isfinite(wide)
            upper = torch.where(faults, wide.to(torch.bfloat16).view(torch.int16).to(torch.int32), upper)
            rest.masked_fill_(faults, 0)
        weight.copy_(upper.to(torch.int16).view(torch.bfloat16))
        piece.of(self.rest).copy_(rest if self.kind == "split32" else rest >> 8)


@dataclass
class Fp8Weight(Scaled):
    """A weight in codes [R, C] and the rest of its master.

    Attributes:
        weight: codes of E4M3, as uint8.
        kind: "fp8_split16", "fp8_split24", "fp8_fp16", "fp8_fp32" or "fp8_stochastic".
        scale_inv: float32 powers of two, [1, 1] or [ceil(R / 128), ceil(C / 128)]; for E experts, whose matrices lie
            one below the other, [E, ...]: such scales for each matrix.
        rest: int8 or int16 remainder, or the float16 or float32 master; None for the last kind.
        amax: float32 of scale_inv's shape, no less than the weight's; None where the master is only read.
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
        """Whether each block of 128 x 128 has a scale."""
        return self.scale_inv.shape[-2:] != (1, 1)

    @property
    def matrices(self) -> int:
        """How many matrices have scales of their own: the experts, or one. No experts count as one without elements."""
        return max(len(self.scale_inv), 1) if self.scale_inv.ndim == 3 else 1

    def matrix(self, index: int) -> Fp8Weight:
        """The master of one of the ``matrices``, over the same memory."""
        if self.scale_inv.ndim == 2 or not len(self.scale_inv):
            return self
        rows = self.weight.shape[0] // self.matrices
        of_one = slice(index * rows, (index + 1) * rows)
        rest, amax = None if self.rest is None else self.rest[of_one], None if self.amax is None else self.amax[index]
        return replace(self, weight=self.weight[of_one], scale_inv=self.scale_inv[index], rest=rest, amax=amax)

    def read_all(self, like: Tensor) -> Tensor:
        """As Scaled's, for all matrices."""
        if self.matrices == 1:
            return super(Fp8Weight, self.matrix(0)).read_all(like)
        return torch.cat([one.read_all(one.weight) for one in map(self.matrix, range(self.matrices))])

    def scale_for(self, amax: Tensor) -> Tensor:
        """The scale for a weight up to this amax, in scale_inv's shape; for blocks [R, n], each row's own copy."""
        scale = scale_from_amax(amax, E4M3.max, True, 0)
        return scale.repeat_interleave(BLOCK, 0)[: self.weight.shape[0]] if self.has_blocks else scale

    def end(self) -> None:
        """Store the scales of what was written, and its amaxes."""
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
        """As MasterWeight's; the weight is codes."""
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
        """Write codes and remainders of the scaled values ``y``; return each block's amax, scaled."""
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
    """The amax of each square block [ceil(R / 128), n], out of those of each row's blocks [R, n]."""
    rows, cols = amax.shape
    whole = amax.new_zeros(-(-rows // BLOCK) * BLOCK, cols)
    whole[:rows] = amax
    return whole.view(-1, BLOCK, cols).amax(1)


def remainder_of(values: Tensor, codes: Tensor, scale_inv: Tensor) -> Tensor:
    """The remainder that split16 keeps of values beside their codes, so that both read 12 bits: int8, shaped as codes.

    Args:
        values: of any float dtype, [R, C], or [E, N, K] for experts.
        codes: uint8 of the same shape: the values rounded to nearest.
        scale_inv: as Fp8Weight's.
    """
    rests = torch.empty_like(codes, dtype=torch.int8)
    if codes.ndim == 3:
        for rest, *one in zip(rests, values, codes, scale_inv, strict=True):
            rest.copy_(remainder_of(*one))
        return rests
    cast = Fp8Weight(codes, "fp8_split16", scale_inv, rests)
    bits = _REST_BITS[cast.kind]
    for piece in pieces(*codes.shape):
        wide = piece.of(values).float() / cast.scale_inv_of(piece)
        code = piece.of(codes).to(torch.int32).bitwise_and_(0x7F)
        magnitude = wide.abs_().mul_(_EXPONENT).view(torch.int32)
        rest = (magnitude + (1 << (19 - bits))).bitwise_right_shift_(20 - bits).sub_(code << bits)
        # half of the ties round the other way than the codes did: clamping their remainder loses 1/4096 of the value
        rest.clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).masked_fill_(code == E4M3.nan_code, 0)
        piece.of(rests).copy_(rest)
    return rests


def values_with(codes: Tensor, scale_inv: Tensor, rest: Tensor) -> Tensor:
    """The float32 values that codes and the remainder of ``remainder_of`` read; arguments as there."""
    codes_RC, rest_RC = (x.flatten(0, -2) for x in (codes, rest))
    return Fp8Weight(codes_RC, "fp8_split16", scale_inv, rest_RC).read_all(codes_RC).view(codes.shape)
