"""NVFP4 on a CPU: casts by C++, bit for bit the reference's; what is read back, multiplied and counted."""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.formats import E2M1
from octavo.granularity import NV
from octavo.kernels import capability, cpu, reference
from octavo.kernels.arguments import Counted
from octavo.kernels.cpu import cast, codes
from octavo.kernels.cpu.library import library
from tests.support.casts import DTYPES, LAYOUTS, laid, of_norm, second, values_of
from tests.support.combinations import dealt
from tests.support.definitions import same_bits

SIGNS = 0b1101_0111_1110_1000
COLUMN, SQUARE = NV[::-1], (NV[1], NV[1])
TARGETS: list[tuple[Any, ...]] = [  # tile, transpose, and what of a rotation and a seed
    *((NV, False, options) for options in ({}, {"rotation": SIGNS}, {"seed": 5}, {"rotation": 1, "seed": 2**31 - 1})),
    *((COLUMN, True, options) for options in ({}, {"rotation": SIGNS}, {"seed": 0}, {"rotation": SIGNS, "seed": 3})),
    *((SQUARE, True, options) for options in ({}, {"seed": 1})),
    (SQUARE, False, {"rotation": SIGNS}),
]
SECONDS: list[dict[str, Any]] = [
    second(E2M1.dtype, COLUMN, True, 0) | {"second_rotation": SIGNS, "second_seed": 3},
    second(E2M1.dtype, SQUARE, True, 1),
    second(torch.float8_e4m3fn, COLUMN, False, 0),
    second(torch.float8_e4m3fn, (-1, -1), True, 2),
]
CASES: dict[str, Any] = {
    "rows": [0, 1, 15, 16, 17, 31, 130],
    "cols": [0, 16, 17, 40, 300],
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "values": ["varied", "faults", "only faults", "zeros", "edge"],
    "largest": [None, 0.0, 1e-38, 1e-41, 3e38],
    "target": TARGETS,
    "second": [None, *SECONDS],
    "source": ["tensor", "tensor", "tensor", "activation", "norm"],
    "place": [(0, 0), (32, 48), (2**31 + 16, 2**31 + 48)],
    "delayed": [None, 0.0, 2.0**-100, 2.0**8, 2.0**126],
    "margin": [0, 3],
    "chunk": [1, 5000, 1 << 18],
    "threads": [1, 2],
}


def bits(values: Tensor) -> Tensor:
    """Return a tensor's bytes, with one NaN."""
    if values.dtype in (torch.bfloat16, torch.float32):
        values = torch.where(values.isnan(), math.nan, values)
    return values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def is_alike(a: Tensor, b: Tensor) -> bool:
    return a.stride() == b.stride() and torch.equal(bits(a), bits(b))


def arguments(case: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a cast's arguments, by place and by name."""
    tile, transpose, options = case["target"]
    named = dict(options) | {"place": case["place"]}
    delayed = None if case["delayed"] is None else torch.tensor([math.nan, case["delayed"]])
    if case["second"] is not None and tile == NV:
        named |= case["second"]
        delayed, transpose = None, True
    shape = case["rows"], case["cols"]
    activation = "swiglu" if case["source"] == "activation" else ""
    x = values_of(case["values"], (shape[0], shape[1] * 2) if activation else shape, case["dtype"])
    if case["largest"] is not None and case["values"] != "zeros" and x.numel():
        finite = torch.where(x.isfinite(), x, 0).double().abs().amax()
        x = (x.double() * (case["largest"] / finite.clamp(min=1e-300))).to(x.dtype)
    if case["source"] == "norm":
        named |= of_norm(torch.rand(shape[1]) + 0.5, None, "rms_norm")
    options_by_place = E2M1.dtype, tile, True, case["margin"], transpose, 16
    return (laid(x, case["layout"]), delayed, 1, *options_by_place, False, activation), named


def differing(count: int, seed: int) -> list[dict[str, Any]]:
    """Return the cases of ``count`` drawn ones in which C++ differs from the reference."""
    assert library("cast") is not None and library("nvfp4") is not None
    torch.manual_seed(seed)
    different = []
    for case in dealt(seed, count, **CASES):
        if case["source"] != "tensor":
            # torch computes the last elements of rows another way, and faults of an activation
            case |= {"cols": 64, "values": "varied", "largest": None}
        args, named = arguments(case)
        expected = reference.KERNELS["cast"](*args, **named)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codes, "CHUNK", case["chunk"])
            patch.setattr(cast, "KEPT", case["chunk"])
            patch.setattr(codes, "_SHARE", 50)
            patch.setattr(torch, "get_num_threads", lambda: case["threads"])  # noqa: B023
            results = cpu.KERNELS["cast"](*args, **named)
        if not all(map(is_alike, results, expected)):
            different.append(case)
    return different


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 12))])
def test_any_cast_is_the_references(seed: int) -> None:
    assert differing(150, seed) == []


