from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.ptx import compute, launch

COUNT = 400
TYPES = ["s16", "u16", "s32", "u32", "s64", "u64"]


def numbers(kind: str, seed: int) -> np.ndarray:
    """Random numbers of every length, and the ends."""
    bits, random = int(kind[1:]), np.random.default_rng(seed)
    values = random.integers(0, 1 << 63, COUNT, dtype=np.uint64) << np.uint64(1) | np.uint64(seed & 1)
    values = (values >> random.integers(0, 64, COUNT, np.uint64)) * random.choice([1, -1], COUNT).astype(np.uint64)
    ends = np.array([0, 1, -1, 2, (1 << bits - 1) - 1, -(1 << bits - 1), 1 << (bits // 2)], object) & ((1 << bits) - 1)
    values[: ends.size] = random.permutation(ends).astype(np.uint64)
    return values.astype(f"u{bits // 8}")


def signed(value: int, kind: str) -> int:
    """A number of ``bits`` bits as its type reads it."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def holds(name: str, kinds: str, function: Callable[..., int], *inputs: Any) -> None:
    """Check that the instruction's bits are those of ``function``; kinds: of the result and the operands."""
    to, *kinds_of_operands = kinds.split()
    got = compute(name, *inputs, out=f"u{int(to[1:]) // 8}")
    columns = [[one] * COUNT if isinstance(one, int) else one.tolist() for one in inputs]
    for row, *values in zip(got.tolist(), *columns, strict=True):
        numbers = [signed(value, kind) for value, kind in zip(values, kinds_of_operands, strict=True)]
        assert row == function(*numbers) & ((1 << int(to[1:])) - 1), (name, numbers)


def quotient(a: int, b: int) -> int:
    """Toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


FOUR, NARROW, PLAIN = ["s32", "u32", "s64", "u64"], ["s16", "u16", "s32", "u32"], ["u16", "u32", "u64"]
# instructions by type, {k}, of which {n} are the bits and {w} the type twice as wide; kinds as ``holds`` takes them
OPERATIONS: list[tuple[str, str, Callable[..., int], list[str]]] = [
    *((f"{name}.{{k}}", "{k} {k} {k}", getattr(operator, name), TYPES) for name in ("add", "sub")),
    *((f"{name}.b{{n}}", "{k} {k} {k}", getattr(operator, f"{name}_"), PLAIN) for name in ("and", "or")),
    ("xor.b{n}", "{k} {k} {k}", operator.xor, PLAIN),
    ("not.b{n}", "{k} {k}", operator.invert, PLAIN),
    ("mul.lo.{k}", "{k} {k} {k}", operator.mul, TYPES),
    ("mul.hi.{k}", "{k} {k} {k}", lambda x, y: x * y >> 32, ["s32", "u32"]),
    ("mul.wide.{k}", "{w} {k} {k}", operator.mul, NARROW),
    ("mad.lo.{k}", "{k} {k} {k} {k}", lambda x, y, z: x * y + z, FOUR),
    ("mad.wide.{k}", "{w} {k} {k} {w}", lambda x, y, z: x * y + z, NARROW),
    ("div.{k}", "{k} {k} {k}", quotient, FOUR),
    *((f"{name}.{{k}}", "{k} {k} {k}", function, TYPES) for name, function in (("min", min), ("max", max))),
    ("neg.{k}", "{k} {k}", operator.neg, ["s32", "s64"]),
    ("abs.{k}", "{k} {k}", abs, ["s32", "s64"]),
    ("popc.b32", "{k} {k}", int.bit_count, ["u32"]),
]


@pytest.mark.parametrize(
    ("name", "kinds", "function", "kind"), [(*operation, kind) for *operation, types in OPERATIONS for kind in types]
)
def test_what_an_instruction_computes(name: str, kinds: str, function: Callable[..., int], kind: str) -> None:
    bits = int(kind[1:])
    kinds = kinds.format(k=kind, w=f"{kind[0]}{2 * bits}")
    operands = [numbers(each, seed) for seed, each in enumerate(kinds.split()[1:], 1)]
    if name.startswith("div"):
        operands[1][operands[1] == 0] = 3
    holds(name.format(k=kind, n=bits), kinds, function, *operands)


@pytest.mark.parametrize("kind", TYPES)
def test_shifts(kind: str) -> None:
    a, bits = numbers(kind, 1), int(kind[1:])
    for by in (np.arange(COUNT, dtype=np.uint32) % 70, np.full(COUNT, 0xFFFFFFFF, np.uint32)):
        holds(f"shl.b{bits}", f"u{bits} u{bits} u32", lambda x, n: x << n if n < bits else 0, a, by)
        holds(f"shr.{kind}", f"{kind} {kind} u32", lambda x, n: x >> min(n, bits), a, by)


def extracted(a: int, start: int, length: int, kind: str) -> int:
    """The manual's words: bits beyond the number are its sign's, which is 0 for unsigned ones and of length 0."""
    start, length = start & 255, length & 255
    if length == 0:
        return 0
    sign = a >> min(start + length - 1, 31) & 1 if kind[0] == "s" else 0
    field = 0
    for place in range(32):
        inside = place < length and start + place < 32
        field |= (a >> (start + place) & 1 if inside else sign) << place
    return field


def inserted(a: int, b: int, start: int, length: int) -> int:
    for place in range(min(length & 255, max(32 - (start & 255), 0))):
        at = (start & 255) + place
        b = b & ~(1 << at) | (a >> place & 1) << at
    return b


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_fields(kind: str) -> None:
    random = np.random.default_rng(3)
    start, length = random.choice([0, 1, 5, 16, 31, 32, 33, 63, 64, 255, 256], (2, COUNT)).astype(np.uint32)
    a, b = numbers(kind, 1), numbers(kind, 2)
    holds(f"bfe.{kind}", "u32 u32 u32 u32", lambda *operands: extracted(*operands, kind), a, start, length)
    holds("bfi.b32", "u32 u32 u32 u32 u32", inserted, a, b, start, length)


def permuted(a: int, b: int, selector: int) -> int:
    both = (a | b << 32).to_bytes(8, "little")
    chosen_bytes = []
    for place in range(4):
        chosen = selector >> 4 * place & 15
        byte = both[chosen & 7]
        chosen_bytes.append((255 if byte & 128 else 0) if chosen & 8 else byte)
    return int.from_bytes(bytes(chosen_bytes), "little")


def test_permuted_bytes() -> None:
    a, b, c = (numbers("u32", seed) for seed in (1, 2, 3))
    holds("prmt.b32", "u32 u32 u32 u32", permuted, a, b, c)
    holds("prmt.b32", "u32 u32 u32 u32", permuted, a, b, 0x7531)


def test_funnel_shift() -> None:
    a, b, by = numbers("u32", 1), numbers("u32", 2), np.arange(COUNT, dtype=np.uint32) % 70
    holds("shf.l.wrap.b32", "u32 u32 u32 u32", lambda x, y, n: (x | y << 32) << (n & 31) >> 32, a, b, by)


COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


@pytest.mark.parametrize("kind", [*TYPES, "b16", "b32", "b64"])
def test_comparisons(kind: str) -> None:
    a, b = (numbers(f"u{kind[1:]}", seed) for seed in (1, 2))
    b[::3] = a[::3]
    for name in ("eq", "ne") if kind[0] == "b" else COMPARED:
        got = compute(f"setp.{name}.{kind}", a, b, out=bool)
        want = [COMPARED[name](signed(x, kind), signed(y, kind)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert got.tolist() == want, name


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_selection(bits: int) -> None:
    a, b = numbers(f"u{bits}", 1), numbers(f"u{bits}", 2)
    letter = {16: "h", 32: "r", 64: "d"}[bits]
    name = f"setp.lt.u{bits} %p2, %{letter}1, %{letter}2; selp.b{bits}"
    assert (compute(name, a, b, form="{d}, {s}, %p2") == np.where(a < b, a, b)).all()


def test_vectors_of_registers() -> None:
    a, b = numbers("u32", 1), numbers("u32", 2)
    both = compute("mov.b64", a, b, form="{d}, {{{s}}}", out=np.uint64)
    assert (both == (b.astype(np.uint64) << np.uint64(32) | a)).all()
    low, high = (compute("mov.b32", a, form=form, out=np.uint16) for form in ("{{{d}, _}}, {s}", "{{_, {d}}}, {s}"))
    assert (low == a & 0xFFFF).all() and (high == a >> 16).all()


def test_constants() -> None:
    a = numbers("u32", 1)
    assert (compute("add.s32", a, -7) == a - np.uint32(7)).all()
    assert (compute("mov.b32", a, form="{d}, 0f3F800000") == np.float32(1).view(np.uint32)).all()
    assert (compute("mov.b32", a, form="{d}, 0x12") == 18).all()


def test_a_vector_s_part_is_a_register_like_any_other() -> None:
    """Read again as two halves, where it came from a vector load that all threads make."""
    data, out = numbers("u64", 1)[:64].copy(), np.zeros(64, np.uint32)
    launch(
        """mul.wide.u32 %d9, %n, 16; add.s64 %d9, %d9, %a0; ld.global.v2.b64 {%d1, %d2}, [%d9];
        mov.b64 {%r1, %r2}, %d2; mul.wide.u32 %d9, %n, 8; add.s64 %d9, %d9, %a1; st.global.v2.b32 [%d9], {%r1, %r2};""",
        data,
        out,
    )
    assert (out.view(np.uint64) == data[1::2]).all()
