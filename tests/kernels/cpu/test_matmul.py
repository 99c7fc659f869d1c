"""The CPU's product, in chunks and in two dtypes, against the float64 product of what the pairs read."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import PerBlock, PerTensor, kernels
from octavo.granularity import Granularity
from octavo.kernels import capability
from octavo.kernels.cpu import chunks
from tests.support import definitions
from tests.support.definitions import GRANULARITIES, sqnr
from tests.support.exact_product import E4M3, E5M2, Pair, exact_product, pair, product, uneven


def only_rounded_once(result: Tensor, a: Pair, a_g: Granularity, b: Pair, b_g: Granularity, bias: Tensor) -> bool:
    """Whether a bf16 result is the rounding of some float32 sum of the exact terms.

    However K terms and a bias are added, in float32 each of K additions, and each product with a scale, is off by at
    most 2^-24 of what it gives: in all by (K + 8) 2^-24 of the sum of the terms' magnitudes. Rounding keeps order.
    """
    a_MK, b_NK = definitions.dequantize(*a, a_g.tile), definitions.dequantize(*b, b_g.tile)
    exact = a_MK @ b_NK.t() + bias.double()
    off = (a_MK.shape[1] + 8) * 2.0**-24 * (a_MK.abs() @ b_NK.abs().t() + bias.double().abs())
    low, high = (exact - off).to(torch.bfloat16), (exact + off).to(torch.bfloat16)
    return bool(((low <= result) & (result <= high)).all())


@pytest.mark.parametrize("run", [500, 1 << 18])
@pytest.mark.parametrize("laid", ["as it is", "transposed"])
@pytest.mark.parametrize("a_g", GRANULARITIES, ids=str)
def test_two_dtypes_differ_in_the_order_of_additions_alone(
    monkeypatch: pytest.MonkeyPatch, a_g: Granularity, laid: str, run: int
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", run)
    scales = itertools.product([a_g, PerBlock(128, 128), PerTensor()], (True, False), (True, False))
    for b_g, power_of_two, has_bias in scales:
        a, b = (pair(uneven(rows, 300), g, E4M3, power_of_two) for rows, g in ((37, a_g), (33, b_g)))
        if laid == "transposed":
            a, b = ((q.t().contiguous().t(), s.t().contiguous().t()) for q, s in (a, b))
        bias = torch.randn(33) * 100 if has_bias else torch.zeros(33)
        for fast in (torch.float32, torch.bfloat16):
            monkeypatch.setattr(capability, "fast_dtype", lambda device, fast=fast: fast)
            found = product(a, a_g, b, b_g, torch.bfloat16, bias if has_bias else None)
            assert only_rounded_once(found, a, a_g, b, b_g, bias.bfloat16()), (fast, b_g)


@pytest.mark.parametrize("run", [500, 1 << 18])
@pytest.mark.parametrize("a_g", GRANULARITIES, ids=str)
def test_float32_applies_all_before_the_one_rounding(
    monkeypatch: pytest.MonkeyPatch, a_g: Granularity, run: int
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", run)
    monkeypatch.setattr(capability, "fast_dtype", lambda device: torch.float32)
    for b_g in GRANULARITIES:
        a, b, bias = pair(uneven(37, 300), a_g), pair(uneven(33, 300), b_g, E5M2), (torch.randn(33) * 100).bfloat16()
        a_t, b_t = ((q.t().contiguous().t(), s.t().contiguous().t()) for q, s in (a, b))
        for x, y in itertools.product([a, a_t], [b, b_t]):
            assert only_rounded_once(product(x, a_g, y, b_g, torch.bfloat16, bias), a, a_g, b, b_g, bias), b_g


@pytest.mark.parametrize("formats", list(itertools.product([E4M3, E5M2], repeat=2)), ids=str)
def test_no_operand_is_widened_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, formats: tuple[torch.dtype, torch.dtype]
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 500)
    seen: list[int] = []
    addmm = torch.addmm

    def watched(start: Tensor, a_MK: Tensor, b_KN: Tensor, **options: Any) -> Tensor:
        seen.append(max(a_MK.numel(), b_KN.numel()))
        return addmm(start, a_MK, b_KN, **options)

    monkeypatch.setattr(torch, "addmm", watched)
    for granularity in GRANULARITIES:
        # grad_weight: both operands are activations; one of them may be narrow
        a, b = pair(uneven(7, 1000), granularity, formats[0]), pair(uneven(20, 1000), granularity, formats[1])
        a_t, b_t = ((q.t().contiguous().t(), s.t().contiguous().t()) for q, s in (a, b))
        assert sqnr(product(a_t, granularity, b_t, granularity), exact_product(a, granularity, b, granularity)) > 120
        assert max(seen) <= max(500, 20 * granularity.tile[1]), granularity
        seen.clear()


@pytest.mark.parametrize("laid", ["as it is", "transposed"])
def test_rows_in_chunks_of_an_operand_that_is_taller_than_wide(monkeypatch: pytest.MonkeyPatch, laid: str) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 500)
    for granularity in GRANULARITIES:
        a, b = pair(uneven(300, 17), granularity), pair(uneven(5, 17), granularity)
        given = a if laid == "as it is" else (a[0].t().contiguous().t(), a[1].t().contiguous().t())
        assert sqnr(product(given, granularity, b, granularity), exact_product(a, granularity, b, granularity)) > 120


def test_scales_whose_product_is_as_large_as_float32_holds() -> None:
    codes, whole = torch.ones(64, 64).to(torch.float8_e4m3fn), (-1, -1)  # so many are read apart from a factor of 2^8
    scales = torch.full((1, 1), 2.0**60), torch.full((1, 1), 2.0**55)
    for dtype in (torch.bfloat16, torch.float32):
        found = kernels.matmul(codes, scales[0], whole, codes, scales[1], whole, None, dtype, False)
        assert (found == 64 * 2.0**115).all()
