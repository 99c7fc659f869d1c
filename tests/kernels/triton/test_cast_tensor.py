"""One scale for the whole tensor: the casts and the amax, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.combinations import each_pair
from tests.support.triton_cases import ALL, BOTH_LAYOUTS, check_cast, input_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@each_pair(**BOTH_LAYOUTS, scale=[None, 0.0, 0.37, 2.0**60], role=[0, 1, 2])
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    x, state = input_of(kernels, monkeypatch, case), None
    if case["scale"] is not None:
        state = torch.full((3,), 7.0)
        state[case["role"]] = case["scale"]
        state = state.to(kernels.device)
    check_cast(kernels, x, case, ALL, state, case["role"])
