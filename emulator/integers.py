"""Instructions on integers, bits and predicates, moves and jumps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.machine import Mask, Threads, instruction, items, operand_type, reader, result, wide, write
from emulator.parse import Fault, Instruction, Program, Vector
from emulator.values import U32, U64, UNSIGNED, dtype_of, from_bf16

END, BARRIER, PAUSE = "end", "barrier", "pause"  # what a closure returns besides None, a place, or places


@instruction("ret", "exit", "bra", "brx", "bar", "barrier", "trap", "fence", "membar")
def control(program: Program, one: Instruction) -> Any:
    """Jumps, barriers of a whole program, and fences, which change nothing where memory is in order."""
    base = one.parts[0]
    if base in ("fence", "membar"):
        one.allow("proxy", "async", "cta", "cluster", "gl", "gpu", "sc", "acq_rel", "release", "acquire", "shared::cta")
        return lambda threads, mask: None
    if base == "trap":
        return _trap(one)
    one.allow("uni", "idx", "sync", "aligned", "warp")
    if base == "bra":
        place = program.labels[one.operands[0].name]
        return lambda threads, mask: place
    if base == "brx":
        return _indexed(program, one)
    if base in ("bar", "barrier"):
        if one.has("warp"):
            return lambda threads, mask: None
        if one.operands[0].value != 0 or (len(one.operands) > 1 and one.operands[1].value != program.threads):
            raise one.unsupported()
        return lambda threads, mask: BARRIER
    if base in ("ret", "exit"):
        return lambda threads, mask: END
    raise one.unsupported()


def _trap(one: Instruction) -> Any:
    def trap(threads: Threads, mask: Mask) -> None:
        raise Fault(f"trap: {one}")

    return trap


def _indexed(program: Program, one: Instruction) -> Any:
    read = reader(one, one.operands[0], "u", 32)
    places = np.array([program.labels[label] for label in program.tables[one.operands[1].name]])

    def jump(threads: Threads, mask: Mask) -> Any:
        chosen = places[np.minimum(wide(read(threads), threads.count), len(places) - 1)]
        live = chosen[threads.active(mask)]
        return int(live[0]) if (live == live[0]).all() else chosen

    return jump


@instruction("mov", "cvta")
def move(program: Program, one: Instruction) -> Any:
    """A register's bits, or the parts of one to a vector and back, the first the lowest."""
    one.allow("to", "global", "shared", "shared::cta")
    (target, source), (kind, bits) = one.operands, operand_type(one)
    if isinstance(target, Vector):
        read, part = reader(one, source, "b", bits), bits // len(target.items)

        def unpack(threads: Threads, mask: Mask) -> None:
            values = np.asarray(read(threads))
            for place, item in enumerate(target.items):
                write(threads, mask, item, (values >> UNSIGNED[bits](place * part)).astype(UNSIGNED[part]))

        return unpack
    if isinstance(source, Vector):
        part = bits // len(source.items)
        reads = [reader(one, item, "b", part) for item in source.items]

        def pack(threads: Threads) -> Any:
            shifted = [
                np.asarray(read(threads)).astype(UNSIGNED[bits]) << UNSIGNED[bits](place * part)
                for place, read in enumerate(reads)
            ]
            return np.bitwise_or.reduce(np.broadcast_arrays(*shifted))

        return result(target, pack)
    return result(target, reader(one, source, "p" if kind == "p" else "b", bits))


COMPARISONS = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
LOGIC: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def compare(name: str, a: Any, b: Any, is_float: bool) -> Any:
    """A comparison; of floats false for NaN, or true where its name ends with u."""
    if not is_float:
        return COMPARISONS[name](a, b)
    nan = (a != a) | (b != b)
    if name in ("num", "nan"):
        return nan if name == "nan" else ~nan
    if name.endswith("u"):
        return COMPARISONS[name[:-1]](a, b) | nan
    return COMPARISONS[name](a, b) & ~nan


