import pytest
import torch

import octavo
from octavo import E4M3, Cast, Delayed, PerBlock, PerTensor, kernels
from octavo.autograd.cast_together import MatrixToCast, cast_together
from octavo.scaling.recipe import WEIGHT


@pytest.mark.parametrize("granularity", [PerTensor(), PerBlock(32, 32)], ids=str)
def test_matrices_are_cast_as_each_alone(granularity):
    cast = Cast(E4M3, granularity, power_of_two=True)
    xs = [torch.randn(64, 32), torch.randn(32, 96)]
    alone = [kernels.cast(x, None, 0, *cast.arguments) for x in xs]
    matrices = [
        MatrixToCast(
            x,
            torch.empty_like(q),
            torch.empty_like(scale_inv),
            transposed=torch.empty_like(q.t(), memory_format=torch.contiguous_format),
            amax=torch.empty_like(amax),
        )
        for x, (q, _, scale_inv, amax, *_) in zip(xs, alone, strict=True)
    ]
    cast_together(matrices, cast)
    for matrix, (q, _, scale_inv, amax, *_) in zip(matrices, alone, strict=True):
        assert torch.equal(matrix.codes.float(), q.float()) and torch.equal(matrix.transposed.float(), q.t().float())
        assert torch.equal(matrix.scale_inv.float(), scale_inv.float()) and torch.equal(matrix.amax, amax)


def test_known_scales_need_no_outputs_but_codes():
    cast = Cast(E4M3, PerTensor(), Delayed())
    xs = [torch.randn(8, 16), torch.randn(4, 16)]
    matrices = [MatrixToCast(x, torch.empty(x.shape, dtype=E4M3.dtype), scale=torch.full((3,), 2.0)) for x in xs]
    cast_together(matrices, cast, WEIGHT)
    for x, matrix in zip(xs, matrices, strict=True):
        assert torch.equal(matrix.codes.float(), (2 * x).to(E4M3.dtype).float())
    cast_together([], cast)


def test_nothing_is_written_where_it_is_skipped():
    codes = torch.zeros(8, 16, dtype=torch.uint8)
    matrix = MatrixToCast(torch.randn(8, 16), codes.view(octavo.E4M3.dtype))
    cast_together([matrix], Cast(E4M3, PerTensor()), skip=torch.ones(1, dtype=torch.int32))
    assert codes.sum() == 0
    cast_together([matrix], Cast(E4M3, PerTensor()), skip=torch.zeros(1, dtype=torch.int32))
    assert codes.sum() > 0
