"""Every op that casts, and whether two tensors share memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.scaling.delayed import State

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


ALL = (-1, -1)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def every_cast(x: Tensor, tile: Sequence[int], *extras: Any) -> list[tuple[str, tuple[Tensor, ...]]]:
    """The results of each op that casts; ``extras`` are pad and column_sum."""
    update = ([448.0] * 3, [False] * 3, [0] * 3, "max")
    found: list[tuple[str, tuple[Tensor, ...]]] = []
    for transpose in (False, True):
        found.append(("cast", kernels.cast(x, None, 0, E4M3, tile, False, 0, transpose, *extras)))
        second = (E5M2, tile[::-1], True, 1, transpose)
        found.append(("cast_two_scalings", kernels.cast_two_scalings(x, E4M3, tile, False, 0, *second, *extras)))
        if tuple(tile) == ALL:
            commit = (x, *State.empty(2), None, None, E4M3, False, 0, *update, transpose, *extras)
            found.append(("cast_and_commit", kernels.cast_and_commit(*commit)))
    return found
