"""A launch that leaves Triton's binder out hands over what the binder would have."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from octavo.scaling.delayed import State
from tests.support.casts import of_norm, second
from tests.support.passes import before_of

triton = pytest.importorskip("triton")
tl = importlib.import_module("triton.language")
offline = importlib.import_module("benchmarks.machine_code.offline").offline
launch = importlib.import_module("octavo.kernels.triton.launch")
known_scales = importlib.import_module("octavo.kernels.triton.delayed_update")
KERNELS = importlib.import_module("octavo.kernels.triton").KERNELS
uncompiled = importlib.import_module("tests.support.uncompiled").uncompiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL, ROW = (-1, -1), (1, -1)
UPDATE = ((448.0, 448.0, 57344.0), (False,) * 3, (0,) * 3, "max")


class Launches:
    """What came to the kernels: (kernel, grid, arguments), tensors as their dtype, shape and strides."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.bound = 0  # by Triton's binder

    def take(self) -> tuple[list[tuple[Any, ...]], int]:
        found = self.seen, self.bound
        self.seen, self.bound = [], 0
        return found


def described(argument: Any) -> Any:
    return tree_map(
        lambda a: (a.dtype, tuple(a.shape), a.stride()) if isinstance(a, Tensor) else a,
        argument,
    )


@pytest.fixture
def launches() -> Iterator[Launches]:
    found = Launches()
    compiled, jit = triton.compiler.CompiledKernel, triton.runtime.jit.JITFunction
    run = jit.run

    def launcher(kernel: Any) -> Callable[..., None]:
        def record(x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
            _, _, _, *arguments = rest  # launch metadata and hooks
            found.seen.append((kernel.hash, (x, y, z), stream, metadata, described(tuple(arguments))))

        return record

    def bind(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.bound += 1
        return run(self, *args, **kwargs)

    with (
        offline(90, record=False),
        uncompiled(),
        mock.patch.object(compiled, "run", property(launcher)),
        mock.patch.object(jit, "run", bind),
    ):
        yield found


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
    "update": lambda x: KERNELS["delayed_update"](*states(), torch.ones(1, 1), None, torch.ones(1, 1), *UPDATE),
    "product": lambda x: KERNELS["matmul"](
        *pair(*x.shape), ROW, *pair(30, x.shape[1]), ROW, torch.ones(30), torch.float32, False
    ),
}


@pytest.mark.parametrize("shape", [(64, 256), (33, 100)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_binder_hands_over(name: str, shape: tuple[int, int], launches: Launches) -> None:
    call = CASES[name]
    call(torch.randn(shape).bfloat16())
    by_binder, bound = launches.take()
    assert bound == len(by_binder) > 0
    call(torch.randn(shape).bfloat16())
    directly, bound = launches.take()
    assert bound == 0
    assert directly == by_binder


def test_a_profiler_sees_every_launch(launches: Launches) -> None:
    heard: list[Any] = []
    x = torch.randn(64, 256).bfloat16()
    KERNELS["cast"](x, None, 0, E4M3, ROW, False, 0)
    launches.take()
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(heard.append)
    try:
        KERNELS["cast"](x, None, 0, E4M3, ROW, False, 0)
    finally:
        hook.remove(heard.append)
    assert launches.take()[1] == 1
    KERNELS["cast"](x, None, 0, E4M3, ROW, False, 0)
    assert launches.take()[1] == 0


def test_the_keys_do_not_grow_without_bound(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST", 3)
    for rows in range(16, 160, 16):
        KERNELS["cast"](torch.randn(rows, 256).bfloat16(), None, 0, E4M3, ROW, False, 0)
        assert len(launch._compiled) <= 3


class Part(NamedTuple):
    """Some of a kernel's arguments."""

    first: Any
    second: Any


class Constant(NamedTuple):
    """Some of its constants, of types of their own."""

    size: int
    flag: bool


@triton.jit
def kernel_of_anything(a, b, c, d, E: tl.constexpr, F: tl.constexpr):
    pass


MEMORY = torch.zeros(64)
TENSORS = [MEMORY.view(dtype)[at:] for dtype in (torch.float32, torch.int32, torch.bfloat16) for at in (0, 1, 16, 17)]
NUMBERS = [0, 1, 2, 15, 16, 32, -16, 1 << 31, 1 << 40, True, False, 0.0, 1.0, 0.5, None]
values = st.sampled_from(NUMBERS)


arguments = st.recursive(
    values | st.sampled_from(TENSORS),
    lambda parts: st.tuples(parts) | st.tuples(parts, parts) | st.builds(Part, parts, parts),
    max_leaves=4,
)
constants = (
    values | st.sampled_from(["", "relu", torch.bfloat16]) | st.builds(Constant, st.integers(0, 2), st.booleans())
)


def likeness(argument: Any, choose: Callable[[list[Any]], Any]) -> Any:
    """One that may be taken for this: a tensor alike, or what equals it."""
    if isinstance(argument, Tensor):
        return choose([tensor for tensor in TENSORS if tensor.dtype == argument.dtype] + TENSORS)
    if isinstance(argument, Constant):
        return choose([argument, tuple(argument)])
    if isinstance(argument, Part):
        return choose([Part, lambda *parts: parts])(*(likeness(part, choose) for part in argument))
    if isinstance(argument, tuple):
        return tuple(likeness(part, choose) for part in argument)
    return choose([value for value in NUMBERS if value == argument] or [argument])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), first=st.tuples(st.sampled_from(TENSORS), *[arguments] * 3, *[constants] * 2))
def test_equal_keys_are_of_one_kernel(data: st.DataObject, first: tuple[Any, ...]) -> None:
    """The key tells apart all that Triton's binder does."""
    place = data.draw(st.integers(0, len(first) - 1))
    other_one = likeness(first[place], lambda choices: data.draw(st.sampled_from(choices)))
    alike = (*first[:place], other_one, *first[place + 1 :])
    with offline(90, record=False):
        *_, bind = kernel_of_anything.device_caches[90]
        bound, other_bound = (str(bind(*parts, num_warps=4)[1:]) for parts in (first, alike))
    key, other = (launch.key_of(kernel_of_anything, parts) for parts in (first, alike))
    assert bound == other_bound or key != other
