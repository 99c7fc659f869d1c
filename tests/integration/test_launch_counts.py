"""How many kernels a cast launches, which docs/kernels.md says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.support.casts import ALL, E4M3, E5M2, second, update_args
from tests.support.passes import before_of
from tests.support.triton_cases import count_launches
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

TENSOR, ROWS, BLOCKS = "cast_tensor_kernel", "cast_rows_kernel", "cast_blocks_kernel"
AMAX, LINES = "amax_kernel", ["line_amax_kernel", "cast_lines_kernel"]


def state(kernels: TritonKernels) -> State:
    """A delayed state whose scales are known to exist."""
    scale, history = torch.ones(3, device=kernels.gpu), torch.zeros(3, 4, device=kernels.gpu)
    delayed_state = State(scale, history, before_of(scale))
    kernels.module("delayed_update").committed(*delayed_state, (True, True, True))
    if kernels.gpu.type == "cuda":
        torch.cuda.synchronize()
    return delayed_state


def casts(*scaling: Any, **named: Any) -> Callable[..., Any]:
    """A Dynamic cast: of (kernels, x, activation)."""
    return lambda kernels, x, activation: kernels.cast(x, *scaling, *activation, **named)


def delayed(kernels: TritonKernels, x: Tensor, activation: tuple[Any, ...]) -> Any:
    return kernels.cast(x, state(kernels)[0], 0, E4M3, ALL, False, 0, True, 16, True, *activation)


def no_history(kernels: TritonKernels, x: Tensor, activation: tuple[Any, ...]) -> Any:
    return kernels.cast(x, torch.zeros(3, device=kernels.gpu), 0, E4M3, ALL, False, 0, False, 16, False, *activation)


def commits(kernels: TritonKernels, x: Tensor, activation: tuple[Any, ...]) -> Any:
    amax = torch.ones(1, 1, device=kernels.gpu)
    update = update_args("max")
    return kernels.cast_and_commit(x, *state(kernels), amax, amax, E5M2, False, 0, *update, True, 16, True, *activation)


def one(tile: tuple[int, int], transpose: bool = False) -> tuple[Any, ...]:
    return None, 0, E4M3, tile, False, 0, transpose, 16


CASTS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "delayed": (delayed, [TENSOR]),
    "no history": (no_history, [AMAX, TENSOR]),
    "commit": (commits, [TENSOR]),
    "dynamic": (casts(*one(ALL), True), [AMAX, TENSOR]),
    "dynamic, both layouts": (casts(*one(ALL, True), True), [AMAX, TENSOR]),
    "rows": (casts(*one((1, -1)), False), [ROWS]),
    "rows and column sums": (casts(*one((1, -1)), True), LINES),
    "rows, both layouts": (casts(*one((1, -1), True), False), LINES),
    "columns": (casts(*one((-1, 1), True), True), LINES),
    "blocks": (casts(*one((1, 32), True), True), [BLOCKS]),
    "square blocks": (casts(*one((32, 32)), True), [BLOCKS]),
    "other blocks, by the reference": (casts(*one((24, 40)), False), []),
    "two block scalings": (casts(*one((1, 64), True), True, **second(E5M2, (64, 1), False, 0)), [BLOCKS]),
    "rows and columns": (casts(*one((1, -1), True), True, **second(E5M2, (-1, 1), False, 0)), LINES),
}
WHAT = {
    "x": lambda device: (numbers(device), ("",)),
    "SwiGLU": lambda device: (numbers(device), ("swiglu",)),
    "its gradient": lambda device: (numbers(device, 64), ("swiglu", numbers(device))),
    "its gradient, of codes": lambda device: (numbers(device, 64), ("swiglu", *codes(device))),
}


def numbers(device: torch.device, cols: int = 128) -> Tensor:
    return torch.randn(48, cols).bfloat16().to(device)


def codes(device: torch.device) -> tuple[Any, ...]:
    q, _, scale_inv, *_ = REFERENCE["cast"](numbers(torch.device("cpu")), None, 0, E4M3, (1, 64), False, 0)
    return q.to(device), scale_inv.to(device), (1, 64)


@pytest.mark.covering(1)
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("name", CASTS)
def test_launches(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
    call, expected = CASTS[name]
    x, activation = WHAT[what](kernels.gpu)
    launched = count_launches(kernels, monkeypatch, computes=False)
    call(kernels, x, activation)
    assert launched == expected


@pytest.mark.parametrize(
    ("tile", "is_delayed", "expected"),
    [(ALL, False, ["amax", "cast"]), (ALL, True, ["cast"]), ((32, 32), False, ["cast_blocks"])],
)
def test_launches_of_many_tensors(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, tile: Any, is_delayed: bool, expected: list[str]
) -> None:
    xs = [numbers(kernels.gpu, cols) for cols in (64, 128, 100)]
    outputs = zip(*(REFERENCE["cast"](x, *one(tile, True))[:4] for x in xs), strict=True)
    scales = [state(kernels)[0] for _ in xs] if is_delayed else []
    launched = count_launches(kernels, monkeypatch, computes=False)
    kernels.multi_tensor_cast(xs, *map(list, outputs), scales, 0, tile, False, 0)
    assert launched == [f"multi_tensor_{name}_kernel" for name in expected]


def test_the_host_learns_that_a_scale_exists(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, activation = WHAT["its gradient"](kernels.gpu)
    eager_state = State.empty(4, kernels.gpu)
    launched = count_launches(kernels, monkeypatch)
    for expected in ([AMAX, TENSOR], [AMAX, TENSOR], [TENSOR], [TENSOR]):  # of the state before the last commit
        commit = (None, None, E5M2, False, 0, *update_args("max"), True, 16, True, *activation)
        kernels.cast_and_commit(x, *eager_state, *commit)
        assert launched == expected
        launched.clear()
        if kernels.gpu.type == "cuda":
            torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["cast_statistics", "note_faults"])
def test_launches_of_what_inspect_reads(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x, (q, scale_inv, tile) = numbers(kernels.gpu, 64), codes(kernels.gpu)
    sums = torch.zeros(71, dtype=torch.float64, device=kernels.gpu)
    notes, one = torch.zeros(4, device=kernels.gpu), torch.ones(1, dtype=torch.int32, device=kernels.gpu)
    arguments = {
        "cast_statistics": (numbers(kernels.gpu), q, scale_inv, tile, sums, notes[:3]),
        "note_faults": (x, q, scale_inv, None, one, notes, one.clone()),
    }
    launched = count_launches(kernels, monkeypatch, computes=False)
    getattr(kernels, name)(*arguments[name])
    assert launched == [f"{name}_kernel"]
    if name == "cast_statistics":  # and of experts
        x, ends = numbers(kernels.gpu), torch.tensor([3, 3, 9], dtype=torch.int32, device=kernels.gpu)
        q, _, scale_inv, _ = REFERENCE["cast"](x, None, 0, E5M2, (-1, -1), False, 0, offsets=ends)
        sums, extremes = torch.zeros(3, 71, dtype=torch.float64, device=x.device), torch.zeros(3, 3, device=x.device)
        kernels.cast_statistics(x, q, scale_inv, (-1, -1), sums, extremes, ends)
        assert launched[1:] == ["cast_statistics_kernel"]
