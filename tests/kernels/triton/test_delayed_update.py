"""The delayed state's update, bit for bit; inside a cast it is tested in test_cast.py."""

from typing import Any

import pytest
import torch

from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.triton_cases import update_args
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
    state, history = torch.full((3,), case["scale"]), torch.rand(3, case["length"])
    history[1] = 0
    amaxes = [case[f"amax_{role}"] for role in ("input", "weight", "grad_output")]
    found = [None if a is None else torch.full((1, 1), a) for a in amaxes]
    update = update_args(case["reduce"], case["powers_of_two"], case["margins"])
    on_device = state.to(kernels.device, copy=True), history.to(kernels.device, copy=True)
    amaxes_on_device = [None if a is None else a.to(kernels.device) for a in found]
    for _ in range(3):
        REFERENCE["delayed_update"](state, history, *found, *update)
        assert kernels.delayed_update(*on_device, *amaxes_on_device, *update) is None
        assert same_bits(on_device[0].cpu(), state)
        assert same_bits(on_device[1].cpu(), history)
