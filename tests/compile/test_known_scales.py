"""In a graph that Inductor compiled, a cast finds out that its delayed scale exists, as in eager."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo import recipes
from octavo.kernels.cpu import KERNELS

pytest.importorskip("triton")
known_scales = importlib.import_module("octavo.kernels.triton.delayed_update")


def test_a_compiled_layer_knows_its_scales_from_the_third_step_on() -> None:
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

    library = torch.library.Library("octavo", "IMPL")
    try:
        library.impl("cast", cast, "CPU", allow_override=True)
        library.impl("cast_and_commit", cast_and_commit, "CPU", allow_override=True)
        layer = torch.compile(octavo.nn.Linear(32, 32, recipe=recipes.delayed()), fullgraph=True)
        for step in range(4):
            known.clear()
            layer(torch.randn(16, 32, requires_grad=True)).sum().backward()
            assert known == [[step > 1] * 3] * 2  # input and weight
    finally:
        library._destroy()
