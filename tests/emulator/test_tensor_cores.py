"""The tensor cores' sums against MMA-Sim, whose authors hold it against the GPUs: the same bits."""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from emulator.tensor_cores import Rule, multiply_add, rule_of
from emulator.values import E8M0

with mock.patch.dict(sys.modules, {"mmasim.arithmetic.fma": ModuleType("fma")}):  # of float64 alone; it compiles C++
    sim = pytest.importorskip("mmasim.nv_ptx.sim")

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "f16": torch.float16, "bf16": torch.bfloat16}
FP8 = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")]
WIDE = [("f16", "f16"), ("bf16", "bf16")]
CASES = [
    *(("sm_89", "mma", *formats) for formats in FP8 + WIDE),
    *(("sm_90a", "wgmma", *formats) for formats in FP8 + WIDE),
    *(("sm_90a", "mma", *formats) for formats in WIDE),
    *(("sm_100a", "tcgen05", *formats) for formats in FP8 + WIDE),
    *(("sm_100a", "mma", *formats) for formats in WIDE),
    *(("sm_120a", "mma", *formats) for formats in FP8 + WIDE),
]
GPUS = {"sm_89": "Ada Lovelace", "sm_90a": "Hopper", "sm_100a": "Blackwell", "sm_120a": "RTX Blackwell"}
KINDS = ("any bits", "finite", "normal", "positive", "alike", "subnormal", "few", "small")
OPERANDS = [*((kind, kind) for kind in KINDS), ("subnormal", "large"), ("large", "subnormal")]
BLOCKS = [(*case, *formats) for case in (("sm_100a", "tcgen05"), ("sm_120a", "mma")) for formats in FP8]
SCALES = {"any": (0, 256), "near 1": (120, 135), "tiny": (0, 4), "huge": (250, 255), "NaN": (254, 256)}  # codes of E8M0
ACCUMULATORS = ("any bits", "0", "-0", "cancels", "near", "subnormal", "special")


def oracle(target: str, instruction: str, a: str, b: str) -> Any:
    """MMA-Sim's model of the instruction."""
    if instruction == "mma":
        return sim.MMA(GPUS[target], f"m16n8k{depth(a)}.f32.{a}.{b}.f32")
    if instruction == "wgmma":
        return sim.WGMMA(GPUS[target], f"m64n16k{depth(a)}.f32.{a}.{b}")
    kind = "f8f6f4" if depth(a) == 32 else "f16"
    return sim.TCGen05MMA(GPUS[target], f"m128n16k{depth(a)}.kind::{kind}.f32.{a}.{b}")


def oracle_of_blocks(target: str, instruction: str, a: str, b: str) -> Any:
    """The same with a scale of 32 elements each."""
    if instruction == "mma":
        return sim.MMABlockScale(GPUS[target], f"m16n8k32.kind::mxf8f6f4.block32.f32.{a}.{b}.f32.ue8m0")
    return sim.TCGen05MMABlockScale(GPUS[target], f"m128n16k32.kind::mxf8f6f4.block32.f32.{a}.{b}.ue8m0")


def depth(element: str) -> int:
    return 32 // DTYPES[element].itemsize


def operand(kind: str, element: str, shape: tuple[int, int]) -> Tensor:
    dtype = DTYPES[element]
    limits, bits = torch.finfo(dtype), torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    anything = bits.view(dtype)[..., 0]
    finite = anything.double().nan_to_num(1.0, 3.0, -3.0)
    values = {
        "any bits": anything.double(),
        "finite": finite,
        "normal": torch.randn(shape),
        "positive": torch.randn(shape).abs(),
        "alike": 1 + torch.rand(shape),
        "large": torch.randn(shape) * (limits.max / 8),
        "subnormal": finite.sign() * torch.randint(0, 8, shape) * limits.smallest_normal * limits.eps,
        "few": finite * (torch.rand(shape) < 0.15),
        "small": torch.rand(shape) * (2.0**-75 if element == "bf16" else 2 * limits.smallest_normal),
    }[kind]
    return values.to(torch.float32).to(dtype)


def accumulator(kind: str, exact: Tensor) -> Tensor:
    return {
        "any bits": torch.randint(-(1 << 31), 1 << 31, exact.shape, dtype=torch.int64).int().view(torch.float32),
        "0": torch.zeros(exact.shape),
        "-0": -torch.zeros(exact.shape),
        "cancels": -exact.float(),
        "near": exact.float() * torch.randn(exact.shape),
        "subnormal": torch.randint(-(1 << 24), 1 << 24, exact.shape) * 2.0**-149,
        "special": torch.tensor([math.inf, -math.inf, math.nan, 3.4028234e38])[torch.randint(0, 4, exact.shape)],
    }[kind]


