"""On a GPU: any casts at models' sizes and beyond int32, CUDA graphs, and several streams."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.kernels.conftest import ops_of
from tests.kernels.test_cast import check_casts
from tests.support.casts import ALL, E4M3, E5M2, OPTIONS, check, drawn, update_args
from tests.support.definitions import same_bits
from tests.support.passes import same_state
from tests.support.triton_cases import assert_counters_are_zero
from tests.support.triton_kernels import TritonKernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICE = "cuda"
UPDATE = update_args("max")


@pytest.mark.parametrize("shape", [(16384, 4096), (3001, 2500)])
@pytest.mark.parametrize("source", ["tensor", "value", "gradient", "norm"])
def test_any_cast(kernels: TritonKernels, source: str, shape: tuple[int, int]) -> None:
    sizes = [([5, 2000, 900], 90)]
    check_casts(ops_of(kernels), 12, 0, DEVICE, shape=[shape], source=[source], small=[False], sizes=sizes)


@pytest.mark.parametrize("activation", ["", "reglu"])
def test_more_elements_than_int32_counts(kernels: TritonKernels, activation: str) -> None:
    x = torch.empty(70001, 32768, dtype=torch.bfloat16, device=DEVICE).normal_()
    x[-1, -1], x[-1, -2] = 77.0, torch.nan
    for tile in (ALL, (1, -1), (-1, 1), (1, 128), (128, 1)):
        how = x, None, 0, E4M3, tile, False, 0, True, 1, False, activation
        results, expected = kernels.cast(*how), REFERENCE["cast"](*how)
        assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True)), tile
        del results, expected


def delayed_state() -> State:
    scale, history = torch.tensor([50.0, 0.0, 3000.0], device=DEVICE), torch.rand(3, 16, device=DEVICE)
    return State(scale, history, State.empty(1, DEVICE).before)


def commits() -> tuple[Any, ...]:
    return torch.full((1, 1), 3.0, device=DEVICE), None, E5M2, False, 0, *UPDATE, True, 16, True


def large(rows: int, cols: int) -> Tensor:
    """Rows and columns differ in size."""
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device=DEVICE).normal_()
    x *= torch.logspace(-1, 1, cols, device=DEVICE).bfloat16()
    return x.mul_(torch.logspace(-1, 1, rows, device=DEVICE).bfloat16()[:, None])


def warm_up(call: Callable[[], Any]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def test_in_a_cuda_graph(kernels: TritonKernels) -> None:
    how = [how for how in OPTIONS["how"] if how != "swizzled"]  # of which the comparison makes another call
    for _, call in drawn(40, 0, DEVICE, shape=[(1000, 1024)], values=["varied"], how=how):
        op = getattr(kernels, call.op)
        warm_up(lambda op=op, call=call: op(*call.args, **call.named))
        graph, x = torch.cuda.CUDAGraph(), call.args[0]
        with torch.cuda.graph(graph):
            results = op(*call.args, **call.named)

        def replayed(*_: Any, graph: Any = graph, results: Any = results, **__: Any) -> Any:
            graph.replay()
            return results

        for scale in (1.0, 0.25, 4.0):  # each replay of a commit rolls once
            if x.itemsize > 1:
                x.copy_(torch.randn(x.shape, device=DEVICE) * scale)
            check(replayed, call, call.is_exact)
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
        assert all(same_bits(a, b) for a, b in zip(results, step(REFERENCE, other), strict=True))
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
        for actual, right in zip(results, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(actual[:-1], right[:-1], strict=True))
            torch.testing.assert_close(actual[-1], right[-1])
    assert_counters_are_zero(kernels)
