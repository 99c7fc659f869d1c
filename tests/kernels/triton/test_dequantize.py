"""Pairs read back, bit for bit."""

from typing import Any

import pytest
import torch

from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.triton_cases import ALL, DTYPES, FORMATS, LAYOUTS, SHAPES, laid, poisoned_memory, values_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@each_pair(
    tile=[ALL, (1, -1), (-1, 1), (1, 128), (128, 128), (1, 32), (128, 1), (3, 5)],
    shape=SHAPES,
    dtype=DTYPES,
    fmt=FORMATS,
    layout=LAYOUTS,
    values=["varied", "faults", "only faults", "edge"],
    transposed=[False, True],
)
def test_dequantize(kernels: TritonKernels, case: dict[str, Any]) -> None:
    tile, dtype = case["tile"], case["dtype"]
    x = values_of(case["values"], case["shape"], torch.float32)
    q, _, scale_inv, *_ = REFERENCE["cast"](x, None, 0, case["fmt"], tile, False, 0)
    on_device = laid(q.view(torch.uint8), case["layout"], kernels.device).view(case["fmt"])
    scale_inv_on_device = scale_inv.to(kernels.device)
    if case["transposed"]:
        q, scale_inv, tile = q.t(), scale_inv.t(), tile[::-1]
        on_device, scale_inv_on_device = on_device.t(), scale_inv_on_device.t()
    with poisoned_memory():
        values = kernels.dequantize(on_device, scale_inv_on_device, tile, dtype)
    expected = REFERENCE["dequantize"](q, scale_inv, tile, dtype)
    assert values.is_contiguous() and values.shape == q.shape
    assert torch.equal(values.cpu().isnan(), expected.isnan())
    assert same_bits(values.cpu().nan_to_num(0), expected.nan_to_num(0))
