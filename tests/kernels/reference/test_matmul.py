"""The product of two pairs against the float64 product of what the pairs read."""

import itertools
import math
from typing import Any

import pytest
import torch

from octavo import PerBlock, PerRow, PerTensor, kernels
from octavo.granularity import Granularity
from tests.support import definitions
from tests.support.combinations import every_case
from tests.support.definitions import GRANULARITIES
from tests.support.exact_product import E4M3, E5M2, Pair, exact_product, pair, product, uneven
from tests.support.helpers import sqnr

OUT = [torch.bfloat16, torch.float16, torch.float32]
# dB: what is lost beside the codes' own error (about 31 dB). bf16 rounds the product and each of its factors, see
# reference/matmul.py; float16 and float32 round once at the end
LEAST = {torch.bfloat16: 48.0, torch.float16: 68.0, torch.float32: 125.0}


def laid(one: Pair, how: str) -> Pair:
    """The same pair: as a cast of the transposed tensor leaves it, or a part of something larger."""
    if how == "columns":
        return one[0].t().contiguous().t(), one[1].t().contiguous().t()
    return (torch.cat((one[0],) * 2, 1)[:, : one[0].shape[1]], torch.stack((one[1],) * 2, 2)[..., 0]) if how else one


@every_case(
    a_g=GRANULARITIES,
    b_g=GRANULARITIES,
    shape=[(37, 139, 133), (64, 96, 80), (0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), (1, 1, 1), (1, 300, 1)],
    formats=list(itertools.product([E4M3, E5M2], repeat=2)),
    a_laid=["", "columns", "part"],
    b_laid=["", "columns", "part"],
    fast=[False, True],
)
def test_products(case: dict[str, Any]) -> None:
    (m, k, n), a_g, b_g = (case[name] for name in ("shape", "a_g", "b_g"))
    a, b = pair(uneven(m, k), a_g, case["formats"][0]), pair(uneven(n, k), b_g, case["formats"][1])
    exact, bias = exact_product(a, a_g, b, b_g), torch.randn(n) * 100
    a, b = laid(a, case["a_laid"]), laid(b, case["b_laid"])
    before = [t.clone() for t in (*a, *b, bias)]
    for out, added in itertools.product(OUT, (None, bias)):
        result = kernels.matmul(
            *a, a_g.tile, *b, b_g.tile, added if added is None else added.to(out), out, case["fast"]
        )
        truth = exact if added is None else exact + added.to(out).double()
        assert result.shape == (m, n) and result.dtype == out and result.is_contiguous()
        if k == 0:
            assert torch.equal(result, truth.to(out))
        elif m and n:  # of one element the error is not that of many
            assert sqnr(result, truth) > min(LEAST[out], 60 if case["fast"] else 200) - 15 * (m * n == 1)
        result.zero_()
    assert all(map(definitions.same_bits, (*a, *b, bias), before))


def test_integers_are_exact() -> None:
    # small integers are codes, and their sums are exact in float32
    a_MK, b_NK = torch.randint(-8, 9, (31, 200)).float(), torch.randint(-4, 5, (29, 200)).float()
    for a_g, b_g in itertools.product([PerTensor(), PerBlock(1, 32), PerBlock(128, 128)], repeat=2):
        a, b = pair(a_MK, a_g, power_of_two=True), pair(b_NK, b_g, power_of_two=True)
        assert torch.equal(product(a, a_g, b, b_g), a_MK @ b_NK.t())


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_faults_reach_their_row_and_column_and_no_other(fault: float, granularity: Granularity) -> None:
    a_MK, b_NK = uneven(9, 140), uneven(11, 140)
    clean = product(pair(a_MK, granularity, E5M2), granularity, pair(b_NK, granularity, E5M2), granularity)
    a_MK[4, 131], b_NK[7, 3] = fault, fault
    a, b = pair(a_MK, granularity, E5M2), pair(b_NK, granularity, E5M2)
    for out in OUT:
        result = product(a, granularity, b, granularity, out)
        hit = torch.zeros(9, 11, dtype=torch.bool)
        hit[4], hit[:, 7] = True, True
        assert torch.equal(~torch.isfinite(result), hit)
        if math.isinf(fault):  # the sign of an infinite sum is that of its infinite term
            column = definitions.read(b[0][:, 131]).sign() * fault
            assert torch.equal(result[4, :7].double(), column[:7])
        else:
            assert bool(torch.isnan(result[hit]).all())
    # the fault is no part of any amax, but the elements that it replaced were
    assert sqnr(result[:4, :7], clean[:4, :7].double()) > 20


@pytest.mark.parametrize("b_g", [PerTensor(), PerRow(), PerBlock(1, 32)], ids=str)
@pytest.mark.parametrize("a_g", [PerTensor(), PerRow(), PerBlock(1, 32)], ids=str)
@pytest.mark.parametrize(
    "scales", [(1e-35, 1e30), (1e30, 1e-35), (1e-35, 1e32), (1e32, 1e-30), (1e-20, 1e-10)], ids=str
)
def test_extreme_scales_do_not_overflow_on_the_way(scales, a_g, b_g):
    a, b = pair(uneven(8, 64), a_g), pair(uneven(6, 64), b_g)
    a, b = (a[0], a[1] * scales[0]), (b[0], b[1] * scales[1])
    exact = exact_product(a, a_g, b, b_g)
    for out in (torch.bfloat16, torch.float32):
        assert sqnr(product(a, a_g, b, b_g, out) / scales[0] / scales[1], exact / scales[0] / scales[1]) > 45


@pytest.mark.parametrize(("a_g", "b_g"), list(itertools.product([PerTensor(), PerRow()], repeat=2)), ids=str)
def test_the_product_of_two_scales_may_leave_float32s_range(a_g: Granularity, b_g: Granularity) -> None:
    # 2.9e-44 would keep 4 bits as a float32; the result is an ordinary number
    a, b = pair(torch.full((3, 64), 448.0), a_g), pair(torch.full((5, 64), -448.0), b_g)
    a, b = (a[0], torch.full_like(a[1], 1.7e-22)), (b[0], torch.full_like(b[1], 1.7e-22))
    exact = exact_product(a, a_g, b, b_g)
    assert sqnr(product(a, a_g, b, b_g) * 2.0**120, exact * 2.0**120) > LEAST[torch.float32]


def test_a_float32_sum_is_kept_in_float32() -> None:
    # in bf16 or fp16 accumulation the ones would be lost beside 448 x 448
    a_MK, b_NK = torch.ones(1, 2049), torch.ones(1, 2049)
    a_MK[0, 0] = b_NK[0, 0] = 448.0
    a, b = pair(a_MK, PerTensor()), pair(b_NK, PerTensor())
    assert product(a, PerTensor(), b, PerTensor()).item() == 448.0 * 448.0 + 2048


def test_float16_output_beyond_its_range_is_infinite_and_not_the_accumulation() -> None:
    # the sum of codes is beyond float16, the product is not
    a = pair(torch.full((2, 512), 1e-2), PerTensor())
    result = product(a, PerTensor(), a, PerTensor(), torch.float16)
    assert sqnr(result, torch.full((2, 2), 512e-4, dtype=torch.float64)) > 60
