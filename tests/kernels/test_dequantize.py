from typing import Any

import pytest
import torch

from tests.kernels.conftest import Ops
from tests.support import definitions
from tests.support.casts import DTYPES, FORMATS, LAYOUTS, laid, poisoned_memory
from tests.support.combinations import dealt
from tests.support.definitions import GRANULARITIES, same_bits, scale_grid

PAIRS: dict[str, Any] = {
    "shape": [(0, 0), (0, 5), (5, 0), (1, 1), (17, 130), (64, 256), (130, 7)],
    "tile": [g.tile for g in GRANULARITIES],
    "fmt": FORMATS,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "transposed": [False, True],
    "size": [2.0**-126, 0.1, 10.0, 2.0**100],
}


@pytest.mark.parametrize("seed", range(2))
def test_any_pair(ops: Ops, seed: int) -> None:
    """Any of the 256 codes is read exactly in float64, rounded to float32 and from there to the dtype."""
    for case in dealt(seed, 10 if ops.kernels else 40, **PAIRS):
        shape, tile = case["shape"], case["tile"]
        qdata = laid(torch.randint(0, 256, shape).to(torch.uint8), case["layout"]).view(case["fmt"])
        scale_inv = (torch.rand(scale_grid(shape, tile)) + 1) * case["size"]
        if case["transposed"]:
            qdata, scale_inv, tile = qdata.t(), scale_inv.t(), tile[::-1]
        before = qdata.clone(), scale_inv.clone()
        with poisoned_memory():
            value = ops.of("dequantize")(qdata, scale_inv, tile, case["dtype"])
        expected = definitions.dequantize(qdata, scale_inv, tile).float().to(case["dtype"])
        assert value.shape == qdata.shape and value.is_contiguous()
        assert torch.equal(value.isnan(), expected.isnan())
        assert same_bits(value.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))
        assert all(map(same_bits, (qdata, scale_inv), before))
