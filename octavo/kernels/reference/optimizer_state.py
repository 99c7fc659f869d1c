"""An optimizer's moments and masters in few bytes, read and written piece by piece.

A tensor is seen as a matrix [R, C] of its first dimension by all others; blocks of up to BLOCK elements lie along C and
end with the row, so that a rank which has some rows has whole blocks. A piece is a view [rows, blocks, width] of some
blocks. A moment and a master each ``read`` a piece as float32 and ``write`` it back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.layouts import BLOCK, blocks_of
from octavo.kernels.moment_codes import decode_moment, encode_moment, round_to_bf16
from octavo.kernels.step_numbers import root_of
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
        """The piece of a matrix [R, C], as a view [rows, blocks, width]."""
        return matrix[self.rows, self.cols].unflatten(1, (-1, self.width))

    def scales_of(self, scales: Tensor) -> Tensor:
        """The piece's part of scales [R, blocks], as a view [rows, blocks, 1]; one scale for all as [1, 1, 1]."""
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


def pieces(rows: int, cols: int, first_row: int = 0, first_col: int = 0, row_length: int = 0) -> Iterator[Piece]:
    """Split a matrix into pieces; it begins at this row and column of a tensor with this row length (0: its own)."""
    whole, length = cols - cols % BLOCK, row_length or cols
    for begin, end, width in ((0, whole, BLOCK), (whole, cols, cols - whole)):
        if begin == end:
            continue
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
    found: Tensor | None = None  # the amax of what was written so far, where the next step needs it

    def read(self, piece: Piece) -> Tensor:
        """The piece in float32: the stored memory where that is float32, else a fresh tensor."""
        raise NotImplementedError

    def read_all(self, like: Tensor) -> Tensor:
        """All values in float32, in a fresh tensor of ``like``'s shape [R, C]."""
        values = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        for piece in pieces(*like.shape):
            piece.of(values).copy_(self.read(piece))
        return values

    def scale_for(self, amax: Tensor) -> Tensor:
        """The scale for values up to this amax."""
        raise NotImplementedError

    def begin(self, amax: Tensor) -> None:
        """Have a step write with the scale for this amax, or for a bound of it."""
        self.scale = self.scale_for(amax)
        self.found = None if self.amax is None else torch.zeros_like(self.scale)

    def raise_found(self, amax: Tensor) -> None:
        """Raise ``found`` to the amax of a piece that was written."""
        if self.found is not None:
            torch.maximum(self.found, amax.max(), out=self.found)

    def end(self) -> None:
        """Store the scale of what was written, and its amax."""
        if self.scale is not None and self.scale_inv is not None:
            self.scale_inv.copy_(scale_inv_from_scale(self.scale))
        if self.amax is not None and self.found is not None:
            self.amax.copy_(self.found)
        self.scale = self.found = None


@dataclass
class MomentTensors(Scaled):
    """A tensor's moment as a step reads and writes it.

    Attributes:
        data: [R, C] float32, bf16, or uint8 codes.
        fmt: of the codes; None for float32 and bf16.
        scale_inv: of the codes, float32 [R, blocks], or [1, 1]; [E, 1] for E experts in FP8.
        amax: where the next scale comes from the previous amax: that amax, float32, shaped as scale_inv; else None.
        root: whether the codes are of the square root.
        stochastic: whether writing rounds stochastically, or to nearest.
    """

    data: Tensor
    fmt: Format | None = None
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    root: bool = False
    stochastic: bool = False

    def matrix(self, index: int, count: int) -> MomentTensors:
        """The moment of one of ``count`` experts, whose matrices lie one below the other, over the same memory."""
        if count == 1:
            return self
        data, scale_inv, amax = (rows_of(x, index, count) for x in (self.data, self.scale_inv, self.amax))
        assert data is not None
        return replace(self, data=data, scale_inv=scale_inv, amax=amax)

    @property
    def needs_amax_first(self) -> bool:
        """Whether one scale is for all codes, so that the amax of all values must be found before the first code."""
        if self.fmt is None or self.scale_inv is None or self.scale_inv.numel() > 1 or self.amax is not None:
            return False
        return self.data.shape[0] * blocks_of(self.data.shape[1]) > 1

    def scale_for(self, amax: Tensor) -> Tensor:
        """The scale for codes of values up to this amax."""
        assert self.fmt is not None
        return scale_from_amax(amax, self.fmt.max, False, 0)

    def read(self, piece: Piece) -> Tensor:
        """As Scaled's."""
        stored = piece.of(self.data)
        if self.fmt is None:
            return stored.to(torch.float32)
        assert self.scale_inv is not None
        wide = decode_moment(stored, self.fmt).mul_(piece.scales_of(self.scale_inv))
        return wide.square_() if self.root else wide

    def write(self, piece: Piece, wide: Tensor, bits16: Tensor | None) -> None:
        """Store an updated piece, float32 ``wide``, which is overwritten; bits16: used where rounding is stochastic."""
        stored = piece.of(self.data)
        bits16 = bits16 if self.stochastic else None
        if self.fmt is None:
            if bits16 is not None:
                wide = round_to_bf16(wide, bits16)
            if stored.data_ptr() != wide.data_ptr():
                stored.copy_(wide)
            return
        assert self.scale_inv is not None
        if self.root:
            wide = root_of(wide)
        if self.found is not None:
            self.raise_found(finite_amax(wide))
        if (scale := self.scale) is None:
            scale = self.scale_for(finite_amax(wide))
            piece.scales_of(self.scale_inv).copy_(scale_inv_from_scale(scale))
        stored.copy_(encode_moment(wide.mul_(scale), self.fmt, bits16))


def rows_of(tensor: Tensor | None, index: int, count: int) -> Tensor | None:
    """One of ``count`` equal runs of a tensor's rows; None for None."""
    if tensor is None:
        return None
    rows = tensor.shape[0] // count
    return tensor[index * rows : (index + 1) * rows]


def finite_amax(wide: Tensor) -> Tensor:
    """The largest absolute finite value of each block [rows, blocks, width] -> [rows, blocks, 1]."""
    # aminmax along a dimension takes 13 times as long as amax and amin
    amax = torch.maximum(wide.amax(-1, keepdim=True), wide.amin(-1, keepdim=True).neg_())
    if bool(torch.isfinite(amax.sum())):
        return amax
    return torch.where(torch.isfinite(wide), wide, 0).abs_().amax(-1, keepdim=True)
