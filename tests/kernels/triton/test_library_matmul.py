"""torch's own product: scales laid as it wants them, equal to the reference, and asked once whether it is right."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from octavo.granularity import Tile
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.casts import ALL, E4M3, E5M2, to
from tests.support.product_cases import BLOCK, ROWS, SQUARE, close, of_flat, operands
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("blocks", [1, 3, 4, 6])
def test_scales_are_laid_as_torch_s_product_wants_them(blocks: int, kernels: TritonKernels) -> None:
    laid = kernels.module("library_matmul").laid_scale_inv
    vectors = torch.rand(8, blocks)
    scales = laid(vectors, BLOCK, 1)
    assert torch.equal(scales, vectors) and scales.stride(0) == 1 and scales.stride(1) in (1, 8)
    x = torch.randn(8, 128 * blocks).bfloat16().to(kernels.gpu)
    _, _, written, *_ = kernels.cast(x, None, 0, E4M3, BLOCK, True, 0)
    assert laid(written, BLOCK, 1).data_ptr() == written.data_ptr()  # as a cast writes it
    squares = torch.rand(2, blocks)
    scales = laid(squares, SQUARE, 0)
    assert (scales.data_ptr() == squares.data_ptr()) == (blocks == 4)  # copied only where padding is missing
    padded = -(-blocks // 4) * 4
    assert scales.shape == (padded, 2) and scales.stride() == (1, padded)
    assert torch.equal(scales[:blocks].t(), squares) and not scales[blocks:].any()
    for dim, shape in ((0, (1, 8)), (1, (8, 1))):
        scales = laid(torch.rand(1, 8).t(), ROWS, dim)
        assert scales.shape == shape and scales.stride() == torch.empty(shape).stride()


@pytest.mark.parametrize("tiles", [(ALL, ALL), (ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK)], ids=str)
def test_torch_s_product(tiles: tuple[Tile, Tile], kernels: TritonKernels) -> None:
    if kernels.gpu.type == "cpu" and tiles[0] == BLOCK:
        pytest.skip("torch's product has no blocks on a CPU")
    if kernels.gpu.type == "cpu" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's product runs on GPUs only")
    library_matmul = of_flat(kernels.module("library_matmul").library_matmul)
    for shape in ((32, 48, 128), (256, 256, 384)):
        for bias in (None, torch.randn(2 * shape[1])[::2] * 100, torch.randn(shape[1]).bfloat16()):
            args = operands(shape, tiles, (E5M2 if tiles[0] != BLOCK else E4M3, E4M3))
            expected = REFERENCE["matmul"](*args, bias, torch.float32, False).bfloat16()
            close(library_matmul(*to(kernels.gpu, (*args, bias)), torch.bfloat16, False).cpu(), expected, kernels)


def test_a_device_is_asked_once_whether_torch_s_product_is_right(kernels: TritonKernels) -> None:
    module = kernels.module("library_matmul")
    if kernels.gpu.type == "cpu" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's product runs on GPUs only")
    true = module.library_matmul
    kind = (E4M3, E4M3, torch.bfloat16), True, False

    def with_error(change: Callable[[Any], Any]) -> Callable[..., Tensor]:
        return lambda operands, *others: true(change(operands), *others)

    for tiles in ((ALL, ALL), (ROWS, ROWS)):
        assert module._agrees(kernels.gpu, *tiles, *kind)
        swapped = with_error(lambda o: o._replace(a=o.a._replace(scale_inv=o.a.scale_inv.flip(0))))
        one_column = with_error(lambda o: o._replace(bias=o.bias * (torch.arange(len(o.bias)) != 7)))
        for wrong in (swapped if tiles[0] == ROWS else one_column, mock.Mock(side_effect=RuntimeError("unsupported"))):
            with mock.patch.object(module, "library_matmul", wrong):
                assert not module._agrees(kernels.gpu, *tiles, *kind)
    if kernels.gpu.type == "cpu":
        assert not module._agrees(kernels.gpu, BLOCK, SQUARE, *kind)  # raises there
    even = kernels.gpu, (32, 48, 64)
    args = to(even[0], (*operands(even[1], (ALL, ALL), (E4M3, E4M3)), None, torch.bfloat16, True))
    with mock.patch.object(module, "_known", {}), mock.patch.object(module, "_agrees", return_value=False) as asked:
        for _ in range(2):
            kernels.matmul(*args)
        assert asked.call_count == 1
        with mock.patch.object(module, "is_capturing", return_value=True):
            kernels.matmul(*args[:-1], False)  # another kind: not asked, and not remembered
        assert asked.call_count == 1 and len(module._known) == 1
