"""On a GPU: casts of tensors, of activations and of gradients at models' sizes, CUDA graphs, and several streams."""

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
from tests.support.passes import same_state
from tests.support.triton_cases import (
    ALL,
    E4M3,
    E5M2,
    Run,
    assert_close,
    assert_counters_are_zero,
    assert_sums,
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
UPDATE = update_args("max")
TILES = [ALL, (1, -1), (-1, 1), (1, 128), (128, 128), (128, 1), (1, 32), (32, 1)]
TWO_SCALINGS = [((1, 128), (128, 1)), ((1, 32), (32, 1)), ((1, -1), (-1, 1))]
EXACT = {"", "relu", "squared_relu", "reglu"}
Source = tuple[Tensor, tuple[Any, ...]]  # x and its activation

# an activation, whether its gradient is cast, and how its input lies if in codes
CAST = [("", False, None), *((name, back, None) for name in ACTIVATIONS for back in (False, True))]
CAST += [(name, back, tile) for name in ("swiglu", "gelu") for back in (False, True) for tile in TILES[:5]]
each_cast = pytest.mark.parametrize("cast", CAST, ids=str)


def large(rows: int, cols: int) -> Tensor:
    """Rows and columns differ in size; activations bend, and beyond."""
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device=DEVICE).normal_()
    x *= torch.logspace(-1, 1, cols, device=DEVICE).bfloat16()
    return x.mul_(torch.logspace(-1, 1, rows, device=DEVICE).bfloat16()[:, None])


def given(rows: int, cols: int, cast: Any, faults: bool = False) -> Source:
    """[rows, cols] is the shape of an activation's output; a gated one's input and its gradient are twice as wide."""
    activation, backward, h_tile = cast
    h = large(rows, 2 * cols if activation and ACTIVATIONS[activation].gated else cols)
    dy = large(rows, cols)
    for x in (h, dy) if faults else ():
        x.view(-1)[5::1_000_003] = torch.nan
        x.view(-1)[7::1_500_007] = -torch.inf
    if not activation:
        return h, ()
    scaling: tuple[Any, ...] = ()
    if h_tile is not None:
        h, _, scale_inv, *_ = REFERENCE["cast"](h, None, 0, E4M3, h_tile, False, 0)
        scaling = scale_inv, h_tile
    return (dy, (activation, h, *scaling)) if backward else (h, (activation, None, *scaling))


def delayed_state() -> State:
    scale, history = torch.tensor([50.0, 0.0, 3000.0], device=DEVICE), torch.rand(3, 16, device=DEVICE)
    return State(scale, history, State.empty(1, DEVICE).before)


def commits() -> tuple[Any, ...]:
    return torch.full((1, 1), 3.0, device=DEVICE), None, E5M2, False, 0, *UPDATE, True, 16, True


@each_cast
@pytest.mark.parametrize(("shape", "faults"), [((16384, 4096), False), ((3001, 2500), False), ((3001, 2500), True)])
def test_every_op(kernels: TritonKernels, shape: tuple[int, int], faults: bool, cast: Any) -> None:
    compare = check if cast[0] in EXACT else check_close
    x, activation = given(*shape, cast, faults)
    for tile in TILES:
        if not activation:
            assert same_bits(kernels.amax(x, tile), REFERENCE["amax"](x, tile))
        compare(kernels, "cast", x, None, 0, E4M3, tile, False, 0, False, 1, False, *activation, where=DEVICE)
        compare(kernels, "cast", x, None, 0, E5M2, tile, True, 1, True, 16, True, *activation, where=DEVICE)
    for tile, second_tile in TWO_SCALINGS:
        how = None, 0, E4M3, tile, True, 0, True, 16, True
        compare(kernels, "cast", x, *how, *activation, **second(E5M2, second_tile, False, 0), where=DEVICE)
    state = delayed_state()
    for role in (0, 1):
        compare(kernels, "cast", x, state.scale, role, E4M3, ALL, False, 0, True, 16, True, *activation, where=DEVICE)
    for _ in range(3):
        compare(kernels, "cast_and_commit", x, *state, *commits(), *activation, where=DEVICE)


@pytest.mark.parametrize("cast", [("", False, None), ("reglu", False, None), ("reglu", True, None)], ids=str)
def test_more_elements_than_int32_counts(kernels: TritonKernels, cast: Any) -> None:
    cols = 16384 if cast[0] else 32768
    x, activation = given(70001, cols, cast)
    assert max(t.numel() for t in (x, *activation) if isinstance(t, Tensor)) > 2**31
    x[-1, -1], x[-1, -2] = 77.0, torch.nan
    for tile in (ALL, (1, -1), (-1, 1), (1, 128), (128, 1)):
        how = x, None, 0, E4M3, tile, False, 0, True, 1, False, *activation
        results, expected = kernels.cast(*how), REFERENCE["cast"](*how)
        assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True)), tile
        del results, expected


