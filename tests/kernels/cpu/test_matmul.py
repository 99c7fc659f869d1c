"""A CPU's products, and gradients of norms, in chunks: bit for bit the reference's, which has none."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.granularity import ALL, Tile, scale_shape
from octavo.kernels import capability, cpu, reference
from octavo.kernels.cpu import codes
from tests.support.casts import DTYPES, E4M3, E5M2, laid
from tests.support.combinations import each_pair
from tests.support.definitions import GRANULARITIES, same_bits

TILES = [g.tile for g in GRANULARITIES]
CHUNKS = [1, 500, 5000, 1 << 18]


def operand(shape: tuple[int, int], tile: Tile, fmt: torch.dtype, how: str, exact: bool) -> tuple[Tensor, Tensor, Tile]:
    """Return codes that are small integers, whose sums are exact, and any scales if these multiply alone."""
    scales = torch.rand(scale_shape(shape, tile)) + 1
    if not exact:
        scales = 2.0 ** torch.randint(-2, 3, scale_shape(shape, tile)).float()
    return laid(torch.randint(-4, 5, shape).float().to(fmt), how), laid(scales, how), tile


def alike(name: str, *args: Any) -> None:
    assert same_bits(cpu.KERNELS[name](*args), reference.KERNELS[name](*args))


@each_pair(
    size=[(0, 5, 17), (5, 0, 17), (5, 17, 0), (1, 1, 1), (17, 127, 33), (127, 130, 1), (100, 200, 150)],
    a_tile=TILES,
    b_tile=TILES,
    formats=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    a_laid=["rows", "columns", "strided"],
    b_laid=["rows", "columns", "strided"],
    dtype=DTYPES,
    bias=[False, True],
    exact=[False, True],
    fast=[torch.bfloat16, torch.float32],
    chunk=CHUNKS,
)
def test_products(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "CHUNK", case["chunk"])
    monkeypatch.setattr(capability, "fast_dtype", lambda device: case["fast"])
    rows, terms, cols = case["size"]
    exact = case["exact"] and case["a_tile"][1] == case["b_tile"][1] == -1 and not case["bias"]
    a = operand((rows, terms), case["a_tile"], case["formats"][0], case["a_laid"], exact)
    b = operand((cols, terms), case["b_tile"], case["formats"][1], case["b_laid"], exact)
    bias = torch.randint(-9, 10, (cols,)).to(case["dtype"]) if case["bias"] else None
    alike("matmul", *a, *b, bias, case["dtype"], False)
    a = operand((rows, terms), (1, case["a_tile"][1]), case["formats"][0], case["a_laid"], exact)
    twice = torch.stack((b[0].view(torch.uint8),) * 2).view(b[0].dtype), torch.stack((b[1],) * 2), b[2]
    more = None if bias is None else bias.expand(2, cols)
    alike("grouped_matmul", *a, *twice, torch.tensor([rows // 3, rows], dtype=torch.int32), more, case["dtype"], False)


@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float32])
def test_any_two_scales(fast: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 0, of numbers whose product float32 holds as a subnormal or not at all, and of none."""
    monkeypatch.setattr(capability, "fast_dtype", lambda device: fast)
    scales = [0.0, *(2.0**exponent for exponent in (-140, -126, -63, 0, 63, 127)), math.inf, math.nan]
    codes = [torch.randint(-4, 5, (rows, 40)).float().to(E4M3) for rows in (7, 11)]
    for pair in itertools.product(scales, repeat=2):
        a, b = ((q, torch.full((1, 1), scale), (ALL, ALL)) for q, scale in zip(codes, pair, strict=True))
        alike("matmul", *a, *b, None, torch.bfloat16, False)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
def test_powers_of_two_that_codes_leave_bfloat16_by(scale: float, fmt: torch.dtype, monkeypatch: Any) -> None:
    """A code times its scale is no normal number in bfloat16, and its product with the other operand is."""
    monkeypatch.setattr(capability, "fast_dtype", lambda device: torch.bfloat16)
    code = format_of(fmt).smallest_subnormal if scale < 1 else format_of(fmt).max
    pairs = (code, scale), (1.0, 1 / scale)
    a, b = ((torch.full((7, 40), x).to(fmt), torch.full((7, 1), s), (1, ALL)) for x, s in pairs)
    alike("matmul", *a, *b, None, torch.bfloat16, False)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@each_pair(size=[(1, 1), (17, 127), (300, 260)], dtype=DTYPES, chunk=CHUNKS)
def test_gradients_of_norms(case: dict[str, Any], norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "CHUNK", case["chunk"])
    rows, cols = case["size"]
    x, dy, residual = (torch.randn(3, rows, cols) * torch.rand(3, rows, 1)).to(case["dtype"])
    gamma = torch.rand(cols)
    mean, rstd = torch.randn(rows if norm == "layer_norm" else 0), torch.rand(rows)
    others = norm, False, True, residual
    strided = torch.stack((mean, mean), 1)[:, 0], torch.stack((rstd, rstd), 1)[:, 0]
    dx, *sums = cpu.KERNELS["norm_backward"](dy, x, gamma, *strided, *others)
    expected, *other = reference.KERNELS["norm_backward"](dy, x, gamma, mean, rstd, *others)
    assert same_bits(dx, expected)
    for actual, reference_sum in zip(sums, other, strict=True):  # in another order
        torch.testing.assert_close(actual, reference_sum, rtol=2.0**-7, atol=1e-3)
