import math

import pytest
import torch
from torch import Tensor

from octavo import E4M3, E5M2, PerBlock, PerRow, PerTensor, ScaledTensor, quantize
from octavo.formats import Format
from octavo.granularity import Granularity
from tests.support import definitions
from tests.support.definitions import same_bits
from tests.support.helpers import sqnr

GRANULARITIES = [
    PerTensor(),
    PerRow(),
    PerRow(dim=-2),
    PerBlock(1, 128),
    PerBlock(128, 128),
    PerBlock(1, 5),
    PerBlock(3, 5),
]
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
each_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
SHAPES = [
    (),
    (0,),
    (7,),
    (130,),
    (0, 5),
    (5, 0),
    (1, 1),
    (7, 130),
    (2, 6, 10),  # rows that fill the blocks
    (2, 7, 11),  # and that don't: the blocks of one matrix end with it
    (3, 1, 4),
    (2, 3, 4, 5),
    (0, 4, 5),
    (2, 0, 5),
    (2, 4, 0),
    (2, 0, 4, 5),
]


def expected_pair(
    x: Tensor, fmt: Format, granularity: Granularity, power_of_two: bool = False, margin: int = 0
) -> tuple[Tensor, Tensor]:
    """Codes as uint8 and scale_inv, one matrix after the other."""
    shape = granularity.scale_shape(x.shape)
    flat = x.reshape(1, -1) if x.ndim < 2 or granularity == PerTensor() else x
    matrices = flat.reshape(math.prod(flat.shape[:-2]), *flat.shape[-2:])
    codes, scales = torch.empty(matrices.shape, dtype=torch.uint8), []
    for i, matrix in enumerate(matrices):
        codes[i], scale_inv, _ = definitions.cast(matrix, fmt.dtype, granularity.tile, power_of_two, margin)
        scales.append(scale_inv)
    return codes.view(x.shape), (torch.stack(scales) if scales else torch.ones(shape)).view(shape)


@each_granularity
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_and_back(shape: tuple[int, ...], granularity: Granularity) -> None:
    # matrices of different size, so that a scale from the wrong one is seen
    x = torch.randn(shape) * (torch.rand((*shape[:-2], 1, 1)) * 100 if len(shape) > 2 else 1)
    for dtype, fmt, power_of_two in ((torch.bfloat16, E4M3, False), (torch.float32, E5M2, True)):
        q = quantize(x.to(dtype), fmt, granularity, power_of_two)
        codes, scale_inv = expected_pair(x.to(dtype), fmt, granularity, power_of_two)
        assert (q.shape, q.dtype, q.format, q.granularity) == (shape, dtype, fmt, granularity)
        assert q.qdata.is_contiguous()
        assert same_bits(q.qdata.view(torch.uint8), codes) and same_bits(q.scale_inv, scale_inv)
        value = q.dequantize()
        assert type(value) is Tensor and (value.shape, value.dtype) == (shape, dtype)
        if value.numel():
            assert sqnr(value, x.to(dtype).double()) > 20
        assert torch.equal(value, q.dequantize())


@each_granularity
@each_format
def test_dequantize_is_exact(fmt: Format, granularity: Granularity) -> None:
    q = quantize(torch.randn(7, 130), fmt, granularity)
    exact = definitions.dequantize(q.qdata, q.scale_inv, granularity.tile)
    assert torch.equal(q.dequantize(), exact.float())
    assert torch.equal(q.to(torch.bfloat16).dequantize(), exact.float().bfloat16())


def test_margin_and_power_of_two() -> None:
    x = torch.randn(5, 9)
    q = quantize(x, E4M3, PerRow(), power_of_two=True, margin=3)
    codes, scale_inv = expected_pair(x, E4M3, PerRow(), True, 3)
    assert same_bits(q.qdata.view(torch.uint8), codes) and same_bits(q.scale_inv, scale_inv)
    assert all(math.frexp(s)[0] == 0.5 for s in q.scale_inv.flatten().tolist())


