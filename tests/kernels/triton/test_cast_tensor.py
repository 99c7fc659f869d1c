"""One scale for the whole tensor: the casts and the amax, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.combinations import each_pair
from tests.support.triton_cases import (
    ALL,
    DTYPES,
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
    transpose=[False, True],
    shape=SHAPES,
    dtype=DTYPES,
    fmt=FORMATS,
    layout=LAYOUTS,
    values=VALUES,
    scale=[None, 0.0, 0.37, 2.0**60],
    role=[0, 1, 2],
    power_of_two=[False, True],
    margin=[0, 3],
    pad=[1, 16],
    column_sum=[False, True],
    small=[False, True],
)
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    x = laid(values_of(case["values"], case["shape"], case["dtype"]), case["layout"], kernels.device)
    state = None
    if case["scale"] is not None:
        state = torch.full((3,), 7.0)
        state[case["role"]] = case["scale"]
        state = state.to(kernels.device)
    cast = (case["fmt"], ALL, case["power_of_two"], case["margin"])
    written = case["transpose"], case["pad"], case["column_sum"]
    check(kernels, "cast", x, state, case["role"], *cast, *written, compare_sums=case["values"] != "edge")
