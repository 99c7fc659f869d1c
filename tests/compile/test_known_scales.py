"""Inductor's code calls kernels without the dispatcher; a delayed scale is known to exist there as in eager."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo import recipes
from octavo.kernels.cpu import KERNELS

pytest.importorskip("triton")
WRITES_CALLS = importlib.util.find_spec("torch._inductor.codegen.custom_extern_kernel_codegen") is not None
known_scales = importlib.import_module("octavo.kernels.triton.delayed_update")


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_compiled_layer_knows_its_scales_from_the_third_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    known: list[list[bool]] = []

    def cast(x: Tensor, *arguments: Any, **named: Any) -> Any:
        known.extend([known_scales.scale_exists(a, role) for role in range(3)] for a in arguments if is_scale(a))
        return KERNELS["cast"](x, *arguments, **named)

    def cast_and_commit(x: Tensor, *arguments: Any) -> Any:
        state = arguments[:3]
        with torch.autograd._unsafe_preserve_version_counter(state):  # as a kernel's writes
            result = KERNELS["cast_and_commit"](x, *arguments)
        known_scales.committed(*state, (True, True, True))
        return result

    def is_scale(argument: Any) -> bool:
        return isinstance(argument, Tensor) and argument.shape == (3,)

    def direct(name: str) -> Any:
        function = {"cast": cast, "cast_and_commit": cast_and_commit}.get(name, KERNELS[name])

        def call(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(torch.ops.octavo, "direct", SimpleNamespace(**{name: direct(name) for name in KERNELS}))
    library = torch.library.Library("octavo", "IMPL")  # before torch 2.13
    try:
        library.impl("cast", cast, "CPU", allow_override=True)
        library.impl("cast_and_commit", cast_and_commit, "CPU", allow_override=True)
        layer = torch.compile(octavo.nn.Linear(32, 32, recipe=recipes.delayed()), fullgraph=True)
        with torch.compiler.config.patch(force_disable_caches=True):
            for step in range(4):
                known.clear()
                layer(torch.randn(16, 32, requires_grad=True)).sum().backward()
                assert known == [[step > 1] * 3] * 2  # input and weight
    finally:
        library._destroy()
    assert called == (["cast", "cast", "matmul", "cast_and_commit", "matmul", "matmul"] * 4 if WRITES_CALLS else [])
