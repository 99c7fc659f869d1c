"""One scale a column, or a row whose codes don't lie in order, or both: the casts in two launches, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.casts import second
from tests.support.combinations import each_pair
from tests.support.triton_cases import BOTH_LAYOUTS, E4M3, E5M2, check, check_cast, input_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@each_pair(**BOTH_LAYOUTS, tile=[(-1, 1), (1, -1)])
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    check_cast(kernels, input_of(kernels, monkeypatch, case), case, case["tile"])


def test_amaxes_are_not_left_for_the_next_cast(kernels: TritonKernels) -> None:
    for factor in (64.0, 1.0):
        x = (factor * torch.randn(40, 200)).bfloat16().to(kernels.device)
        columns = second(E5M2, (-1, 1), False, 0)
        check(kernels, "cast", x, None, 0, E4M3, (1, -1), False, 0, True, 16, True, **columns)
    assert not kernels.module("launch").workspace(x, 1).any()
