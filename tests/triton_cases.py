"""What the Triton kernels' tests put in, and the one comparison with the reference."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from octavo.kernels.reference import KERNELS as REFERENCE
from tests.definitions import same_bits
from tests.triton_kernels import TritonKernels

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(0, 17), (17, 0), (0, 0), (1, 1), (1, 1000), (1000, 1), (17, 127), (127, 128), (128, 17), (64, 256)]
SHAPES += [(128, 128), (1000, 17), (127, 1000)]
LAYOUTS = ["rows", "columns", "strided", "offset"]
VALUES = ["varied", "faults", "only faults", "zeros", "edge"]
ALL = (-1, -1)

# Smaller tiles than a table has, so that small tensors are several programs in each direction. What is padded to 16
# needs tiles of 16.
SMALL_TILES = {
    "amax": [16, 64, 2, 4],
    "cast": [8, 64, 3, 4],
    "cast_transpose": [16, 32, 2, 4],
    "cast_rows": [4, 128, 1, 4],
    "cast_rows_transpose": [16, 64, 1, 4],
    "cast_blocks": [16, 32, 1, 4],
    "cast_blocks_transpose": [32, 32, 1, 4],
}


def values_of(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor [R, C] on the CPU, whose rows and columns differ in size.

    Args:
        kind: "varied": finite; "faults": with inf and NaN; "only faults": some rows and columns hold no other;
            "zeros"; "edge": the largest and the smallest numbers too.
        shape: its shape.
        dtype: its dtype.
    """
    rows, cols = shape
    x = torch.randn(shape) * torch.logspace(-2, 1, cols) * torch.logspace(-1, 1, rows)[:, None]
    if kind == "zeros":
        x.zero_()
    if kind == "only faults":
        x[: (rows + 1) // 2], x[:, : (cols + 1) // 2] = math.nan, math.nan
        x[1:2] = math.inf
    x = x.to(dtype)
    info = torch.finfo(dtype)
    special = {
        "faults": [math.nan, math.inf, -math.inf, -math.nan],
        "edge": [info.max, -info.max / 3, info.smallest_normal * info.eps, -info.smallest_normal, -0.0],
    }
    for i, value in enumerate(special.get(kind, ())):
        flat = x.view(-1)[(7 * i + 1) % 11 :: 211 + i]
        flat.fill_(value)
    return x


def laid(x: Tensor, layout: str, device: torch.device) -> Tensor:
    """``x`` on the device, in memory whose other elements are the largest numbers.

    Args:
        x: [R, C] on the CPU.
        layout: "rows": contiguous; "columns": that of a transposed tensor; "strided": both strides odd; "offset":
            contiguous, but where no vector may be read.
        device: where to.
    """
    rows, cols = x.shape
    strides, offset = {
        "rows": ((cols, 1), 0),
        "columns": ((1, rows), 0),
        "strided": (((3 * cols + 1) | 1, 3), 5),
        "offset": ((cols, 1), 1),
    }[layout]
    size = offset + (rows * strides[0] + cols * strides[1]) + 1
    largest = torch.finfo(x.dtype).max if x.is_floating_point() else 0x7E
    memory = torch.full((size,), largest, dtype=x.dtype)
    memory.as_strided(x.shape, strides, offset).copy_(x)
    return memory.to(device).as_strided(x.shape, strides, offset)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def to(device: str | torch.device, tree: Any) -> Any:
    """A copy, with its tensors on the device."""
    return tree_map(lambda a: a.detach().to(device, copy=True) if isinstance(a, Tensor) else a, tree)


def check(
    kernels: TritonKernels, op: str, *args: Any, compare_sums: bool = True, where: str = "cpu"
) -> tuple[Tensor, ...]:
    """Run an op that casts and compare each result and each argument that it may write with the reference's.

    Args:
        kernels: the Triton kernels.
        op: its name.
        args: its arguments, tensors on the kernels' device, x first.
        compare_sums: False where a sum may depend on the order.
        where: on which device the reference runs and is compared.

    Returns:
        the results, on that device.
    """
    reference_args = to(where, args)
    expected = REFERENCE[op](*reference_args)
    with poisoned_memory():
        actual = getattr(kernels, op)(*args)
    assert all(result.is_contiguous() and result.device.type == kernels.device.type for result in actual)
    names = [f"result {i}" for i in range(len(actual) - 1)] + [f"argument {i}" for i in range(len(args))]
    found, right = to(where, [*actual[:-1], *args]), [*expected[:-1], *reference_args]
    for name, a, b in zip(names, found, right, strict=True):
        assert not isinstance(a, Tensor) or same_bits(a, b), f"{op}: {name} differs"
    assert_counters_are_zero(kernels)
    actual = to(where, actual)
    if compare_sums:
        assert_sums(actual[-1], expected[-1], reference_args[0])
    return actual


def assert_sums(sums: Tensor, expected: Tensor, x: Tensor) -> None:
    """Column sums, which may be added in any order."""
    assert sums.shape == expected.shape and sums.dtype == expected.dtype == x.dtype
    if sums.numel() == 0:
        return
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    finite, infinite = exact.isfinite(), exact.isinf()
    assert torch.equal(sums.isnan(), exact.isnan())
    assert torch.equal(sums[infinite].double(), exact[infinite])
    allowed = torch.finfo(x.dtype).eps / 2 * exact.abs() + 2.0**-18 * size
    assert bool(((sums.double() - exact).abs() <= allowed)[finite].all())


def assert_counters_are_zero(kernels: TritonKernels) -> None:
    """What programs share is as the next launch expects it."""
    launch = kernels.module("launch")
    for work in (*launch._work.values(), *(work for pool in launch._pools.values() for work in pool)):
        assert not work.any(), "a launch left a counter or an amax behind"


def use_small_tiles(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels work in SMALL_TILES for the rest of the test."""
    launch = kernels.module("launch")
    config = launch.config

    def small(kernel: str, log2_elements: int) -> Any:
        return launch.Config(*SMALL_TILES[kernel]) if kernel in SMALL_TILES else config(kernel, log2_elements)

    for module in kernels.modules.values():
        if vars(module).get("config") is config:
            monkeypatch.setattr(module, "config", small)


def update_args(
    reduce: str, powers_of_two: Sequence[bool] = (False, True, False), margins: Sequence[int] = (0, 1, 2)
) -> tuple[Any, ...]:
    """An update's limits, powers_of_two, margins and reduce."""
    return [448.0, 448.0, 57344.0], list(powers_of_two), list(margins), reduce
