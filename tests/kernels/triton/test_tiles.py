"""Kernels' shared helpers, by a cast and an amax, around each of their boundaries; test_codes.py has the codes."""

import math

import pytest
import torch
from torch import Tensor

from octavo import numerics
from octavo.formats import format_of
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.casts import FORMATS
from tests.support.definitions import FLOAT32_MAX, MAX, neighbours, same_bits
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


def amaxes(limit: float) -> Tensor:
    """Non-negative finite numbers, among them all where a quotient of ``limit`` comes near a power of two."""
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64)
    mantissa = limit / 2.0 ** math.floor(math.log2(limit))
    near = neighbours(torch.cat([powers, mantissa * powers[:-1]]))
    anything = torch.randint(0, 0x7F800000, (20000,), dtype=torch.int32).view(torch.float32)
    numbers = torch.cat([near, anything, torch.tensor([0.0, FLOAT32_MAX])])
    return numbers[: len(numbers) // 64 * 64].view(-1, 64)


@pytest.mark.covering(1)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda dtype: str(format_of(dtype)))
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 7, 40, 64])
def test_scales(kernels: TritonKernels, margin: int, power_of_two: bool, fmt: torch.dtype) -> None:
    amax = amaxes(MAX[fmt])
    _, _, scale_inv, amax_of_cast, _ = kernels.cast(amax, None, 0, fmt, (1, 1), power_of_two, margin)
    expected = numerics.scale_from_amax(amax, MAX[fmt], power_of_two, margin)
    assert same_bits(scale_inv, numerics.scale_inv_from_scale(expected)) and same_bits(amax_of_cast, amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow(kernels: TritonKernels, dtype: torch.dtype) -> None:
    """Products of codes and scales that lie between numbers of the dtype, in the middle and next to it."""
    lattice = torch.arange(0x3000, 0x5000, dtype=torch.int32) << 16  # as scales, of codes of one
    scales = neighbours(torch.cat([lattice, lattice[:-1] + 0x8000, lattice[::3] + 0x1000]).view(torch.float32), 1)
    scales = torch.cat([scales, torch.tensor([65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25])])
    scales = scales[: len(scales) // 64 * 64].view(-1, 64)
    arguments = torch.ones(scales.shape).to(FORMATS[0]), scales, (1, 1), dtype
    expected = REFERENCE["dequantize"](*arguments)
    assert same_bits(kernels.dequantize(*arguments), expected)
    assert same_bits(expected, scales.to(dtype))
