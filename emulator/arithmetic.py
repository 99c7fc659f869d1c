"""Compute a lane's result from its operands, and execute instructions in which a warp's lanes see each other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

import emulator.values as numbers
from emulator.machine import Threads, elementwise, instruction
from emulator.values import TYPES, U32, U64, UNSIGNED, canonical, extreme

Function = Callable[..., Any]
OPERATORS = vars(operator) | {"mul.lo": operator.mul, "and": operator.and_, "or": operator.or_, "not": operator.invert}
OPERATORS |= {"min": np.minimum, "max": np.maximum, "div": np.divide, "sqrt": np.sqrt}


def _rounded(name: str, *kind: str) -> Function:
    """Return an operator, rounded by NumPy as IEEE 754 asks, with the canonical NaN."""
    function = OPERATORS[name]
    return lambda *values: canonical(function(*values))


def _least_magnitude(a: Any, b: Any) -> Any:
    """Return the lesser magnitude with the product's sign; NaN if a or b is one."""
    magnitude = extreme(np.abs(a), np.abs(b), True, True)
    return magnitude.view(U32) | np.where(magnitude != magnitude, U32(0), (a.view(U32) ^ b.view(U32)) & U32(1 << 31))


def _signs(name: str, bits: str) -> Function:
    """Return abs, neg or copysign, which only move sign bits, and so keep NaN as it is."""
    sign = UNSIGNED[int(bits)](1 << (int(bits) - 1))
    if name == "copysign":
        return lambda a, b: (a & sign) | (b & ~sign)
    return (lambda a: a & ~sign) if name == "abs" else lambda a: a ^ sign


elementwise("(add|sub|mul)(?:.rn)?.(f32|f64|f32x2)", "{1} {1} {1}", _rounded)
elementwise("(div).rn.(f32|f64)", "{1} {1} {1}", _rounded)
elementwise("(sqrt).rn.(f32|f64)", "{1} {1}", _rounded)
elementwise("(add|sub).rn.f32.(bf16|f16)", "f32 {1} f32", _rounded)
elementwise("fma.rn.(f32|f32x2)", "{0} {0} {0} {0}", lambda kind: numbers.fma32)
elementwise("fma.rn.f32.(bf16|f16)", "f32 {0} {0} f32", lambda kind: numbers.fma32)


def _extremes(name: str, nan: str = "") -> Function:
    """Return the min or max of two numbers, or on Blackwell of three."""
    return lambda *operands: functools.reduce(lambda a, b: extreme(a, b, name == "min", bool(nan)), operands)


elementwise("(min|max)(.NaN)?.f32", "f32 f32 f32 f32?", _extremes)
elementwise("min.NaN.xorsign.abs.f32", "f32 f32 f32", lambda: _least_magnitude)
elementwise("(abs|neg).f(32|64)", "b{1} b{1}", _signs)
elementwise("(copysign).f(32)", "b32 b32 b32", _signs)
elementwise("abs.(?:bf16x2|f16x2)", "b32 b32", lambda: lambda a: a & U32(0x7FFF7FFF))
instruction("(ex2|rcp).approx.ftz.f32", "f32 f32")(
    lambda threads, name, values: numbers.approximate(name, values, threads.launch.options.approximation)
)

# --- conversions ------------------------------------------------------------------------------------------------------


def _to(kind: str, source: str = "") -> Function:
    dtype = TYPES[kind]
    return lambda values: canonical(values.astype(dtype)) if kind[0] == "f" else values.astype(dtype)


NARROW: dict[str, Function] = {
    "bf16": numbers.to_bf16,
    "f16": _to("f16"),
    **{name: lambda values, name=name: numbers.to_fp8(values, name) for name in ("e4m3", "e5m2")},
}


def _pair(name: str) -> Function:
    """Return the conversion of two float32 to narrower ones in one register; the first is the upper."""
    return lambda high, low: NARROW[name](np.stack(np.broadcast_arrays(low, high), -1).reshape(-1))


