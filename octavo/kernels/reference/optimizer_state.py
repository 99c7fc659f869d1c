"""An optimizer's moments and masters in few bytes, read and written piece by piece.

A tensor is seen as a matrix [R, C] of its first dimension by all others; blocks of up to BLOCK elements lie along C and
end with the row, so that a rank which has some rows has whole blocks. A piece is a view [rows, blocks, width] of some
blocks. A moment and a master each ``read`` a piece as float32 and ``write`` it back.

A master is the float32 weight that an optimizer updates, made of the weight itself and ``low_bits``: MASTER_KINDS.

A bf16 weight with a remainder is its master rounded to nearest, ties away from zero: so the remainder, master minus
weight in units of the last bit, always fits. When the user writes a weight, its master follows: a remainder is added to
whatever the weight is.

Where a weight lives in FP8, its codes are the master's high part. The code is the master rounded to nearest, so a
remainder, the difference, always fits. Scales are powers of two: a new scale changes only masters that become
subnormal. They are known before the update (bound_after), one for the weight or one for each block of 128 x 128. Each
expert's matrix has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3, Format
from octavo.granularity import BLOCK
from octavo.kernels.layouts import as_tiles, blocks_in_row
from octavo.kernels.moment_codes import decode_moment, encode_moment, round_to_bf16, round_to_half
from octavo.kernels.step_numbers import root_of, upper_bits
from octavo.numerics import scale_from_amax, scale_inv_from_scale

PIECE = 1 << 17  # elements: with a dozen float32 temporaries they fit a CPU's second-level cache


@dataclass(frozen=True)
class Piece:
    """Some rows and columns of a matrix, in blocks of one width.

    ``start``: the index of its first element in the whole tensor, whose rows are ``row_length`` long.
    """

    rows: slice
    cols: slice
    width: int
    start: int
    row_length: int

    def of(self, matrix: Tensor) -> Tensor:
        """Return the piece of a matrix [R, C], as a view [rows, blocks, width]."""
        return matrix[self.rows, self.cols].unflatten(1, (-1, self.width))

    def scales_of(self, scales: Tensor) -> Tensor:
        """Return the piece's part of scales [R, blocks], a view [rows, blocks, 1]; one scale for all as [1, 1, 1]."""
        if scales.numel() == 1:
            return scales.view(1, 1, 1)
        first, count = self.cols.start // BLOCK, (self.cols.stop - self.cols.start) // self.width
        return scales[self.rows, first : first + count, None]

    def index(self, device: torch.device) -> Tensor:
        """Return the elements' indices in the whole tensor [rows, blocks, width], int64."""
        rows, cols = self.rows.stop - self.rows.start, self.cols.stop - self.cols.start
        starts = torch.arange(rows, device=device).mul_(self.row_length).add_(self.start)
        return (starts[:, None] + torch.arange(cols, device=device)).view(rows, -1, self.width)


