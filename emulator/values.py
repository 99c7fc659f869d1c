"""Numbers as the GPU has them: types, NaN, rounding, fused multiply-add, FP8, approximate functions.

Arrays hold bits: uint8 to uint64, a predicate's bool. Functions here take and return arrays of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT: dict[int, Any] = {16: np.float16, 32: np.float32, 64: np.float64}
U16, U32, U64 = np.uint16, np.uint32, np.uint64
# What arithmetic makes of any NaN, by bits; bf16's is float16's.
NAN: dict[int, Any] = {16: U16(0x7FFF), 32: U32(0x7FFFFFFF), 64: U64(0x7FFFFFFFFFFFFFFF)}


def kind_of(name: str) -> tuple[str, int]:
    """("b", "u", "s", "f" or "B" for bf16, bits) of a type's name; a pair of 16-bit floats is ("b", 32)."""
    if name == "bf16":
        return "B", 16
    if name.endswith("x2"):
        return "b", 64 if name == "f32x2" else 32
    return ("p", 1) if name == "pred" else (name[0], int(name[1:]))


def dtype_of(kind: str, bits: int) -> Any:
    """NumPy's dtype."""
    return (FLOAT if kind == "f" else SIGNED if kind == "s" else UNSIGNED)[bits]


def canonical(values: Any) -> Any:
    """An arithmetic result with the one NaN that NVIDIA's units make."""
    values = np.atleast_1d(values)
    nan = values != values
    if nan.any():
        bits = values.dtype.itemsize * 8
        values = values.copy()
        values.view(UNSIGNED[bits])[nan] = NAN[bits]
    return values


def from_bf16(bits: Any) -> Any:
    """float32 of bf16's bits."""
    return (np.asarray(bits).astype(U32) << U32(16)).view(np.float32)


def _is_inexact_and_even(bits: Any, error: Any) -> Any:
    return ((bits & 1) == 0) & (np.abs(error) > 0)


def _to_odd(values: Any, error: Any) -> Any:
    """A rounded number and what rounding lost, rounded to odd instead: rounding it again rounds once."""
    values = np.atleast_1d(values)
    bits = values.view(SIGNED[values.dtype.itemsize * 8])
    step = np.where((error > 0) == (values > 0), 1, -1).astype(bits.dtype)
    return np.where(_is_inexact_and_even(bits, error), bits + step, bits).view(values.dtype)


def fma32(x: Any, y: Any, z: Any) -> Any:
    """float32 x * y + z, rounded once: in float64 the product is exact, and the sum is rounded to odd."""
    product, addend = np.asarray(x).astype(np.float64) * y, np.asarray(z).astype(np.float64)
    total = product + addend
    back = total - product
    return _to_odd(total, (product - (total - back)) + (addend - back)).astype(np.float32)


