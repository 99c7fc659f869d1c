"""Operands in groups are multiplied as the reference multiplies them."""

import pytest
import torch

from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.groups import SIZES, offsets_of
from tests.support.product_cases import close
from tests.support.triton_cases import ALL, E4M3, poisoned_memory, to
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("sizes", "rest"), SIZES, ids=lambda v: str(v)[:20])
def test_rows_in_groups(sizes: list[int], rest: int, kernels: TritonKernels) -> None:
    offsets = offsets_of(sizes)
    x, b = torch.randn(sum(sizes) + rest, 48), torch.randn(len(sizes), 24, 48).to(E4M3)
    a, _, scale_inv, _ = REFERENCE["grouped_cast"](x, offsets, None, 0, E4M3, ALL, False, 0)
    args = a, scale_inv, ALL, b, torch.rand(len(sizes), 1, 1) + 0.5, ALL, offsets, None, torch.float32, False
    with poisoned_memory():
        found = kernels.grouped_matmul(*to(kernels.device, args))
    close(found.cpu(), REFERENCE["grouped_matmul"](*args), kernels)
