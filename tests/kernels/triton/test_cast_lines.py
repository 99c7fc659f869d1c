"""One scale a column, or a row whose codes don't lie in order, or both: the casts in two launches, bit for bit."""

from typing import Any

import pytest
import torch

from tests.support.combinations import each_pair
from tests.support.triton_cases import (
    DTYPES,
    E4M3,
    E5M2,
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
    tile=[(-1, 1), (1, -1)],
    shape=SHAPES,
    dtype=DTYPES,
    fmt=FORMATS,
    layout=LAYOUTS,
    values=VALUES,
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
    cast = (case["fmt"], case["tile"], case["power_of_two"], case["margin"])
    written = case["transpose"], case["pad"], case["column_sum"]
    check(kernels, "cast", x, None, 0, *cast, *written, compare_sums=case["values"] != "edge")


def test_amaxes_are_not_left_for_the_next_cast(kernels: TritonKernels) -> None:
    scalings = (E4M3, (1, -1), False, 0, E5M2, (-1, 1), False, 0)
    for factor in (64.0, 1.0):
        x = (factor * torch.randn(40, 200)).bfloat16().to(kernels.device)
        check(kernels, "cast_two_scalings", x, *scalings, True, 16, True)
    assert not kernels.module("launch").workspace(x, 1).any()