@instruction("setp")
def set_predicate(program: Program, one: Instruction) -> Any:
    """A comparison; with a second target its negation, of packed floats the upper half's."""
    one.allow(*COMPARISONS, *(f"{name}u" for name in COMPARISONS), "num", "nan", *LOGIC)
    name, targets, given = one.parts[1], items(one.operands[0]), one.operands[1:]
    if one.parts[-1] in ("bf16x2", "f16x2"):
        if len(one.parts) != 3:
            raise one.unsupported()
        read_a, read_b = (reader(one, item, "b", 32) for item in given)

        def half(values: Any, place: int) -> Any:
            bits = np.atleast_1d(values >> U32(16 * place)).astype(np.uint16)
            return from_bf16(bits) if one.parts[-1] == "bf16x2" else bits.view(np.float16)

        def packed(threads: Threads, mask: Mask) -> None:
            a, b = read_a(threads), read_b(threads)
            for place, target in enumerate(targets):
                write(threads, mask, target, compare(name, half(a, place), half(b, place), True))

        return packed
    kind, bits = operand_type(one)
    read_a, read_b = (reader(one, item, kind, bits) for item in given[:2])
    join = LOGIC[one.parts[2]] if len(one.parts) == 4 else None
    read_c = reader(one, given[2], "p", 1) if join else None

    def single(threads: Threads, mask: Mask) -> None:
        found = compare(name, read_a(threads), read_b(threads), kind in "fB")
        for target, value in zip(targets, (found, ~np.asarray(found)), strict=False):
            write(threads, mask, target, join(value, read_c(threads)) if join and read_c else value)

    return single


@instruction("selp")
def select(program: Program, one: Instruction) -> Any:
    """One of two by a predicate."""
    one.allow()
    bits = operand_type(one)[1]
    read_a, read_b = (reader(one, item, "b", bits) for item in one.operands[1:3])
    read_p = reader(one, one.operands[3], "p", 1)
    return result(one.operands[0], lambda threads: np.where(read_p(threads), read_a(threads), read_b(threads)))


@instruction("and", "or", "xor", "not", "lop3")
def logic(program: Program, one: Instruction) -> Any:
    """Bit by bit; lop3 by its table."""
    one.allow()
    kind, bits = operand_type(one)
    target, *given = one.operands
    if one.parts[0] == "lop3":
        table = given.pop().value
        reads = [reader(one, item, "b", bits) for item in given]

        def by_table(threads: Threads) -> Any:
            a, b, c = (read(threads) for read in reads)
            out = np.zeros(threads.count, UNSIGNED[bits])
            for row in range(8):
                if table >> row & 1:
                    out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            return out

        return result(target, by_table)
    reads = [reader(one, item, "p" if kind == "p" else "b", bits) for item in given]
    if one.parts[0] == "not":
        return result(target, lambda threads: ~reads[0](threads))
    join = LOGIC[one.parts[0]]
    return result(target, lambda threads: join(reads[0](threads), reads[1](threads)))


@instruction("shl", "shr")
def shift(program: Program, one: Instruction) -> Any:
    """By up to all bits; signed to the right the sign comes in."""
    one.allow()
    kind, bits = operand_type(one)
    signed = one.parts[0] == "shr" and kind == "s"
    dtype = dtype_of("s" if signed else "u", bits)
    read_a = reader(one, one.operands[1], "s" if signed else "u", bits)
    read_b = reader(one, one.operands[2], "u", 32)
    move_bits = operator.rshift if one.parts[0] == "shr" else operator.lshift

    def shifted(threads: Threads) -> Any:
        by = read_b(threads)
        found = move_bits(read_a(threads), np.minimum(by, U32(bits - 1)).astype(dtype))
        return found if signed else np.where(by >= bits, dtype(0), found)

    return result(one.operands[0], shifted)


