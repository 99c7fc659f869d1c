"""One scale a row, or a column: the casts and the amax, bit for bit."""

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

TILES = [(1, -1), (-1, 1)]


@each_pair(
    transpose=[False, True],
    tile=TILES,
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


def test_rows_longer_than_the_widest_tile(kernels: TritonKernels) -> None:
    for tile in TILES:
        x = values_of("faults", (3, 5000) if tile == (1, -1) else (5000, 3), torch.bfloat16).to(kernels.device)
        check(kernels, "cast", x, None, 0, E4M3, tile, False, 0, True, 16, True)
        check(kernels, "cast", x, None, 0, E4M3, tile, False, 0, False, 16, True)