@pytest.mark.full
def test_casts_without_vector_instructions_are_the_references() -> None:
    program = "from tests.kernels.test_nvfp4_cpu import differing; assert differing(150, 20) == []"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "ATEN_CPU_CAPABILITY": "default"})


def test_codes_of_a_block_with_a_fault_are_all_the_same() -> None:
    """The sign of a NaN, which no arithmetic defines, is in no code; and no other block changes."""
    x = torch.randn(16, 48)
    clean = reference.KERNELS["cast"](x, None, 0, E2M1.dtype, NV, True, 0, False, 16)
    for fault in (math.nan, -math.nan, math.inf, -math.inf):
        x[3, 20] = fault
        for kernels in (reference.KERNELS, cpu.KERNELS):
            q, _, scale_inv, *_ = kernels["cast"](x, None, 0, E2M1.dtype, NV, True, 0, False, 16)
            assert scale_inv[3, 1].isnan() and (q.view(torch.uint8)[3, 8:16] == 0x77).all()
            differs = (q.view(torch.uint8) != clean[0].view(torch.uint8)).nonzero()
            assert (differs[:, 0] == 3).all() and ((differs[:, 1] >= 8) & (differs[:, 1] < 16)).all()


def pair_of(shape: tuple[int, int], values: str, tile: tuple[int, int]) -> tuple[Tensor, Tensor, tuple[int, int]]:
    x = values_of(values, shape, torch.bfloat16)
    q, _, scale_inv, *_ = reference.KERNELS["cast"](x, None, 0, E2M1.dtype, tile, True, 0, False, 16)
    return q, scale_inv, tile


