"""What the cases of compiled.py are made of: a case, and the tensors and states that it takes, at every size.

Tensors are never read, so their memory isn't even touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.granularity import ALL, Tile, granularity_of
from octavo.kernels.groups import grouped_scale_shape
from octavo.kernels.triton import KERNELS
from octavo.kernels.triton.launch import TABLE
from octavo.numerics import E8M0, scale_inv_dtype

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, COLUMN = (ALL, ALL), (1, ALL), (ALL, 1)
VECTOR, SQUARE, MX = (1, 128), (128, 128), (1, 32)
PAD = 16


class Case(NamedTuple):
    """A call of an op that launches kernels, whose accesses of tiles should have so many ``bits``."""

    op: str
    what: str
    call: Callable[[], object]
    bits: int = 128


def scales(shape: Sequence[int], tile: Tile) -> Tensor:
    """In place of scale_inv of this shape; of MX's tiles E8M0 by columns, as casts write it."""
    return torch.empty((*shape[:-2], *shape[:-3:-1]), dtype=E8M0).mT if tile == MX else torch.empty(shape)


def terms_scales(shape: tuple[int, int], groups: int, tile: Tile) -> Tensor:
    """The same of an operand by ``tile`` whose terms are in groups; shape: of what was cast, terms by rows."""
    return torch.empty(grouped_scale_shape(shape, groups, tile[::-1]), dtype=scale_inv_dtype(tile, True)).t()


def _sizes() -> list[tuple[int, int]]:
    """Shapes of which each row of configs.json serves one."""
    *bounds, _ = sorted({row[0] for rows in TABLE.values() for row in rows})  # the last row serves any larger size
    logs = [*bounds, max(24, *(bound + 1 for bound in bounds))]
    return [(1 << (log - 1 - log // 2), 1 << (log // 2)) for log in logs]


SIZES = _sizes()
LARGE = SIZES[-1]
RAGGED = (1000, 8176)  # not made of whole tiles, yet aligned


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_").removesuffix("fn")


def describe(tile: Tile, codes: torch.dtype, x: Tensor, *more: str) -> str:
    rows, cols = x.shape
    words = [
        granularity_of(tile),
        name_of(codes),
        *(word for word in more if word),
        f"of {name_of(x.dtype)} [{rows}, {cols}]",
    ]
    return " ".join(map(str, words))


def tensor(shape: tuple[int, int] = LARGE, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # never read, so its memory isn't even touched


UPDATE = (448.0, 448.0, 57344.0), (False,) * 3, (0,) * 3, "max"


def delayed_state(length: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """The delayed state of a module that has stepped, so that no amax is looked for before the cast."""
    one, scales = torch.ones(1, 1), torch.ones(3)
    state = scales, torch.zeros(3, length), torch.stack((torch.zeros(3), scales)).view(torch.int32)
    KERNELS["delayed_update"](*state, one, one, one, *UPDATE)
    return state