@each_granularity
def test_non_contiguous_input(granularity: Granularity) -> None:
    x = torch.randn(9, 4, 6)
    for view in (x.transpose(0, 1), x.mT, x[::2, 1:, ::3], x[:1].expand(5, -1, -1)):
        q = quantize(view, E4M3, granularity)
        codes, scale_inv = expected_pair(view, E4M3, granularity)
        assert q.qdata.is_contiguous()
        assert same_bits(q.qdata.view(torch.uint8), codes) and same_bits(q.scale_inv, scale_inv)


@each_granularity
@each_format
def test_the_gradient_is_straight_through_and_zero_at_faults(fmt: Format, granularity: Granularity) -> None:
    x = torch.randn(2, 7, 11)
    x[0, 1, 2], x[1, 3, 4], x[1, 6, 10] = math.nan, math.inf, -math.inf
    x.requires_grad_()
    q = quantize(x, fmt, granularity)
    assert q.requires_grad
    weights = torch.randn(2, 11, 7)
    q.transpose(1, 2).dequantize().backward(weights)
    passed = torch.where(torch.isfinite(x), weights.mT, 0)
    assert torch.equal(x.grad, passed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_gradient_has_the_inputs_dtype_and_passes_at_the_largest_element(dtype: torch.dtype) -> None:
    x = torch.nn.Parameter(torch.tensor([[1.0, -3.0, 0.0], [1e-5, 2e4, 5.0]], dtype=dtype))
    for granularity in GRANULARITIES:  # a scale from the tensor's own amax clips nothing
        quantize(x, E4M3, granularity).to(torch.float32).dequantize().sum().backward()
    assert x.grad.dtype == dtype and bool((x.grad == len(GRANULARITIES)).all())
    with torch.no_grad():
        assert not quantize(x, E4M3, PerTensor()).requires_grad
    assert not quantize(x.detach(), E4M3, PerTensor()).requires_grad


def test_dequantize_passes_the_gradient_to_a_leaf() -> None:
    q = quantize(torch.randn(4, 6), E4M3, PerBlock(3, 5)).requires_grad_()
    grad = torch.randn(4, 6)
    q.dequantize().backward(grad)
    assert type(q.grad) is Tensor and torch.equal(q.grad, grad)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"bfloat16, float16 and float32 .*not {dtype}"):
        quantize(torch.zeros(2, 2).to(dtype), E4M3, PerTensor())


def test_wrong_arguments_are_refused_by_name() -> None:
    x = torch.randn(2, 2)
    with pytest.raises(TypeError, match="not list"):
        quantize([1.0], E4M3, PerTensor())
    with pytest.raises(TypeError, match=r"'e4m3': use octavo\.E4M3 or octavo\.E5M2"):
        quantize(x, "e4m3", PerTensor())
    with pytest.raises(TypeError, match=r"float8_e4m3fn: use octavo\.E4M3"):
        quantize(x, torch.float8_e4m3fn, PerTensor())
    with pytest.raises(TypeError, match=r"PerTensor.*: use octavo.PerTensor\(\), PerRow\(\) or PerBlock"):
        quantize(x, E4M3, PerTensor)
    with pytest.raises(TypeError, match=r"\(1, 128\): use octavo.PerTensor"):
        quantize(x, E4M3, (1, 128))
    for margin in (-1, 65, 1.5, "2"):
        with pytest.raises(ValueError, match=r"margin=.* integer from 0 to 64"):
            quantize(x, E4M3, PerTensor(), margin=margin)


def test_a_pair_is_not_quantized_again() -> None:
    q = quantize(torch.randn(2, 2), E4M3, PerTensor())
    with pytest.raises(TypeError, match=r"ScaledTensor already; quantize x.dequantize\(\)"):
        quantize(q, E5M2, PerRow())
    assert isinstance(quantize(q.dequantize(), E5M2, PerRow()), ScaledTensor)
