"""The casts of a tensor as it is, and what reads codes back; fused_cases.py has casts of what is computed first."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.granularity import ALL
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.tune.timing import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROWS, COLUMNS = (ALL, ALL), (1, ALL), (ALL, 1)
UPDATE = ([448.0, 448.0, 57344.0], [False] * 3, [0] * 3, "max")
SCALE = 64.0  # of normal numbers: nothing saturates

# by its path: the function of the same name hides the module
_history = importlib.import_module("octavo.kernels.triton.known_scales")


def _x_alone(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


class Case(NamedTuple):
    """An op of the kernels' table, what it reads, made from x [R, C], and its arguments, made from what it reads.

    The last argument may be Named.
    """

    op: str
    arguments: Callable[..., tuple[Any, ...]]
    reads: int = 1  # of all that is read
    inputs: Callable[[Tensor], tuple[Tensor, ...]] = _x_alone
    exact: bool = True  # its codes are the reference's; else it may round otherwise on the way to them


class Named(dict[str, Any]):
    """A case's arguments by name."""


def call(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A kernel's results of a case's arguments."""
    *flat, last = arguments
    return kernel(*flat, **last) if isinstance(last, Named) else kernel(*arguments)


def second(tile: Sequence[int], power_of_two: bool) -> Named:
    """A second scaling, in E4M3."""
    return Named(second_dtype=E4M3, second_tile=tile, second_power_of_two=power_of_two)


def delayed_state(scale: float = SCALE) -> tuple[Tensor, Tensor, Tensor]:
    """A delayed state whose scales are known to exist, as after the first steps of training."""
    scales, history = torch.full((3,), scale, device=DEVICE), torch.full((3, 16), 448 / scale, device=DEVICE)
    before = torch.stack((torch.zeros_like(scales), scales)).view(torch.int32)  # of no pass
    _history.committed(scales, history, before, (True, True, True))
    return scales, history, before


def _delayed(transpose: bool = False) -> Callable[[Tensor], tuple[Any, ...]]:
    return lambda x: (x, delayed_state()[0], 0, E4M3, TENSOR, False, 0, transpose)


def _dynamic(
    tile: Sequence[int], power_of_two: bool = False, transpose: bool = False
) -> Callable[[Tensor], tuple[Any, ...]]:
    return lambda x: (x, None, 0, E4M3, tile, power_of_two, 0, transpose)


def _grouped(tile: Sequence[int], as_is: bool = True, delayed: bool = False) -> Callable[[Tensor], tuple[Any, ...]]:
    """Eight groups of equal sizes; transposed codes unless a scale is for a part of a row."""

    def arguments(x: Tensor) -> tuple[Any, ...]:
        ends = torch.arange(1, 9, device=DEVICE, dtype=torch.int32) * (len(x) // 8)
        cast = delayed_state()[0] if delayed else None, 0, E4M3, tile, tile[0] * tile[1] > 1, 0
        return x, *cast, tile[0] != 1, 16, Named(offsets=ends, as_is=as_is)

    return arguments


def _columns(x: Tensor) -> tuple[Any, ...]:
    return x.t(), None, 0, E4M3, ROWS, False, 0


def _commit(x: Tensor) -> tuple[Any, ...]:
    amax = torch.full((1, 1), 5.0, device=DEVICE)
    return x, *delayed_state(), amax, amax, E5M2, False, 0, *UPDATE, True, 1, True


def _two(tile: Sequence[int], other: Sequence[int], power_of_two: bool) -> Callable[[Tensor], tuple[Any, ...]]:
    return lambda x: (x, None, 0, E4M3, tile, power_of_two, 0, True, second(other, power_of_two))


def _pair(tile: Sequence[int]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: REFERENCE["cast"](x, None, 0, E4M3, tile, False, 0)[:3:2]


def _dequantized(tile: Sequence[int]) -> Case:
    return Case("dequantize", lambda q, scale_inv: (q, scale_inv, tile, torch.bfloat16), inputs=_pair(tile))


def _weights(x: Tensor) -> tuple[Any, ...]:
    """x as five weights of uneven heights, and where their pairs go."""
    rows = len(x)
    unit = max(rows // 16, 1)
    xs = [piece for piece in x.split([unit, 2 * unit, 3 * unit, 4 * unit, rows - 10 * unit]) if len(piece)]
    outputs = [torch.empty(w.shape, dtype=E4M3, device=DEVICE) for w in xs]
    transposed = [torch.empty(w.shape[::-1], dtype=E4M3, device=DEVICE) for w in xs]
    scales = [[torch.empty(1, 1, device=DEVICE) for _ in xs] for _ in range(2)]
    return x, xs, outputs, transposed, *scales


def many(kernel: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    """``multi_tensor_cast`` as a function of ``_weights``, with results."""

    def run(x: Tensor, xs: list[Tensor], *outputs: list[Tensor]) -> tuple[Tensor, ...]:
        kernel(xs, *outputs, [], 1, TENSOR, False, 0, None)
        return tuple(tensor for group in outputs for tensor in group)

    return run


CASES = {
    "amax": Case("amax", lambda x: (x, TENSOR)),
    "cast delayed": Case("cast", _delayed()),
    "cast dynamic": Case("cast", _dynamic(TENSOR), reads=2),
    "cast+transpose delayed": Case("cast", _delayed(True)),
    "cast+transpose dynamic": Case("cast", _dynamic(TENSOR, transpose=True), reads=2),
    "cast+transpose+sum+commit": Case("cast_and_commit", _commit),
    "five weights at once": Case("many", _weights, reads=2),
    "cast rows": Case("cast", _dynamic(ROWS)),
    "cast columns": Case("cast", _columns, reads=2),
    "cast rows + columns": Case("cast", _two(ROWS, COLUMNS, False), reads=2),
    "cast 1x128": Case("cast", _dynamic((1, 128), True)),
    "cast 1x128 + 128x1": Case("cast", _two((1, 128), (128, 1), True)),
    "cast 1x32 + 32x1": Case("cast", _two((1, 32), (32, 1), True)),
    "cast+transpose 128x128": Case("cast", _dynamic((128, 128), True, True)),
    "grouped cast+transpose delayed": Case("cast", _grouped(TENSOR, delayed=True)),
    "grouped cast columns, transposed": Case("cast", _grouped(COLUMNS, False), reads=2),
    "grouped cast 1x128": Case("cast", _grouped((1, 128))),
    "grouped cast 128x1, transposed": Case("cast", _grouped((128, 1), False)),
    "dequantize tensor": _dequantized(TENSOR),
    "dequantize 1x128": _dequantized((1, 128)),
}
