"""The delayed state's update, bit for bit, and the casts of a pass; test_cast.py has one of any state."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.support.casts import ALL, E5M2, update_args
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.passes import end_step, one_pass, same_state
from tests.support.triton_cases import count_launches
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@each_pair(
    length=[1, 2, 4, 5, 16, 100],
    reduce=["max", "most_recent"],
    amax_input=[None, 0.0, 2.0**-149, 1.7],
    amax_weight=[None, 0.0, 3.3e38, 1.7],
    amax_grad_output=[None, 0.0, 1e-20, 0.3],
    powers_of_two=[(False,) * 3, (True,) * 3, (False, True, False)],
    margins=[(0, 0, 0), (1, 7, 40)],
    scale=[0.0, 3.0],
)
def test_update(kernels: TritonKernels, case: dict[str, Any]) -> None:
    state = State.empty(case["length"])
    state.scale.fill_(case["scale"])
    state.amax_history[::2].uniform_()
    amaxes = [case[f"amax_{role}"] for role in ("input", "weight", "grad_output")]
    tensors = [None if a is None else torch.full((1, 1), a) for a in amaxes]
    update = update_args(case["reduce"], case["powers_of_two"], case["margins"])
    ours = state.clone()

    def both(*order: int) -> None:
        REFERENCE["delayed_update"](*state, *(tensors[role] for role in order), *update)
        assert kernels.delayed_update(*ours, *(tensors[role] for role in order), *update) is None
        assert same_state(ours, state)
        scales_of_pass = REFERENCE["scales_of_pass"](*state[::2]), kernels.scales_of_pass(*ours[::2])
        assert same_bits(scales_of_pass[0], scales_of_pass[1])

    for _ in range(3):
        both(0, 1, 2)
        both(1, 2, 0)  # a pass by itself of the same step
        end_step()
    for _ in range(2):  # in one pass amaxes rise and fall, and roles are left out
        end_step()
        one_pass(partial(both, 0, 1, 2), partial(both, 1, 2, 0), partial(both, 2, 0, 1), partial(both, 0, 1, 2))


def test_casts_of_a_pass_read_the_scales_of_before_it(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    state, other = State.empty(3), State.empty(3)
    update, launched = update_args("max"), count_launches(kernels, monkeypatch)
    exists = kernels.module("delayed_update").scale_exists

    def both(x: Tensor, *amaxes: Tensor | None) -> Tensor:
        arguments = *amaxes, E5M2, False, 2, *update, True, 1, True
        results = kernels.cast_and_commit(x, *state, *arguments)
        expected = REFERENCE["cast_and_commit"](x, *other, *arguments)
        assert all(same_bits(a, b) for a, b in zip((*results[:3], *state), (*expected[:3], *other), strict=True))
        exists(state.scale, 2)  # as a forward asks
        return results[2]

    for step in range(6):
        old, gradients = state.scale.clone(), [steps_values(step + call, call) for call in range(3)]
        amaxes: list[tuple[Tensor | None, ...]] = [
            (x.float().nan_to_num().abs().amax().view(1, 1) if x.numel() else None, None) for x in gradients
        ]
        launched.clear()
        actual = one_pass(*(partial(both, x, *amax) for x, amax in zip(gradients, amaxes, strict=True)))
        assert launched.count("amax_kernel") == (3, 1, 0)[min(step, 2)]  # the second pass's first commit tells the host
        expected_scales = [kernels.cast(x, old, 2, E5M2, ALL, False, 2)[2] for x in gradients]
        assert all(same_bits(a, b) for a, b in zip(actual, expected_scales, strict=True))
        end_step()
    assert (state.scale != 0).tolist() == [True, False, True]


def steps_values(step: int, role: int) -> Tensor:
    """Return a role's tensor in a step: nothing but zeros at times, nothing at all, or one with a fault."""
    x = torch.randn(17, 40).bfloat16() * 2.0 ** (step * (-1) ** role)
    if (step + role) % 4 == 0:
        x.zero_()
    if (step + role) % 5 == 3:
        x = x[:0]
    if (step + role) % 3 == 0:
        x[2:3, 2:4] = torch.tensor([math.nan, math.inf])
    return x
