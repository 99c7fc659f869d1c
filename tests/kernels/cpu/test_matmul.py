"""What the CPU's product widens at a time, and its largest scales. What it computes tells test_by_the_reference.py."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels.cpu import codes
from tests.support.definitions import GRANULARITIES
from tests.support.exact_product import E4M3, E5M2, exact_product, pair, product, uneven
from tests.support.helpers import sqnr


@pytest.mark.parametrize("formats", list(itertools.product([E4M3, E5M2], repeat=2)), ids=str)
def test_no_operand_is_widened_as_a_whole(monkeypatch, formats):
    monkeypatch.setattr(codes, "CHUNK", 500)
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
        assert max(seen) <= max(4 * 500, 20 * granularity.tile[1]), granularity
        seen.clear()


def test_scales_whose_product_is_as_large_as_float32_holds() -> None:
    codes, whole = torch.ones(64, 64).to(torch.float8_e4m3fn), (-1, -1)  # so many are read apart from a factor of 2^8
    scales = torch.full((1, 1), 2.0**60), torch.full((1, 1), 2.0**55)
    for dtype in (torch.bfloat16, torch.float32):
        found = kernels.matmul(codes, scales[0], whole, codes, scales[1], whole, None, dtype, False)
        assert (found == 64 * 2.0**115).all()
