"""All 256 codes, all 65536 bfloat16 values, and float32 values around every place where the nearest code changes."""

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.reference.codes import decode
from tests.support.definitions import FINITE, FLOAT32_MAX, MAX, VALUES, all_codes, read, round_to_codes, same_bits

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
pytestmark = pytest.mark.parametrize("dtype", FORMATS, ids=["E4M3", "E5M2"])


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x as it is, by way of a delayed scale of 1."""
    unit = torch.tensor([0.0, 1.0, 0.0])
    qdata, scale_inv, _, _ = kernels.cast(x.reshape(1, -1), unit, 1, dtype, (-1, -1), True, 3)
    assert qdata.dtype == dtype and scale_inv.item() == 1.0
    return qdata.view(x.shape)


def all_bfloat16() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def around_boundaries(dtype: torch.dtype) -> Tensor:
    """Float32 values from 3 ulp below to 3 ulp above every code and every midpoint, both signs."""
    grid = FINITE[dtype]
    places = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([MAX[dtype] * 1.0625, MAX[dtype] * 2])]).float()
    bits = places.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    near = bits.clamp(min=0).flatten().view(torch.float32)
    return torch.cat([near, -near])


def check_decode(codes: Tensor, out: torch.dtype) -> Tensor:
    value = decode(codes.view(1, -1) if codes.ndim == 1 else codes, out).view(codes.shape)
    assert value.dtype == out and value.shape == codes.shape
    return value


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("repeats", [1, 64])  # a few codes and many are read in two ways
def test_every_code_reads_exactly(dtype: torch.dtype, out: torch.dtype, repeats: int) -> None:
    codes = all_codes(dtype).repeat(repeats)
    value = check_decode(codes, out)
    assert torch.equal(value.double().nan_to_num(nan=1e9), read(codes).nan_to_num(nan=1e9))
    # the sign of every zero and number
    number = ~torch.isnan(value)
    assert torch.equal(torch.signbit(value)[number], (codes.view(torch.uint8) >= 0x80)[number])


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("repeats", [1, 64])
def test_every_code_reads_exactly_where_subnormals_are_flushed(
    dtype: torch.dtype, out: torch.dtype, repeats: int, flush_denormal: None
) -> None:
    codes = all_codes(dtype).repeat(repeats)
    value = check_decode(codes, out)
    flushed = torch.full((8,), 2.0**-140) * 1.0
    torch.set_flush_denormal(False)
    assert not flushed.any(), "the setting had no effect"
    assert torch.equal(value.double().nan_to_num(nan=1e9), read(codes).nan_to_num(nan=1e9))


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("repeats", [1, 64])
def test_strided_codes(dtype: torch.dtype, out: torch.dtype, repeats: int) -> None:
    codes = all_codes(dtype).view(16, 16).repeat(1, repeats)
    strided = {
        "transposed": codes.t(),
        "every other": codes[::2, 1::3],
        "column": codes[:, 3:4],
        "expanded": codes[:, :1].expand(-1, 5 * repeats),
        "one": codes[7:8, 15:16],
        "empty": codes[:0],
    }
    for name, view in strided.items():
        value = check_decode(view, out)
        assert torch.equal(value.double().nan_to_num(nan=1e9), read(view).nan_to_num(nan=1e9)), name


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
@pytest.mark.parametrize("size", [1, 20000])
def test_a_lone_nan_is_read(dtype: torch.dtype, nan: int, size: int) -> None:
    raw = torch.full((size,), 0x80, dtype=torch.uint8)
    raw[size // 2] = nan
    for out in (torch.bfloat16, torch.float32):
        assert torch.isnan(check_decode(raw.view(dtype), out)).nonzero().tolist() == [[size // 2]]


def test_decode_is_fresh(dtype: torch.dtype) -> None:
    for repeats in (1, 64):
        codes = all_codes(dtype).repeat(repeats).view(16, -1)
        before = codes.clone()
        decode(codes, torch.float32).zero_()
        assert same_bits(codes, before)


def test_the_brute_force_is_nearest_even(dtype: torch.dtype) -> None:
    # the tests' own definition, held against a search through all codes with exact fractions
    finite = [c for c in range(256) if math.isfinite(VALUES[dtype][c])]
    exact = {c: Fraction(float(VALUES[dtype][c])) for c in finite}
    x = torch.cat([around_boundaries(dtype)[::53], torch.randn(20) * MAX[dtype] / 2, torch.tensor([0.0, -0.0])])
    for value, code in zip(x.tolist(), round_to_codes(x, dtype).tolist(), strict=True):
        signed = [c for c in finite if (c >= 0x80) == (math.copysign(1, value) < 0)]
        distance = {c: abs(exact[c] - Fraction(value)) for c in signed}
        nearest = [c for c in signed if distance[c] == min(distance.values())]
        assert code == (nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))


def with_a_fault(x: Tensor, faulty: bool) -> Tensor:
    """x, followed by a NaN: finite tensors and others are rounded in two ways."""
    return torch.cat((x, torch.tensor([math.nan], dtype=x.dtype))) if faulty else x


@pytest.mark.parametrize("faulty", [True, False])
def test_every_finite_bfloat16(dtype: torch.dtype, faulty: bool) -> None:
    x = all_bfloat16()
    x = with_a_fault(x[torch.isfinite(x)], faulty)
    assert torch.equal(encode(x, dtype).view(torch.uint8), round_to_codes(x, dtype))


def test_every_bfloat16_with_its_faults(dtype: torch.dtype) -> None:
    x = all_bfloat16()
    codes = encode(x, dtype).view(torch.uint8)
    assert torch.equal(codes, round_to_codes(x, dtype))
    assert set(codes[torch.isnan(x)].tolist()) == {0x7F}, "NaN has one canonical code, whatever its sign and payload"
    assert codes[torch.isinf(x)].tolist() == ([0x7F, 0x7F] if dtype == torch.float8_e4m3fn else [0xFC, 0x7C])


@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0**40])
def test_every_bfloat16_times_a_scale(dtype: torch.dtype, scale: float) -> None:
    x = all_bfloat16().view(256, 256)
    codes, _, amax, _ = kernels.cast(x, torch.full((3,), scale), 0, dtype, (-1, -1), False, 0)
    scaled = torch.where(torch.isfinite(x), (x.float() * scale).clamp(-FLOAT32_MAX, FLOAT32_MAX), x)
    assert torch.equal(codes.view(torch.uint8), round_to_codes(scaled, dtype))
    assert amax.item() == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("faulty", [True, False])
def test_float32_around_every_boundary(dtype: torch.dtype, faulty: bool) -> None:
    x = with_a_fault(around_boundaries(dtype), faulty)
    assert torch.equal(encode(x, dtype).view(torch.uint8), round_to_codes(x, dtype))


def test_ties_go_to_even(dtype: torch.dtype) -> None:
    grid = FINITE[dtype]
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    codes = encode(middle, dtype).view(torch.uint8)
    assert torch.equal(codes % 2, torch.zeros_like(codes))
    assert torch.equal((read(codes.view(dtype)) - middle).abs(), grid.diff() / 2)


@pytest.mark.parametrize("faulty", [True, False])
def test_saturation(dtype: torch.dtype, faulty: bool) -> None:
    limit = MAX[dtype]
    x = torch.tensor([limit, math.nextafter(limit, 1e9), 1.04 * limit, 1.25 * limit, 2 * limit, 1e30, FLOAT32_MAX])
    for sign in (1.0, -1.0):
        assert read(encode(with_a_fault(sign * x, faulty), dtype))[: len(x)].tolist() == [sign * limit] * len(x)


@pytest.mark.parametrize("faulty", [True, False])
def test_zeros_keep_their_sign(dtype: torch.dtype, faulty: bool) -> None:
    x = with_a_fault(torch.tensor([0.0, -0.0, 2.0**-30, -(2.0**-30)]), faulty)
    assert encode(x, dtype).view(torch.uint8).tolist()[:4] == [0, 0x80, 0, 0x80]


def test_every_code_is_a_fixed_point(dtype: torch.dtype) -> None:
    value = read(all_codes(dtype)).float()
    canonical = torch.where(torch.isnan(value), 0x7F, all_codes(dtype).view(torch.uint8))
    assert torch.equal(encode(value, dtype).view(torch.uint8), canonical)