elementwise("cvt.rn.(bf16|f16).f32", "{0} f32", NARROW.get)
elementwise("cvt.rz.f16.f32", "f16 f32", lambda: numbers.to_f16_toward_zero)
elementwise("cvt.rn.(bf16|f16)x2.f32", "{0}x2 f32 f32", _pair)
elementwise("cvt.rn.satfinite.(e4m3|e5m2)x2.f32", "{0}x2 f32 f32", _pair)
elementwise("cvt.rn.satfinite.(e4m3|e5m2)x2.f16x2", "{0}x2 f16x2", NARROW.get)
elementwise("cvt.rn.f16x2.(e4m3|e5m2)x2", "f16x2 {0}x2", lambda kind: lambda codes: numbers.FP8_AS_F16[kind][codes])
elementwise("cvt.(f32).f16", "f32 f16", _to)
elementwise("cvt.f32.bf16", "f32 bf16", lambda: lambda values: values)  # a shift, which keeps a NaN's bits (on an H100)
elementwise("cvt.(f64).f32", "f64 f32", _to)
elementwise("cvt.rn.(f32|f64).(f64|[su]32|[su]64)", "{0} {1}", _to)
elementwise("cvt.rzi.s64.f32", "s64 f32", lambda: numbers.to_s64)
elementwise("cvt.([su](?:8|16|32|64)).([su](?:8|16|32|64))", "{0} {1}", _to)

# --- integers ---------------------------------------------------------------------------------------------------------


def _quotient(a: Any, b: Any) -> Any:
    """Return a / b, toward zero; by zero all bits."""
    safe = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, ~np.zeros_like(b), (a - np.fmod(a, safe)) // safe)


def _product(kind: str) -> Function:
    """Return the whole product, in a type of twice the bits."""
    return lambda a, b: np.multiply(a, b, dtype=TYPES[f"{kind}w"])


def _shift(name: str, kind: str) -> Function:
    """Return a shift by up to all bits; signed numbers to the right bring in the sign."""
    move, dtype, bits = operator.rshift if name == "shr" else operator.lshift, TYPES[kind], int(kind[1:])

    def shift(a: Any, by: Any) -> Any:
        shifted = move(a, np.minimum(by, U32(bits - 1)).astype(dtype))
        return shifted if kind[0] == "s" else np.where(by >= bits, dtype(0), shifted)

    return shift


INTEGER = "([su]16|[su]32|[su]64)"
elementwise(f"(add|sub|mul.lo|min|max).{INTEGER}", "{1} {1} {1}", OPERATORS.get)
elementwise(f"(neg|abs).{INTEGER}", "{1} {1}", OPERATORS.get)
elementwise("div.([su]32|[su]64)", "{0} {0} {0}", lambda kind: _quotient)
elementwise(f"mad.lo.{INTEGER}", "{0} {0} {0} {0}", lambda kind: lambda a, b, c: a * b + c)
elementwise(
    "mul.hi.([su]32)", "{0} {0} {0}", lambda kind: lambda a, b: (_product(kind)(a, b) >> 32).astype(TYPES[kind])
)
elementwise("mul.wide.([su]16|[su]32)", "{0}w {0} {0}", _product)
elementwise("mad.wide.([su]16|[su]32)", "{0}w {0} {0} {0}w", lambda kind: lambda a, b, c: _product(kind)(a, b) + c)
elementwise("(shl).b(16|32|64)", "u{1} u{1} u32", lambda name, bits: _shift(name, f"u{bits}"))
elementwise(f"(shr).{INTEGER}", "{1} {1} u32", _shift)

# --- bits and predicates ----------------------------------------------------------------------------------------------


def _extracted(sign: str) -> Function:
    """Return bfe: ``length`` bits from ``start`` of 32; bits beyond the number are its highest, or if unsigned 0."""

    def extract(value: Any, start: Any, length: Any) -> Any:
        start, length = np.minimum(start & U32(255), U32(32)), np.minimum(length & U32(255), U32(32))
        left = U32(64) - start - length  # above the field, of 64 bits
        field = (value.astype(TYPES[f"{sign}64"]) << left) >> (U32(64) - length)
        return np.where(length == 0, 0, field).astype(TYPES[f"{sign}32"])

    return extract


def _inserted(field: Any, into: Any, start: Any, length: Any) -> Any:
    start, length = np.minimum(start & U32(255), U32(32)), np.minimum(length & U32(255), U32(32))
    mask = ((U64(1) << length.astype(U64)) - U64(1)) << start
    return ((into & ~mask) | ((field.astype(U64) << start) & mask)).astype(U32)


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    both, out = a.astype(U64) | (b.astype(U64) << U64(32)), U64(0)
    for place in range(4):
        chosen = (selector >> U32(4 * place)) & U32(15)
        byte = (both >> (U32(8) * (chosen & U32(7))).astype(U64)) & U64(255)
        out = out | np.where(chosen & U32(8), (byte >> U64(7)) * U64(255), byte) << U64(8 * place)
    return out.astype(U32)


