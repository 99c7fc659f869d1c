"""Numbers as the GPU has them: types, NaN, rounding, fused multiply-add, FP8, approximate functions.

Registers hold bits: uint8 to uint64, a predicate's bool. Functions here take and return arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

U16, U32, U64 = np.uint16, np.uint32, np.uint64
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: U16, 32: U32, 64: U64}
# NumPy's dtypes of PTX's types; of packed ones an element's. A bf16 is read as float32.
TYPES: dict[str, Any] = {
    **{f"{letter}{bits}": UNSIGNED[bits] for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}").type for bits in (16, 32, 64)},
    **{f"{letter}16w": np.dtype(f"{kind}4").type for letter, kind in ("si", "uu")},  # what holds a product
    **{f"{letter}32w": np.dtype(f"{kind}8").type for letter, kind in ("si", "uu")},
    "pred": np.bool_,
    "f16x2": np.float16,
    "f32x2": np.float32,
    **dict.fromkeys(("bf16", "bf16x2"), U16),
    **dict.fromkeys(("e4m3", "e5m2", "e4m3x2", "e5m2x2"), np.uint8),
}
BITS = {
    kind: 1 if kind == "pred" else np.dtype(dtype).itemsize * (16 if "x2" in kind else 8)
    for kind, dtype in TYPES.items()
}


def canonical(values: Any) -> Any:
    """Return an arithmetic result with the one NaN that NVIDIA's units make; bf16's is float16's."""
    nan = values != values
    if np.count_nonzero(nan):
        values = np.array(values)
        bits = f"i{values.itemsize}"
        values.view(bits)[nan] = np.iinfo(bits).max  # of float16 0x7FFF, and so on
    return values


def from_bf16(bits: Any) -> Any:
    """Return float32 of bf16's bits."""
    return (bits.astype(U32) << U32(16)).view(np.float32)


def fma32(x: Any, y: Any, z: Any) -> Any:
    """Return float32 x * y + z, rounded once: in float64 the product is exact, and the sum is rounded to odd."""
    product = np.multiply(x, y, dtype=np.float64)
    total = np.atleast_1d(product + z)
    back = total - product
    error = (product - (total - back)) + (z - back)
    bits = total.view(np.int64)
    even = (bits & 1 == 0) & (np.abs(error) > 0)  # and inexact; false for infinities and NaN
    if np.count_nonzero(even):
        bits = bits + even * np.where((error > 0) == (total > 0), 1, -1)
    return canonical(bits.view(np.float64).astype(np.float32))


def extreme(a: Any, b: Any, least: bool, keeps_nan: bool) -> Any:
    """Return PTX's min or max of float32: of a NaN and a number the number, or NaN; -0 is below +0."""
    chosen = (np.fmin if least else np.fmax)(a, b)
    zeros = (a == 0) & (b == 0)
    if np.count_nonzero(zeros):
        first, second = (np.asarray(v, np.float32).view(U32) for v in (a, b))
        chosen = np.where(zeros, first | second if least else first & second, chosen.view(U32)).view(np.float32)
    if keeps_nan:
        chosen = np.where((a != a) | (b != b), np.float32(np.nan), chosen)
    return canonical(chosen)


# --- conversions ------------------------------------------------------------------------------------------------------

# Of codes without their sign: E4M3's bits are float16's with another bias, E5M2's are its upper half.
_HALVES = {"e4m3": (7, 256.0), "e5m2": (8, 1.0)}
with np.errstate(invalid="ignore"):  # NaN
    _POSITIVE = {
        element: (np.arange(128, dtype=U16) << U16(shift)).view(np.float16).astype(np.float64) * factor
        for element, (shift, factor) in _HALVES.items()
    }
_POSITIVE["e4m3"][0x7F] = np.nan
MAGNITUDES = {element: values[np.isfinite(values)] for element, values in _POSITIVE.items()}
FP8 = {element: np.concatenate([values, -values]) for element, values in _POSITIVE.items()}  # float64 of each code
E8M0 = np.append(np.exp2(np.arange(-127.0, 128.0)), np.nan)  # of a scale's code
FP8_AS_F16 = {element: canonical(values.astype(np.float16)) for element, values in FP8.items()}


def to_fp8(values: Any, element: str) -> Any:
    """Return the nearest codes, ties to even, saturated to the largest number; NaN is 0x7F."""
    magnitudes, exact = MAGNITUDES[element], np.abs(values).astype(np.float64)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    code = np.searchsorted(ties, exact)  # of a tie the lower one
    at = np.minimum(code, ties.size - 1)
    code += (ties[at] == exact) & (code < ties.size) & (code & 1 == 1)
    return np.where(exact != exact, 0x7F, code | np.signbit(values) * 0x80).astype(np.uint8)


def to_bf16(values: Any) -> Any:
    """Return bf16's bits of float32: nearest, ties to even."""
    bits = np.asarray(values).view(U32)
    nearest = (bits + (U32(0x7FFF) + ((bits >> U32(16)) & U32(1)))) >> U32(16)
    return np.where(values != values, U16(0x7FFF), nearest.astype(U16))


def to_f16_toward_zero(values: Any) -> Any:
    """Return float16 numbers, never farther from zero than the given ones."""
    near = np.atleast_1d(canonical(values.astype(np.float16)))
    is_beyond = np.isfinite(values) & (np.abs(near.astype(np.float32)) > np.abs(values))
    return (near.view(U16) - is_beyond.astype(U16)).view(np.float16)


def to_s64(values: Any) -> Any:
    """Return int64 of float32 toward zero, saturated; NaN is the lowest."""
    low, high = np.int64(-(1 << 63)), np.int64((1 << 63) - 1)
    inside = np.abs(values) < 2.0**63
    return np.where(inside, np.where(inside, values, 0).astype(np.int64), np.where(values > 0, high, low))


# --- approximate functions --------------------------------------------------------------------------------------------

# (in float64, the largest relative error that the PTX manual gives for its approximation of float32)
APPROXIMATE: dict[str, tuple[Callable[..., Any], float]] = {
    "ex2": (np.exp2, 2.0**-22.5),
    "rcp": (np.reciprocal, 2.0**-23),
}


def flushed(values: Any) -> Any:
    """Return subnormal numbers as zeros of their sign."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def approximate(name: str, values: Any, error: float) -> Any:
    """Return a function's float32 values at ``error`` times the largest error, -1 to 1, from the exact ones; .ftz."""
    function, bound = APPROXIMATE[name]
    exact = function(flushed(values).astype(np.float64))
    rounded = np.atleast_1d(exact * (1 + error * bound)).astype(np.float32)
    is_past_bound = np.isfinite(rounded) & (
        np.abs(rounded - exact) > bound * np.abs(exact)
    )  # rounding went over the bound
    rounded = np.where(
        is_past_bound, np.nextafter(rounded, np.where(rounded > exact, -np.inf, np.inf).astype(np.float32)), rounded
    )
    return canonical(flushed(rounded))
