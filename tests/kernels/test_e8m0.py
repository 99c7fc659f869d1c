"""Pairs whose scale_inv is E8M0 are those of float32: every op reads them the same."""

import random

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.numerics import E8M0
from tests.kernels.conftest import Ops
from tests.support.casts import DTYPES, E4M3, FORMATS, values_of
from tests.support.definitions import same_bits
from tests.support.product_cases import MX, pair


@pytest.mark.parametrize("seed", range(2))
def test_pairs_are_those_of_float32(ops: Ops, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for tile in (MX, MX[::-1]):
        x = values_of("faults", (draw.choice([1, 33, 70]), draw.choice([1, 32, 77])), draw.choice(DTYPES))
        q, _, scale_inv, *_ = REFERENCE["cast"](x, None, 0, draw.choice(FORMATS), tile, True, seed)
        assert scale_inv.dtype == E8M0
        read = {}
        for scales in (scale_inv, scale_inv.float()):
            counts = torch.zeros(71, dtype=torch.float64), torch.zeros(3), torch.zeros(4), torch.zeros(1).int()
            args = x, q, scales, tile, torch.tensor([5]).int()
            ops.of("cast_statistics")(*args[:4], *counts[:2])
            ops.of("note_faults")(args[0].float().sum(1, keepdim=True), args[0], args[2], None, args[4], *counts[2:])
            flat = False, 0, False, 1, False, "gelu", None, scales, tile
            gelu = ops.of("cast")(q, None, 0, q.dtype, (1, -1), *flat)
            read[scales.dtype] = [*counts, *gelu, *(ops.of("dequantize")(q, scales, tile, out) for out in DTYPES)]
        assert all(map(same_bits, *read.values()))
        assert float(read[E8M0][2][2]) == float(scale_inv.float().max())


def test_all_256_scales_are_read(ops: Ops) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E8M0)
    true = torch.from_numpy(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    ones = torch.ones(256, 32).to(E4M3)
    for q, scale_inv, tile in ((ones, codes[:, None], MX), (ones.t(), codes[None], MX[::-1])):
        values = ops.of("dequantize")(q, scale_inv, tile, torch.float32)
        values = values if tile == MX else values.t()
        assert bool(values[255].isnan().all()) and torch.equal(values[:255], true[:255, None].expand(255, 32))
    one = *pair(torch.ones(1, 32), MX), MX
    product = ops.of("matmul")(ones, codes[:, None], MX, *one, None, torch.float32, False)
    assert torch.equal(product[:250], 32 * true[:250, None]) and bool(product[255].isnan())
