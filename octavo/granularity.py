"""Granularity: which elements of a tensor share a scale.

Every granularity is a *tile* (rows, columns) over the last two dimensions, -1 meaning all of that dimension. The tiles
are laid from index 0, so the last one of a dimension may be ragged. All dimensions before the last two are independent.

    PerTensor()       tile (-1, -1)   scale_shape of [T, K]: (1, 1); it alone spans the leading dimensions too
    PerRow()          tile (1, -1)    (T, 1)
    PerRow(dim=-2)    tile (-1, 1)    (1, K): what a transposed PerRow becomes
    PerBlock(r, c)    tile (r, c)     (ceil(T / r), ceil(K / c))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Tile = tuple[int, int]
ALL = -1
PADDING = 16  # terms: where a product takes no other number of them than its multiples, casts pad to one
BLOCK = 128  # elements along a row, or a square's side, that share a scale in weights and in an optimizer's state
NV: Tile = (1, 16)  # elements that share an E4M3 scale in NVFP4
PACKED_TILES: tuple[Tile, ...] = (NV, (NV[1], NV[1]))  # of casts to E2M1, with the contraction last
MX: Tile = (1, 32)  # elements that share a scale in the OCP's formats of that name


@dataclass(frozen=True)
class Granularity:
    """Base of PerTensor, PerRow and PerBlock."""

    @property
    def tile(self) -> Tile:
        """(rows, columns) that share a scale; -1 stands for the whole dimension."""
        raise NotImplementedError

    def of_matrices(self, shape: Sequence[int]) -> Granularity:
        """Return the granularity that gives each matrix of [..., R, C] scales of its own; this one for [R, C].

        PerTensor() alone has a scale of several matrices: that of one of their matrices is a block of its size.

        Example:
            >>> from octavo import PerTensor
            >>> PerTensor().of_matrices((8, 4, 16)), PerTensor().of_matrices((4, 16))
            (PerBlock(4, 16), PerTensor())
        """
        return PerBlock(*shape[-2:]) if len(shape) > 2 and self == PerTensor() else self

    def transposed(self) -> Granularity:
        """Return the granularity of the tensor with its last two dimensions exchanged."""
        return granularity_of(self.tile[::-1])

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of scale_inv for a tensor of this shape.

        Args:
            shape: the tensor's shape, any number of dimensions, sizes may be 0.

        Returns:
            as many dimensions as ``shape``; for [T, K]: PerTensor (1, 1), PerRow (T, 1),
            PerBlock(r, c) (ceil(T / r), ceil(K / c)).

        Example:
            >>> from octavo import PerBlock, PerRow, PerTensor
            >>> PerBlock(128, 128).scale_shape((300, 256))
            (3, 2)
            >>> PerRow().scale_shape((8, 4, 16)), PerTensor().scale_shape((8, 4, 16))
            ((8, 4, 1), (1, 1, 1))
        """
        return scale_shape(shape, self.tile)


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor.

    Example:
        >>> from octavo import PerTensor
        >>> PerTensor().scale_shape((512, 256))
        (1, 1)
    """

    @property
    def tile(self) -> Tile:
        """(-1, -1)."""
        return (ALL, ALL)


@dataclass(frozen=True)
class PerRow(Granularity):
    """One scale for each slice along ``dim``: with the default, for each row.

    Args:
        dim: the dimension whose elements share a scale, -1 or -2.

    Raises:
        ValueError: for another ``dim``.

    Example:
        >>> from octavo import PerRow
        >>> PerRow().scale_shape((512, 256)), PerRow().transposed()
        ((512, 1), PerRow(dim=-2))
    """

    dim: int = -1

    def __post_init__(self) -> None:
        if self.dim not in (-1, -2):
            raise ValueError(f"PerRow(dim={self.dim}): dim is -1 (a scale per row) or -2 (a scale per column)")

    @property
    def tile(self) -> Tile:
        """(1, -1), or (-1, 1) for ``dim=-2``."""
        return (1, ALL) if self.dim == -1 else (ALL, 1)

    def __repr__(self) -> str:
        return "PerRow()" if self.dim == -1 else f"PerRow(dim={self.dim})"


@dataclass(frozen=True)
class PerBlock(Granularity):
    """One scale for each block of ``rows`` x ``cols`` elements; the last blocks may be ragged.

    Args:
        rows: block height, at least 1.
        cols: block width, at least 1.

    Raises:
        ValueError: for a block without elements.

    Example:
        >>> from octavo import PerBlock
        >>> PerBlock(1, 128).scale_shape((512, 300))
        (512, 3)
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for name, size in (("rows", self.rows), ("cols", self.cols)):
            if type(size) is not int or size < 1:
                raise ValueError(f"PerBlock({self.rows}, {self.cols}): {name} must be an integer of at least 1")

    @property
    def tile(self) -> Tile:
        """(rows, cols)."""
        return (self.rows, self.cols)

    def __repr__(self) -> str:
        return f"PerBlock({self.rows}, {self.cols})"


def granularity_of(tile: Sequence[int]) -> Granularity:
    """Return the granularity of a tile.

    Example:
        >>> granularity_of((1, -1)), granularity_of((128, 128))
        (PerRow(), PerBlock(128, 128))
    """
    return _WITHOUT_BLOCKS.get(tuple(tile)) or PerBlock(*tile)


_WITHOUT_BLOCKS: dict[tuple[int, ...], Granularity] = {one.tile: one for one in (PerTensor(), PerRow(), PerRow(dim=-2))}


def check_packed(granularity: Granularity, power_of_two: bool, where: str = "") -> None:
    """Raise ValueError, whose text begins with ``where``, for scales that no cast to E2M1 has."""
    if granularity.tile not in PACKED_TILES or not power_of_two:
        raise ValueError(f"{where}E2M1 by {granularity}: use PerBlock(1, 16) or PerBlock(16, 16), power_of_two=True")


def scale_shape(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """Return ``Granularity.scale_shape`` for a tile. A tensor of fewer than two dimensions is one row."""
    if tile[0] == ALL and tile[1] == ALL:
        return (1,) * len(shape)
    if len(shape) == 0:
        return ()
    cols = tiles_along(shape[-1], tile[1])
    return (cols,) if len(shape) == 1 else (*shape[:-2], tiles_along(shape[-2], tile[0]), cols)


def tiles_along(size: int, tile: int) -> int:
    """Return how many tiles cover a dimension of ``size`` elements: 1 for a whole-dimension tile, even an empty one."""
    return 1 if tile == ALL else -(-size // tile)
