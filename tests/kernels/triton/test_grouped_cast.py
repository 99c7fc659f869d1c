"""Rows in groups are cast as the reference casts them."""

import pytest
import torch

from tests.support.definitions import same_bits
from tests.support.groups import SIZES, offsets_of
from tests.support.triton_cases import E4M3, run_both, to
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("sizes", "rest"), SIZES, ids=lambda v: str(v)[:20])
def test_each_group_is_cast_alone(sizes: list[int], rest: int, kernels: TritonKernels) -> None:
    x, offsets = to(kernels.device, (torch.randn(sum(sizes) + rest, 40), offsets_of(sizes)))
    run = run_both(kernels, "grouped_cast", (x, offsets, None, 0, E4M3, (-1, -1), False, 0, True, True, 16))
    assert all(map(same_bits, run.actual, run.expected))