def pieces(rows: int, cols: int, first_row: int = 0, first_col: int = 0, row_length: int = 0) -> Iterator[Piece]:
    """Split a matrix into pieces; it begins at this row and column of a tensor with this row length (0: ``cols``)."""
    whole, length = cols - cols % BLOCK, row_length or cols
    for begin, end, width in ((0, whole, BLOCK), (whole, cols, cols - whole)):
        step = max(PIECE // BLOCK * BLOCK, width)
        for left in range(begin, end, step):
            right = min(left + step, end)
            height = max(PIECE // (right - left), 1) if right - left == end - begin else 1
            for top in range(0, rows, height):
                bottom = min(top + height, rows)
                start = (first_row + top) * length + first_col + left
                yield Piece(slice(top, bottom), slice(left, right), width, start, length)


class Scaled:
    """A moment or a master whose scale may be known before a step writes it.

    Between ``begin`` and ``end`` it is read with the old scale_inv and written with the new scale.
    """

    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    scale: Tensor | None = None
    amax_written: Tensor | None = None  # of the pieces that a step has written, where the next step needs it

    def read(self, piece: Piece) -> Tensor:
        """Return the piece in float32: the stored memory where that is float32, else a fresh tensor."""
        raise NotImplementedError

    def read_all(self, like: Tensor) -> Tensor:
        """Return all values in float32, in a fresh tensor of ``like``'s shape [R, C]."""
        values = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        for piece in pieces(*like.shape):
            piece.of(values).copy_(self.read(piece))
        return values

    def scale_for(self, amax: Tensor) -> Tensor:
        """Return the scale for values up to this amax."""
        raise NotImplementedError

    def begin(self, amax: Tensor) -> None:
        """Have a step write with the scale for this amax, or for a bound of it."""
        self.scale = self.scale_for(amax)
        self.amax_written = None if self.amax is None else torch.zeros_like(self.scale)

    def raise_amax_written(self, amax: Tensor) -> None:
        """Raise ``amax_written`` to the amax of a piece that was written."""
        if self.amax_written is not None:
            torch.maximum(self.amax_written, amax.max(), out=self.amax_written)

    def end(self) -> None:
        """Store the scale of the written values, and their amax."""
        if self.scale is not None and self.scale_inv is not None:
            self.scale_inv.copy_(scale_inv_from_scale(self.scale))
        if self.amax is not None and self.amax_written is not None:
            self.amax.copy_(self.amax_written)
        self.scale = self.amax_written = None


@dataclass
class MomentTensors(Scaled):
    """A tensor's moment as a step reads and writes it.

    Attributes:
        data: [R, C] float32, bf16, or uint8 codes.
        fmt: of the codes; None for float32 and bf16.
        scale_inv: of the codes, float32 [R, blocks], or [1, 1]; [E, 1] for E experts in FP8.
        amax: where the next scale comes from the previous amax: that amax, float32, shaped as scale_inv; else None.
        root: whether the codes are of the square root.
        rounding: of writing: to "nearest", "stochastic", or "hybrid": stochastically only where rounding to nearest
            would not change the stored value.
    """

    data: Tensor
    fmt: Format | None = None
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    root: bool = False
    rounding: str = "nearest"

    def matrix(self, index: int, count: int) -> MomentTensors:
        """Return one of ``count`` experts' moment, whose matrices lie one below the other, over the same memory."""
        if count == 1:
            return self
        data, scale_inv, amax = (rows_of(x, index, count) for x in (self.data, self.scale_inv, self.amax))
        assert data is not None
        return replace(self, data=data, scale_inv=scale_inv, amax=amax)

    @property
    def is_random(self) -> bool:
        """Whether writing takes random bits."""
        return self.rounding != "nearest"

    @property
    def needs_amax_first(self) -> bool:
        """Whether one scale is for all codes, so that the amax of all values must be found before the first code."""
        if self.fmt is None or self.scale_inv is None or self.scale_inv.numel() > 1 or self.amax is not None:
            return False
        return self.data.shape[0] * blocks_in_row(self.data.shape[1]) > 1

    def scale_for(self, amax: Tensor) -> Tensor:
        """Return the scale for codes of values up to this amax."""
        assert self.fmt is not None
        return scale_from_amax(amax, self.fmt.max, False, 0)

    def read(self, piece: Piece) -> Tensor:
        """Return the piece in float32, as Scaled does."""
        stored = piece.of(self.data)
        if self.fmt is None:
            return stored.to(torch.float32)
        assert self.scale_inv is not None
        wide = decode_moment(stored, self.fmt).mul_(piece.scales_of(self.scale_inv))
        return wide.square_() if self.root else wide

    def write(self, piece: Piece, wide: Tensor, bits: Tensor | None) -> None:
        """Store an updated piece, float32 ``wide``, which is overwritten.

        ``bits``: int32, 32 random bits for each element where ``is_random``; None rounds to nearest.
        """
        stored = piece.of(self.data)
        bits = bits if self.is_random else None
        replaced = stored if self.rounding == "hybrid" and bits is not None else None
        if self.fmt is None:
            if bits is not None:
                wide = round_to_bf16(wide, bits, replaced)
            stored.copy_(wide)  # a copy to itself costs nothing
            return
        assert self.scale_inv is not None
        if self.root:
            wide = root_of(wide)
        if self.amax_written is not None:
            self.raise_amax_written(finite_amax(wide))
        if (scale := self.scale) is None:
            scale = self.scale_for(finite_amax(wide))
            piece.scales_of(self.scale_inv).copy_(scale_inv_from_scale(scale))
        stored.copy_(encode_moment(wide.mul_(scale), self.fmt, bits, replaced))


def rows_of(tensor: Tensor | None, index: int, count: int) -> Tensor | None:
    """Return one of ``count`` equal runs of a tensor's rows; None for None."""
    return None if tensor is None else tensor.chunk(count)[index]


def finite_amax(wide: Tensor) -> Tensor:
    """Return the largest absolute finite value of each block: [rows, blocks, width] -> [rows, blocks, 1]."""
    # aminmax along a dimension takes 13 times as long as amax and amin
    amax = torch.maximum(wide.amax(-1, keepdim=True), wide.amin(-1, keepdim=True).neg_())
    if bool(torch.isfinite(amax.sum())):
        return amax
    return torch.where(torch.isfinite(wide), wide, 0).abs_().amax(-1, keepdim=True)


_EXPONENT = 2.0 ** (E4M3.bias - 127)  # gives a float32 the exponent bits of an E4M3 code
FLOAT16_FACTOR = 128.0  # a float16 master is this many times the scaled weight: float16 holds larger numbers than E4M3


class MasterKind(NamedTuple):
    """A way to keep a master.

    Attributes:
        name: an optimizer's ``master=`` that means it.
        low_bits: the dtype of what is kept besides the weight: an integer remainder or the whole master; None: nothing.
        is_random: whether writing rounds stochastically.
        bf16_name: of FP8 weights' kinds, the ``master=`` that the name means of bf16 weights beside them, if another.
    """

    name: str | None
    low_bits: torch.dtype | None
    is_random: bool
    bf16_name: str | None = None


# of plain weights, and of codes ("fp8_"); saved states and the C++ hold indices of it: a new kind comes last
MASTER_KINDS = {
    "weight": MasterKind("fp32", None, False),  # the weight is its own master
    "split32": MasterKind("split32", torch.int16, False),  # a bf16 weight and the rest of float32's bits add up to them
    "split24": MasterKind("split24", torch.int8, True),  # the upper 24 bits of these
    "stochastic": MasterKind(None, None, True),
    "fp8_split16": MasterKind("split16", torch.int8, True, "split24"),  # 4 exponent and 11 mantissa bits
    "fp8_split24": MasterKind("split24", torch.int16, True),  # 19 mantissa bits
    "fp8_fp16": MasterKind("fp16_scaled", torch.float16, True, "split32"),  # FLOAT16_FACTOR times the scaled weight
    "fp8_fp32": MasterKind("fp32", torch.float32, False, "split32"),
    "fp8_stochastic": MasterKind(None, None, True),  # the code alone
}


@dataclass(eq=False)  # launches are kept for the object
class MasterWeight(Scaled):
    """A weight [R, C] and the rest of its master.

    Attributes:
        weight: float32, bf16 or float16.
        kind: of MASTER_KINDS.
        low_bits: the remainder, if that kind has one.
        matrices: how many have scales of their own; a plain weight counts as one.
        has_blocks: whether each block of 128 x 128 has a scale: of no plain weight.
    """

    weight: Tensor
    kind: str
    low_bits: Tensor | None = None
    matrices: ClassVar[int] = 1
    has_blocks: ClassVar[bool] = False

    @property
    def is_random(self) -> bool:
        """Whether writing takes random bits."""
        return MASTER_KINDS[self.kind].is_random

    def read(self, piece: Piece) -> Tensor:
        """Return a piece of the master in float32: the weight's memory where it is float32, else a fresh tensor."""
        weight = piece.of(self.weight)
        if self.low_bits is None:
            return weight.to(torch.float32)
        remainder = piece.of(self.low_bits)
        bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        bits.add_(remainder.to(torch.int32), alpha=1 << (16 - 8 * remainder.itemsize))
        return bits.view(torch.float32)

    def write(self, piece: Piece, wide: Tensor, random: Tensor | None) -> None:
        """Store the updated master, float32 ``wide``, which is overwritten.

        ``random``: int32, 32 random bits for each element where ``is_random``.
        """
        weight = piece.of(self.weight)
        if self.low_bits is None:
            if self.is_random:
                assert random is not None
                wide = round_to_bf16(wide, random)
            weight.copy_(wide)  # a copy to itself costs nothing
            return
        bits = wide.view(torch.int32)
        finite = bool(torch.isfinite(wide.sum()))
        dropped = 16 - 8 * self.low_bits.itemsize
        if self.is_random:
            assert random is not None
            bits = (bits + upper_bits(random, dropped)).bitwise_and_(-(1 << dropped))
        upper = (bits + 0x8000) >> 16
        remainder = bits - (upper << 16)
        if not finite:  # a NaN's bits must not run over into another number's
            faults = ~torch.isfinite(wide)
            upper = torch.where(faults, wide.to(torch.bfloat16).view(torch.int16).to(torch.int32), upper)
            remainder.masked_fill_(faults, 0)
        weight.copy_(upper.to(torch.int16).view(torch.bfloat16))
        piece.of(self.low_bits).copy_(remainder >> dropped if dropped else remainder)


@dataclass(eq=False)
class Fp8Weight(Scaled):
    """A weight in codes [R, C] and the rest of its master.

    Attributes:
        weight: codes of E4M3, as uint8.
        kind: of MASTER_KINDS.
        scale_inv: float32 powers of two, [1, 1] or [ceil(R / 128), ceil(C / 128)]; for E experts, whose matrices lie
            one below the other, [E, ...]: such scales for each matrix.
        low_bits: the remainder or the master, if that kind has one.
        amax: float32 of scale_inv's shape, no less than the weight's; None where the master is only read.
    """

    weight: Tensor
    kind: str
    scale_inv: Tensor
    low_bits: Tensor | None = None
    amax: Tensor | None = None

    @property
    def is_random(self) -> bool:
        """Whether writing takes random bits."""
        return MASTER_KINDS[self.kind].is_random

    @property
    def remainder_bits(self) -> int:
        """The number of bits that a remainder adds to a code; 0 without a remainder."""
        return 0 if self.low_bits is None or self.low_bits.is_floating_point() else 8 * self.low_bits.itemsize

    @property
    def has_blocks(self) -> bool:
        """Whether each block of 128 x 128 has a scale."""
        return self.scale_inv.shape[-2:] != (1, 1)

    @property
    def matrices(self) -> int:
        """The number of matrices with scales of their own: of experts, or 1. No experts count as one empty matrix."""
        return max(len(self.scale_inv), 1) if self.scale_inv.ndim == 3 else 1

    def matrix(self, index: int) -> Fp8Weight:
        """Return the master of one of the ``matrices``, over the same memory."""
        if self.scale_inv.ndim == 2 or not len(self.scale_inv):
            return self
        weight, low_bits = (rows_of(x, index, self.matrices) for x in (self.weight, self.low_bits))
        assert weight is not None
        amax = None if self.amax is None else self.amax[index]
        return replace(self, weight=weight, scale_inv=self.scale_inv[index], low_bits=low_bits, amax=amax)

    def read_all(self, like: Tensor) -> Tensor:
        """Return the values of all matrices in float32, as Scaled does."""
        if self.matrices == 1:
            return super(Fp8Weight, self.matrix(0)).read_all(like)
        return torch.cat([matrix.read_all(matrix.weight) for matrix in map(self.matrix, range(self.matrices))])

    def scale_for(self, amax: Tensor) -> Tensor:
        """Return the scale for a weight up to this amax, in scale_inv's shape; for blocks [R, n], a copy a row."""
        finite = amax.clamp(max=torch.finfo(torch.float32).max)  # some betas bound no update
        scale = scale_from_amax(finite, E4M3.max, True, 0)
        return scale.repeat_interleave(BLOCK, 0)[: self.weight.shape[0]] if self.has_blocks else scale

    def end(self) -> None:
        """Store the scales of the written codes, and their amaxes."""
        if self.has_blocks and self.scale is not None and self.amax_written is not None:
            self.scale, self.amax_written = self.scale[::BLOCK], as_tiles(self.amax_written, (BLOCK, 1)).amax((1, 3))
        super().end()

    def read(self, piece: Piece) -> Tensor:
        """Return a piece of the master in float32, a fresh tensor."""
        codes = piece.of(self.weight)
        if self.low_bits is None:
            return decode_moment(codes, E4M3).mul_(self.scale_inv_of(piece))
        low_bits = piece.of(self.low_bits)
        if low_bits.dtype == torch.float32:
            return low_bits.clone()
        scale_inv = self.scale_inv_of(piece)
        if not (bits := self.remainder_bits):
            return low_bits.float().mul_(scale_inv / FLOAT16_FACTOR)
        wide = codes.to(torch.int32)
        sign = (wide & 0x80) << 24
        magnitude = ((wide & 0x7F) << bits).add_(low_bits)
        faults = (wide & 0x7F) == E4M3.nan_code
        value = (magnitude << (20 - bits)).view(torch.float32).mul_(1 / _EXPONENT)
        value = (value.view(torch.int32) | sign).view(torch.float32).mul_(scale_inv)
        return value.masked_fill_(faults, float("nan"))

    def write(self, piece: Piece, wide: Tensor, random: Tensor | None) -> None:
        """Store the updated master as MasterWeight does; the weight is codes."""
        assert self.scale is not None
        scales = piece.scales_of(self.scale)
        y = wide * scales
        if self.low_bits is None:
            codes = encode_moment(y, E4M3, random)
            piece.of(self.weight).copy_(codes)
            largest = finite_amax(decode_moment(codes, E4M3))
        elif self.remainder_bits:
            assert random is not None
            largest = self._write_split(piece, y, self.low_bits, random)
        else:
            piece.of(self.weight).copy_(encode_moment(y.clone(), E4M3, None))
            if self.low_bits.dtype == torch.float16:
                assert random is not None
                wide = round_to_half(y.mul_(FLOAT16_FACTOR), random)
                largest = finite_amax(wide.float()) / FLOAT16_FACTOR
            else:
                largest = finite_amax(wide) * scales
            piece.of(self.low_bits).copy_(wide)
        amax = largest * scale_inv_from_scale(scales)
        if self.has_blocks and self.amax_written is not None:
            piece.scales_of(self.amax_written).copy_(amax)
        else:
            self.raise_amax_written(amax)

    def _write_split(self, piece: Piece, y: Tensor, remainders: Tensor, random: Tensor) -> Tensor:
        """Write codes and remainders of the scaled values ``y``; return each block's amax, scaled."""
        bits = self.remainder_bits
        dropped = 20 - bits
        sign = (y.view(torch.int32) >> 24).bitwise_and_(0x80)
        faults = ~torch.isfinite(y)
        magnitude = y.abs_().mul_(_EXPONENT).view(torch.int32).add_(upper_bits(random, dropped))
        magnitude.bitwise_right_shift_(dropped).clamp_(0, E4M3.max_code << bits).masked_fill_(faults, 0)
        largest = magnitude.amax(-1, keepdim=True)
        codes = (magnitude + (1 << (bits - 1))) >> bits
        piece.of(remainders).copy_(magnitude.sub_(codes << bits))
        codes.bitwise_or_(sign).masked_fill_(faults, E4M3.nan_code)  # whatever a NaN's sign: devices differ in it
        piece.of(self.weight).copy_(codes)
        return (largest << dropped).view(torch.float32) * (1 / _EXPONENT)

    def scale_inv_of(self, piece: Piece) -> Tensor:
        """Return the piece's scale_inv [rows, blocks, 1], or [1, 1, 1]."""
        if not self.has_blocks:
            return self.scale_inv.view(1, 1, 1)
        rows = torch.arange(piece.rows.start, piece.rows.stop, device=self.scale_inv.device)
        return self.scale_inv[rows // BLOCK, piece.cols.start // BLOCK : blocks_in_row(piece.cols.stop), None]


Master = MasterWeight | Fp8Weight


def remainder_of(values: Tensor, codes: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the remainder that split16 stores beside values' codes, so that both read 12 bits: int8, shaped as codes.

    Args:
        values: of any float dtype, [R, C], or [E, N, K] for experts.
        codes: uint8 of the same shape: the values rounded to nearest.
        scale_inv: as Fp8Weight's.
    """
    remainders = torch.empty_like(codes, dtype=torch.int8)
    if codes.ndim == 3:
        for remainder, *arguments in zip(remainders, values, codes, scale_inv, strict=True):
            remainder.copy_(remainder_of(*arguments))
        return remainders
    cast = Fp8Weight(codes, "fp8_split16", scale_inv, remainders)
    bits = cast.remainder_bits
    for piece in pieces(*codes.shape):
        wide = piece.of(values).float() / cast.scale_inv_of(piece)
        code = piece.of(codes).to(torch.int32).bitwise_and_(0x7F)
        magnitude = wide.abs_().mul_(_EXPONENT).view(torch.int32)
        remainder = (magnitude + (1 << (19 - bits))).bitwise_right_shift_(20 - bits).sub_(code << bits)
        # half of the ties round the other way than the codes did: clamping their remainder loses 1/4096 of the value
        remainder.clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).masked_fill_(code == E4M3.nan_code, 0)
        piece.of(remainders).copy_(remainder)
    return remainders


def values_with(codes: Tensor, scale_inv: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 values that codes and the remainder of ``remainder_of`` read; arguments as there."""
    codes_RC, remainder_RC = (x.flatten(0, -2) for x in (codes, remainder))
    return Fp8Weight(codes_RC, "fp8_split16", scale_inv, remainder_RC).read_all(codes_RC).view(codes.shape)
