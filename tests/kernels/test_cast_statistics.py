"""What a cast did to a tensor, counted: against the definition in float64, element by element."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.arguments import EXPONENTS, EXTREMES, LOWEST, SUMS
from octavo.kernels.cpu import KERNELS as CPU
from octavo.kernels.cpu import codes as codes_in_cpp
from octavo.kernels.reference import KERNELS as REFERENCE
from tests.support.combinations import each_pair
from tests.support.triton_cases import ALL, DTYPES, FORMATS, laid, values_of
from tests.support.triton_kernels import TritonKernels

MAX, NEXT = {FORMATS[0]: 448, FORMATS[1]: 57344}, {FORMATS[0]: 480, FORMATS[1]: 65536}  # behind max, went it on


def empty(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    sums = torch.zeros(len(SUMS) + EXPONENTS, dtype=torch.float64, device=device)
    return sums, torch.zeros(len(EXTREMES), device=device)


def counted(x: Tensor, q: Tensor, scales: Tensor) -> dict[str, float]:
    """By the definition; q as numbers, scales as large as x."""
    found = dict.fromkeys((*SUMS, *range(EXPONENTS)), 0.0)
    numbers = [t.double().flatten().tolist() for t in (x, q.float(), scales)]
    largest, beyond = MAX[q.dtype], (MAX[q.dtype] + NEXT[q.dtype]) / 2
    for value, code, scale_inv in zip(*numbers, strict=True):
        found["elements"] += 1
        found["zeros"] += value == 0
        if not math.isfinite(value):
            found["nonfinite"] += 1
            continue
        found["flushed"] += value != 0 and code == 0
        found["clipped"] += abs(code) == largest and abs(value) > beyond * scale_inv
        found["power"] += value * value
        found["error"] += (value - code * scale_inv) ** 2
        if value != 0:
            found[min(max(math.frexp(value)[1] - 1 - LOWEST, 0), EXPONENTS - 1)] += 1
    return found


CAST: dict[str, Any] = {
    "tile": [ALL, (1, -1), (1, 32), (128, 128), (32, 1)],
    "dtype": DTYPES,
    "fmt": FORMATS,
    "values": ["varied", "faults", "edge"],
    "transposed": [False, True],
    "margin": [0, 3],
    "raised": [1.0, 3.0],
}
SHAPES = [(1, 1), (17, 40), (130, 20), (9, 140), (0, 4)]


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=["reference", "cpu"])
@each_pair(shape=SHAPES, **CAST)
def test_reference_and_cpu_are_the_definition(
    case: dict[str, Any], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes_in_cpp, "threads_for", lambda elements: 3)
    x, q, scale_inv, tile = pair_of(case)
    sums, extremes = empty()
    for _ in range(2):  # what is there is added to
        kernels["cast_statistics"](x, q, scale_inv, tile, sums, extremes)
    codes = q[:, : x.shape[1]]
    ones = torch.ones_like(codes.float()).to(codes.dtype)
    scales = REFERENCE["dequantize"](ones, scale_inv, tile, torch.float32)
    expected = torch.tensor(list(counted(x, codes, scales).values()), dtype=torch.float64)
    error, power = SUMS.index("error"), SUMS.index("power")
    # a code is read by a product that float32 rounds
    rounding = 2**-22 * (expected[error] * expected[power]).sqrt() + 2**-46 * expected[power]
    assert (sums - 2 * expected)[error].abs() <= rounding
    sums[error] = 2 * expected[error]
    torch.testing.assert_close(sums, 2 * expected, rtol=1e-12, atol=0)
    if x.numel():
        largest = [x.float().nan_to_num(0, 0, 0).abs().max(), scale_inv.max(), 1 / scale_inv.min()]
        assert torch.equal(extremes, torch.stack(largest))


@pytest.mark.gpu
@each_pair(shape=SHAPES, **CAST)
def test_the_kernel_is_the_reference(kernels: TritonKernels, case: dict[str, Any]) -> None:
    x, q, scale_inv, tile = pair_of(case)
    found, expected = empty(kernels.device), empty()
    on_device = [
        laid(t.view(torch.uint8) if t.itemsize == 1 else t, "strided", kernels.device) for t in (x, q, scale_inv)
    ]
    on_device[1] = on_device[1].view(q.dtype)
    kernels.cast_statistics(*on_device, tile, *found)
    REFERENCE["cast_statistics"](x, q, scale_inv, tile, *expected)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-12, atol=0)
    assert torch.equal(found[1].cpu(), expected[1])


SIZES = {"ragged": [3, 0, 130, 1, 17], "none": [0, 0], "more groups than rows": [0, 1, 0, 0, 1]}  # of groups


def groups_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """Rows in groups and their pairs; the last two rows are in none."""
    offsets = torch.tensor(SIZES[case["sizes"]]).cumsum(0).to(torch.int32)
    x = values_of(case["values"], (int(offsets[-1]) + 2, case["cols"]), case["dtype"])
    q, _, scale_inv, _ = REFERENCE["cast"](x, None, 0, case["fmt"], case["tile"], False, 0, offsets=offsets)
    return x, q, scale_inv, case["tile"], offsets


def empty_groups(count: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    found = empty(device)
    return found[0].repeat(count, 1), found[1].repeat(count, 1)


IN_GROUPS: dict[str, Any] = {
    "tile": [ALL, (1, -1), (1, 32), (128, 128), (32, 1), (-1, 1)],
    "sizes": list(SIZES),
    "cols": [17, 40],
    "dtype": DTYPES,
    "fmt": FORMATS,
    "values": ["varied", "faults"],
}


@each_pair(**IN_GROUPS)
def test_groups_are_counted_as_alone(case: dict[str, Any]) -> None:
    x, q, scale_inv, tile, offsets = groups_of(case)
    found = empty_groups(len(offsets))
    REFERENCE["cast_statistics"](x, q, scale_inv, tile, *found, offsets)
    rows = x.split([*SIZES[case["sizes"]], 2])
    for own, sums, extremes in zip(rows[:-1], *found, strict=True):
        alone = empty()
        own_q, _, own_inv, *_ = REFERENCE["cast"](own, None, 0, case["fmt"], tile, False, 0)
        REFERENCE["cast_statistics"](own, own_q, own_inv, tile, *alone)
        assert torch.equal(sums, alone[0]) and torch.equal(extremes, alone[1])


@pytest.mark.gpu
@each_pair(**IN_GROUPS)
def test_the_kernel_counts_groups_as_the_reference(kernels: TritonKernels, case: dict[str, Any]) -> None:
    x, q, scale_inv, tile, offsets = groups_of(case)
    found, expected = empty_groups(len(offsets), kernels.device), empty_groups(len(offsets))
    kernels.cast_statistics(
        *(t.to(kernels.device) for t in (x, q, scale_inv)), tile, *found, offsets.to(kernels.device)
    )
    REFERENCE["cast_statistics"](x, q, scale_inv, tile, *expected, offsets)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-12, atol=0)
    assert torch.equal(found[1].cpu(), expected[1])


def pair_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """A tensor and the pair of one that may be smaller, so that it is clipped."""
    x, tile = values_of(case["values"], case["shape"], case["dtype"]), case["tile"]
    q, _, scale_inv, *_ = REFERENCE["cast"](
        x, None, 0, case["fmt"], tile, False, case["margin"], False, 16 if tile[1] in (-1, 32, 128) else 1
    )
    if case["raised"] != 1:
        scale_inv = scale_inv / 64
        wide = x.float() / REFERENCE["dequantize"](torch.ones(x.shape).to(case["fmt"]), scale_inv, tile, torch.float32)
        q = REFERENCE["cast"](wide, torch.ones(3), 0, case["fmt"], ALL, False, 0)[0]
    if case["transposed"]:
        return x.t(), q[:, : x.shape[1]].t(), scale_inv.t(), tile[::-1]
    return x, q, scale_inv, tile
