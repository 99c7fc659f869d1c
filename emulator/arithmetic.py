"""Instructions that compute each lane's result from its operands: floats, conversions, integers, bits, predicates."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

import emulator.values as numbers
from emulator.machine import Mask, Run, Threads, check_target, elementwise, instruction, reader, wide, write
from emulator.parse import Instruction, Program
from emulator.values import TYPES, U32, U64, UNSIGNED, canonical, extreme

Function = Callable[..., Any]
OPERATORS: dict[str, Function] = {
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "xor", "neg")
    },
    "mul.lo": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "min": np.minimum,
    "max": np.maximum,
    "div": np.divide,
    "rem": np.fmod,
    "sqrt": np.sqrt,
    "abs": np.abs,
}

# --- floats -----------------------------------------------------------------------------------------------------------


def _rounded(name: str, *kind: str) -> Function:
    """An operator's result, rounded by NumPy as IEEE 754 asks, with the canonical NaN."""
    function = OPERATORS[name]
    return lambda *values: canonical(function(*values))


def _magnitudes(name: str) -> Function:
    """min or max of the magnitudes, NaN if one is, with the product's sign."""

    def find(a: Any, b: Any) -> Any:
        found = extreme(np.abs(a), np.abs(b), name == "min", True)
        sign = np.where(found != found, U32(0), (a.view(U32) ^ b.view(U32)) & U32(1 << 31))
        return found.view(U32) | sign

    return find


def _signs(name: str, bits: str) -> Function:
    """abs, neg and copysign only move sign bits, and so keep NaN as it is."""
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


def _extremes(name: str, nan: str | None) -> Function:
    """Of two numbers, or on Blackwell three."""
    return lambda *given: functools.reduce(lambda a, b: extreme(a, b, name == "min", bool(nan)), given)


elementwise("(min|max)(.NaN)?.f32", "f32 f32 f32 f32", _extremes, fewest=3)
elementwise("(min|max).NaN.xorsign.abs.f32", "f32 f32 f32", _magnitudes)
elementwise("(abs|neg).f(32|64)", "b{1} b{1}", _signs)
elementwise("(copysign).f(32)", "b32 b32 b32", _signs)
elementwise("abs.(?:bf16x2|f16x2)", "b32 b32", lambda: lambda a: a & U32(0x7FFF7FFF))


@instruction("(ex2|rcp).approx.ftz.f32")
def approximation(program: Program, one: Instruction, name: str) -> Run:
    """With an error that the launch chooses."""
    target, source = one.operands
    read = reader(one, source, "f32")

    def run(threads: Threads, mask: Mask) -> None:
        write(threads, mask, target, numbers.approximate(name, read(threads), threads.launch.options.approximation))

    return run


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
    """Two float32 to narrower ones in one register; the first is the upper."""
    return lambda high, low: NARROW[name](np.stack(np.broadcast_arrays(low, high), -1).reshape(-1))


elementwise("cvt.rn.(bf16|f16).f32", "{0} f32", NARROW.get)
elementwise("cvt.rz.f16.f32", "f16 f32", lambda: numbers.to_f16_toward_zero)
elementwise("cvt.rn.(bf16|f16)x2.f32", "{0}x2 f32 f32", _pair)
elementwise("cvt.rn.satfinite.(e4m3|e5m2)x2.f32", "{0}x2 f32 f32", _pair)
elementwise("cvt.rn.satfinite.(e4m3|e5m2)x2.f16x2", "{0}x2 f16x2", NARROW.get)
elementwise("cvt.rn.f16x2.(e4m3|e5m2)x2", "f16x2 {0}x2", lambda kind: lambda codes: numbers.FP8_AS_F16[kind][codes])
elementwise("cvt.(f32).(f16|bf16)", "f32 {1}", _to)
elementwise("cvt.(f64).f32", "f64 f32", _to)
elementwise("cvt.rn.(f32).f64", "f32 f64", _to)
elementwise("cvt.rn.(f32|f64).([su]32|[su]64)", "{0} {1}", _to)
elementwise("cvt.rzi.s64.f32", "s64 f32", lambda: numbers.to_s64)
elementwise("cvt.([su](?:8|16|32|64)).([su](?:8|16|32|64))", "{0} {1}", _to)

# --- integers ---------------------------------------------------------------------------------------------------------


def _quotient(kind: str) -> Function:
    """Toward zero; by zero all bits."""

    def divide(a: Any, b: Any) -> Any:
        safe = np.where(b == 0, np.ones_like(b), b)
        return np.where(
            b == 0, TYPES[kind](-1 if kind[0] == "s" else ~0 & (1 << int(kind[1:])) - 1), (a - np.fmod(a, safe)) // safe
        )

    return divide


def _product(kind: str) -> Function:
    """All of it, in a type of twice the bits."""
    return lambda a, b: np.multiply(a, b, dtype=TYPES[f"{kind}w"])


def _high(kind: str) -> Function:
    """The upper half of a product."""
    return lambda a, b: (_product(kind)(a, b) >> 32).astype(TYPES[kind])


