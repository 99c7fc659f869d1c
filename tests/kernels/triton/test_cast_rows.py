"""One scale a row, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.combinations import each_pair
from tests.support.triton_cases import (
    DTYPES,
    E4M3,
    FORMATS,
    LAYOUTS,
    SHAPES,
    VALUES,
    check,
    laid,
    use_small_tiles,
    values_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@each_pair(
    shape=SHAPES,
    dtype=DTYPES,
    fmt=FORMATS,
    layout=LAYOUTS,
    values=VALUES,
    power_of_two=[False, True],
    margin=[0, 3],
    pad=[1, 16],
    small=[False, True],
)
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    x = laid(values_of(case["values"], case["shape"], case["dtype"]), case["layout"], kernels.device)
    cast = (case["fmt"], (1, -1), case["power_of_two"], case["margin"])
    written = False, case["pad"], False
    check(kernels, "cast", x, None, 0, *cast, *written)


def test_rows_longer_than_the_widest_tile(kernels: TritonKernels) -> None:
    x = values_of("faults", (3, 9000), torch.bfloat16).to(kernels.device)
    check(kernels, "cast", x, None, 0, E4M3, (1, -1), False, 0, False, 16)
