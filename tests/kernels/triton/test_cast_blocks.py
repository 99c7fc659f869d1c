"""One scale a block, of sizes that are powers of two and of any other: the casts and the amax, bit for bit."""

from typing import Any

import pytest

from tests.support.combinations import each_pair
from tests.support.triton_cases import BOTH_LAYOUTS, check_cast, input_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

IN_REGISTERS = [(1, 128), (128, 128), (1, 32), (128, 1), (32, 1), (64, 16), (2, 8), (1, 1)]
# of any size, and in any direction the whole tensor
OTHERS = [(3, 5), (100, 7), (256, 48), (-1, 48), (32, -1), (1, 50), (-1, 128)]
FEW_BLOCKS = [(0, 17), (17, 0), (1, 1), (1, 100), (17, 1), (17, 65), (48, 20)]


@each_pair(**BOTH_LAYOUTS, tile=IN_REGISTERS)
def test_cast(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    check_cast(kernels, input_of(kernels, monkeypatch, case), case, case["tile"])


@each_pair(**BOTH_LAYOUTS | {"shape": FEW_BLOCKS, "small": [False]}, tile=OTHERS)
def test_cast_in_blocks_of_any_size(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    check_cast(kernels, input_of(kernels, monkeypatch, case), case, case["tile"])
