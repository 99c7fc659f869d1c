"""What an optimizer keeps of a tensor, read and written piece by piece: moments and masters in few bytes.

A tensor is seen as a matrix [R, C] of its first dimension by all others; blocks of up to BLOCK elements lie along C and
end with the row, so that ranks which hold some rows hold whole blocks. A piece is a view [rows, blocks, width] of some
of them. Each store knows how to ``read`` a piece as float32 and to ``write`` it back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3, Format
from octavo.kernels.reference.moment_codes import decode_moment, encode_moment
from octavo.numerics import scale_from_amax, scale_inv_from_scale

BLOCK = 128
LARGEST_ROOT = 2.0**63  # that moments in codes hold: what is twice as large has no finite square in float32
LARGEST_SQUARE = LARGEST_ROOT**2
PIECE = 1 << 17  # elements: with a dozen of float32 scratches it stays in a CPU's second cache


@dataclass(frozen=True)
class Piece:
    """Some rows and columns of a matrix, in blocks of one width.

    ``start``: index of the first element in the whole tensor, whose rows are ``row_length`` long.
    """

    rows: slice
    cols: slice
    width: int
    start: int
    row_length: int

    def of(self, matrix: Tensor) -> Tensor:
        """The piece of a matrix [R, C], as a view [rows, blocks, width]."""
        return matrix[self.rows, self.cols].unflatten(1, (-1, self.width))

    def scales_of(self, scales: Tensor) -> Tensor:
        """The piece's scales of [R, blocks], as a view [rows, blocks, 1]; of [1, 1] as it is."""
        if scales.numel() == 1:
            return scales.view(1, 1, 1)
        first, count = self.cols.start // BLOCK, (self.cols.stop - self.cols.start) // self.width
        return scales[self.rows, first : first + count, None]

    def index(self, device: torch.device) -> Tensor:
        """The elements' indices in the whole tensor, int32 or, where they pass 2^31, int64: [rows, blocks, width]."""
        rows, cols = self.rows.stop - self.rows.start, self.cols.stop - self.cols.start
        if cols == self.row_length or rows == 1:
            if self.start + rows * cols < 1 << 31:
                return counted(rows * cols, device).add(self.start).view(rows, -1, self.width)
            found = torch.arange(self.start, self.start + rows * cols, device=device)
        else:
            starts = torch.arange(rows, device=device).mul_(self.row_length).add_(self.start)
            found = starts[:, None] + torch.arange(cols, device=device)
        return found.view(rows, -1, self.width)


