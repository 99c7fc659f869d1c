import math

import pytest
import torch

from octavo import kernels
from tests.support import definitions
from tests.support.definitions import GRANULARITIES, all_codes, same_bits, scale_grid

each_tile = pytest.mark.parametrize("tile", [g.tile for g in GRANULARITIES], ids=map(str, GRANULARITIES))
each_format = pytest.mark.parametrize("fmt", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["E4M3", "E5M2"])
OUT = [torch.bfloat16, torch.float16, torch.float32]


def random_pair(shape: tuple[int, int], tile: tuple[int, int], fmt: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, shape).to(torch.uint8).view(fmt)
    return codes, torch.rand(scale_grid(shape, tile)) * 10 + 0.1


@each_tile
@each_format
@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (17, 130), (128, 256), (130, 7)], ids=str)
def test_dequantize(shape: tuple[int, int], dtype: torch.dtype, fmt: torch.dtype, tile: tuple[int, int]) -> None:
    qdata, scale_inv = random_pair(shape, tile, fmt)
    before = qdata.clone(), scale_inv.clone()
    value = kernels.dequantize(qdata, scale_inv, tile, dtype)
    # exact in float64, rounded to float32 and from there to dtype
    expected = definitions.dequantize(qdata, scale_inv, tile).float().to(dtype)
    assert value.dtype == dtype and value.shape == shape and value.is_contiguous()
    assert torch.equal(torch.isnan(value), torch.isnan(expected))
    assert torch.equal(value.nan_to_num(nan=0), expected.nan_to_num(nan=0))
    assert same_bits(qdata, before[0]) and same_bits(scale_inv, before[1])


@each_tile
@each_format
def test_strided_pairs(fmt: torch.dtype, tile: tuple[int, int]) -> None:
    for transposed in (False, True):
        qdata, scale_inv = random_pair((134, 260), tile, fmt)
        if transposed:
            qdata, scale_inv, laid = qdata.t(), scale_inv.t(), tile[::-1]
        else:
            qdata, laid = torch.cat((qdata, qdata), 1)[:, :260], tile
        value = kernels.dequantize(qdata, scale_inv, laid, torch.float32)
        expected = definitions.dequantize(qdata, scale_inv, laid).float()
        assert value.is_contiguous() and torch.equal(value.nan_to_num(nan=0), expected.nan_to_num(nan=0))


@each_format
def test_faults_and_signed_zeros_survive(fmt: torch.dtype) -> None:
    codes = all_codes(fmt).view(16, 16)
    value = kernels.dequantize(codes, torch.full((1, 1), 2.0), (-1, -1), torch.bfloat16)
    exact = definitions.read(codes)
    assert torch.equal(torch.isnan(value), torch.isnan(exact)) and torch.equal(torch.isinf(value), torch.isinf(exact))
    assert value[0, 0] == 0 and math.copysign(1, value[8, 0].item()) == -1


@each_format
@pytest.mark.parametrize("scale_inv", [2.0**-126, 2.0**-120, 2.0**100])
def test_extreme_scales(scale_inv: float, fmt: torch.dtype) -> None:
    codes = all_codes(fmt)[:0x70].view(1, -1)
    value = kernels.dequantize(codes, torch.full((1, 1), scale_inv), (-1, -1), torch.float32)
    assert torch.equal(value.double(), (definitions.read(codes) * scale_inv).float().double())
    assert bool((value[0, 1:] > 0).all())