@pytest.mark.parametrize("tile", [NV, SQUARE], ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (17, 300), (33, 40)], ids=str)
def test_what_codes_read(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    for values in ("varied", "only faults"):
        q, scale_inv, _ = pair_of(shape, values, tile)
        any_scale = torch.rand_like(scale_inv)  # not of the few digits that casts write: read values are rounded
        for scales in (scale_inv, any_scale, scale_inv.float()):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                expected = reference.KERNELS["dequantize"](q, scales, tile, dtype)
                assert torch.equal(cpu.KERNELS["dequantize"](q, scales, tile, dtype).isnan(), expected.isnan())
                actual = cpu.KERNELS["dequantize"](q, scales, tile, dtype)
                assert torch.equal(actual.nan_to_num(0.25), expected.nan_to_num(0.25))


@pytest.mark.parametrize("fast", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chunk", [1, 500, 1 << 18])
def test_products(fast: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of codes by scales that are powers of two, whose sums are exact, in any order."""
    monkeypatch.setattr(codes, "CHUNK", chunk)
    monkeypatch.setattr(capability, "fast_dtype", lambda device: fast)
    for rows, terms, cols in ((1, 16, 1), (17, 48, 33), (40, 304, 50)):
        operands = []
        for size, tile in ((rows, NV), (cols, SQUARE)):
            q, scale_inv, _ = pair_of((size, terms), "varied", tile)
            operands += [q, (2.0 ** torch.randint(-2, 3, scale_inv.shape)).to(scale_inv.dtype), tile]
        for dtype in DTYPES:
            args = *operands, None, dtype, False
            assert same_bits(cpu.KERNELS["matmul"](*args), reference.KERNELS["matmul"](*args))


def counted(x: Tensor, read: Tensor, magnitudes: Tensor) -> dict[str, float]:
    """Count a cast's effects by the definition; ``magnitudes``: what codes stand for, without scales."""
    counts = dict.fromkeys(Counted.sums, 0.0)
    for value, number, magnitude in zip(*(t.double().flatten().tolist() for t in (x, read, magnitudes)), strict=True):
        counts["elements"] += 1
        counts["zeros"] += value == 0
        if not math.isfinite(value):
            counts["nonfinite"] += 1
            continue
        counts["power"] += value * value
        if math.isnan(number):
            continue
        counts["flushed"] += value != 0 and number == 0
        counts["clipped"] += magnitude == 6 and number != 0 and abs(value) > 7 / 6 * abs(number)
        counts["error"] += (value - number) ** 2
    return counts


def clips(x: Tensor, tile: tuple[int, int], scale: float) -> bool:
    """Whether a block's scale, in E4M3, is more than a sixth smaller than its amax asks for, but not 0.

    It is so where the scale saturates, or rounds down to one or two of E4M3's smallest steps.
    """
    padding = (0, -x.shape[1] % tile[1], 0, -x.shape[0] % tile[0])
    blocks = torch.nn.functional.pad(x.double().abs(), padding).unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
    asked = blocks.amax((1, 3)) / E2M1.max * scale
    stored = asked.float().clamp(max=448.0).to(torch.float8_e4m3fn).double()
    return bool(((asked > 7 / 6 * stored) & (stored > 0)).any())


@pytest.mark.parametrize("tile", [NV, SQUARE], ids=str)
@pytest.mark.parametrize("values", ["varied", "faults", "zeros"])
@pytest.mark.parametrize("scale", [0.0, 2.0**16, 2.0**-6], ids=["own", "too large", "too small"])
def test_casts_are_counted(values: str, tile: tuple[int, int], scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose scale underflowed is flushed as a whole, and one that has a fault is not measured."""
    x = values_of(values, (35, 40), torch.bfloat16)
    q, _, scale_inv, *_ = reference.KERNELS["cast"](x, torch.full((3,), scale), 0, E2M1.dtype, tile, True, 0, False, 16)
    read = reference.KERNELS["dequantize"](q, scale_inv, tile, torch.float32)[:, :40]
    magnitudes = reference.KERNELS["dequantize"](q, torch.ones_like(scale_inv), tile, torch.float32)[:, :40].abs()
    expected = counted(x, read, magnitudes)
    positive = scale_inv.float()[scale_inv > 0]
    for kernels, chunk in ((reference.KERNELS, 1), (cpu.KERNELS, 1000), (cpu.KERNELS, 1 << 18)):
        monkeypatch.setattr(codes, "CHUNK", chunk)
        sums, extremes = torch.zeros(len(Counted.sums) + Counted.exponents, dtype=torch.float64), torch.zeros(3)
        kernels["cast_statistics"](x, q, scale_inv, tile, sums, extremes)
        counts = dict(zip(Counted.sums, sums.tolist(), strict=False))
        assert counts == pytest.approx(expected, rel=1e-6)
        assert sums[len(Counted.sums) :].sum() == counts["elements"] - counts["zeros"] - counts["nonfinite"]
        assert extremes[0] == x.float().nan_to_num(0, 0, 0).abs().max()
        assert extremes[1:].tolist() == ([positive.max(), 1 / positive.min()] if len(positive) else [0.0, 0.0])
    if values == "varied":
        assert (expected["clipped"] > 0) == (scale != 0.0 and clips(x, tile, scale))
        assert scale != 2.0**-6 or expected["flushed"] > 100


def test_four_bits_are_not_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(32, 32)
    if codes.compiled_packed(x) is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(cast, "reference_write", None)
    cpu.KERNELS["cast"](x, None, 0, E2M1.dtype, NV, True, 0, False, 16, False)
