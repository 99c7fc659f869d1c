"""On a GPU: tensors of the sizes that models have, CUDA graphs, and several streams."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.support.casts import second
from tests.support.definitions import same_bits
from tests.support.passes import same_state
from tests.support.triton_cases import (
    ALL,
    DTYPES,
    E4M3,
    E5M2,
    assert_counters_are_zero,
    assert_sums,
    check,
    to,
    update_args,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

UPDATE = update_args("max")
TILES = [ALL, (1, -1), (-1, 1), (1, 128), (128, 128), (128, 1), (1, 32), (32, 1)]
TWO_SCALINGS = [((1, 128), (128, 1)), ((1, 32), (32, 1)), ((1, -1), (-1, 1))]


def large(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rows, cols = shape
    x = torch.empty(shape, dtype=dtype, device="cuda").normal_()
    x *= torch.logspace(-2, 0, cols, device="cuda").to(dtype)
    return x.mul_(torch.logspace(0, 1, rows, device="cuda").to(dtype)[:, None])


def delayed_state() -> State:
    scale, history = torch.tensor([50.0, 0.0, 3000.0], device="cuda"), torch.rand(3, 16, device="cuda")
    return State(scale, history, State.empty(1, "cuda").before)


def commits() -> tuple[Any, ...]:
    return torch.full((1, 1), 3.0, device="cuda"), None, E5M2, False, 0, *UPDATE, True, 16, True


@pytest.mark.parametrize("faults", [False, True], ids=["", "faults"])
@pytest.mark.parametrize("shape", [(4096, 8192), (3001, 5000), (16384, 8192)], ids=str)
def test_every_op(kernels: TritonKernels, shape: tuple[int, int], faults: bool) -> None:
    x = large(shape)
    if faults:
        x.view(-1)[5::1_000_003] = torch.nan
        x.view(-1)[7::1_500_007] = -torch.inf
    for tile in TILES:
        assert same_bits(kernels.amax(x, tile), REFERENCE["amax"](x, tile))
        check(kernels, "cast", x, None, 0, E4M3, tile, False, 0, where="cuda")
        check(kernels, "cast", x, None, 0, E5M2, tile, True, 1, True, 16, True, where="cuda")
    for tile, second_tile in TWO_SCALINGS:
        scalings = None, 0, E4M3, tile, True, 0, True, 16, True
        check(kernels, "cast", x, *scalings, **second(E5M2, second_tile, False, 0), where="cuda")
    state = delayed_state()
    for role in (0, 1):
        check(kernels, "cast", x, state.scale, role, E4M3, ALL, False, 0, True, 16, where="cuda")
    for _ in range(3):
        check(kernels, "cast_and_commit", x, *state, *commits(), where="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_layouts(kernels: TritonKernels, dtype: torch.dtype) -> None:
    x = large((3000, 2056), dtype)
    for laid in (x, x.t(), x[:, 1:], x[5:, ::3]):
        for tile in TILES:
            check(kernels, "cast", laid, None, 0, E4M3, tile, False, 0, True, 16, True, where="cuda")
            check(kernels, "cast", laid, None, 0, E5M2, tile, True, 0, False, 1, True, where="cuda")


def test_more_elements_than_int32_counts(kernels: TritonKernels) -> None:
    x = torch.empty(70001, 32768, dtype=torch.bfloat16, device="cuda").normal_()
    x[-1, -1], x[-1, -2] = 77.0, torch.nan
    assert x.numel() > 2**31
    for tile in (ALL, (1, -1), (-1, 1), (1, 128), (128, 1)):
        assert same_bits(kernels.amax(x, tile), REFERENCE["amax"](x, tile))
        results = kernels.cast(x, None, 0, E4M3, tile, False, 0, True)
        expected = REFERENCE["cast"](x, None, 0, E4M3, tile, False, 0, True)
        assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True)), tile
        del results, expected


CAPTURED: dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "Dynamic": ("cast", lambda: (None, 0, E4M3, ALL, False, 0, False, 16, True), {}),
    "rows": ("cast", lambda: (None, 0, E4M3, (1, -1), False, 0), {}),
    "transpose": ("cast", lambda: (None, 0, E5M2, ALL, True, 0, True, 16, True), {}),
    "Delayed": ("cast", lambda: (delayed_state()[0], 0, E4M3, ALL, False, 0, True), {}),
    "no history": ("cast", lambda: (delayed_state()[0], 1, E4M3, ALL, False, 0, True), {}),
    "two block scalings": (
        "cast",
        lambda: (None, 0, E4M3, (1, 128), True, 0, True, 16, True),
        second(E5M2, (128, 1), False, 0),
    ),
    "rows and columns": (
        "cast",
        lambda: (None, 0, E4M3, (1, -1), True, 0, True, 16, True),
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


@pytest.mark.parametrize("name", CAPTURED)
def test_in_a_cuda_graph(kernels: TritonKernels, name: str) -> None:
    op, make_args, named = CAPTURED[name]
    x, args = large((1000, 2048)), make_args()
    warm_up(lambda: getattr(kernels, op)(x, *args, **named))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = getattr(kernels, op)(x, *args, **named)
    for _ in range(3):  # each replay of a commit rolls once
        x.copy_(large((1000, 2048)) * torch.rand((), device="cuda"))
        reference_args = to("cuda", (x, *args))
        expected = REFERENCE[op](*reference_args, **named)
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(results[:-1], expected[:-1], strict=True))
        assert_sums(results[-1], expected[-1], x)
        for a, b in zip((x, *args), reference_args, strict=True):
            if isinstance(a, Tensor) and a.dtype == torch.int32:  # delayed_before; each replay is a pass by itself
                assert same_bits(a[1], b[1])
            else:
                assert not isinstance(a, Tensor) or same_bits(a, b)
        assert_counters_are_zero(kernels)


def test_capture_right_after_a_commit(kernels: TritonKernels) -> None:
    # the host doesn't know the new scales yet, and may not ask while it captures
    x, state, args = large((1000, 2048)), delayed_state(), commits()
    kernels.cast_and_commit(x, *state, *args)
    graph = torch.cuda.CUDAGraph()
    torch.cuda._sleep(10_000_000)
    kernels.delayed_update(*state, *[torch.ones(1, 1, device="cuda")] * 3, *UPDATE)
    with torch.cuda.graph(graph):
        q, *_ = kernels.cast(x, state.scale, 0, E4M3, ALL, False, 0)
        g, *_ = kernels.cast_and_commit(x, *state, *args)
    before = state.clone()
    graph.replay()
    assert same_bits(q, REFERENCE["cast"](x, before[0], 0, E4M3, ALL, False, 0)[0])
    assert same_bits(g, REFERENCE["cast_and_commit"](x, *before, *args)[0])
    assert same_state(state, before)


def test_a_captured_step_feeds_the_next(kernels: TritonKernels) -> None:
    x, state = large((512, 1024)), State.empty(4, "cuda")

    def step(run: Any, state: State) -> list[Tensor]:
        q, _, _, amax, _ = run["cast"](x, state.scale, 0, E4M3, ALL, False, 0)
        w, _, _, amax_weight, _ = run["cast"](x.t(), state.scale, 1, E4M3, ALL, False, 0, True)
        g, t, *_ = run["cast_and_commit"](x, *state, amax, amax_weight, *commits()[2:])
        return [q, w, g, t]

    ours = {op: getattr(kernels, op) for op in ("cast", "cast_and_commit")}
    warm_up(lambda: step(ours, State.empty(4, "cuda")))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(ours, state)
    other = State.empty(4, "cuda")
    for scale in (1.0, 8.0, 0.0, 0.5, 2.0):
        x.copy_(large((512, 1024)) * scale)
        graph.replay()
        expected = step(REFERENCE, other)
        assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))
        assert same_state(state, other)


def test_two_streams(kernels: TritonKernels) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [large((4096, 4096)) * 2.0**i for i in range(8)]
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
