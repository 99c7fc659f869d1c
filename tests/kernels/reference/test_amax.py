import math

import pytest
import torch
from torch import Tensor

from octavo import kernels
from tests.support.definitions import FLOAT32_MAX, scale_grid, tiles_of

TILES = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (1, 32), (128, 1), (3, 5)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def expected_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    amax = torch.full(scale_grid(x.shape, tile), math.nan)
    for i, j, rows, cols in tiles_of(x.shape, tile):
        numbers = [abs(v) for v in x[rows, cols].flatten().tolist() if math.isfinite(v)]
        amax[i, j] = max(numbers, default=0.0)
    return amax


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (17, 127), (128, 128), (130, 40)])
def test_amax(shape: tuple[int, int], dtype: torch.dtype, tile: tuple[int, int]) -> None:
    x = torch.randn(shape).to(dtype)
    amax = kernels.amax(x, tile)
    assert amax.dtype == torch.float32 and amax.is_contiguous()
    assert torch.equal(amax, expected_amax(x, tile))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan, -math.nan])
def test_only_finite_values_count(fault: float, dtype: torch.dtype, tile: tuple[int, int]) -> None:
    x = torch.randn(9, 130).to(dtype)
    x[4, 7] = fault
    x[8] = fault  # whole tiles of it
    assert torch.equal(kernels.amax(x, tile), expected_amax(x, tile))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, -(2.0**-126), FLOAT32_MAX, -FLOAT32_MAX])
def test_edge_values(value: float, tile: tuple[int, int]) -> None:
    amax = kernels.amax(torch.full((4, 6), value), tile)
    assert bool((amax == abs(value)).all())
    assert not torch.signbit(amax).any()


@pytest.mark.parametrize("tile", TILES)
def test_the_sign_does_not_matter(tile: tuple[int, int]) -> None:
    x = torch.tensor([[-5.0, 1.0, 2.0], [0.5, 3.0, -4.0]])
    assert torch.equal(kernels.amax(x, tile), kernels.amax(-x, tile))
    assert torch.equal(kernels.amax(x, tile), expected_amax(x, tile))


@pytest.mark.parametrize("tile", TILES)
def test_strided_input(tile: tuple[int, int]) -> None:
    base = torch.randn(40, 60)
    for x in (base.t(), base[::3, 1::2], base[:, :1].expand(-1, 9), base[3:4].expand(7, -1)):
        assert torch.equal(kernels.amax(x, tile), expected_amax(x, tile))


@pytest.mark.parametrize("tile", TILES)
def test_the_input_is_untouched(tile: tuple[int, int]) -> None:
    x = torch.full((1, 1), math.inf)
    kernels.amax(x, tile).fill_(3.0)
    assert x.item() == math.inf
    y = torch.ones(1, 1)
    kernels.amax(y, tile).fill_(3.0)
    assert y.item() == 1.0
