"""One scale a block, of sizes that are powers of two and of any other: the casts and the amax, bit for bit."""

from typing import Any

import pytest

from tests.support.combinations import each_pair
from tests.support.triton_cases import (
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

IN_REGISTERS = [(1, 128), (128, 128), (1, 32), (128, 1), (32, 1), (64, 16), (2, 8), (1, 1)]
# of any size, and in any direction the whole tensor
OTHERS = [(3, 5), (100, 7), (256, 48), (-1, 48), (32, -1), (1, 50), (-1, 128)]
FEW_BLOCKS = [(0, 17), (17, 0), (1, 1), (1, 100), (17, 1), (17, 65), (48, 20)]


def run(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    x = laid(values_of(case["values"], case["shape"], case["dtype"]), case["layout"], kernels.device)
    cast = (case["fmt"], case["tile"], case["power_of_two"], case["margin"])
    written = case["transpose"], case["pad"], case["column_sum"]
    check(kernels, "cast", x, None, 0, *cast, *written, compare_sums=case["values"] != "edge")


OPTIONS = {
    "dtype": DTYPES,
    "fmt": FORMATS,
    "layout": LAYOUTS,
    "values": VALUES,
    "power_of_two": [False, True],
    "margin": [0, 3],
    "pad": [1, 16],
    "column_sum": [False, True],
    "transpose": [False, True],
}


@each_pair(shape=SHAPES, tile=IN_REGISTERS, small=[False, True], **OPTIONS)
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    run(kernels, monkeypatch, case)


@each_pair(shape=FEW_BLOCKS, tile=OTHERS, small=[False], **OPTIONS)
def test_cast_in_blocks_of_any_size(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    run(kernels, monkeypatch, case)
