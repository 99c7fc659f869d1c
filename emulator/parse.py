"""Parse PTX text into instructions: one kernel a module, as Triton emits it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from emulator.values import BITS

SPECIAL = ("tid.x", "ctaid.x", "nctaid.x")  # registers that begin with a value
BASE = 1024  # bytes of shared memory that CUDA keeps for itself, so that a kernel's begin at a multiple of it


class Unsupported(RuntimeError):
    """An instruction, a modifier or an operand that is not modelled; the emulator does not guess."""


class Fault(RuntimeError):
    """A GPU would fault here or leave the result undefined: out of bounds, a race, a barrier that not all reach."""


class Register(NamedTuple):
    """A register's number among the program's, and its bits; of a predicate 1."""

    number: int
    bits: int


class Address(NamedTuple):
    """[base + offset], in bytes."""

    base: Any
    offset: int


SINK = "_"  # a target that takes what nobody needs


@dataclass(slots=True, eq=False)
class Instruction:
    """One line: ``@guard name operands;``, and its closure, ``run``.

    An operand is a Register, an Address, a list of such (a vector), a number's bits (negative integers in two's
    complement), the name of a parameter, or a jump's place among the instructions, or a list of such (a table).
    """

    name: str
    operands: list[Any]
    guard: Register | None
    negated: bool
    text: str
    line: int
    registers: frozenset[int]  # numbers of all that it names
    run: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"

    def unsupported(self, reason: str = "") -> Unsupported:
        """Return the error to raise."""
        return Unsupported(f"{reason} {self}".strip())


def split(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)
    return [part.strip() for part in parts if part.strip()]


class Program:
    """A kernel.

    Attributes:
        name: the kernel's.
        target: ``sm_90a`` and its like.
        threads: of a program (a thread block).
        instructions: in their order; ``labels`` says where jumps lead, those of an inner block by it and their name.
        parameters: {name: bytes}, in their order.
        registers: bits of each register.
        special: numbers of the registers that begin with a value, by name.
    """

    def __init__(self, text: str) -> None:
        source = re.sub(r"//[^\n]*|^\s*\.(?:loc|file|pragma)\b[^\n]*", "", text, flags=re.M)
        head = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\.(?:req|max)ntid\s+(\d+)[^{]*\{", source)
        target = re.search(r"\.target\s+(\w+)", source)
        if not head or not target or source.count(".entry") != 1 or ".func" in source:
            raise Unsupported("not one kernel with a known number of threads and without functions")
        self.name, self.target, self.threads = head[1], target[1], int(head[3])
        self.parameters: dict[str, int] = {}
        for parameter in split(head[2]):
            parameter_match = re.fullmatch(r"\.param\s+\.(\w+).*?([\w$]+)", parameter, re.S)
            if not parameter_match:
                raise Unsupported(parameter)
            self.parameters[parameter_match[2]] = BITS[parameter_match[1]] // 8
        variables = "".join(re.findall(r"^\s*(\.(?:extern|global|const|shared)\b.*)", source, re.M))
        shared = re.fullmatch(r"(?:\.extern \.shared \.align \d+ \.b8 ([\w$]+)\[\];)?", variables)
        if not shared:
            raise Unsupported(f"variables: {variables}")
        self._shared = shared[1]  # or None
        self._bits: dict[str, int] = dict.fromkeys(SPECIAL, 32)
        self._known: dict[str, Register] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._tables: dict[str, list[str]] = {}
        for statement, line, self._block in _statements(source, head.end()):
            try:
                self._statement(statement, line)
            except (AttributeError, KeyError, ValueError) as error:
                raise Unsupported(f"line {line}: {statement}") from error
        for one in self.instructions:
            if one.name.startswith("br"):
                label, is_table = one.operands[-1], one.name == "brx.idx"
                names = self._tables.get(label, []) if is_table else [label]
                places = [self.labels.get(name, self.labels.get(name.partition(":")[2], -1)) for name in names]
                if not places or -1 in places:
                    raise one.unsupported()
                one.operands[-1] = places if is_table else places[0]
        last = self.instructions[-1] if self.instructions else None
        if last is None or last.guard is not None or last.name not in ("ret", "bra", "bra.uni"):
            raise Unsupported("a kernel that does not end with ret or a jump")
        self.registers = [register.bits for register in self._known.values()]
        self.special = {name: self._known[name].number for name in SPECIAL if name in self._known}

    def _statement(self, text: str, line: int) -> None:
        if text.endswith(":"):
            self.labels[self._block + text[:-1].strip()] = len(self.instructions)
        elif text.startswith(".branchtargets"):
            self._tables[next(reversed(self.labels))] = split(text.partition(" ")[2])
        elif declaration := re.fullmatch(r"\.reg\s*\.(\w+)\s+(.+)", text):
            for name in split(declaration[2]):
                stem, count = re.fullmatch(r"%?([\w$]+)(?:<(\d+)>)?", name).groups()  # type: ignore[union-attr]
                for register_name in [stem] if count is None else [f"{stem}{number}" for number in range(int(count))]:
                    if self._bits.setdefault(register_name, BITS[declaration[1]]) != BITS[declaration[1]]:
                        raise ValueError(register_name)
        else:
            guard, name, operand_text = re.fullmatch(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text).groups()  # type: ignore[union-attr]
            self._used = set[int]()
            guard_register = None if guard is None else self._register(guard.lstrip("!%"))
            operands = (
                [self._block + operand_text]
                if name.startswith("bra")
                else [self._operand(part) for part in split(operand_text)]
            )
            negated = bool(guard) and guard[0] == "!"
            self.instructions.append(
                Instruction(name, operands, guard_register, negated, text, line, frozenset(self._used))
            )

    def _register(self, name: str) -> Register:
        if name not in self._known:
            self._known[name] = Register(len(self._known), self._bits[name])
        self._used.add(self._known[name].number)
        return self._known[name]

    def _operand(self, text: str) -> Any:
        if text[0] == "{":
            return [self._operand(part) for part in split(text[1:-1])]
        if address_match := re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+)\s*)?\]", text):
            return Address(self._operand(address_match[1]), int(address_match[2] or 0))
        if "|" in text:
            return [self._operand(part) for part in text.split("|")]
        if (name := text.removeprefix("%")) in self._bits:
            return self._register(name)
        if re.fullmatch(r"0[fd]([0-9A-F]{8}){1,2}", text):
            return int(text[2:], 16)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return int(text.rstrip("U"), 0)
        if not re.fullmatch(r"[A-Za-z_$][\w$]*", text):
            raise ValueError(text)
        return BASE if text == self._shared else text


def _statements(source: str, at: int) -> Iterator[tuple[str, int, str]]:
    """Yield a body's labels, with their colon, and statements: (text, line, inner block as "place in source:")."""
    blocks, line, counted_to = [""], 1, 0
    for match in re.compile(r"\s*([{}]|[\w$]+\s*:|[^{};\s][^;]*;)").finditer(source, at):
        text = match[1]
        line, counted_to = line + source.count("\n", counted_to, match.start(1)), match.start(1)
        if text == "{":
            blocks.append(f"{match.start()}:")
        elif text != "}":
            yield " ".join(text.rstrip(";").split()), line, blocks[-1]
        elif blocks.pop() == "":
            return
    raise Unsupported("a brace that does not close")


parse = functools.lru_cache(maxsize=32)(Program)  # the program of a PTX module, kept
