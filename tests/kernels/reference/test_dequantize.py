from typing import Any

import torch

from octavo import kernels
from tests.support import definitions
from tests.support.combinations import every_case
from tests.support.definitions import GRANULARITIES, same_bits, scale_grid


@every_case(
    shape=[(0, 0), (0, 5), (5, 0), (1, 1), (17, 130), (128, 256), (130, 7)],
    tile=[g.tile for g in GRANULARITIES],
    fmt=[torch.float8_e4m3fn, torch.float8_e5m2],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    laid=["rows", "columns", "part"],
    size=[2.0**-126, 0.1, 10.0, 2.0**100],
)
def test_dequantize(case: dict[str, Any]) -> None:
    """Of any of the 256 codes: exact in float64, rounded to float32 and from there to the dtype."""
    shape, tile = case["shape"], case["tile"]
    qdata = torch.randint(0, 256, shape).to(torch.uint8).view(case["fmt"])
    scale_inv = (torch.rand(scale_grid(shape, tile)) + 1) * case["size"]
    if case["laid"] == "columns":
        qdata, scale_inv, tile = qdata.t(), scale_inv.t(), tile[::-1]
    elif case["laid"] == "part":
        qdata = torch.cat((qdata, qdata), 1)[:, : shape[1]]
    before = qdata.clone(), scale_inv.clone()
    value = kernels.dequantize(qdata, scale_inv, tile, case["dtype"])
    expected = definitions.dequantize(qdata, scale_inv, tile).float().to(case["dtype"])
    assert value.dtype == case["dtype"] and value.shape == qdata.shape and value.is_contiguous()
    assert torch.equal(value.isnan(), expected.isnan())
    assert same_bits(value.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))
    assert all(map(same_bits, (qdata, scale_inv), before))
