"""CRC-32s of tensors in a safetensors file: in the header's metadata, where other readers ignore them.

A tensor has one for each block of whole rows of about BLOCK_BYTES, so that a rank that reads some rows of a sharded
tensor checks those alone, and at most a block more at each end.
"""

from __future__ import annotations

import ctypes
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import first_line
from octavo.reading import read_json

BLOCK_BYTES = 1 << 22
KEY = "octavo_crc32"  # {"block_bytes": number, "tensors": {name: 8 hexadecimal digits for each block}}


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the metadata of a file with these contiguous tensors on the CPU."""
    sums = {name: "".join(_sums(tensor, _rows_of_block(tensor, BLOCK_BYTES))) for name, tensor in tensors.items()}
    return {KEY: json.dumps({"block_bytes": BLOCK_BYTES, "tensors": sums}, separators=(",", ":"))}


def _rows_of_block(tensor: Tensor, block_bytes: int) -> int:
    """Return how many rows of a tensor a block of so many bytes holds, at least one."""
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    return max(block_bytes // max(row_bytes, 1), 1)


def _sums(tensor: Tensor, rows_of_block: int) -> list[str]:
    """Return the CRC-32 of each block of rows of a contiguous tensor on the CPU; a number is a row."""
    blocks = torch.atleast_1d(tensor).split(rows_of_block) if tensor.numel() else ()
    # a block's memory as a buffer: without a copy and without NumPy
    buffers = ((ctypes.c_char * block.nbytes).from_address(block.data_ptr()) for block in blocks)
    return [f"{zlib.crc32(buffer):08x}" for buffer in buffers]


class CheckedFile:
    """A safetensors file whose tensors are checked as they are read, if its header has their CRC-32s.

    Args:
        path: the file.
        file: it, opened by ``safetensors.safe_open(path, "pt")``.

    Raises:
        ValueError: the CRC-32s in the header can't be read.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._file = path, file
        self._block_bytes, self._sums = 0, dict[str, str]()
        if (written := (file.metadata() or {}).get(KEY)) is None:
            return
        try:
            content = read_json(written)
            self._block_bytes = int(content["block_bytes"])
            self._sums = {name: str(digits) for name, digits in dict(content["tensors"]).items()}
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{path} has no CRC-32s that can be read in its header: {first_line(error)}") from error

    def keys(self) -> list[str]:
        """Return the names of the file's tensors."""
        return list(self._file.keys())

    def header(self, key: str) -> tuple[tuple[int, ...], str]:
        """Return the shape of a tensor, and the name that files have for its dtype."""
        tensor = self._file.get_slice(key)
        return tuple(tensor.get_shape()), tensor.get_dtype()

    def read(self, key: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Return a part of a tensor, by a slice with both ends for each dimension; without them all of it.

        Raises:
            ValueError: what is read differs from what was written.
        """
        if (sums := self._sums.get(key)) is None:
            return self._file.get_slice(key)[part] if part else self._file.get_tensor(key)
        if not part:
            return self._check(key, self._file.get_tensor(key), 0, sums)
        tensor = self._file.get_slice(key)
        rows, step = part[0], _rows_of_block(tensor[:0], self._block_bytes)
        first, last = rows.start // step * step, min(-(-rows.stop // step) * step, tensor.get_shape()[0])
        whole = self._check(key, tensor[first:last], first // step, sums)
        return whole[(slice(rows.start - first, rows.stop - first), *part[1:])]

    def _check(self, key: str, rows: Tensor, first_block: int, sums: str) -> Tensor:
        """Return whole blocks of rows, from the block of this number on, if they have the CRC-32s of ``sums``."""
        read = "".join(_sums(rows, _rows_of_block(rows, self._block_bytes)))
        begin = 8 * first_block
        if sums[begin : begin + len(read)] != read:
            raise ValueError(
                f"{self.path}: {key} is not what was written, by its CRC-32: copy or download the file again"
            )
        return rows