def fma64(x: Any, y: Any, z: Any) -> Any:
    """float64 x * y + z, rounded once, an element at a time."""

    def one(a: float, b: float, c: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
            return float(np.float64(a) * b + c)
        total = Fraction(a) * Fraction(b) + Fraction(c)
        try:
            return total.numerator / total.denominator if total else a * b + c
        except OverflowError:
            return math.copysign(math.inf, total)

    return np.array([one(*map(float, values)) for values in np.broadcast(*np.broadcast_arrays(x, y, z))])


def extreme(a: Any, b: Any, least: bool, keeps_nan: bool) -> Any:
    """PTX's min and max of floats: of a NaN and a number the number, or NaN; -0 is below +0."""
    found = np.atleast_1d((np.fmin if least else np.fmax)(a, b))
    bits = UNSIGNED[found.dtype.itemsize * 8]
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        first, second = (np.ascontiguousarray(np.broadcast_to(v, found.shape)).view(bits) for v in (a, b))
        found = np.where(zeros, first | second if least else first & second, found.view(bits)).view(found.dtype)
    if keeps_nan:
        found = np.where((a != a) | (b != b), found.dtype.type(np.nan), found)
    return canonical(found)


# --- conversions ------------------------------------------------------------------------------------------------------


def _fp8_values(mantissa: int, bias: int, count: int) -> np.ndarray:
    code = np.arange(count)
    exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(exponent > 0, np.ldexp(1 + fraction, exponent - bias), np.ldexp(fraction, 1 - bias))


# The numbers >= 0 by their codes, ascending.
MAGNITUDES = {"e4m3": _fp8_values(3, 7, 0x7F), "e5m2": _fp8_values(2, 15, 0x7C)}


def _decoded(element: str) -> np.ndarray:
    values = np.full(128, np.nan)
    values[: MAGNITUDES[element].size] = MAGNITUDES[element]
    if element == "e5m2":
        values[0x7C] = np.inf
    return np.concatenate([values, -values])


FP8 = {element: _decoded(element) for element in MAGNITUDES}  # float64 of each code


def to_fp8(values: Any, element: str) -> Any:
    """The nearest code, ties to even, saturated to the largest number; NaN is 0x7F."""
    magnitudes = MAGNITUDES[element]
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    wide = np.abs(np.asarray(values).astype(np.float64))
    code = np.searchsorted(ties, wide)  # of a tie the lower one
    at = np.minimum(code, ties.size - 1)
    code += (ties[at] == wide) & (code < ties.size) & (code & 1 == 1)
    return np.where(np.isnan(wide), 0x7F, code | np.where(np.signbit(values), 0x80, 0)).astype(U16)


def to_bf16(values: Any, mode: str = "rn") -> Any:
    """bf16's bits of float32: nearest, ties to even, or toward zero."""
    bits = np.ascontiguousarray(values).view(U32)
    up = U32(0x7FFF) + ((bits >> U32(16)) & U32(1)) if mode == "rn" else U32(0)
    return np.where(np.isnan(values), NAN[16], ((bits + up) >> U32(16)).astype(U16))


def to_f16(values: Any, mode: str = "rn") -> Any:
    """float16's bits: nearest, ties to even, or toward zero."""
    near = np.atleast_1d(values).astype(np.float16)
    bits = canonical(near).view(U16)
    if mode == "rz":
        is_beyond = np.abs(near.astype(np.float64)) > np.abs(np.asarray(values).astype(np.float64))
        bits = bits - (is_beyond & ~np.isinf(values))
    return bits.astype(U16)


def bf16_of_wide(values: Any) -> Any:
    """bf16's bits of float64, rounded once."""
    narrow = values.astype(np.float32)
    return to_bf16(_to_odd(narrow, np.where(np.isfinite(narrow), values - narrow, 0)))


def to_integer(values: Any, kind: str, bits: int) -> Any:
    """Integers of floats that are whole already: saturated; NaN is 0, or of 64 bits the lowest bit pattern 0x80...0."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind == "s" else (0, (1 << bits) - 1)
    dtype = dtype_of(kind, bits)
    wide = values.astype(np.float64)
    above, below, nan = wide >= float(high), wide <= float(low), np.isnan(wide)
    found = np.where(above | below | nan, 0.0, wide).astype(dtype)
    found = np.where(above, dtype(high), np.where(below, dtype(low), found))
    wide_nan = bits == 64 or values.dtype == np.float64
    lowest = (low if kind == "s" else 1 << (bits - 1)) if wide_nan else 0
    return np.where(nan, dtype(lowest), found)


WHOLE = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}

# --- approximate functions --------------------------------------------------------------------------------------------

# (in float64, the largest relative error that the PTX manual gives for its approximation of float32)
APPROXIMATE: dict[str, tuple[Callable[..., Any], float]] = {
    "ex2": (np.exp2, 2.0**-22.5),
    "lg2": (np.log2, 2.0**-22),
    "rcp": (lambda x: 1 / x, 2.0**-23),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2.0**-22.9),
    "sqrt": (np.sqrt, 2.0**-23),
    "div": (np.divide, 2.0**-22),
    "tanh": (np.tanh, 2.0**-11),
    "sin": (np.sin, 2.0**-20.5),
    "cos": (np.cos, 2.0**-20.5),
}


def flushed(values: Any) -> Any:
    """Subnormal numbers as zeros of their sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def approximate(name: str, ftz: bool, error: float, *arguments: Any) -> Any:
    """A function's float32 values at ``error`` times the largest error, -1 to 1, from the exact ones."""
    function, bound = APPROXIMATE[name]
    given = [flushed(x) if ftz else x for x in arguments]
    exact = function(*(np.asarray(x).astype(np.float64) for x in given))
    found = np.atleast_1d(exact * (1 + error * bound)).astype(np.float32)
    return canonical(flushed(found) if ftz else found)
