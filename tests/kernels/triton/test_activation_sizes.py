"""On a GPU: activations and their gradients at the sizes that models have, and in CUDA graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.support.casts import second
from tests.support.definitions import same_bits
from tests.support.triton_cases import (
    ALL,
    DTYPES,
    E4M3,
    E5M2,
    Run,
    assert_close,
    assert_counters_are_zero,
    check,
    check_close,
    named_arguments,
    named_results,
    to,
    update_args,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = "cuda"
TILES = [ALL, (1, -1), (-1, 1), (1, 128), (128, 128), (128, 1), (1, 32)]
TWO_SCALINGS = [((1, 128), (128, 1)), ((1, 32), (32, 1)), ((1, -1), (-1, 1))]
# of an activation's output; a gated one's input and its gradient are twice as wide
LARGE = [((16384, 4096), False), ((3001, 2500), False), ((3001, 2500), True)]
EXACT = {"relu", "squared_relu", "reglu"}


def large(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers where activations bend, and beyond."""
    x = torch.empty(rows, cols, dtype=dtype, device=DEVICE).normal_()
    return x.mul_(torch.logspace(-1, 1, cols, device=DEVICE).to(dtype))


def given(
    shape: tuple[int, int], activation: str, backward: bool, h_tile: tuple[int, int] | None = None, faults: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    """X and its activation; ``shape`` is that of the activation's output."""
    rows, cols = shape
    h = large(rows, 2 * cols if ACTIVATIONS[activation].gated else cols)
    dy = large(rows, cols)
    for x in (h, dy) if faults else ():
        x.view(-1)[5::1_000_003] = torch.nan
        x.view(-1)[7::1_500_007] = torch.inf
    scaling: tuple[Any, ...] = ()
    if h_tile is not None:
        h, _, scale_inv, *_ = REFERENCE["cast"](h, None, 0, E4M3, h_tile, False, 0)
        scaling = scale_inv, h_tile
    return (dy, (activation, h, *scaling)) if backward else (h, (activation, None, *scaling))


def delayed_state() -> tuple[Tensor, Tensor, Tensor]:
    scale, history = torch.tensor([50.0, 0.0, 3000.0], device=DEVICE), torch.rand(3, 16, device=DEVICE)
    return scale, history, State.empty(1, DEVICE).before


def commits() -> tuple[Any, ...]:
    return torch.full((1, 1), 3.0, device=DEVICE), None, E5M2, False, 0, *update_args("max"), True, 16, True


@pytest.mark.parametrize(("shape", "faults"), LARGE, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "gelu_tanh", "squared_relu"])
def test_every_op(
    kernels: TritonKernels, activation: str, backward: bool, shape: tuple[int, int], faults: bool
) -> None:
    compare = check if activation in EXACT else check_close
    x, arguments = given(shape, activation, backward, faults=faults)
    for tile in TILES:
        compare(kernels, "cast", x, None, 0, E4M3, tile, False, 0, False, 1, False, *arguments, where=DEVICE)
        compare(kernels, "cast", x, None, 0, E5M2, tile, True, 1, True, 16, True, *arguments, where=DEVICE)
    for tile, second_tile in TWO_SCALINGS:
        cast = None, 0, E4M3, tile, True, 0, True, 16, True
        compare(kernels, "cast", x, *cast, *arguments, **second(E5M2, second_tile, False, 0), where=DEVICE)
    state = delayed_state()
    for role in (0, 1):
        compare(kernels, "cast", x, state[0], role, E4M3, ALL, False, 0, True, 16, True, *arguments, where=DEVICE)
    for _ in range(3):
        compare(kernels, "cast_and_commit", x, *state, *commits(), *arguments, where=DEVICE)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dtypes_and_layouts(kernels: TritonKernels, activation: str, backward: bool) -> None:
    rows, cols = 1000, 520
    wide = 2 * cols if ACTIVATIONS[activation].gated else cols
    compare = check if activation in EXACT else check_close
    for dtype in DTYPES:
        for of in (lambda x: x, lambda x: x.t().contiguous().t(), lambda x: torch.cat((x, x), 1)[:, ::2]):
            h, dy = of(large(rows, wide, dtype)), of(large(rows, cols, dtype))
            x, arguments = (dy, (activation, h)) if backward else (h, (activation,))
            for tile in TILES:
                compare(kernels, "cast", x, None, 0, E4M3, tile, False, 0, True, 16, True, *arguments, where=DEVICE)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("h_tile", [ALL, (1, -1), (1, 128), (1, 32), (128, 128)], ids=str)
