"""A replay hands the kernels the arguments of the call that it repeats, without Triton's binder."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from octavo.scaling.delayed import State
from tests.support.casts import of_norm, second
from tests.support.passes import before_of

triton = pytest.importorskip("triton")
offline = importlib.import_module("benchmarks.machine_code.offline").offline
replay = importlib.import_module("octavo.kernels.triton.replay")
known_scales = importlib.import_module("octavo.kernels.triton.delayed_update")
KERNELS = importlib.import_module("octavo.kernels.triton").KERNELS
uncompiled = importlib.import_module("tests.support.uncompiled").uncompiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL, ROW = (-1, -1), (1, -1)
UPDATE = ((448.0, 448.0, 57344.0), (False,) * 3, (0,) * 3, "max")


class Launches:
    """The launches of kernels: (kernel, grid, arguments), tensors as their bytes."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.bound = 0  # by Triton's binder

    def take(self) -> tuple[list[tuple[Any, ...]], int]:
        recorded = self.seen, self.bound
        self.seen, self.bound = [], 0
        return recorded


@pytest.fixture
def launches() -> Iterator[Launches]:
    launches = Launches()
    compiled, jit = triton.compiler.CompiledKernel, triton.runtime.jit.JITFunction
    run = jit.run

    def launcher(kernel: Any) -> Callable[..., None]:
        def record(x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *others: Any) -> None:
            _, _, _, *arguments = others  # launch metadata and hooks
            described = tree_map(lambda one: one.nbytes if isinstance(one, Tensor) else one, arguments)
            launches.seen.append((kernel.hash, (x, y, z), stream, metadata, described))

        return record

    def bind(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.bound += 1
        return run(self, *args, **kwargs)

    noted = mock.patch.object(compiled, "run", property(launcher))
    with offline(90, record=False), uncompiled(), noted, mock.patch.object(jit, "run", bind):
        yield launches


def states() -> State:
    scale = torch.ones(3)
    state = State(scale, torch.zeros(3, 4), before_of(scale))
    known_scales.committed(*state, (True, True, True))
    return state


def pair(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, cols).to(E4M3), torch.ones(rows, 1)


CASES: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda x: KERNELS["amax"](x, ALL),
    "delayed": lambda x: KERNELS["cast"](x, states()[0], 0, E4M3, ALL, False, 0, False, 16),
    "commit": lambda x: KERNELS["cast_and_commit"](
        x, *states(), torch.ones(1, 1), None, E5M2, False, 0, *UPDATE, True, 16, True
    ),
    "two rows": lambda x: KERNELS["cast"](
        x, None, 0, E4M3, ROW, False, 0, True, 16, True, **second(E4M3, (-1, 1), False, 0)
    ),
    "blocks": lambda x: KERNELS["cast"](x, None, 0, E4M3, (128, 128), True, 0, True, 16),
    "its gradient": lambda x: KERNELS["cast_and_commit"](
        x[:, ::2].contiguous(), *states(), torch.ones(1, 1), None, E5M2, False, 0, *UPDATE, True, 16, True, "swiglu", x
    ),
    "norm": lambda x: KERNELS["cast"](
        x, states()[0], 0, E4M3, ALL, False, 0, True, 16, **of_norm(torch.ones(x.shape[1]), None, "rms_norm")
    ),
    "norm's backward": lambda x: KERNELS["norm_backward"](
        x, x, *torch.ones(1, x.shape[1]), torch.zeros(len(x)), torch.ones(len(x)), "layer_norm", False, True
    ),
    "norm of a sum": lambda x: KERNELS["norm"](x, torch.ones(x.shape[1]), None, "rms_norm", 1e-5, False, x),
    "rotary": lambda x: KERNELS["rotary"](*[x[None, :, None, :64]] * 3, *torch.ones(2, 1, len(x), 64), False),
    "cross entropy": lambda x: KERNELS["cross_entropy"](x, torch.zeros(len(x)).long(), -100, 0.0, 0.0),
    "its backward": lambda x: KERNELS["cross_entropy_backward"](
        x, torch.zeros(len(x)).long(), -100, 0.0, 0.0, *torch.ones(2, len(x))
    ),
    "its codes": lambda x: KERNELS["cross_entropy_codes"](
        *(x, torch.zeros(len(x)).long(), -100, 0.0, 0.0, torch.ones(len(x))),
        *(torch.zeros(shape).to(E5M2) for shape in (x.shape, (x.shape[1], len(x)))),
        0,
    ),
    "update": lambda x: KERNELS["delayed_update"](*states(), torch.ones(1, 1), None, torch.ones(1, 1), *UPDATE),
    "product": lambda x: KERNELS["matmul"](
        *pair(*x.shape), ROW, *pair(30, x.shape[1]), ROW, torch.ones(30), torch.float32, False
    ),
}


@pytest.mark.parametrize("shape", [(64, 256), (33, 100)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_binder_hands_over(name: str, shape: tuple[int, int], launches: Launches) -> None:
    call = CASES[name]
    for _ in range(2):  # seen, then recorded
        call(torch.randn(shape).bfloat16())
        by_binder, bound = launches.take()
        assert bound == len(by_binder) > 0
    call(torch.randn(shape).bfloat16())
    replayed, bound = launches.take()
    assert bound == 0
    assert replayed == by_binder


COPIES: dict[str, Callable[[Tensor], Any]] = {  # an argument first
    "a gamma with a stride": lambda x: KERNELS["norm_backward"](
        x, x, torch.ones(x.shape[1], 2)[:, 0], torch.empty(0), torch.ones(len(x)), "rms_norm", False, False
    ),
    "a bias in float32": lambda x: KERNELS["matmul"](
        *pair(*x.shape), ROW, *pair(30, x.shape[1]), ROW, torch.ones(30), torch.bfloat16, False
    ),
    "codes along the other dimension": lambda x: KERNELS["matmul"](
        *(pair(x.shape[1], len(x))[0].t(), torch.ones(len(x), 1), ROW),
        *(*pair(30, x.shape[1]), ROW, None, torch.bfloat16, False),
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COPIES)
def test_a_call_in_any_mode_is_recorded(name: str, mode: Any, launches: Launches) -> None:
    """A call is recorded in any mode; in inference mode recorders get ``contiguous``, which looks like a view."""
    x, bound = torch.randn(33, 100).bfloat16(), []
    for where in (nullcontext, mode, nullcontext):
        with where():
            COPIES[name](x)
        bound.append(launches.take()[1])
    assert bound[0] == bound[1] > 0 == bound[2]


def test_a_profiler_sees_every_launch(launches: Launches) -> None:
    heard: list[Any] = []
    x = torch.randn(64, 256).bfloat16()

    def bound() -> int:
        KERNELS["cast"](x, None, 0, E4M3, ROW, False, 0)
        return launches.take()[1]

    assert [bound(), bound(), bound()] == [1, 1, 0]
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(heard.append)
    try:
        assert bound() == 1
    finally:
        hook.remove(heard.append)
    assert bound() == 0


def test_replays_do_not_grow_without_bound(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST", 3)
    for rows in range(16, 160, 16):
        KERNELS["cast"](torch.randn(rows, 256).bfloat16(), None, 0, E4M3, ROW, False, 0)
        assert len(replay.REPLAYS) <= 3
