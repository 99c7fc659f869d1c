"""A product that is itself a pair, against the product in float32 and the definition's cast of it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import PerBlock, PerRow, PerTensor, kernels
from tests.support import definitions
from tests.support.casts import shares_memory
from tests.support.combinations import each_pair
from tests.support.definitions import GRANULARITIES, same_bits
from tests.support.exact_product import exact_product, pair, uneven
from tests.support.norm_codes import check_codes

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL = (-1, -1)


@each_pair(
    shape=[(37, 139, 133), (1, 1, 1), (0, 5, 7), (5, 0, 7), (5, 7, 0), (2, 300, 1)],
    a=[PerTensor(), PerRow(), PerBlock(1, 32), PerBlock(128, 128)],
    b=[PerTensor(), PerRow(), PerBlock(128, 128)],
    bias=[None, torch.bfloat16, torch.float16, torch.float32],
    fmt=FORMATS,
    granularity=GRANULARITIES,
    scaling=[(False, 0), (True, 0), (False, 2)],
    scale=[None, 0.0, 0.25],
    role=[0, 1, 2],
    transpose=[False, True],
    pad=[1, 2, 16],
    fast_accum=[False, True],
)
def test_a_product_and_then_a_cast(case: dict[str, Any]) -> None:
    (m, k, n), fmt, tile, pad = case["shape"], case["fmt"], case["granularity"].tile, case["pad"]
    a, b = pair(uneven(m, k), case["a"]), pair(uneven(n, k), case["b"], E5M2)
    bias = None if case["bias"] is None else (torch.randn(n) * 100).to(case["bias"])
    product = (*a, case["a"].tile, *b, case["b"].tile, bias)
    scale, role = (case["scale"] if tile == ALL else None), case["role"]
    state = None if scale is None else torch.full((3,), 7.0)
    if state is not None:
        state[role] = scale
    before = [t.clone() for t in (*product, state) if isinstance(t, Tensor)]
    qdata, laid, scale_inv, amax = kernels.matmul_cast(
        *product, case["fast_accum"], state, role, fmt, tile, *case["scaling"], case["transpose"], pad
    )
    out = kernels.matmul(*product, torch.float32, case["fast_accum"])
    codes, expected, expected_amax = definitions.cast(out, fmt, tile, *case["scaling"], scale or 0.0)
    check_codes(qdata, codes, fmt, pad)
    if case["transpose"]:
        check_codes(laid, codes.t(), fmt, pad)
        assert not shares_memory(qdata, laid)
    else:
        assert laid.shape == (0, 0) and laid.dtype == fmt
    assert same_bits(scale_inv, expected) and same_bits(amax, expected_amax)
    assert not shares_memory(scale_inv, amax)
    assert all(map(same_bits, [t for t in (*product, state) if isinstance(t, Tensor)], before))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_it_reads_back_as_the_product(granularity: Any) -> None:
    # at least what one rounding to three bits of mantissa leaves of uneven rows and columns
    a, b, bias = pair(uneven(64, 96), PerRow()), pair(uneven(80, 96), PerRow()), torch.randn(80)
    exact = exact_product(a, PerRow(), b, PerRow()) + bias.double()
    qdata, _, scale_inv, amax = kernels.matmul_cast(
        *a, (1, -1), *b, (1, -1), bias, False, None, 0, E4M3, granularity.tile, False, 0, False
    )
    assert definitions.sqnr(definitions.dequantize(qdata, scale_inv, granularity.tile), exact) > 30
    assert float(amax.max()) == pytest.approx(float(exact.abs().max()), rel=1e-5)


def test_the_product_is_not_rounded_before() -> None:
    # 1 + 2^-4 lies in the middle of two codes, and is what bf16 makes of 1 + 2^-4 + 2^-9
    a, b, one = torch.tensor([[1.0, 2.0**-9]]).to(E4M3), torch.ones(1, 2).to(E4M3), torch.ones(1, 1)
    qdata, *_ = kernels.matmul_cast(
        a, one, ALL, b, one, ALL, torch.tensor([2.0**-4]), False, torch.ones(3), 0, E4M3, ALL, False, 0, False
    )
    assert definitions.read(qdata).tolist() == [[1.125]]


def test_faults_reach_their_codes() -> None:
    a_MK, b_NK = uneven(9, 40), uneven(11, 40)
    a_MK[4, 3] = math.nan
    a, b = pair(a_MK, PerTensor()), pair(b_NK, PerTensor())
    for granularity in GRANULARITIES:
        tile = granularity.tile
        qdata, laid, scale_inv, _ = kernels.matmul_cast(
            *a, ALL, *b, ALL, None, False, None, 0, E4M3, tile, False, 0, True
        )
        faulty = torch.zeros(9, 11, dtype=torch.bool)
        faulty[4] = True
        assert torch.equal(qdata.view(torch.uint8) == 0x7F, faulty)
        assert torch.equal(laid.view(torch.uint8) == 0x7F, faulty.t())
        assert bool(scale_inv.isfinite().all())


def test_wrong_arguments_are_refused() -> None:
    a, b = pair(torch.randn(3, 4), PerTensor()), pair(torch.randn(5, 4), PerTensor())
    for fmt, pad, error, said in (
        (E4M3, 3, ValueError, "pad=3: .* 1, 2, 4, 8 or 16"),
        (torch.uint8, 1, TypeError, r"torch.float8_e4m3fn or torch.float8_e5m2"),
    ):
        with pytest.raises(error, match=said):
            kernels.matmul_cast(*a, ALL, *b, ALL, None, False, None, 0, fmt, ALL, False, 0, True, pad)
