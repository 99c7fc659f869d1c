"""The casts that are timed: how each is called, and that its results are right.

A case's arguments are made once for each input; the same go to the Triton kernel and to the reference. The bytes of a
case are what it must at least move: its input once (twice where the scale needs an amax of the whole tensor first) and
each of its outputs once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import benchmarks.interpreter  # noqa: F401
from benchmarks.gpu_timer import DEVICE, synchronize
from octavo.granularity import ALL
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.triton import KERNELS as TRITON

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROWS, COLUMNS = (ALL, ALL), (1, ALL), (ALL, 1)
UPDATE = ([448.0, 448.0, 57344.0], [False] * 3, [0] * 3, "max")
SCALE = 64.0  # of normal numbers: nothing saturates

# by its path: the function of the same name hides the module
_history = importlib.import_module("octavo.kernels.triton.history")


class Case(NamedTuple):
    """An op of the kernels' table and its arguments, made from x [R, C]."""

    op: str
    arguments: Callable[[Tensor], tuple[Any, ...]]
    reads: int = 1  # of x


def _state() -> tuple[Tensor, Tensor]:
    """Delayed scales that are known to exist, as after the first steps of training, and their history."""
    scale, history = torch.full((3,), SCALE, device=DEVICE), torch.full((3, 16), 448 / SCALE, device=DEVICE)
    _history.committed(scale, history, (True, True, True))
    return scale, history


def _delayed(x: Tensor) -> tuple[Any, ...]:
    return x, _state()[0], 0, E4M3, TENSOR, False, 0


def _dynamic(tile: Sequence[int], power_of_two: bool = False) -> Callable[[Tensor], tuple[Any, ...]]:
    return lambda x: (x, None, 0, E4M3, tile, power_of_two, 0)


def _columns(x: Tensor) -> tuple[Any, ...]:
    return x.t(), None, 0, E4M3, ROWS, False, 0


def _commit(x: Tensor) -> tuple[Any, ...]:
    amax = torch.full((1, 1), 5.0, device=DEVICE)
    return x, *_state(), amax, amax, E5M2, False, 0, *UPDATE, True, 1, True


def _two(tile: Sequence[int], second: Sequence[int], power_of_two: bool) -> Callable[[Tensor], tuple[Any, ...]]:
    return lambda x: (x, E4M3, tile, power_of_two, 0, E4M3, second, power_of_two, 0, True)


def _pair(tile: Sequence[int]) -> Callable[[Tensor], tuple[Any, ...]]:
    def arguments(x: Tensor) -> tuple[Any, ...]:
        q, scale_inv = REFERENCE["cast"](x, None, 0, E4M3, tile, False, 0)[:2]
        return q, scale_inv, tile, torch.bfloat16

    return arguments


def _weights(x: Tensor) -> tuple[Any, ...]:
    """x as five weights of uneven heights, and where their pairs go."""
    rows = len(x)
    unit = max(rows // 16, 1)
    xs = [piece for piece in x.split([unit, 2 * unit, 3 * unit, 4 * unit, rows - 10 * unit]) if len(piece)]
    outputs = [torch.empty(w.shape, dtype=E4M3, device=DEVICE) for w in xs]
    transposed = [torch.empty(w.shape[::-1], dtype=E4M3, device=DEVICE) for w in xs]
    scales = [[torch.empty(1, 1, device=DEVICE) for _ in xs] for _ in range(2)]
    return x, xs, outputs, transposed, *scales


def _many(kernel: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    """``multi_tensor_cast`` as a function of ``_weights``, with results."""

    def run(x: Tensor, xs: list[Tensor], *outputs: list[Tensor]) -> tuple[Tensor, ...]:
        kernel(xs, *outputs, [], 1, TENSOR, False, 0, None)
        return tuple(tensor for group in outputs for tensor in group)

    return run


KERNELS = {**TRITON, "many": _many(TRITON["multi_tensor_cast"])}
DEFINITIONS = {**REFERENCE, "many": _many(REFERENCE["multi_tensor_cast"])}

CASES = {
    "amax": Case("amax", lambda x: (x, TENSOR)),
    "cast delayed": Case("cast", _delayed),
    "cast dynamic": Case("cast", _dynamic(TENSOR), reads=2),
    "cast+transpose delayed": Case("cast_transpose", _delayed),
    "cast+transpose dynamic": Case("cast_transpose", _dynamic(TENSOR), reads=2),
    "cast+transpose+sum+commit": Case("cast_and_commit", _commit),
    "five weights at once": Case("many", _weights, reads=2),
    "cast rows": Case("cast", _dynamic(ROWS)),
    "cast columns": Case("cast", _columns),
    "cast rows + columns": Case("cast_two_scalings", _two(ROWS, COLUMNS, False)),
    "cast 1x128": Case("cast", _dynamic((1, 128), True)),
    "cast 1x128 + 128x1": Case("cast_two_scalings", _two((1, 128), (128, 1), True)),
    "cast 1x32 + 32x1": Case("cast_two_scalings", _two((1, 32), (32, 1), True)),
    "cast+transpose 128x128": Case("cast_transpose", _dynamic((128, 128), True)),
    "dequantize tensor": Case("dequantize", _pair(TENSOR)),
    "dequantize 1x128": Case("dequantize", _pair((1, 128))),
}


def inputs(rows: int, cols: int, sets: int) -> list[Tensor]:
    """So many tensors [rows, cols] of normal numbers, bf16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(rows, cols, dtype=torch.bfloat16, device=DEVICE, generator=generator) for _ in range(sets)]


def calls(name: str, xs: Sequence[Tensor]) -> list[Callable[[], Any]]:
    """The Triton kernel on each input."""
    case = CASES[name]
    kernel = KERNELS[case.op]

    def call(arguments: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: kernel(*arguments)

    bound = [call(case.arguments(x)) for x in xs]
    synchronize()  # the scales' arrival on the host
    return bound


def moved_bytes(name: str, x: Tensor, result: Any) -> int:
    """What the case must move at least."""
    outputs = (result,) if isinstance(result, Tensor) else result
    source = CASES[name].arguments(x)[0]
    return CASES[name].reads * source.nbytes + sum(output.nbytes for output in outputs)


def wrong(name: str, x: Tensor) -> str:
    """What differs between the kernel and its reference, "" for nothing: bit for bit but for sums of columns."""
    case = CASES[name]
    arguments, expected_arguments = case.arguments(x), case.arguments(x)
    synchronize()
    results, expected = KERNELS[case.op](*arguments), DEFINITIONS[case.op](*expected_arguments)
    results, expected = ((r,) if isinstance(r, Tensor) else tuple(r) for r in (results, expected))
    for index, (result, truth) in enumerate(zip(results, expected, strict=True)):
        if result.shape != truth.shape or result.dtype != truth.dtype:
            return f"output {index}: {tuple(result.shape)} {result.dtype}, not {tuple(truth.shape)} {truth.dtype}"
        is_sum = result.ndim == 1
        if is_sum and not torch.allclose(result, truth, rtol=2**-7, atol=1e-3 * x.shape[0] ** 0.5):
            return f"output {index}: sums differ by {(result.float() - truth.float()).abs().max().item():.3g}"
        if not is_sum and not torch.equal(_bits(result), _bits(truth)):
            differing = int((_bits(result) != _bits(truth)).sum())
            return f"output {index}: {differing} of {result.numel()} differ"
    for before, after in zip(expected_arguments, arguments, strict=True):
        if isinstance(before, Tensor) and before.dtype == torch.float32 and not torch.equal(before, after):
            return "state differs"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
