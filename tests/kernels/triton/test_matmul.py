"""The product of two pairs: Triton's kernel beside the reference, and which product a case goes to."""

from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from octavo.granularity import Tile, scale_shape
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.triton.launch import LIBRARY, Config
from octavo.numerics import E8M0
from tests.support.product_cases import BLOCK, MX, ROWS, SQUARE, close, of_flat, operands, sums_shortly
from tests.support.triton_cases import ALL, E4M3, E5M2, poisoned_memory, to
from tests.support.triton_kernels import TritonKernels, running

pytestmark = pytest.mark.gpu

SHAPES = [(64, 48, 128), (17, 19, 127), (1, 1, 1), (260, 140, 300), (5, 3, 0), (0, 4, 16), (4, 0, 16)]
TILES = [(ALL, ALL), (ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK), (MX, MX), (ROWS, (128, 64)), (ALL, (64, 96))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("formats", "dtype", "bias_dtype", "fast"),
    [
        ((E4M3, E4M3), torch.float32, None, True),
        ((E5M2, E4M3), torch.bfloat16, torch.bfloat16, False),
        ((E4M3, E5M2), torch.float16, torch.float32, False),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_triton_s_product(formats, dtype, bias_dtype, fast, shape, tiles, kernels):
    triton_matmul = of_flat(kernels.module("matmul").triton_matmul)
    args = operands(shape, tiles, formats)
    if dtype == torch.float16:  # within its range
        args = (args[0], (args[1].float() * 2.0**-7).to(args[1].dtype), *args[2:])
    bias = None if bias_dtype is None else torch.randn(shape[1]).to(bias_dtype)
    expected = REFERENCE["matmul"](*args, bias, torch.float32, fast).to(dtype)
    with poisoned_memory():
        found = triton_matmul(*to(kernels.device, (*args, bias)), dtype, fast)
    close(found.cpu(), expected, kernels, fast)


TOO_SMALL, TOO_LARGE = (-70, -70, 208.0), (65, 65, 2.0**-9)
EXTREMES = [TOO_SMALL, TOO_LARGE, (119, -119, 1.5), (-126, 126, 1.5), (65, 65, 1.0), (-126, -126, 1.0)]
EXTREME_CELLS = [  # by default those of all tiles whose scales' product float32 does not hold, of the others one each
    pytest.param(
        *extreme, tiles, marks=[] if extreme in (TOO_SMALL, TOO_LARGE) or (i - j) % 6 == 0 else pytest.mark.full
    )
    for i, extreme in enumerate(EXTREMES)
    for j, tiles in enumerate(TILES[:6])
]


@pytest.mark.parametrize(("a_exponent", "b_exponent", "code", "tiles"), EXTREME_CELLS, ids=str)
def test_scales_whose_product_float32_does_not_hold(a_exponent, b_exponent, code, tiles, kernels):
    a = torch.full((20, 256), code).to(E4M3)
    b = torch.full((24, 256), code).to(E4M3)
    a[3] = 0.0
    scales = [torch.full(scale_shape(q.shape, tile), 1.3) for q, tile in zip((a, b), tiles, strict=True)]
    scales[0][::2] *= 2.0**a_exponent
    scales[1][:, -1] *= 2.0**b_exponent
    if tiles == (MX, MX):
        scales = [(scale / 1.3).to(E8M0) for scale in scales]
    values = [
        REFERENCE["dequantize"](q, scale_inv, tile, torch.float32).double()
        for q, scale_inv, tile in zip((a, b), scales, tiles, strict=True)
    ]
    args = (a, scales[0], tiles[0], b, scales[1], tiles[1])
    with numpy.errstate(over="ignore", invalid="ignore", under="ignore"):
        found = of_flat(kernels.module("matmul").triton_matmul)(*to(kernels.device, args), None, torch.float32, False)
    torch.testing.assert_close(found.cpu(), (values[0] @ values[1].t()).float(), rtol=1e-3, atol=2.0**-126)


@pytest.mark.parametrize("tiles", [(ALL, ALL), (BLOCK, SQUARE)], ids=str)
def test_operands_of_any_strides(tiles: tuple[Tile, Tile], kernels: TritonKernels) -> None:
    args = operands((32, 48, 256), tiles, (E4M3, E4M3))
    expected = REFERENCE["matmul"](*args, None, torch.float32, False)
    a, a_scale_inv, a_tile, b, b_scale_inv, b_tile = to(kernels.device, args)
    turned = [t.view(torch.uint8).t().contiguous().view(E4M3).t() for t in (a, b)]
    scales = [s.t().contiguous().t() for s in (a_scale_inv, b_scale_inv)]
    wide = [torch.zeros(t.shape[0], 300, dtype=torch.uint8, device=t.device) for t in (a, b)]
    for w, t in zip(wide, (a, b), strict=True):
        w[:, : t.shape[1]] = t.view(torch.uint8)
    sliced = [w.view(E4M3)[:, :256] for w in wide]
    for first, second in (turned, sliced, (turned[0], sliced[1])):
        found = kernels.matmul(first, scales[0], a_tile, second, scales[1], b_tile, None, torch.float32, False)
        close(found.cpu(), expected, kernels)


@pytest.mark.parametrize("tiles", [(ALL, ALL), (ROWS, ROWS), (BLOCK, SQUARE)], ids=str)
def test_a_bias_of_any_stride_and_dtype(tiles: tuple[Tile, Tile], kernels: TritonKernels) -> None:
    args, column = operands((32, 48, 256), tiles, (E4M3, E4M3)), torch.randn(96)[::2] * 100
    module = kernels.module("matmul")
    products = [of_flat(module.triton_matmul)]
    if tiles[0] != BLOCK and (kernels.device.type != "cpu" or torch.__version__ >= "2.12"):  # before, on GPUs only
        products.append(of_flat(kernels.module("library_matmul").library_matmul))
    for bias in (column, column.bfloat16()):
        expected = REFERENCE["matmul"](*args, bias, torch.bfloat16, False)
        for product in products:
            found = product(*to(kernels.device, args), bias.to(kernels.device), torch.bfloat16, False).cpu()
            other = (found != expected).float().mean()  # sums in another order, or cut off to fewer bits
            assert other < (0.05 if sums_shortly(kernels) else 0.01)


def chosen(kernels: TritonKernels, *args: Any, right: bool = True) -> str:
    """Which product ``matmul`` goes to, on a device whose own is right or not."""
    module = kernels.module("matmul")
    library = kernels.module("library_matmul")
    with (
        mock.patch.object(module, "library_matmul", return_value="torch"),
        mock.patch.object(library, "_known", {}),
        mock.patch.object(library, "_agrees", return_value=right),
        mock.patch.object(module, "triton_matmul", return_value="Triton"),
        mock.patch.object(module, "reference_matmul", return_value="reference"),
    ):
        found: str = kernels.matmul(*to(kernels.device, args))
        return found


def test_the_choice(kernels: TritonKernels) -> None:
    bf16 = torch.bfloat16
    both, pair = (ALL, ALL), (E4M3, E4M3)
    even = operands((32, 48, 64), both, pair)
    assert chosen(kernels, *even, None, bf16, True) == chosen(kernels, *even, None, torch.float32, False) == "torch"
    assert chosen(kernels, *even, None, bf16, True, right=False) == "Triton"
    assert chosen(kernels, *even, torch.ones(48), bf16, True) == "torch"
    assert chosen(kernels, *even, torch.ones(48), torch.float32, True) == "Triton"  # torch's has no such bias
    assert chosen(kernels, *operands((17, 48, 64), both, pair), None, bf16, True) == "torch"
    for odd in ((32, 47, 64), (32, 48, 63), (0, 48, 64)):
        assert chosen(kernels, *operands(odd, both, pair), None, bf16, True) == "Triton"
    assert chosen(kernels, *operands((32, 48, 64), both, (E5M2, E5M2)), None, bf16, True) == "Triton"
    assert chosen(kernels, *operands((32, 48, 60), ((1, 20), (1, 20)), pair), None, bf16, True) == "reference"
    scaled = operands((32, 48, 64), (MX, MX), pair)
    assert chosen(kernels, *scaled, None, bf16, False) == "torch"
    assert chosen(kernels, *scaled, None, bf16, False, right=False) == "Triton"
    wide = *scaled[:1], scaled[1].float(), *scaled[2:]  # another cast's: torch's takes E8M0 of both
    for args in ((*scaled, None, torch.float32), (*wide, None, bf16)):
        assert chosen(kernels, *args, False) == "Triton"


@pytest.mark.parametrize("tiles", [(ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK)], ids=str)
def test_the_choice_is_the_table_s(tiles: tuple[Tile, Tile], kernels: TritonKernels) -> None:
    module = kernels.module("matmul")
    args = (*operands((32, 64, 256), tiles, (E4M3, E4M3)), None, torch.bfloat16, False)
    for table, expected in (({(*tiles, False)}, "torch"), ({(*tiles, True)}, "Triton"), (set(), "Triton")):
        with mock.patch.object(module, "LIBRARY", table):
            assert chosen(kernels, *args) == expected
    with mock.patch.object(module, "LIBRARY", {(*tiles, False)}):
        half = (*operands((32, 64, 192), tiles, (E4M3, E4M3)), None, torch.bfloat16, False)
        assert chosen(kernels, *half) == ("torch" if tiles[0] == ROWS else "Triton")  # half a block
        short = (*operands((30, 64, 256), tiles, (E4M3, E4M3)), None, torch.bfloat16, False)
        assert chosen(kernels, *short) == ("torch" if tiles[0] == ROWS else "Triton")  # scales not in sixteens
    assert (ALL, ALL, True) in LIBRARY


@pytest.mark.full
@pytest.mark.parametrize("capability", [90, 100])
def test_a_row_is_the_same_in_another_batch_and_tile(capability: int) -> None:
    """Bit for bit, on tensor cores: the configuration does not change the order of a sum along the contraction."""
    a, a_scale, *rest = operands((40, 128, 384), (ROWS, ROWS), (E4M3, E4M3))
    found = []
    with running(capability) as kernels:
        for rows, config in ((40, Config(128, 64, 4, 4)), (17, Config(128, 128, 4, 8)), (1, Config(128, 128, 3, 8))):
            args = to(kernels.device, (a[:rows], a_scale[:rows], *rest, None))
            with mock.patch.object(kernels.module("matmul"), "product_config", lambda *shapes, config=config: config):
                found.append(of_flat(kernels.module("matmul").triton_matmul)(*args, torch.float32, False).cpu())
    assert all(torch.equal(other, found[0][: len(other)]) for other in found)
