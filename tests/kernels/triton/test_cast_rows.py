"""One scale a row, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.combinations import each_pair
from tests.support.triton_cases import CAST, E4M3, check, check_cast, input_of, values_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@each_pair(**CAST)
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    check_cast(kernels, input_of(kernels, monkeypatch, case), case, (1, -1))


def test_rows_longer_than_the_widest_tile(kernels: TritonKernels) -> None:
    x = values_of("faults", (3, 9000), torch.bfloat16).to(kernels.device)
    check(kernels, "cast", x, None, 0, E4M3, (1, -1), False, 0, False, 16)
