"""What the kernels share, function by function, over all of a domain or around each of its boundaries."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import numerics
from tests.support.definitions import (
    FLOAT32_MAX,
    MAX,
    VALUES,
    all_bfloat16,
    all_codes,
    boundaries,
    neighbours,
    round_to_codes,
    same_bits,
)
from tests.support.triton_cases import E5M2, FORMATS
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

each_format = pytest.mark.parametrize("fmt", FORMATS, ids=["E4M3", "E5M2"])


@pytest.fixture
def tile_kernel(kernels: TritonKernels) -> Callable[..., None]:
    """Runs one of tests/support/tile_kernels.py."""

    def run(name: str, first: Tensor, *args: Any) -> None:
        # compiled as much as registers hold; the interpreter takes 3 ms a program, whatever its size
        block = 1 << min((len(first) - 1).bit_length(), 16) if kernels.interpreted else 2048
        kernels.launch(name, -(-len(first) // block), first, *args, block)

    return run


def with_faults(x: Tensor) -> Tensor:
    return torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])])


@each_format
def test_round_by_bits(kernels: TritonKernels, tile_kernel: Callable[..., None], fmt: torch.dtype) -> None:
    for x in (all_bfloat16().float(), with_faults(boundaries(fmt))):
        codes = torch.full(x.shape, 99, dtype=torch.uint8, device=kernels.device)
        tile_kernel("round_kernel", x.to(kernels.device), codes, len(x), fmt == E5M2)
        # infinities too are numbers beyond the largest here
        assert same_bits(codes.cpu(), round_to_codes(x.clamp(-FLOAT32_MAX, FLOAT32_MAX), fmt))


@each_format
@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0**40])
def test_encode(kernels: TritonKernels, tile_kernel: Callable[..., None], scale: float, fmt: torch.dtype) -> None:
    scales = torch.full((1,), scale, device=kernels.device)
    near = with_faults(boundaries(fmt))
    for x in (all_bfloat16(), near, (near / scale).half()):
        product = (x.float() * scales.cpu()).clamp(-FLOAT32_MAX, FLOAT32_MAX)
        expected = round_to_codes(torch.where(x.isinf(), x.float(), product), fmt)
        for finite, values, right in ((False, x, expected), (True, x[~x.isinf()], expected[~x.isinf()])):
            codes = torch.empty(values.shape, dtype=fmt, device=kernels.device)
            tile_kernel("encode_kernel", values.to(kernels.device), scales, codes, len(values), fmt == E5M2, finite)
            assert same_bits(codes.cpu().view(torch.uint8), right)


@each_format
def test_decode(kernels: TritonKernels, fmt: torch.dtype) -> None:
    found = torch.full((2, 256), 99.0, device=kernels.device)
    kernels.launch("decode_kernel", 1, all_codes(fmt).to(kernels.device), *found, 256)
    for values in found.cpu().double():
        assert torch.equal(values.isnan(), VALUES[fmt].isnan())
        assert same_bits(values[~values.isnan()], VALUES[fmt][~values.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow(kernels: TritonKernels, tile_kernel: Callable[..., None], dtype: torch.dtype) -> None:
    lattice = torch.arange(0, 0x7F80, 1 if dtype == torch.bfloat16 else 7, dtype=torch.int32) << 16
    halfway = lattice[:-1] + 0x8000
    if dtype == torch.float16:
        halfway = halfway[::3] + (torch.randint(0, 8, halfway[::3].shape, dtype=torch.int32) << 12)
    special = torch.tensor([math.inf, math.nan, 65504.0, 65519.996, 65520.0, FLOAT32_MAX])
    x = torch.cat([neighbours(torch.cat([lattice, halfway]).view(torch.float32), 1), special])
    x = torch.cat([x, -x])
    out = torch.empty(x.shape, dtype=dtype, device=kernels.device)
    tile_kernel("narrow_kernel", x.to(kernels.device), out, len(x))
    assert torch.equal(out.cpu().isnan(), x.isnan())
    assert same_bits(out.cpu()[~x.isnan()], x.to(dtype)[~x.isnan()])


def amaxes(limit: float) -> Tensor:
    """Non-negative finite numbers, among them all where a quotient of ``limit`` comes near a power of two."""
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64)
    mantissa = limit / 2.0 ** math.floor(math.log2(limit))
    near = neighbours(torch.cat([powers, mantissa * powers[:-1]]))
    anything = torch.randint(0, 0x7F800000, (20000,), dtype=torch.int32).view(torch.float32)
    largest = torch.tensor([0.0, FLOAT32_MAX])
    return torch.cat([near, anything, largest])


@each_format
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 7, 40, 100])
def test_scales(
    kernels: TritonKernels, tile_kernel: Callable[..., None], margin: int, power_of_two: bool, fmt: torch.dtype
) -> None:
    amax = amaxes(MAX[fmt])
    scale, scale_inv = (torch.full(amax.shape, math.nan, device=kernels.device) for _ in range(2))
    args = (scale, scale_inv, len(amax), MAX[fmt] * 2.0**-margin, power_of_two)
    tile_kernel("scale_kernel", amax.to(kernels.device), *args)
    expected = numerics.scale_from_amax(amax, MAX[fmt], power_of_two, margin)
    assert same_bits(scale.cpu(), expected)
    assert same_bits(scale_inv.cpu(), numerics.scale_inv_from_scale(expected))


def test_finite_abs(kernels: TritonKernels, tile_kernel: Callable[..., None]) -> None:
    x = torch.cat([all_bfloat16().float(), torch.tensor([FLOAT32_MAX, -FLOAT32_MAX, 2.0**-149, -(2.0**-149)])])
    out = torch.full_like(x, math.nan).to(kernels.device)
    tile_kernel("finite_abs_kernel", x.to(kernels.device), out, len(x))
    assert same_bits(out.cpu(), torch.where(x.isfinite(), x.abs(), 0.0))


@pytest.mark.parametrize("programs", [1, 2, 17])
def test_one_program_is_the_last_and_leaves_zeros(kernels: TritonKernels, programs: int) -> None:
    work = torch.zeros(2, dtype=torch.int32, device=kernels.device)
    launches = 3
    ends = torch.zeros(1, dtype=torch.int32, device=kernels.device)
    for launch in range(launches):
        x = torch.rand(programs) * 10.0**-launch  # so that an amax left behind would show
        amax = torch.full((1,), math.nan, device=kernels.device)
        kernels.launch("largest_kernel", programs, x.to(kernels.device), work, amax, ends, programs)
        assert amax.item() == x.max() and not work.any()
    assert ends.item() == launches
