"""A 2-D tensor in chunks of rows that fit a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.granularity import ALL

# Elements worked on at a time. Fresh memory costs more than arithmetic on a CPU: reading 2048x1408 codes in one piece
# took 3.5 to 15 ms, depending on what malloc had to fetch from the system, in chunks with one scratch 1.0 ms (1 core,
# AMD EPYC Zen 5).
CHUNK = 1 << 18
CHUNK_ELSEWHERE = 1 << 26  # on a GPU each chunk is more launches, and only memory asks for any: 256 MiB of float32


def row_slices(shape: Sequence[int], unit: int, device: torch.device, chunks: int = 1) -> list[slice]:
    """Rows in chunks of about so many times CHUNK elements, each of whole units but the last."""
    rows, cols = shape
    chunk = CHUNK if device.type == "cpu" else CHUNK_ELSEWHERE
    step = max(chunks * chunk // max(cols, 1) // unit, 1) * unit
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)] or [slice(0, 0)]


def tile_rows(scales: Tensor, tile: Sequence[int], rows: slice) -> Tensor:
    """The scales of whole tiles' rows."""
    return scales if tile[0] == ALL else scales[rows.start // tile[0] : -(-rows.stop // tile[0])]