CAPTURED: dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "Dynamic": ("cast", lambda: (None, 0, E4M3, ALL, False, 0, False, 16, True), {}),
    "rows": ("cast", lambda: (None, 0, E4M3, (1, -1), False, 0, False, 16, True), {}),
    "columns": ("cast", lambda: (None, 0, E4M3, (-1, 1), True, 0, True, 16, True), {}),
    "transpose": ("cast", lambda: (None, 0, E5M2, ALL, True, 0, True, 16, True), {}),
    "Delayed": ("cast", lambda: (delayed_state()[0], 0, E4M3, ALL, False, 0, True, 16, False), {}),
    "no history": ("cast", lambda: (delayed_state()[0], 1, E4M3, ALL, False, 0, True, 16, False), {}),
    "two block scalings": (
        *("cast", lambda: (None, 0, E4M3, (1, 128), True, 0, True, 16, True)),
        second(E5M2, (128, 1), False, 0),
    ),
    "rows and columns": (
        *("cast", lambda: (None, 0, E4M3, (1, -1), True, 0, True, 16, True)),
        second(E5M2, (-1, 1), False, 0),
    ),
    "commit": ("cast_and_commit", lambda: (*delayed_state(), *commits()), {}),
}


def warm_up(call: Callable[[], Any]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "cast",
    [("", False, None), *(("swiglu", back, h_tile) for back in (False, True) for h_tile in (None, (1, 128)))],
    ids=str,
)
@pytest.mark.parametrize("name", CAPTURED)
def test_in_a_cuda_graph(kernels: TritonKernels, name: str, cast: Any) -> None:
    op, make_args, named = CAPTURED[name]
    x, activation = given(1000, 1024, cast)
    args = x, *make_args(), *activation
    warm_up(lambda: getattr(kernels, op)(*args, **named))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = getattr(kernels, op)(*args, **named)
    for scale in (1.0, 0.25, 4.0):  # each replay of a commit rolls once
        fresh, of_fresh = given(1000, 1024, cast)
        x.copy_(fresh if fresh.element_size() == 1 else fresh * scale)
        for old, new in zip(activation, of_fresh, strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        before, right = to(DEVICE, args), to(DEVICE, args)
        expected = REFERENCE[op](*right, **named)
        graph.replay()
        if op == "cast_and_commit":  # each replay is a pass by itself
            right[3][0] = args[3][0]
        old, left, of_reference = (named_arguments(op, *values, **named) for values in (before, args, right))
        ours, theirs = (named_results(op, old, found) for found in (results, expected))
        if cast[0] in EXACT:
            assert all(same_bits(ours[key], theirs[key]) for key in ours if key != "sums")
            assert all(not isinstance(a, Tensor) or same_bits(a, of_reference[key]) for key, a in left.items())
            assert_sums(ours["sums"], theirs["sums"], x)
        else:
            assert_close(Run(op, old, ours, left, theirs, of_reference))
        assert_counters_are_zero(kernels)


def test_capture_right_after_a_commit(kernels: TritonKernels) -> None:
    # the host doesn't know the new scales yet, and may not ask while it captures
    x, state, args = large(1000, 2048), delayed_state(), commits()
    kernels.cast_and_commit(x, *state, *args)
    graph = torch.cuda.CUDAGraph()
    torch.cuda._sleep(10_000_000)
    kernels.delayed_update(*state, *[torch.ones(1, 1, device=DEVICE)] * 3, *UPDATE)
    with torch.cuda.graph(graph):
        q, *_ = kernels.cast(x, state.scale, 0, E4M3, ALL, False, 0)
        g, *_ = kernels.cast_and_commit(x, *state, *args)
    before = state.clone()
    graph.replay()
    assert same_bits(q, REFERENCE["cast"](x, before[0], 0, E4M3, ALL, False, 0)[0])
    assert same_bits(g, REFERENCE["cast_and_commit"](x, *before, *args)[0])
    assert same_state(state, before)


def test_a_captured_step_feeds_the_next(kernels: TritonKernels) -> None:
    x, state = large(512, 1024), State.empty(4, DEVICE)

    def step(run: Any, state: State) -> list[Tensor]:
        q, _, _, amax, _ = run["cast"](x, state.scale, 0, E4M3, ALL, False, 0)
        w, _, _, amax_weight, _ = run["cast"](x.t(), state.scale, 1, E4M3, ALL, False, 0, True)
        g, t, *_ = run["cast_and_commit"](x, *state, amax, amax_weight, *commits()[2:])
        return [q, w, g, t]

    ours = {op: getattr(kernels, op) for op in ("cast", "cast_and_commit")}
    warm_up(lambda: step(ours, State.empty(4, DEVICE)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(ours, state)
    other = State.empty(4, DEVICE)
    for scale in (1.0, 8.0, 0.0, 0.5, 2.0):
        x.copy_(large(512, 1024) * scale)
        graph.replay()
        expected = step(REFERENCE, other)
        assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))
        assert same_state(state, other)


def test_two_streams(kernels: TritonKernels) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [large(4096, 4096) * 2.0**i for i in range(8)]
    expected = [REFERENCE["cast"](x, None, 0, E4M3, ALL, False, 0, True, 1, True) for x in inputs]
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                results.append(kernels.cast(x, None, 0, E4M3, ALL, False, 0, True, 1, True))
        torch.cuda.synchronize()
        for x, found, right in zip(inputs, results, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(found[:-1], right[:-1], strict=True))
            assert_sums(found[-1], right[-1], x)
    assert_counters_are_zero(kernels)
