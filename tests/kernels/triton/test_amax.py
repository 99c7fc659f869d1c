"""amax of a tensor, of rows, columns and blocks, bit for bit."""

from typing import Any

import pytest
import torch

from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.triton_cases import (
    ALL,
    DTYPES,
    INPUT,
    LAYOUTS,
    VALUES,
    assert_counters_are_zero,
    laid,
    poisoned_memory,
    use_small_tiles,
    values_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


def compare(kernels: TritonKernels, case: dict[str, Any]) -> None:
    x = values_of(case["values"], case["shape"], case["dtype"])
    on_device = laid(x, case["layout"], kernels.device)
    with poisoned_memory():
        amax = kernels.amax(on_device, case["tile"])
    assert (amax.t() if case["tile"] == (1, 128) else amax).is_contiguous() and amax.device == on_device.device
    assert same_bits(amax.cpu(), REFERENCE["amax"](x, case["tile"]))
    assert same_bits(on_device.cpu(), x)
    assert_counters_are_zero(kernels)


@each_pair(
    tile=[ALL, (1, -1), (-1, 1), (1, 128), (128, 128)],
    **INPUT,
)
def test_amax(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    compare(kernels, case)


@each_pair(
    tile=[(1, 32), (32, 1), (64, 16), (1, 1), (3, 5), (256, 48), (-1, 48), (32, -1)],
    shape=[(0, 17), (17, 0), (1, 1), (1, 100), (17, 1), (17, 65), (48, 20)],
    dtype=DTYPES,
    layout=LAYOUTS,
    values=VALUES,
)
def test_amax_of_other_blocks(kernels: TritonKernels, case: dict[str, Any]) -> None:
    compare(kernels, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_is_the_largest_wherever_it_lies(kernels: TritonKernels, dtype: torch.dtype) -> None:
    for at in (0, 1, 127, 128, 2047, 4095, 5000, 130 * 77 - 1):
        x = torch.zeros(130, 77, dtype=dtype)
        x.view(-1)[at] = -3.0
        assert kernels.amax(x.to(kernels.device), ALL).item() == 3.0
