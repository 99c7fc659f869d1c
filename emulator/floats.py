"""Instructions on floating-point numbers, and every conversion."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.integers import integer_arithmetic
from emulator.machine import Threads, instruction, reader, result, wide
from emulator.parse import Instruction, Program
from emulator.values import (
    APPROXIMATE,
    FLOAT,
    FP8,
    MAGNITUDES,
    NAN,
    U16,
    U32,
    U64,
    UNSIGNED,
    WHOLE,
    approximate,
    bf16_of_wide,
    canonical,
    dtype_of,
    extreme,
    fma32,
    fma64,
    from_bf16,
    to_bf16,
    to_f16,
    to_fp8,
    to_integer,
)

TWO: dict[str, Callable[..., Any]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": np.divide}


@instruction("add", "sub", "mul", "mad", "div", "rem", "min", "max", "abs", "neg", "fma", "copysign", *APPROXIMATE)
def arithmetic(program: Program, one: Instruction) -> Any:
    """By the type that the name ends with."""
    kind = one.parts[-1]
    if kind[0] in "us" and kind[1:].isdigit():
        return integer_arithmetic(one)
    if kind == "f32x2":
        return _pairs(one)
    if kind in ("bf16x2", "f16x2", "bf16", "f16"):
        return _mixed(one) if one.parts[-2] == "f32" else _halves(one, kind)
    if kind not in ("f32", "f64"):
        raise one.unsupported()
    return _floats(one, int(kind[1:]))


def _sign(one: Instruction, bits: int, signs: int) -> Any:
    """abs, neg and copysign, which only move sign bits and so keep NaN as it is."""
    one.allow()
    sign, base = UNSIGNED[bits](signs), one.parts[0]
    reads = [reader(one, item, "b", bits) for item in one.operands[1:]]
    if base == "abs":
        return result(one.operands[0], lambda threads: reads[0](threads) & ~sign)
    if base == "neg":
        return result(one.operands[0], lambda threads: reads[0](threads) ^ sign)
    return result(one.operands[0], lambda threads: (reads[0](threads) & sign) | (reads[1](threads) & ~sign))


def _floats(one: Instruction, bits: int) -> Any:
    base = one.parts[0]
    if base in ("abs", "neg", "copysign"):
        return _sign(one, bits, 1 << (bits - 1))
    reads = [reader(one, item, "f", bits) for item in one.operands[1:]]
    if base in ("min", "max"):
        return _extremes(one, bits, reads)
    if one.has("approx", "full"):
        one.allow("approx", "full", "ftz")
        if bits != 32 or base not in APPROXIMATE:
            raise one.unsupported()

        def approximated(threads: Threads) -> Any:
            error = threads.launch.options.approximation
            return approximate(base, one.has("ftz"), error, *(read(threads) for read in reads))

        return result(one.operands[0], approximated)
    one.allow("rn")
    functions: dict[str, Any] = {"fma": fma32 if bits == 32 else fma64, "sqrt": np.sqrt, "rcp": lambda x: 1 / x} | TWO
    if base not in functions or (base in ("sqrt", "rcp", "div") and not one.has("rn")):
        raise one.unsupported()
    return result(one.operands[0], lambda threads: canonical(functions[base](*(read(threads) for read in reads))))


def _extremes(one: Instruction, bits: int, reads: Any) -> Any:
    one.allow("NaN", "xorsign", "abs")
    least, keeps, sign = one.parts[0] == "min", one.has("NaN"), UNSIGNED[bits](1 << (bits - 1))

    def find(threads: Threads) -> Any:
        first, *rest = (np.atleast_1d(read(threads)) for read in reads)
        for other in rest:
            if one.has("abs"):
                signs = (first.view(UNSIGNED[bits]) ^ other.view(UNSIGNED[bits])) & sign
                found = extreme(np.abs(first), np.abs(other), least, keeps)
                first = np.where(found != found, found.view(UNSIGNED[bits]), found.view(UNSIGNED[bits]) | signs)
                first = first.view(found.dtype)
            else:
                first = extreme(first, other, least, keeps)
        return first

    return result(one.operands[0], find)


def _pairs(one: Instruction) -> Any:
    """Two float32 in 64 bits."""
    one.allow("rn")
    function = (TWO | {"fma": fma32}).get(one.parts[0])
    if function is None or one.parts[0] == "div":
        raise one.unsupported()
    reads = [reader(one, item, "b", 64) for item in one.operands[1:]]

    def both(threads: Threads) -> Any:
        values = [wide(read(threads), threads.count).view(np.float32).reshape(-1, 2) for read in reads]
        return canonical(function(*values)).view(U64).reshape(-1)

    return result(one.operands[0], both)


def _mixed(one: Instruction) -> Any:
    """A 16-bit operand, widened, and float32: add.f32.bf16 and its like."""
    one.allow("rn")
    function: Any = {"add": operator.add, "sub": operator.sub, "fma": fma32}.get(one.parts[0])
    if function is None:
        raise one.unsupported()
    *narrow, last = one.operands[1:]
    kind = "B" if one.parts[-1] == "bf16" else "f"
    reads = [*(reader(one, item, kind, 16) for item in narrow), reader(one, last, "f", 32)]

    def compute(threads: Threads) -> Any:
        return canonical(function(*(np.asarray(read(threads)).astype(np.float32) for read in reads)))

    return result(one.operands[0], compute)


def _halves(one: Instruction, kind: str) -> Any:
    """16-bit floats, alone or two in 32 bits: computed in float64, where sums and products of them are exact enough."""
    is_bf16, bits = kind.startswith("bf16"), 32 if kind.endswith("x2") else 16
    base = one.parts[0]
    if base in ("abs", "neg"):
        return _sign(one, bits, 0x80008000 & ((1 << bits) - 1))
    one.allow("rn", "NaN")
    functions: dict[str, Callable[..., Any]] = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "fma": lambda x, y, z: x * y + z,
        **{name: lambda x, y, least=name == "min": extreme(x, y, least, one.has("NaN")) for name in ("min", "max")},
    }
    if base not in functions:
        raise one.unsupported()
    reads = [reader(one, item, "b", bits) for item in one.operands[1:]]

    def compute(threads: Threads) -> Any:
        given = (wide(read(threads), threads.count).view(U16) for read in reads)
        values = [(from_bf16(v) if is_bf16 else v.view(np.float16)).astype(np.float64) for v in given]
        found = functions[base](*values)
        return (bf16_of_wide(found) if is_bf16 else to_f16(found)).view(UNSIGNED[bits])

    return result(one.operands[0], compute)


# --- conversions ------------------------------------------------------------------------------------------------------


def _f16_of(element: str) -> np.ndarray:
    found = FP8[element].astype(np.float16).view(U16)
    found[np.isnan(FP8[element])] = NAN[16]
    return found


FP8_AS_F16 = {element: _f16_of(element) for element in MAGNITUDES}


@instruction("cvt")
def convert(program: Program, one: Instruction) -> Any:
    """cvt.rounding.to.from."""
    to, given = one.parts[-2:]
    if to.removesuffix("x2") in MAGNITUDES or given.removesuffix("x2") in MAGNITUDES:
        return _fp8(one, to, given)
    if to in ("bf16x2", "f16x2") and given == "f32":
        one.allow("rn", "rz")
        narrow, mode = to_bf16 if to == "bf16x2" else to_f16, one.one_of(("rn", "rz"))
        high, low = (reader(one, item, "f", 32) for item in one.operands[1:])

        def pack(threads: Threads) -> Any:
            upper, lower = (narrow(wide(read(threads), threads.count), mode) for read in (high, low))
            return (upper.astype(U32) << U32(16)) | lower

        return result(one.operands[0], pack)
    (kind, bits), (source_kind, source_bits) = _kind(to), _kind(given)
    read = reader(one, one.operands[1], source_kind, source_bits)
    change, sign = _conversion(one, kind, bits, source_kind, source_bits)
    return result(one.operands[0], lambda threads: change(wide(read(threads), threads.count)), sign)


def _kind(name: str) -> tuple[str, int]:
    return ("B", 16) if name == "bf16" else (name[0], int(name[1:]))


def _conversion(one: Instruction, kind: str, bits: int, source_kind: str, source_bits: int) -> tuple[Any, str]:
    """(of an array, how to extend it) of a conversion between numbers of one element."""
    dtype = dtype_of("u" if kind in "bB" else kind, bits)
    if kind in "us" and source_kind in "us":
        one.allow()
        return (lambda values: values.astype(dtype)), kind
    if kind in "us":
        one.allow(*WHOLE)
        whole = WHOLE[one.one_of(WHOLE)]
        return (lambda values: to_integer(whole(values), kind, bits)), kind
    if source_kind in "us":
        one.allow("rn")
        if kind == "B":
            raise one.unsupported()
        return (lambda values: values.astype(dtype)), "b"
    one.allow("rn", "rz", *WHOLE)
    if one.has(*WHOLE):
        if kind != "f" or bits != source_bits:
            raise one.unsupported()
        return (lambda values: canonical(WHOLE[one.one_of(WHOLE)](values))), "b"
    if bits == 16:
        mode = one.one_of(("rn", "rz"))
        if source_bits != 32:
            raise one.unsupported()
        return (lambda values: (to_bf16 if kind == "B" else to_f16)(values, mode)), "b"
    if one.has("rz"):
        raise one.unsupported()
    return (lambda values: canonical(values.astype(FLOAT[bits]))), "b"


def _fp8(one: Instruction, to: str, given: str) -> Any:
    """To a pair of codes, saturated, of two float32 or a pair of float16; and from a pair of codes to float16."""
    one.allow("rn", "satfinite", to, given)
    if to == "f16x2":
        read, table = reader(one, one.operands[1], "b", 16), FP8_AS_F16[given.removesuffix("x2")]

        def widen(threads: Threads) -> Any:
            codes = wide(read(threads), threads.count).view(np.uint8)
            return table[codes].view(U32)

        return result(one.operands[0], widen)
    if not one.has("satfinite") or given not in ("f32", "f16x2"):
        raise one.unsupported()
    element = to.removesuffix("x2")
    if given == "f16x2":
        read = reader(one, one.operands[1], "b", 32)

        def narrow(threads: Threads) -> Any:
            pairs = wide(read(threads), threads.count).view(np.float16)
            return to_fp8(pairs, element).astype(np.uint8).view(U16)

        return result(one.operands[0], narrow)
    high, low = (reader(one, item, "f", 32) for item in one.operands[1:])

    def join(threads: Threads) -> Any:
        upper, lower = (to_fp8(wide(read(threads), threads.count), element) for read in (high, low))
        return (upper << U16(8)) | lower

    return result(one.operands[0], join)
