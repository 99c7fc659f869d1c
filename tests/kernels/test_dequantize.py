from typing import Any

import pytest
import torch

from octavo.kernels.cpu import KERNELS as CPU
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support import definitions
from tests.support.combinations import each_pair, every_case
from tests.support.definitions import GRANULARITIES, same_bits, scale_grid
from tests.support.triton_cases import DTYPES, FORMATS, LAYOUTS, laid, poisoned_memory
from tests.support.triton_kernels import TritonKernels

PAIRS: dict[str, Any] = {
    "shape": [(0, 0), (0, 5), (5, 0), (1, 1), (17, 130), (64, 256), (130, 7)],
    "tile": [g.tile for g in GRANULARITIES],
    "fmt": FORMATS,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "transposed": [False, True],
    "size": [2.0**-126, 0.1, 10.0, 2.0**100],
}


def check(case: dict[str, Any], dequantize: Any, device: torch.device) -> None:
    """Of any of the 256 codes: exact in float64, rounded to float32 and from there to the dtype."""
    shape, tile = case["shape"], case["tile"]
    qdata = laid(torch.randint(0, 256, shape).to(torch.uint8), case["layout"], device).view(case["fmt"])
    scale_inv = ((torch.rand(scale_grid(shape, tile)) + 1) * case["size"]).to(device)
    if case["transposed"]:
        qdata, scale_inv, tile = qdata.t(), scale_inv.t(), tile[::-1]
    before = qdata.clone(), scale_inv.clone()
    with poisoned_memory():
        value = dequantize(qdata, scale_inv, tile, case["dtype"])
    expected = definitions.dequantize(qdata.cpu(), scale_inv.cpu(), tile).float().to(case["dtype"])
    assert value.shape == qdata.shape and value.is_contiguous()
    assert torch.equal(value.cpu().isnan(), expected.isnan())
    assert same_bits(value.cpu().nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))
    assert all(map(same_bits, (qdata, scale_inv), before))


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=["reference", "cpu"])
@every_case(**PAIRS)
def test_dequantize(case: dict[str, Any], kernels: dict[str, Any]) -> None:
    check(case, kernels["dequantize"], torch.device("cpu"))


@pytest.mark.gpu
@each_pair(**PAIRS)
def test_dequantize_by_triton(case: dict[str, Any], kernels: TritonKernels) -> None:
    check(case, kernels.dequantize, kernels.device)