@functools.lru_cache(maxsize=8)
def counted(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., int32; not to be written to."""
    return torch.arange(count, dtype=torch.int32, device=device)


def as_matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(R, C) of a tensor as the kernels see it: its first dimension by all others; vectors are one row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def blocks_of(cols: int) -> int:
    """How many blocks a row has."""
    return -(-cols // BLOCK)


def pieces(rows: int, cols: int, first_row: int = 0) -> Iterator[Piece]:
    """Split a matrix, whose first row is ``first_row`` of the tensor, into pieces."""
    whole = cols - cols % BLOCK
    for begin, end, width in ((0, whole, BLOCK), (whole, cols, cols - whole)):
        if begin == end:
            continue
        step = max(PIECE // BLOCK * BLOCK, width)
        for left in range(begin, end, step):
            right = min(left + step, end)
            height = max(PIECE // (right - left), 1) if right - left == end - begin else 1
            for top in range(0, rows, height):
                bottom = min(top + height, rows)
                yield Piece(slice(top, bottom), slice(left, right), width, (first_row + top) * cols + left, cols)


class CodedGradient(NamedTuple):
    """A gradient in E4M3.

    Attributes:
        codes: uint8 [R, C].
        scale_inv: float32 [R, blocks]; of a vector that is seen as [n, 1], of blocks along it: [1, ceil(n / 128)].
    """

    codes: Tensor
    scale_inv: Tensor

    def read(self, piece: Piece) -> Tensor:
        """The piece in float32."""
        if self.scale_inv.shape[0] == self.codes.shape[0]:
            scale_inv = piece.scales_of(self.scale_inv)
        else:
            rows = torch.arange(piece.rows.start, piece.rows.stop, device=self.codes.device)
            scale_inv = self.scale_inv.view(-1)[rows // BLOCK].view(-1, 1, 1)
        return decode_moment(piece.of(self.codes), E4M3).mul_(scale_inv)


Gradient = Tensor | CodedGradient


def gradient_of(piece: Piece, grad: Gradient, grad_scale: float, maximize: bool) -> Tensor:
    """A piece of the gradient in float32, unscaled, its sign turned to go up; not to be written to."""
    g = grad.read(piece) if isinstance(grad, CodedGradient) else piece.of(grad).to(torch.float32)
    if grad_scale != 1.0:
        g = g / grad_scale
    return -g if maximize else g


@dataclass
class MomentTensors:
    """A moment of a tensor.

    Attributes:
        data: [R, C] float32, bf16, or uint8 codes.
        fmt: of the codes; None for float32 and bf16.
        scale_inv: float32 [R, blocks], or [1, 1]; of codes.
        amax: [1, 1] float32, what the next step's scale comes from where that is the previous amax; else None.
        root: whether codes are of the square root.
        stochastic: whether it is rounded so, or to nearest.
    """

    data: Tensor
    fmt: Format | None = None
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    root: bool = False
    stochastic: bool = False

    @property
    def needs_amax_first(self) -> bool:
        """Whether one scale for all takes the amax of all before the first code."""
        if self.fmt is None or self.scale_inv is None or self.scale_inv.numel() > 1 or self.amax is not None:
            return False
        return self.data.shape[0] * blocks_of(self.data.shape[1]) > 1

    def begin(self) -> tuple[Tensor | None, Tensor | None]:
        """(scale, found) to ``write`` with, of a moment whose scale the amax before gives; else (None, None)."""
        if self.amax is None:
            return None, None
        assert self.fmt is not None
        return scale_from_amax(self.amax, self.fmt.max, False, 0), torch.zeros_like(self.amax)

    def end(self, scale: Tensor | None, found: Tensor | None) -> None:
        """Note the one scale that all was written with, and the amax that was found."""
        if scale is not None:
            assert self.scale_inv is not None
            self.scale_inv.copy_(scale.reciprocal())
        if self.amax is not None and found is not None:
            self.amax.copy_(found)

    def read(self, piece: Piece) -> Tensor:
        """The piece in float32: the stored one itself where it is that, else a fresh tensor."""
        stored = piece.of(self.data)
        if self.fmt is None:
            return stored.to(torch.float32)
        assert self.scale_inv is not None
        wide = decode_moment(stored, self.fmt).mul_(piece.scales_of(self.scale_inv))
        return wide.square_() if self.root else wide

    def write(
        self, piece: Piece, wide: Tensor, bits16: Tensor | None, scale: Tensor | None, found: Tensor | None
    ) -> None:
        """Store what ``read`` gave, updated; ``wide`` is overwritten.

        Args:
            piece: where.
            wide: float32.
            bits16: random bits, where it is rounded stochastically.
            scale: [1, 1], where one serves the whole tensor.
            found: [1, 1], raised to the amax of what is stored, where the next step asks for it.
        """
        stored = piece.of(self.data)
        if self.fmt is None:
            if self.data.dtype == torch.float32:
                if stored.data_ptr() != wide.data_ptr():
                    stored.copy_(wide)
            elif self.stochastic and bits16 is not None:
                stored.copy_(round_to_bf16(wide, bits16))
            else:
                stored.copy_(wide)
            return
        assert self.scale_inv is not None
        if self.root:
            wide.sqrt_()
        if found is not None:
            torch.maximum(found, finite_amax(wide).max(), out=found)
        if scale is None:
            scale = scale_from_amax(finite_amax(wide), self.fmt.max, False, 0)
            piece.scales_of(self.scale_inv).copy_(scale_inv_from_scale(scale))
        stored.copy_(encode_moment(wide.mul_(scale), self.fmt, bits16 if self.stochastic else None))


def scales_of_all(moments: Sequence[MomentTensors], values: Iterable[Sequence[Tensor]]) -> list[Tensor | None]:
    """The scale [1, 1] of each moment that has one for all and no earlier amax; None for the others.

    Args:
        moments: of a tensor.
        values: of each piece the new moments, in float32, which are computed twice for it.
    """
    found = [torch.zeros(1, 1, device=moment.data.device) for moment in moments]
    for piece in values:
        for amax, moment, wide in zip(found, moments, piece, strict=False):
            torch.maximum(amax, finite_amax(wide.sqrt() if moment.root else wide).max(), out=amax)
    return [
        scale_from_amax(amax, moment.fmt.max, False, 0) if moment.fmt is not None and moment.needs_amax_first else None
        for amax, moment in zip(found, moments, strict=True)
    ]


def finite_amax(wide: Tensor) -> Tensor:
    """The largest absolute finite value of each block [rows, blocks, width] -> [rows, blocks, 1]."""
    # aminmax along a dimension takes 13 times as long as both
    amax = torch.maximum(wide.amax(-1, keepdim=True), wide.amin(-1, keepdim=True).neg_())
    if bool(torch.isfinite(amax.sum())):
        return amax
    magnitude = torch.where(torch.isfinite(wide), wide, 0).abs_()
    return magnitude.amax(-1, keepdim=True)


def round_to_bf16(wide: Tensor, bits16: Tensor) -> Tensor:
    """Round float32 to bf16 stochastically; NaN and inf stay what they are."""
    bits = (wide.view(torch.int32) + bits16) >> 16
    rounded = bits.to(torch.int16).view(torch.bfloat16)
    if bool(torch.isfinite(wide.sum())):
        return rounded
    return torch.where(torch.isfinite(wide), rounded, wide.to(torch.bfloat16))


def round_to_half(wide: Tensor, bits16: Tensor) -> Tensor:
    """Round float32, below float16's max, to float16 stochastically; NaN and inf stay what they are."""
    sign = (wide.view(torch.int32) >> 16) & -0x8000
    bits = (wide.abs().mul_(2.0**-112).view(torch.int32) + (bits16 >> 3)) >> 13
    rounded = (bits | sign).to(torch.int16).view(torch.float16)
    if bool(torch.isfinite(wide.sum())):
        return rounded
    return torch.where(torch.isfinite(wide), rounded, wide.half())
