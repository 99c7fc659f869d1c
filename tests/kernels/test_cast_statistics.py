"""Statistics of what a cast did to a tensor, against the definition in float64, element by element."""

import functools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from octavo.kernels.arguments import Counted
from octavo.kernels.cpu import codes as codes_in_cpp
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.kernels.conftest import Ops
from tests.support.casts import ALL, DTYPES, FORMATS, laid, values_of
from tests.support.combinations import dealt

MAX, NEXT = {FORMATS[0]: 448, FORMATS[1]: 57344}, {FORMATS[0]: 480, FORMATS[1]: 65536}  # behind max, went it on


def counted(x: Tensor, q: Tensor, scales: Tensor) -> list[float]:
    """Count by the definition; q as numbers, scales as large as x."""
    counts = dict.fromkeys((*Counted.sums, *range(Counted.exponents)), 0.0)
    counts |= {"elements": x.numel(), "zeros": int((x == 0).sum())}
    numbers = [t.double().flatten().tolist() for t in (x, q.float(), scales)]
    largest, beyond = MAX[q.dtype], (MAX[q.dtype] + NEXT[q.dtype]) / 2
    for value, code, scale_inv in zip(*numbers, strict=True):
        if not math.isfinite(value):
            counts["nonfinite"] += 1
            continue
        counts["flushed"] += value != 0 and code == 0
        counts["clipped"] += abs(code) == largest and abs(value) > beyond * scale_inv
        counts["power"] += value * value
        counts["error"] += (value - code * scale_inv) ** 2
        if value != 0:
            counts[min(max(math.frexp(value)[1] - 1 - Counted.lowest, 0), Counted.exponents - 1)] += 1
    return list(counts.values())


CAST: dict[str, Any] = {
    "shape": [(1, 1), (17, 40), (130, 20), (9, 140), (0, 4), (1, 270)],
    "tile": [ALL, (1, -1), (1, 32), (128, 128), (32, 1)],
    "dtype": DTYPES,
    "fmt": FORMATS,
    "values": ["varied", "faults", "edge"],
    "transposed": [False, True],
    "margin": [0, 3],
    "raised": [False, True],
}


def pair_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """Return a tensor, and the pair of one that may be smaller, so that it is clipped."""
    x, tile = values_of(case["values"], case["shape"], case["dtype"]), case["tile"]
    pad = 16 if tile[1] in (-1, 32, 128) else 1
    q, _, scale_inv, *_ = REFERENCE["cast"](x, None, 0, case["fmt"], tile, False, case["margin"], False, pad)
    if case["raised"]:
        scale_inv = scale_inv / 64
        wide = x.float() / REFERENCE["dequantize"](torch.ones(x.shape).to(case["fmt"]), scale_inv, tile, torch.float32)
        q = REFERENCE["cast"](wide, torch.ones(3), 0, case["fmt"], ALL, False, 0)[0]
    if case["transposed"]:
        return x.t(), q[:, : x.shape[1]].t(), scale_inv.t(), tile[::-1]
    return x, q, scale_inv, tile


def nothing_counted(*groups: int) -> tuple[Tensor, Tensor]:
    """Return sums and extremes before the first tensor, or before the first one of so many groups."""
    sums = torch.zeros(*groups, len(Counted.sums) + Counted.exponents, dtype=torch.float64)
    return sums, torch.zeros(*groups, len(Counted.extremes))


def count(ops: Ops, *args: Any) -> None:
    """Run the op; a Triton program has two tiles, or four of groups: an empty one takes as long as a full one."""
    module = ops.kernels.module("cast_statistics") if ops.kernels else mock.Mock()
    with mock.patch.object(module, "Counting", functools.partial(module.Counting, tiles=2)):
        ops.of("cast_statistics")(*args)


def check(ops: Ops, case: dict[str, Any], times: int = 2) -> None:
    x, q, scale_inv, tile = pair_of(case)
    sums, extremes = counts = nothing_counted()
    for _ in range(times):  # counts are added to
        count(ops, *(laid(t, "strided") for t in (x, q, scale_inv)), tile, *counts)
    codes = q[:, : x.shape[1]]
    scales = REFERENCE["dequantize"](torch.ones_like(codes.float()).to(codes.dtype), scale_inv, tile, torch.float32)
    expected = times * torch.tensor(counted(x, codes, scales), dtype=torch.float64)
    error, power = Counted.sums.index("error"), Counted.sums.index("power")
    # a code is read by a product that float32 rounds
    rounding = 2**-22 * (expected[error] * expected[power]).sqrt() + 2**-46 * expected[power]
    assert (sums - expected)[error].abs() <= rounding
    sums[error] = expected[error]
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)
    if x.numel():
        largest = [x.float().nan_to_num(0, 0, 0).abs().max(), scale_inv.max(), 1 / scale_inv.min()]
        assert torch.equal(extremes, torch.stack(largest))


def test_any_cast_is_counted(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes_in_cpp, "threads_for", lambda elements: 3)
    for case in dealt(0, 4 if ops.kernels else 20, **CAST):
        check(ops, case)


SIZES = [[3, 0, 130, 1, 17], [0, 0], [0, 1, 0, 0, 1]]  # of groups; two rows more are in none
IN_GROUPS: dict[str, Any] = {
    "tile": [ALL, (1, -1), (1, 32), (128, 128), (32, 1), (-1, 1)],
    "sizes": SIZES,
    "cols": [17, 40],
    "dtype": DTYPES,
    "fmt": FORMATS,
    "values": ["varied", "faults"],
}


def check_groups(ops: Ops, case: dict[str, Any]) -> None:
    """Check that each group is counted as if it were alone."""
    sizes, tile = case["sizes"], case["tile"]
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, cast = values_of(case["values"], (sum(sizes) + 2, case["cols"]), case["dtype"]), (case["fmt"], tile, False, 0)
    q, _, scale_inv, _ = REFERENCE["cast"](x, None, 0, *cast, offsets=offsets)
    counts = nothing_counted(len(sizes))
    count(ops, x, q, scale_inv, tile, *counts, offsets)
    for x_of_group, sums, extremes in zip(x.split([*sizes, 2])[:-1], *counts, strict=True):
        alone = nothing_counted()
        own_q, _, own_inv, *_ = REFERENCE["cast"](x_of_group, None, 0, *cast)
        REFERENCE["cast_statistics"](x_of_group, own_q, own_inv, tile, *alone)
        torch.testing.assert_close(sums, alone[0], rtol=1e-12, atol=0)
        assert torch.equal(extremes, alone[1])


def test_any_groups_are_counted(ops: Ops) -> None:
    for case in dealt(0, 3 if ops.kernels else 12, **IN_GROUPS):
        check_groups(ops, case)
