"""All 256 codes, all 65536 bfloat16 values, and float32 values around every place where the nearest code changes."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo.formats import format_of
from tests.kernels.conftest import Ops
from tests.support.casts import FORMATS
from tests.support.definitions import all_bfloat16, all_codes, boundaries, read, round_to_codes

pytestmark = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(format_of(dtype)))


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def encode(ops: Ops, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of x as it is, by way of a delayed scale of 1."""
    unit = torch.tensor([0.0, 1.0, 0.0])
    wide = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
    qdata, _, scale_inv, _, _ = ops.of("cast")(wide, unit, 1, dtype, (-1, -1), True, 3)
    assert qdata.dtype == dtype and scale_inv.item() == 1.0
    return qdata.flatten()[: x.numel()].view(x.shape)


def decode(ops: Ops, codes: Tensor, out: torch.dtype) -> Tensor:
    value = ops.of("dequantize")(codes.view(1, -1), torch.ones(1, 1), (-1, -1), out).view(codes.shape)
    assert value.dtype == out
    return value


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("repeats", [1, 64])  # a few codes and many are read in two ways
@pytest.mark.parametrize("flushes", [False, True])
def test_every_code_reads_exactly(dtype, flushes, repeats, out, ops, request):
    flushes = flushes and not ops.kernels  # which a GPU has no setting for
    repeats = min(repeats, 8) if ops.kernels else repeats  # which have one way
    if flushes:
        request.getfixturevalue("flush_denormal")
    codes = all_codes(dtype).repeat(repeats)
    value = decode(ops, codes, out)
    flushed = torch.full((8,), 2.0**-140) * 1.0
    torch.set_flush_denormal(False)
    assert bool(flushed.any()) != flushes, "the setting had no effect"
    assert torch.equal(value.double().nan_to_num(nan=1e9), read(codes).nan_to_num(nan=1e9))
    # the sign of every zero and number
    number = ~torch.isnan(value)
    assert torch.equal(torch.signbit(value)[number], (codes.view(torch.uint8) >= 0x80)[number])


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [1, 20000])
def test_a_lone_nan_is_read(dtype: torch.dtype, size: int, ops: Ops) -> None:
    size = min(size, 3000) if ops.kernels else size
    raw = torch.full((size,), 0x80, dtype=torch.uint8)
    for nan, out in itertools.product((0x7F, 0xFF), (torch.bfloat16, torch.float32)):
        raw[size // 2] = nan
        assert torch.isnan(decode(ops, raw.view(dtype), out)).nonzero().tolist() == [[size // 2]]


@pytest.mark.parametrize("faulty", [True, False])  # finite tensors and others are rounded in two ways
def test_every_number_of_16_bits_and_float32_around_every_boundary(dtype: torch.dtype, faulty: bool, ops: Ops) -> None:
    for x in (all_bfloat16(), all_bfloat16().view(torch.int16).view(torch.float16), boundaries(dtype)):
        if faulty:
            x = torch.cat([x, torch.tensor([math.inf, math.nan, -math.inf, 1.0, -math.nan], dtype=x.dtype)])
        else:
            x = x[x.isfinite()]
        assert torch.equal(encode(ops, x, dtype).view(torch.uint8), round_to_codes(x, dtype))