def sums(a: str, b: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return many sums, [count, K], [count, K] and [count]: every kind of operand with every kind of accumulator."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for kinds, of_c in itertools.product(OPERANDS, ACCUMULATORS):
        x, y = (operand(kind, element, (count, depth(a))) for kind, element in zip(kinds, (a, b), strict=True))
        parts.append((x, y, accumulator(of_c, (x.double() * y.double()).sum(1))))
    x, y, c = zip(*parts, strict=True)
    return torch.cat(x), torch.cat(y), torch.cat(c)


def ours(x: Tensor, y: Tensor, c: Tensor, rule: Rule, *scales: Tensor) -> np.ndarray:
    """The results' bits."""
    a, b = (part.double().numpy()[:, None] for part in (x, y))
    factors = (E8M0[scale.numpy()][:, None] for scale in scales)
    return multiply_add(a, b, c.numpy()[:, None, None], rule, *factors).view(np.uint32)[:, 0, 0]


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_sums_are_the_oracles(case: tuple[str, str, str, str], count: int) -> None:
    x, y, c = sums(*case[2:], count)
    expected = oracle(*case).dpa(x, y, c).numpy().view(np.uint32)
    wrong = np.flatnonzero(ours(x, y, c, rule_of(*case)) != expected)
    assert wrong.size == 0, (wrong.size, x[wrong[0]], y[wrong[0]], c[wrong[0]], hex(expected[wrong[0]]))
    assert (expected == 0x7FFFFFFF).any() and (expected == 0x7F800000).any() and (expected == 0).any()
    assert not (expected == 0x80000000).any()


@pytest.mark.parametrize("case", BLOCKS, ids=" ".join)
def test_sums_of_scaled_blocks_are_the_oracles(case: tuple[str, str, str, str]) -> None:
    x, y, c = sums(*case[2:], 4)
    rule, one = rule_of(*case), oracle_of_blocks(*case)
    for kind in SCALES:
        codes = [torch.randint(*kind, (len(c), 1), dtype=torch.uint8) for kind in (SCALES[kind], SCALES["any"])]
        expected = one.dpa(x, y, c, *(code.view(torch.float8_e8m0fnu) for code in codes)).numpy().view(np.uint32)
        wrong = np.flatnonzero(ours(x, y, c, rule, *codes) != expected)
        assert wrong.size == 0, (kind, x[wrong[0]], y[wrong[0]], c[wrong[0]], [code[wrong[0]] for code in codes])


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" in case], ids=" ".join)
def test_the_exponent_of_zero_shows_where_products_are_small(case: tuple[str, str, str, str]) -> None:
    x, y, c = operand("small", "bf16", (2000, 16)), operand("small", "bf16", (2000, 16)), torch.zeros(2000)
    rule = rule_of(*case)
    sums = ours(x, y, c, rule)
    assert np.array_equal(sums, oracle(*case).dpa(x, y, c).numpy().view(np.uint32))
    for zero in (rule.zero - 1, rule.zero + 1):
        assert (ours(x, y, c, rule._replace(zero=zero)) != sums).any()


@pytest.mark.parametrize("case", CASES[:: len(FP8 + WIDE) - 1], ids=" ".join)
@pytest.mark.parametrize("groups", [0, 1, 10])
def test_matrices_and_groups(case: tuple[str, str, str, str], groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulator.tensor_cores._AT_ONCE", 10000)
    one = oracle(*case)
    a, b = (operand("finite", element, (groups * n, one.k)) for element, n in ((case[2], one.m), (case[3], one.n)))
    a, b, c = a.view(groups, one.m, one.k), b.view(groups, one.n, one.k), torch.randn(groups, one.m, one.n)
    values = a.double().numpy(), np.ascontiguousarray(b.double().numpy().swapaxes(1, 2)).swapaxes(1, 2), c.numpy()
    before = [part.copy() for part in values]
    sums = multiply_add(*values, rule_of(*case))
    assert sums.dtype == np.float32 and sums.shape == c.shape
    for x, y, z, result in zip(a, b, c, sums, strict=True):
        assert np.array_equal(one(x, y.T, z).numpy(), result)
    assert all(np.array_equal(part, old) for part, old in zip(values, before, strict=True))


def test_a_longer_k_is_further_instructions() -> None:
    rng, rule = np.random.default_rng(0), rule_of("sm_89", "mma", "e4m3", "e4m3")
    a, b = rng.integers(-8, 9, (1, 4, 64)).astype(float), rng.integers(-8, 9, (1, 3, 64)).astype(float)
    first = multiply_add(a[..., :32], b[..., :32], np.full((1, 4, 3), 1000.3, np.float32), rule)
    second = multiply_add(a[..., 32:], b[..., 32:], first, rule)
    assert np.array_equal(multiply_add(a, b, np.full((1, 4, 3), 1000.3, np.float32), rule), second)


@pytest.mark.parametrize(
    "case",
    [
        ("sm_90a", "mma", "e4m3", "e4m3"),
        ("sm_100a", "mma", "e4m3", "e5m2"),
        ("sm_103a", "tcgen05", "e4m3", "e4m3"),
        ("sm_121a", "mma", "e4m3", "e4m3"),
        ("sm_90a", "tcgen05", "f16", "f16"),
        ("sm_89", "mma", "f16", "bf16"),
        ("sm_120a", "mma", "e4m3", "f16"),
        ("sm_120a", "mma", "e2m1", "e2m1"),
    ],
)
def test_nothing_is_guessed(case: tuple[str, str, str, str]) -> None:
    with pytest.raises(NotImplementedError, match=f"{case[1]} sums {case[2]} by {case[3]} in float32 on {case[0]}"):
        rule_of(*case)