def _shift(name: str, kind: str) -> Function:
    """By up to all bits; signed ones to the right bring in the sign."""
    move, dtype, bits = operator.rshift if name == "shr" else operator.lshift, TYPES[kind], int(kind[1:])

    def shift(a: Any, by: Any) -> Any:
        found = move(a, np.minimum(by, U32(bits - 1)).astype(dtype))
        return found if kind[0] == "s" else np.where(by >= bits, dtype(0), found)

    return shift


INTEGER = "([su]16|[su]32|[su]64)"
elementwise(f"(add|sub|mul.lo|min|max).{INTEGER}", "{1} {1} {1}", lambda name, kind: OPERATORS[name])
elementwise(f"(neg|abs).{INTEGER}", "{1} {1}", lambda name, kind: OPERATORS[name])
elementwise("(min|max).relu.s32", "s32 s32 s32", lambda name: lambda a, b: np.maximum(OPERATORS[name](a, b), 0))
elementwise("div.([su]32|[su]64)", "{0} {0} {0}", _quotient)
elementwise("(rem).([su]32|[su]64)", "{1} {1} {1}", lambda name, kind: OPERATORS[name])
elementwise(f"mad.lo.{INTEGER}", "{0} {0} {0} {0}", lambda kind: lambda a, b, c: a * b + c)
elementwise("mul.hi.(s32|u32)", "{0} {0} {0}", _high)
elementwise("mul.wide.([su]16|[su]32)", "{0}w {0} {0}", _product)
elementwise("mad.wide.([su]16|[su]32)", "{0}w {0} {0} {0}w", lambda kind: lambda a, b, c: _product(kind)(a, b) + c)
elementwise("(shl).b(16|32|64)", "u{1} u{1} u32", lambda name, bits: _shift(name, f"u{bits}"))
elementwise(f"(shr).{INTEGER}", "{1} {1} u32", _shift)

# --- bits and predicates ----------------------------------------------------------------------------------------------


def _extracted(sign: str) -> Function:
    """``length`` bits from ``start`` of 32; those beyond the number are its highest, or of unsigned ones 0."""

    def extract(value: Any, start: Any, length: Any) -> Any:
        start, length = np.minimum(start & U32(255), U32(32)), np.minimum(length & U32(255), U32(32))
        left = U32(64) - start - length  # above the field, of 64 bits
        found = (value.astype(TYPES[f"{sign}64"]) << left) >> (U32(64) - length)
        return np.where(length == 0, 0, found).astype(TYPES[f"{sign}32"])

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
elementwise("(and|or|xor).(b16|b32|b64|pred)", "{1} {1} {1}", lambda name, kind: OPERATORS[name])
elementwise("(not).(b16|b32|b64|pred)", "{1} {1}", lambda name, kind: OPERATORS[name])
elementwise("selp.[bf](16|32|64)", "b{0} b{0} b{0} pred", lambda bits: lambda a, b, which: np.where(which, a, b))


def _compared(name: str, unordered: str, kind: str) -> Function:
    """A comparison; of floats false for NaN, or true where its name ends with u."""
    if name in ("num", "nan"):
        return lambda a, b: ((a != a) | (b != b)) ^ (name == "num")
    function = OPERATORS[name]
    if kind[0] in "sub" and kind[1].isdigit():
        return function
    if unordered:
        return lambda a, b: function(a, b) | (a != a) | (b != b)
    return (lambda a, b: function(a, b) & (a == a) & (b == b)) if name == "ne" else function


elementwise("setp.(eq|ne)().(b16|b32|b64)", "pred {2} {2}", _compared)
elementwise(f"setp.(eq|ne|lt|le|gt|ge)().{INTEGER}", "pred {2} {2}", _compared)
elementwise("setp.(eq|ne|lt|le|gt|ge)(u?).(f16|bf16|f32|f64)", "pred {2} {2}", _compared)
elementwise("setp.(num|nan)().(f16|bf16|f32|f64)", "pred {2} {2}", _compared)


elementwise("setp.(eq|ne|lt|le|gt|ge)(u?).(f16x2|bf16x2)", "pred|pred {2} {2}", _compared)  # of the lower half first


@instruction("mov.(?:[bu](16|32|64)|(pred))")
def move(program: Program, one: Instruction, digits: str | None, is_predicate: str | None) -> Run:
    """A register's bits, or the parts of one to a vector and back, the first the lowest."""
    (target, source), bits = one.operands, int(digits or 1)
    into, parts = (bits // len(operand) if isinstance(operand, list) else bits for operand in (target, source))
    read, dtype = reader(one, source, "pred" if is_predicate else f"b{parts}"), UNSIGNED[into]
    check_target(one, target, "pred" if is_predicate else f"b{into}")
    if parts == into:
        return lambda threads, mask: write(threads, mask, target, read(threads))

    def run(threads: Threads, mask: Mask) -> None:
        write(threads, mask, target, wide(read(threads), threads.count).reshape(-1).view(dtype))

    return run
