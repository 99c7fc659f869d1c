"""PTX text to instructions: one kernel a module, as Triton emits it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

BITS = {
    **{f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)},
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "f32": 32,
    "f32x2": 64,
    "f64": 64,
    "b128": 128,
    "pred": 1,
}
SPECIAL = {"tid", "ntid", "ctaid", "nctaid", "laneid", "warpid", "globaltimer", "clock", "clock64", "smid"}


class Unsupported(RuntimeError):
    """An instruction, a modifier or an operand that is not modelled; nothing is guessed."""


class Fault(RuntimeError):
    """What a GPU would fault at or leave undefined: an access out of bounds, a race, a barrier that not all reach."""


class Register(NamedTuple):
    """A register's number among the program's, and its bits; of a predicate 1."""

    number: int
    bits: int


class Constant(NamedTuple):
    """A number as its bits, negative ones in two's complement; a float only where it is written in decimal."""

    value: int | float


class Special(NamedTuple):
    """%tid.x and its like."""

    name: str
    dimension: str


class Symbol(NamedTuple):
    """A parameter, a label, or a variable in shared or constant memory."""

    name: str


class Address(NamedTuple):
    """[base + offset], in bytes."""

    base: Any
    offset: int


class Vector(NamedTuple):
    """{a, b, ...}; ``a|b`` too."""

    items: tuple[Any, ...]


class Negated(NamedTuple):
    """A predicate, negated."""

    register: Any


SINK = Symbol("_")


@dataclass(slots=True, eq=False)
class Instruction:
    """One line: ``@guard name operands;``. ``run`` is its closure, made at the program's first launch."""

    name: str
    operands: list[Any]
    guard: Register | None
    negated: bool
    text: str
    line: int
    parts: list[str] = field(init=False)  # the name, split at its points
    used: frozenset[int] = frozenset()  # the numbers of all registers in it
    run: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.parts = self.name.split(".")

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"

    def has(self, *modifiers: str) -> bool:
        """Whether one of these modifiers is there."""
        return any(modifier in self.parts for modifier in modifiers)

    def one_of(self, choices: Any) -> Any:
        """The one modifier of these that is there."""
        found = [part for part in self.parts[1:] if part in choices]
        if len(found) != 1:
            raise self.unsupported()
        return found[0]

    def allow(self, *modifiers: str) -> None:
        """Raise Unsupported for a modifier that is neither one of these nor a type."""
        if strange := [part for part in self.parts[1:] if part not in modifiers and part not in BITS]:
            raise self.unsupported(f".{strange[0]}")

    def unsupported(self, what: str = "") -> Unsupported:
        """The error to raise."""
        return Unsupported(f"{what} {self}".strip())


