"""Arguments of casts, every op that casts, and what is asserted of codes."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.scaling.delayed import State
from tests.support.definitions import same_bits

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL = (-1, -1)


def second(dtype: torch.dtype, tile: Sequence[int], power_of_two: bool, margin: int) -> dict[str, Any]:
    """A second scaling, as ``cast`` takes it."""
    names = ("dtype", "tile", "power_of_two", "margin")
    return {f"second_{name}": value for name, value in zip(names, (dtype, tile, power_of_two, margin), strict=True)}


def of_norm(
    gamma: Tensor, beta: Tensor | None, kind: str, eps: float = 1e-5, zero_centered: bool = False
) -> dict[str, Any]:
    """A norm of what is cast, as ``cast`` takes it."""
    return {"gamma": gamma, "beta": beta, "kind": kind, "eps": eps, "zero_centered": zero_centered}


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def every_cast(x: Tensor, tile: Sequence[int], *extras: Any) -> list[tuple[str, tuple[Tensor, ...]]]:
    """The results of each op that casts; ``extras`` are pad and column_sum."""
    update = ([448.0] * 3, [False] * 3, [0] * 3, "max")
    found: list[tuple[str, tuple[Tensor, ...]]] = []
    for transpose in (False, True):
        found.append(("cast", kernels.cast(x, None, 0, E4M3, tile, False, 0, transpose, *extras)))
        both = kernels.cast(x, None, 0, E4M3, tile, False, 0, transpose, *extras, **second(E5M2, tile[::-1], True, 1))
        found.append(("two scalings", both))
        if tuple(tile) == ALL:
            commit = (x, *State.empty(2), None, None, E4M3, False, 0, *update, transpose, *extras)
            found.append(("cast_and_commit", kernels.cast_and_commit(*commit)))
    return found


def check_codes(qdata: Tensor, codes: Tensor, fmt: torch.dtype, pad: int) -> None:
    """That qdata is these bytes, and zeros up to a multiple of ``pad``."""
    rows, cols = codes.shape
    raw = qdata.view(torch.uint8)
    assert qdata.dtype == fmt and qdata.is_contiguous() and qdata.shape == (rows, math.ceil(cols / pad) * pad)
    assert same_bits(raw[:, :cols], codes) and not raw[:, cols:].any()
