"""The delayed state's update, bit for bit; inside a cast it is tested in test_cast.py."""

from functools import partial
from typing import Any

import pytest
import torch

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.scaling.delayed import State
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.passes import one_pass, same_state
from tests.support.triton_cases import to, update_args
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
    found = [None if a is None else torch.full((1, 1), a) for a in amaxes]
    update = update_args(case["reduce"], case["powers_of_two"], case["margins"])
    on_device = State(*to(kernels.device, tuple(state)))
    amaxes_on_device = [None if a is None else a.to(kernels.device) for a in found]

    def both(*order: int) -> None:
        REFERENCE["delayed_update"](*state, *(found[role] for role in order), *update)
        assert kernels.delayed_update(*on_device, *(amaxes_on_device[role] for role in order), *update) is None
        assert same_state(on_device, state)
        scales_of_pass = REFERENCE["scales_of_pass"](*state[::2]), kernels.scales_of_pass(*on_device[::2])
        assert same_bits(scales_of_pass[0], scales_of_pass[1].cpu())

    for _ in range(3):
        both(0, 1, 2)
    for _ in range(2):  # in one pass amaxes rise and fall, and roles are left out
        one_pass(partial(both, 0, 1, 2), partial(both, 1, 2, 0), partial(both, 2, 0, 1), partial(both, 0, 1, 2))
