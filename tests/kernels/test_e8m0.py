"""Pairs whose scale_inv is E8M0 are those of float32: every op reads them the same, of any shape and values."""

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.layouts import swizzled
from octavo.numerics import E8M0, exponents_of, powers_of, scale_from_amax, scale_inv_from_scale
from tests.support import definitions
from tests.support.definitions import same_bits
from tests.support.groups import offsets_of
from tests.support.helpers import sqnr
from tests.support.triton_cases import to

Ops = dict[str, Callable[..., Any]]
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
NAMES = "cast", "dequantize", "matmul", "grouped_matmul", "cast_statistics", "note_faults"


@pytest.fixture(params=["reference", "cpu", pytest.param("Triton", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param != "Triton":
        return {"reference": reference, "cpu": cpu}[request.param].KERNELS
    kernels = request.getfixturevalue("kernels")
    return {name: on_device(getattr(kernels, name), kernels.device) for name in NAMES}


def on_device(op: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        moved, by_name = to(device, arguments), to(device, named)
        found = op(*moved, **by_name)
        for given, own in zip(arguments, moved, strict=True):
            if isinstance(given, Tensor) and own is not given:  # what was written
                given.copy_(own)
        return to("cpu", found)

    return call


def drawn(draw: random.Random, rows: int, cols: int) -> Tensor:
    """Numbers of all sizes, with faults, zero rows and subnormal results."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-60, 60, (rows, 1)).float())
    if x.numel():
        x[draw.randrange(rows)] = 0
        x.view(-1)[:: draw.choice([7, 97])] = draw.choice([0.0, float("nan"), float("inf"), 1e-38])
    return x.to(draw.choice([torch.bfloat16, torch.float16, torch.float32]))


@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_those_of_float32(ops: Ops, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for tile in ((1, 32), (32, 1)):
        x, dtype, margin = drawn(draw, draw.choice([0, 1, 33, 70]), draw.choice([1, 32, 77])), draw.choice(DTYPES), seed
        q, t, scale_inv, amax, _ = ops["cast"](x, None, 0, dtype, tile, True, margin, True)
        limit = torch.finfo(dtype).max
        wide = scale_inv_from_scale(scale_from_amax(amax, limit, True, margin))
        assert scale_inv.dtype == E8M0 and amax.dtype == torch.float32 and same_bits(scale_inv.float(), wide)
        assert same_bits(q.view(torch.uint8), definitions.cast(x, dtype, tile, True, margin)[0])
        assert same_bits(t.view(torch.uint8), q.view(torch.uint8).t())
        for out in (torch.bfloat16, torch.float32):
            assert same_bits(ops["dequantize"](q, scale_inv, tile, out), ops["dequantize"](q, wide, tile, out))
        h = q, 0, dtype, (1, -1), False, 0, False, 1, False
        found = [ops["cast"](h[0], None, *h[1:], "gelu", None, scales, tile) for scales in (scale_inv, wide)]
        assert all(map(same_bits, *found))


@pytest.mark.parametrize("seed", range(2))
def test_products_are_those_of_float32(ops: Ops, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tile, E4M3, K = (1, 32), torch.float8_e4m3fn, draw.choice([32, 77])
    sizes = [draw.choice([0, 1, 40]) for _ in range(3)] if seed else [0, 33, 0]
    a, b = torch.randn(sum(sizes) + 3, K), torch.randn(3, 20, K)
    how = None, 0, E4M3, tile, True, 0
    qb, _, b_inv, _ = ops["cast"](b.flatten(0, 1), *how, offsets=offsets_of([20] * 3))
    of_b = qb.unflatten(0, (3, 20)), b_inv[:60].unflatten(0, (3, 20))
    qa, _, a_inv, _ = ops["cast"](a, *how, offsets=offsets_of(sizes))
    scaled = ops is not reference.KERNELS and ops is not cpu.KERNELS
    scales = [(a_inv, of_b[1]), (a_inv, of_b[1].float()), (a_inv.float(), of_b[1].float())]
    for out in (torch.bfloat16, torch.float32):
        whole = [ops["matmul"](qa, x, tile, of_b[0][0], y[0], tile, None, out, False) for x, y in scales]
        grouped = [
            ops["grouped_matmul"](qa, x, tile, of_b[0], y, tile, offsets_of(sizes), None, out, False) for x, y in scales
        ]
        laid = swizzled(a_inv), tile, of_b[0][0], swizzled(of_b[1][0])
        assert same_bits(ops["matmul"](qa, *laid, tile, None, out, False), whole[0])
        for e8m0, mixed, float32 in (whole, grouped):
            assert same_bits(mixed, float32)
            # tensor cores that multiply by the scales, as the interpreter does too, add more terms at once
            near = scaled and sqnr(e8m0, float32) > {torch.bfloat16: 48, torch.float32: 110}[out]
            assert near or same_bits(e8m0, float32)


def test_all_256_scales_are_read(ops: Ops) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E8M0)
    true = torch.from_numpy(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    ones = torch.ones(256, 32).to(torch.float8_e4m3fn)
    for q, scale_inv, tile in ((ones, codes[:, None], (1, 32)), (ones.t(), codes[None], (32, 1))):
        found = ops["dequantize"](q, scale_inv, tile, torch.float32)
        found = found if tile == (1, 32) else found.t()
        assert bool(found[255].isnan().all()) and torch.equal(found[:255], true[:255, None].expand(255, 32))
    one = ones[:1], codes[127:128, None]
    product = ops["matmul"](ones, codes[:, None], (1, 32), *one, (1, 32), None, torch.float32, False)
    assert torch.equal(product[:250], 32 * true[:250, None]) and bool(product[255].isnan())


def test_what_ranks_send_keeps_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    sent = exponents_of(codes.view(E8M0))
    assert torch.equal(sent, codes) and same_bits(powers_of(sent).to(E8M0), codes.view(E8M0))


def test_statistics_are_those_of_float32(ops: Ops) -> None:
    torch.manual_seed(0)
    x = drawn(random.Random(0), 40, 70)
    q, _, scale_inv, *_ = ops["cast"](x, None, 0, torch.float8_e4m3fn, (1, 32), True, 0)
    found = []
    for scales in (scale_inv, scale_inv.float()):
        counts = torch.zeros(71, dtype=torch.float64), torch.zeros(3), torch.zeros(4), torch.zeros(1, dtype=torch.int32)
        ops["cast_statistics"](x, q, scales, (1, 32), *counts[:2])
        place = torch.tensor([5], dtype=torch.int32)
        ops["note_faults"](x.float().sum(1, keepdim=True), x, scales, None, place, *counts[2:])
        found.append(counts)
    assert all(map(torch.equal, *found)) and float(found[0][2][2]) == float(scale_inv.float().max())