def quotient(a: Any, b: Any) -> Any:
    """Integer division toward zero; by zero all bits."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, np.ones_like(b), b)
    found = a // safe
    found = found + (((a % safe) != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, ~np.zeros_like(found), found).astype(a.dtype)


def high_half(a: Any, b: Any, kind: str, bits: int) -> Any:
    """The upper half of a product."""
    if bits < 64:
        wider = dtype_of(kind, 2 * bits)
        return ((np.asarray(a).astype(wider) * np.asarray(b).astype(wider)) >> wider(bits)).astype(dtype_of(kind, bits))
    a, b = (np.ascontiguousarray(value) for value in np.broadcast_arrays(a, b))
    x, y, low, half = a.view(U64), b.view(U64), U64(0xFFFFFFFF), U64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    found = x1 * y1 + (middle >> half) + ((x0 * y1 + (middle & low)) >> half)
    if kind == "s":
        found = found - np.where(a < 0, y, U64(0)) - np.where(b < 0, x, U64(0))
    return found.view(dtype_of(kind, 64))


TWO: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
}


def integer_arithmetic(one: Instruction) -> Any:
    """add, sub, mul, mad, div, rem, min, max, abs and neg of integers."""
    one.allow("lo", "hi", "wide", "relu")
    kind, bits = operand_type(one)
    base, out = one.parts[0], 2 * bits if one.has("wide") else bits
    dtype = dtype_of(kind, out)
    reads = [reader(one, item, kind, bits) for item in one.operands[1:3]]
    if base in ("abs", "neg"):
        change: Callable[..., Any] = np.abs if base == "abs" else operator.neg
        return result(one.operands[0], lambda threads: change(reads[0](threads)), kind)
    if base == "mad":
        read_c = reader(one, one.operands[3], kind, out)

    def two(threads: Threads) -> Any:
        a, b = (read(threads) for read in reads)
        if one.has("hi"):
            found = high_half(a, b, kind, bits)
        else:
            function = operator.mul if base == "mad" else TWO[base]
            found = function(np.asarray(a).astype(dtype), np.asarray(b).astype(dtype))
        if base == "mad":
            found = found + read_c(threads)
        return np.maximum(found, dtype(0)) if one.has("relu") else found

    return result(one.operands[0], two, kind)


@instruction("popc", "clz", "brev", "prmt", "bfe", "bfi", "shf")
def bit_fields(program: Program, one: Instruction) -> Any:
    """Counts of bits, permuted bytes, and fields."""
    one.allow("l", "r", "wrap", "clamp")
    kind, bits = operand_type(one)
    base, given = one.parts[0], one.operands[1:]
    if len(one.parts) != {"shf": 4}.get(base, 2):
        raise one.unsupported()
    reads = [
        reader(one, item, "b", bits if place < {"bfe": 1, "bfi": 2}.get(base, 3) else 32)
        for place, item in enumerate(given)
    ]

    def compute(threads: Threads) -> Any:
        values = [wide(read(threads), threads.count).astype(U64) for read in reads]
        if base == "shf":
            return _funnel(one.parts[1] == "l", one.has("clamp"), *values).astype(U32)
        if base in ("popc", "clz", "brev"):
            return _counted(base, values[0], bits)
        if base == "prmt":
            return _permuted(*values).astype(U32)
        return (_extracted(kind == "s", bits, *values) if base == "bfe" else _inserted(bits, *values)).astype(
            UNSIGNED[bits]
        )

    return result(one.operands[0], compute)


def _counted(base: str, value: Any, bits: int) -> Any:
    if base == "popc":
        return np.bitwise_count(value).astype(U32)
    if base == "clz":
        for by in (1, 2, 4, 8, 16, 32):
            value = value | (value >> U64(by))
        return (bits - np.bitwise_count(value)).astype(U32)
    out = np.zeros_like(value)
    for place in range(bits):
        out |= ((value >> U64(place)) & U64(1)) << U64(bits - 1 - place)
    return out.astype(UNSIGNED[bits])


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    both, out = a | (b << U64(32)), np.zeros_like(a)
    for place in range(4):
        chosen = (selector >> U64(4 * place)) & U64(15)
        byte = (both >> (U64(8) * (chosen & U64(7)))) & U64(255)
        sign = np.where(byte & U64(128), U64(255), U64(0))
        out |= np.where(chosen & U64(8), sign, byte) << U64(8 * place)
    return out


def _ones(length: Any) -> Any:
    """As many low bits set, up to 64."""
    return np.where(length >= 64, ~U64(0), (U64(1) << np.minimum(length, U64(63))) - U64(1))


def _extracted(signed: bool, bits: int, value: Any, start: Any, length: Any) -> Any:
    start, length, top = start & U64(255), length & U64(255), U64(bits - 1)
    kept = np.minimum(length, np.where(start > top, U64(0), U64(bits) - np.minimum(start, U64(bits))))
    found = np.where(start > top, U64(0), value >> np.minimum(start, U64(63))) & _ones(kept)
    if signed:
        last = np.minimum(start + np.maximum(length, U64(1)) - U64(1), top)
        negative = (length > 0) & ((value >> last) & U64(1) == 1)
        found = np.where(negative, found | ~_ones(kept), found)
    return found


def _inserted(bits: int, field: Any, into: Any, start: Any, length: Any) -> Any:
    start = np.minimum(start & U64(255), U64(bits))
    mask = _ones(np.minimum(length & U64(255), U64(bits) - start))
    mask = np.where(start >= 64, U64(0), mask << np.minimum(start, U64(63)))
    return (into & ~mask) | ((field << np.minimum(start, U64(63))) & mask)


def _funnel(left: bool, clamps: bool, low: Any, high: Any, by: Any) -> Any:
    by = np.minimum(by, U64(32)) if clamps else by & U64(31)
    both = low | (high << U64(32))
    return (both << by) >> U64(32) if left else both >> by
