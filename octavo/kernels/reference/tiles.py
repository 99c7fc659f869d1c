"""A 2-D tensor seen as tiles, so that one scale broadcasts over its tile, and in chunks of rows that fit a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.granularity import ALL, tiles_along

# Elements worked on at a time. Fresh memory costs more than arithmetic on a CPU: reading 2048x1408 codes in one piece
# took 3.5 to 15 ms, depending on what malloc had to fetch from the system, in chunks with one scratch 1.0 ms (1 core,
# AMD EPYC Zen 5).
CHUNK = 1 << 18
CHUNK_ELSEWHERE = 1 << 26  # on a GPU each chunk is more launches, and only memory asks for any: 256 MiB of float32

_BROADCASTS = (ALL, 1)


def row_chunks(tile: Sequence[int], scale: Tensor | float | None, *tensors: Tensor) -> list[tuple[Any, ...]]:
    """Chunks of rows, between tiles: (scale, *tensors) of each, the first as long as any other.

    scale is [R / r, C / c], or one number, or None. All tensors have R rows; the first's size decides on the chunks.
    """
    rows, cols = tensors[0].shape
    chunk = CHUNK if tensors[0].device.type == "cpu" else CHUNK_ELSEWHERE
    if rows * cols <= chunk:
        return [(scale, *tensors)]
    unit = 1 if tile[0] == ALL else tile[0]
    step = max(chunk // cols // unit, 1) * unit
    parts = [tensor.split(step) for tensor in tensors]
    split = isinstance(scale, Tensor) and tile[0] != ALL
    scales = scale.split(step // unit) if split else [scale] * len(parts[0])  # type: ignore[union-attr]
    return list(zip(scales, *parts, strict=True))


def with_scratch(chunks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Chunks as (scale, scratch, *tensors): float32 of the first tensor's chunk, the same memory each time."""
    whole: Tensor | None = None
    for scale, *parts in chunks:
        if whole is None:
            whole = torch.empty_like(parts[0], dtype=torch.float32)
        yield scale, whole[: len(parts[0])], *parts


def as_tiles(x_RC: Tensor, tile: Sequence[int]) -> Tensor:
    """View [R, C] as [R / r, r, C / c, c]; a copy padded with zeros where a tile is ragged."""
    rows, cols = x_RC.shape
    r = rows if tile[0] == ALL else tile[0]
    c = cols if tile[1] == ALL else tile[1]
    n_r, n_c = tiles_along(rows, tile[0]), tiles_along(cols, tile[1])
    if (rows, cols) != (n_r * r, n_c * c):
        x_RC = torch.nn.functional.pad(x_RC, (0, n_c * c - cols, 0, n_r * r - rows))
    return x_RC.unflatten(1, (n_c, c)).unflatten(0, (n_r, r))


def multiply_tiles_(x_RC: Tensor, scale: Tensor | float, tile: Sequence[int]) -> Tensor:
    """Multiply each tile of [R, C] by its element of scale [R / r, C / c], in place (in a copy if ragged)."""
    if isinstance(scale, float) or (tile[0] in _BROADCASTS and tile[1] in _BROADCASTS):
        return x_RC.mul_(scale)
    tiled = as_tiles(x_RC, tile).mul_(scale[:, None, :, None])
    if tiled.data_ptr() == x_RC.data_ptr():
        return x_RC
    rows, cols = x_RC.shape
    return tiled.flatten(2, 3).flatten(0, 1)[:rows, :cols]


def row_slices(shape: tuple[int, int], unit: int, chunks: int = 1) -> list[slice]:
    """Rows in chunks of about so many times CHUNK elements, each of whole units but the last."""
    rows, cols = shape
    step = max(chunks * CHUNK // max(cols, 1) // unit, 1) * unit
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)] or [slice(0, 0)]


def tile_rows(scales: Tensor, tile: Sequence[int], rows: slice) -> Tensor:
    """The scales of whole tiles' rows."""
    return scales if tile[0] == ALL else scales[rows.start // tile[0] : -(-rows.stop // tile[0])]