def split(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    found, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [part.strip() for part in found if part.strip()]


class Program:
    """A kernel: its instructions and labels, its parameters' places, its variables.

    Attributes:
        name: the kernel's.
        target: ``sm_90a`` and its like.
        threads: of a program (a thread block).
        instructions: in their order; ``labels`` and ``tables`` say where jumps lead.
        parameters: bytes of each, in their order, by name.
        constants: uint8 arrays, by name.
        registers: bits of each.
    """

    def __init__(self, text: str) -> None:
        source = re.sub(r"//[^\n]*", "", text)
        head = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", source, re.S)
        threads = head and re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head[3])
        target = re.search(r"\.target\s+(\w+)", source)
        if not head or not threads or not target:
            raise Unsupported("no kernel with a known number of threads in this text")
        self.name, self.target, self.threads = head[1], target[1], int(threads[1])
        self.parameters: dict[str, int] = {}
        for parameter in split(head[2]):
            found = re.fullmatch(r"\.param\s+\.(\w+).*?([\w$]+)(?:\[(\d+)\])?", parameter, re.S)
            if not found:
                raise Unsupported(parameter)
            self.parameters[found[2]] = BITS[found[1]] // 8 * int(found[3] or 1)
        end = _end_of_block(source, head.end() - 1)
        self.shared: set[str] = set()
        self.constants: dict[str, np.ndarray] = {}
        self._variables(source[: head.start()] + source[end:])
        self._bits: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self._body(source[head.end() : end], source.count("\n", 0, head.end()) + 1)
        self.registers = [self._bits[name] for name in self._numbers]

    def _variables(self, module: str) -> None:
        pattern = r"\.(global|const|shared)\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)\[(\d*)\]\s*(?:=\s*\{([^}]*)\})?"
        for space, kind, name, size, values in re.findall(pattern, module):
            if space == "shared":
                self.shared.add(name)
                continue
            given = [int(value) & 255 for value in values.split(",") if value.strip()]
            if BITS[kind] != 8:
                raise Unsupported(f"constants of .{kind}")
            self.constants[name] = np.array(given + [0] * (int(size or len(given)) - len(given)), np.uint8)
        if len(self.shared) > 1:
            raise Unsupported(f"several variables in shared memory: {self.shared}")

    def _body(self, body: str, line: int) -> None:
        """Statements, each with the line where it begins; braces inside a statement are a vector's."""
        statement, began = "", line
        for character in re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*", "", body, flags=re.M):
            line += character == "\n"
            if not statement.strip():
                statement, began = "", line
                if character in "{}":
                    continue
            if character == ";":
                self._statement(" ".join(statement.split()), began)
                statement = ""
            elif character == ":" and re.fullmatch(r"\s*[\w$]+", statement):
                self.labels[statement.strip()] = len(self.instructions)
                statement = ""
            else:
                statement += character

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".branchtargets"):
            name = next(name for name, at in reversed(self.labels.items()) if at == len(self.instructions))
            self.tables[name] = split(text.removeprefix(".branchtargets"))
        elif text.startswith(".reg"):
            kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.+)", text).groups()  # type: ignore[union-attr]
            for name in split(names):
                stem, count = re.fullmatch(r"%?([\w$]+)(?:<(\d+)>)?", name).groups()  # type: ignore[union-attr]
                every = [stem] if count is None else [f"{stem}{number}" for number in range(int(count))]
                self._bits |= dict.fromkeys(every, BITS[kind])
        elif text and not text.startswith("."):
            guard, negated = None, False
            if text.startswith("@"):
                name, text = text[1:].split(None, 1)
                guard, negated = self._register(name.lstrip("!%")), name.startswith("!")
            name = re.match(r"[\w.:]+", text)[0]  # type: ignore[index]
            operands = [self._operand(part) for part in split(text[len(name) :])]
            made = Instruction(name, operands, guard, negated, text, line)
            made.used = frozenset(_registers_of(operands))
            self.instructions.append(made)

    def _register(self, name: str) -> Register:
        return Register(self._numbers.setdefault(name, len(self._numbers)), self._bits[name])

    def _operand(self, text: str) -> Any:
        if text[0] == "{":
            return Vector(tuple(map(self._operand, split(text[1 : text.rindex("}")]))))
        if text[0] == "[":
            found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:([-+])\s*([-+]?\w+))?\s*\]", text)
            if not found:
                raise Unsupported(text)
            return Address(self._operand(found[1]), int(found[3] or "0", 0) * (-1 if found[2] == "-" else 1))
        if "|" in text:
            return Vector(tuple(map(self._operand, text.split("|"))))
        if text[0] == "!":
            return Negated(self._operand(text[1:]))
        name = text.removeprefix("%")
        if name in self._bits:
            return self._register(name)
        if text[0] == "%":
            base, _, dimension = name.partition(".")
            if base not in SPECIAL:
                raise Unsupported(text)
            return Special(base, dimension)
        if re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", text):
            return Constant(int(text[2:], 16))
        if re.fullmatch(r"[-+]?\d*\.\d+([eE][-+]?\d+)?", text):
            return Constant(float(text))
        if re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            return Constant(int(text.rstrip("U"), 0))
        return SINK if text == "_" else Symbol(text)


def _registers_of(operands: Any) -> list[int]:
    found = []
    for operand in operands:
        if isinstance(operand, Register):
            found.append(operand.number)
        elif isinstance(operand, (Vector, Negated, Address)):
            inner = operand.items if isinstance(operand, Vector) else operand[:1]
            found += _registers_of(inner)
    return found


def _end_of_block(source: str, at: int) -> int:
    """Where the brace that opens at ``at`` closes."""
    depth = 0
    for brace in re.finditer(r"[{}]", source[at:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return at + brace.start()
    raise Unsupported("a brace that does not close")


@functools.lru_cache(maxsize=512)
def parse(text: str) -> Program:
    """The program of a PTX module, kept."""
    return Program(text)