elementwise("bfe.([su])32", "{0}32 {0}32 u32 u32", _extracted)
elementwise("bfi.b32", "u32 u32 u32 u32 u32", lambda: _inserted)
elementwise("prmt.b32", "u32 u32 u32 u32", lambda: _permuted)
elementwise("popc.b32", "u32 u32", lambda: lambda a: np.bitwise_count(a).astype(U32))
elementwise(
    "shf.l.wrap.b32",
    "u32 u32 u32 u32",
    lambda: lambda low, high, by: ((high.astype(U64) << U64(32) | low) << (by & U32(31)) >> U64(32)).astype(U32),
)
elementwise("(and|or|xor).(b16|b32|b64|pred)", "{1} {1} {1}", OPERATORS.get)
elementwise("(not).(b16|b32|b64|pred)", "{1} {1}", OPERATORS.get)
elementwise("selp.[bf](16|32|64)", "b{0} b{0} b{0} pred", lambda bits: lambda a, b, which: np.where(which, a, b))


def _compared(name: str, unordered: str, kind: str) -> Function:
    """Return a comparison of floats: false for NaN, or true where its name ends with u."""
    function = OPERATORS[name]
    if unordered:
        return lambda a, b: function(a, b) | (a != a) | (b != b)
    return (lambda a, b: function(a, b) & (a == a) & (b == b)) if name == "ne" else function


elementwise("setp.(eq|ne).(b16|b32|b64)", "pred {1} {1}", OPERATORS.get)
elementwise(f"setp.(eq|ne|lt|le|gt|ge).{INTEGER}", "pred {1} {1}", OPERATORS.get)
elementwise("setp.(eq|ne|lt|le|gt|ge)(u?).(f16|bf16|f32|f64)", "pred {2} {2}", _compared)
elementwise("setp.num.f32", "pred f32 f32", lambda: lambda a, b: (a == a) & (b == b))
elementwise("setp.(eq|ne|lt|le|gt|ge)(u?).(f16x2|bf16x2)", "pred|pred {2} {2}", _compared)  # of the lower half first
elementwise("mov.pred", "pred pred", lambda: np.asarray)
# or a vector's parts, the first the lowest
elementwise("mov.[bu](16|32|64)", "b{0}/ b{0}/", lambda bits: lambda held: held.reshape(-1))

# --- a warp -----------------------------------------------------------------------------------------------------------


@instruction("shfl.sync.(bfly|idx).b32", "b32 b32 u32 31 u32")
@instruction("shfl.sync.(up).b32", "b32 b32 u32 0 u32")
def shuffle(threads: Threads, mode: str, values: np.ndarray, by: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return another lane's value."""
    lanes, lane = threads.warps(members), np.arange(32, dtype=U32)
    step = by[lanes] & U32(31)
    other = {"bfly": lane ^ step, "idx": step, "up": np.where(lane < step, lane, lane - step)}[mode]
    return values[lanes[:, :1] + other]


REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of [warps, 32]
    "add": lambda values: values.sum(1, dtype=values.dtype),
    "min": lambda values: values.min(1),
    "max": lambda values: values.max(1),
    "max.f32": lambda values: _extremes("max")(*values.T),
    "max.abs.f32": lambda values: _extremes("max")(*np.abs(values).T),
    "ballot": lambda values: np.packbits(values, 1, "little").view(U32)[:, 0],  # a bit for each predicate that holds
}


@instruction("redux.sync.(add|min|max).([su]32)", "{1} {1} u32")
@instruction("redux.sync.(max.f32|max.abs.f32)", "f32 f32 u32")
@instruction("vote.sync.(ballot).b32", "b32 pred u32")
def reduce_warp(threads: Threads, name: str, *operands: Any) -> np.ndarray:
    """Return one number of a warp's lanes to all of them."""
    values, members = operands[-2:]
    return np.repeat(REDUCTIONS[name](values[threads.warps(members)]), 32)


@instruction("bar.warp.sync", "- u32")
def meet_in_warp(threads: Threads, members: np.ndarray) -> None:
    """Meet at a barrier of a warp's lanes, which run together: all are there."""
    threads.warps(members)


@instruction("elect.sync", "u32|pred u32")
def elect(threads: Threads, members: np.ndarray) -> np.ndarray:
    """Elect the lowest lane."""
    threads.warps(members)
    return np.stack([np.zeros(threads.count, U32), threads.lane == 0], 1)
