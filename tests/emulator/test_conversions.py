from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.support.ptx import compute

FP8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 0x7E), "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 0x7B)}
HALF = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def floats(*magnitudes: np.ndarray) -> np.ndarray:
    """float32: every number of bf16, random bits, and these numbers with their neighbours and signs."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 50_000, dtype=np.uint64).astype(np.uint32)
    every = [(np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32), bits.view(np.float32)]
    for numbers in (values.astype(np.float32) for values in magnitudes):
        for values in (numbers, np.nextafter(numbers, np.float32(0)), np.nextafter(numbers, np.float32(np.inf))):
            every += [values, -values]
    return np.concatenate(every)


def ties(codes: np.ndarray) -> np.ndarray:
    """Half way between neighbours."""
    values = codes.astype(np.float64)
    return (values[1:] + values[:-1]) / 2


@pytest.mark.parametrize("element", FP8)
def test_to_fp8(element: str) -> None:
    """Nearest, ties to even, saturated, of infinity too; NaN is 0x7F whatever its sign."""
    dtype, most, last = FP8[element]
    magnitudes = np.arange(last + 1, dtype=np.uint8).view(dtype)
    numbers = floats(ties(magnitudes), magnitudes, np.array([most, most * 17 / 16, most * 1.25]))
    with np.errstate(all="ignore"):
        want = np.clip(numbers, -most, most).astype(dtype).view(np.uint8)
    want[np.isnan(numbers)] = 0x7F
    pair = compute(f"cvt.rn.satfinite.{element}x2.f32", numbers, numbers[::-1], out=np.uint16)
    assert (pair >> 8 == want).all() and (pair & 255 == want[::-1]).all()  # the first operand is the upper half


@pytest.mark.parametrize("element", FP8)
def test_float16_to_fp8(element: str) -> None:
    dtype, most, _ = FP8[element]
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        want = np.clip(numbers.astype(np.float32), -most, most).astype(dtype).view(np.uint8)
    want[np.isnan(numbers)] = 0x7F
    pairs = np.stack([numbers, numbers[::-1]], 1).copy().view(np.uint32).reshape(-1)
    got = compute(f"cvt.rn.satfinite.{element}x2.f16x2", pairs, out=np.uint16).view(np.uint8).reshape(-1, 2)
    assert (got[:, 0] == want).all() and (got[:, 1] == want[::-1]).all()


@pytest.mark.parametrize("element", FP8)
def test_from_fp8(element: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    got = compute(f"cvt.rn.f16x2.{element}x2", codes, out=np.uint32).view(np.float16)
    want = codes.view(FP8[element][0]).astype(np.float16)
    nan = np.isnan(want)
    assert (got.view(np.uint16)[~nan] == want.view(np.uint16)[~nan]).all()
    assert (got.view(np.uint16)[nan] == 0x7FFF).all() and nan.any()


@pytest.mark.parametrize("kind", HALF)
def test_to_halves(kind: str) -> None:
    dtype = HALF[kind]
    codes = np.arange(0x7C00 if kind == "f16" else 0x7F80, dtype=np.uint16).view(dtype)
    last = codes[-1:].astype(np.float64)
    over = last + (last - codes[-2:-1].astype(np.float64)) / 2  # from here on, infinity
    numbers = floats(ties(codes), codes.astype(np.float64), over)
    with np.errstate(all="ignore"):
        want = numbers.astype(dtype).view(np.uint16)
    nan = np.isnan(numbers)
    want[nan] = 0x7FFF
    assert (compute(f"cvt.rn.{kind}.f32", numbers, out=np.uint16) == want).all()
    if kind == "f16":  # toward zero: the nearest, but where that is farther from zero one less
        with np.errstate(all="ignore"):
            beyond = np.abs(want.view(dtype).astype(np.float64)) > np.abs(numbers.astype(np.float64))
        assert (compute("cvt.rz.f16.f32", numbers, out=np.uint16) == want - (beyond & ~nan)).all() and beyond.any()
    pair = compute(f"cvt.rn.{kind}x2.f32", numbers, numbers[::-1], out=np.uint32)
    assert (pair >> 16 == want).all() and (pair & 0xFFFF == want[::-1]).all()


@pytest.mark.parametrize("kind", HALF)
def test_from_halves(kind: str) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    got, want = compute(f"cvt.f32.{kind}", codes, out=np.float32), codes.view(HALF[kind]).astype(np.float32)
    nan = np.isnan(want)
    assert (got[~nan].view(np.uint32) == want[~nan].view(np.uint32)).all() and np.isnan(got[nan]).all()


def test_between_float32_and_float64() -> None:
    numbers = floats()
    number = ~np.isnan(numbers)
    wide = compute("cvt.f64.f32", numbers, out=np.float64)
    assert (wide[number] == numbers[number]).all() and np.isnan(wide[~number]).all()
    random = np.random.default_rng(1)
    drawn = random.standard_normal(1000) * np.exp2(random.integers(-180, 150, 1000))
    wide = np.concatenate([wide, wide * (1 + 2.0**-24), drawn])
    with np.errstate(all="ignore"):
        want = wide.astype(np.float32)
    number = ~np.isnan(wide)
    got = compute("cvt.rn.f32.f64", wide, out=np.float32)
    assert (got[number].view(np.uint32) == want[number].view(np.uint32)).all()
    assert (got[~number].view(np.uint32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_between_integers(source: str, to: str) -> None:
    """Cut off, or extended by the source's sign; a register that is wider than the result by the result's."""
    size, out = int(source[1:]) // 8, int(to[1:]) // 8
    numbers = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, 500).astype(f"{source[0]}{size}".replace("s", "i"))
    got = compute(f"cvt.{to}.{source}", numbers.view(f"u{size}"), out=f"u{max(out, 2)}")
    want = numbers.astype(f"{to[0]}{out}".replace("s", "i")).astype(f"{to[0]}{max(out, 2)}".replace("s", "i"))
    assert (got == want.view(got.dtype)).all()


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("to", ["f32", "f64"])
def test_integers_to_floats(source: str, to: str) -> None:
    dtype = f"{source[0]}{int(source[1:]) // 8}".replace("s", "i")
    numbers = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, 500) >> np.arange(500) % 63
    ends = np.iinfo(dtype)
    numbers = np.r_[numbers.astype(dtype), ends.max, ends.min, (1 << 24) + 1, (1 << 24) + 3].astype(dtype)
    got = compute(f"cvt.rn.{to}.{source}", numbers, out=f"f{int(to[1:]) // 8}")
    assert (got == numbers.astype(got.dtype)).all()


def test_floats_to_integers_saturate() -> None:
    whole = [0.0, -0.0, 0.9, -0.9, 2.5, -2.5, 2.0**53, -(2.0**62), 2.0**63, -(2.0**63), 1e30, -1e30]
    whole += [np.inf, -np.inf, np.nan]
    low, high = -(1 << 63), (1 << 63) - 1
    want = [0, 0, 0, 0, 2, -2, 1 << 53, -(1 << 62), high, low, high, low, high, low, low]
    assert compute("cvt.rzi.s64.f32", np.array(whole, np.float32), out=np.int64).tolist() == want