def test_of_codes(kernels: TritonKernels, h_tile: tuple[int, int], backward: bool) -> None:
    for activation in ("swiglu", "gelu"):
        x, arguments = given((4096, 2048), activation, backward, h_tile)
        for tile in TILES:
            cast = None, 0, E4M3, tile, False, 0, True, 16, True
            check_close(kernels, "cast", x, *cast, *arguments, where=DEVICE)
        for tile, second_tile in TWO_SCALINGS:
            cast = None, 0, E4M3, tile, True, 0, True, 16, True
            check_close(kernels, "cast", x, *cast, *arguments, **second(E5M2, second_tile, False, 0), where=DEVICE)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
def test_more_elements_than_int32_counts(kernels: TritonKernels, backward: bool) -> None:
    rows, cols = 70001, 16384
    assert rows * 2 * cols > 2**31
    x, arguments = given((rows, cols), "reglu", backward)
    for tile in (ALL, (1, -1), (-1, 1), (1, 128), (128, 1)):
        cast = x, None, 0, E4M3, tile, False, 0, True, 1, False, *arguments
        results, expected = kernels.cast(*cast), REFERENCE["cast"](*cast)
        assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True)), tile
        del results, expected


CAPTURED: dict[str, tuple[str, bool, Callable[[], tuple[Any, ...]]]] = {
    "forward, Dynamic": ("cast", False, lambda: (None, 0, E4M3, ALL, False, 0, False, 16, True)),
    "forward, Delayed": ("cast", False, lambda: (delayed_state()[0], 0, E4M3, ALL, False, 0, True, 16, False)),
    "forward, no history": ("cast", False, lambda: (delayed_state()[0], 1, E4M3, ALL, False, 0, False, 16, False)),
    "gradient, rows": ("cast", True, lambda: (None, 0, E4M3, (1, -1), False, 0, False, 16, True)),
    "gradient, columns": ("cast", True, lambda: (None, 0, E4M3, (-1, 1), True, 0, True, 16, True)),
    "gradient, blocks": ("cast", True, lambda: (None, 0, E4M3, (1, 128), True, 0, True, 16, True)),
    "gradient, commit": ("cast_and_commit", True, lambda: (*delayed_state(), *commits())),
}


@pytest.mark.parametrize("h_tile", [None, (1, 128)], ids=["", "of codes"])
@pytest.mark.parametrize("name", CAPTURED)
def test_in_a_cuda_graph(kernels: TritonKernels, name: str, h_tile: tuple[int, int] | None) -> None:
    op, backward, make_args = CAPTURED[name]
    x, arguments = given((1000, 1024), "swiglu", backward, h_tile)
    args, named = (x, *make_args(), *arguments), {}
    if name == "gradient, blocks":
        named = second(E5M2, (128, 1), False, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            getattr(kernels, op)(*args, **named)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = getattr(kernels, op)(*args, **named)
    for scale in (1.0, 0.25, 4.0):  # each replay of a commit rolls once
        fresh, of_fresh = given((1000, 1024), "swiglu", backward, h_tile)
        x.copy_(fresh if fresh.element_size() == 1 else fresh * scale)
        for old, new in zip(arguments, of_fresh, strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        before, right = to(DEVICE, args), to(DEVICE, args)
        expected = REFERENCE[op](*right, **named)
        graph.replay()
        if op == "cast_and_commit":  # each replay is a pass by itself
            right[3][0] = args[3][0]
        old, left, of_reference = (named_arguments(op, *values, **named) for values in (before, args, right))
        ours, theirs = (named_results(op, old, found) for found in (results, expected))
        assert_close(Run(op, old, ours, left, theirs, of_reference))
        assert_counters_are_zero(kernels)
