"""Threads that run together: their registers, and how instructions read operands and write results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.counters import Count
from emulator.memory import BASE, GlobalMemory, SharedMemory
from emulator.parse import (
    SINK,
    Address,
    Constant,
    Fault,
    Instruction,
    Negated,
    Program,
    Register,
    Special,
    Symbol,
    Vector,
)
from emulator.values import U32, UNSIGNED, dtype_of, from_bf16, kind_of

Mask = Any  # bool [lanes], or None for all
Read = Callable[["Threads"], Any]
Build = Callable[[Program, Instruction], Callable[["Threads", Mask], Any]]


@dataclass(frozen=True)
class Options:
    """How a launch runs.

    Args:
        schedule: "together": all threads of all programs, the least advanced first, so that branches meet again;
            "warps": each warp, or warpgroup, alone until a barrier or an atomic, in a random order, of some programs.
        seed: of that order, of the order in which lanes of one atomic come, and of approximations.
        races: look for races in shared memory; "together" only.
        counts: count sectors, wavefronts and instructions.
        late: asynchronous copies and products happen as late as their waits allow, or else at once.
        approximation: where approximate functions land, from -1 to 1 times their largest error from the exact value.
        most: instructions of a launch before it counts as one that does not end.
    """

    schedule: str = "together"
    seed: int = 0
    races: bool = False
    counts: bool = False
    late: bool = True
    approximation: float = 0.0
    most: int = 3_000_000


class Launch:
    """What all threads of a launch share."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        values: list[bytes],
        shared: int,
        memory: GlobalMemory,
        options: Options,
    ) -> None:
        self.program, self.grid, self.memory, self.options = program, grid, memory, options
        self.programs = grid[0] * grid[1] * grid[2]
        self.parameters = dict(zip(program.parameters, values, strict=True))
        self.shared = SharedMemory(self.programs, shared, options.races and options.schedule == "together")
        self.counts: defaultdict[Any, Count] = defaultdict(Count)
        self.executed: defaultdict[int, int] = defaultdict(int)  # lanes that ran an instruction, by its number
        self.random = np.random.default_rng(options.seed)
        self.tensor_memory: Any = None
        self.barriers: dict[tuple[int, int], Any] = {}  # mbarriers, by program and address
        for data in program.constants.values():
            memory.add((data.ctypes.data, data.nbytes, None))


class Threads:
    """Lanes that execute one instruction at a time, each an element of every register.

    Attributes:
        program: [lanes] which of the grid each lane is of, ``thread`` [lanes] its number there.
        under_way: registers that an asynchronous product or load will write; nobody may use them before a wait.
    """

    def __init__(self, launch: Launch, program: np.ndarray, thread: np.ndarray) -> None:
        self.launch, self.program, self.thread = launch, program, thread
        self.count = thread.size
        unset = {bits: np.full(self.count, 0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1), UNSIGNED[bits]) for bits in UNSIGNED}
        self.registers: list[Any] = [unset[bits] for bits in launch.program.registers]
        self.lane = (thread % 32).astype(np.int64)
        self.warp = (program * (launch.program.threads // 32) + thread // 32).astype(np.int64)
        self.copies: list[Callable[[], None]] = []  # begun, not yet in a group
        self.copy_groups: list[list[Callable[[], None]]] = []
        self.products: list[Callable[[], None]] = []
        self.product_groups: list[list[Callable[[], None]]] = []
        self.under_way: frozenset[int] = frozenset()

    def special(self, name: str, dimension: str) -> Any:
        """A special register's values."""
        if name in ("laneid", "warpid"):
            return (self.lane if name == "laneid" else self.thread // 32).astype(U32)
        axis = "xyz".index(dimension)
        x, y, _ = grid = self.launch.grid
        if name == "ctaid":
            return (self.program % x, self.program // x % y, self.program // (x * y))[axis].astype(U32)
        if name == "tid":
            return self.thread.astype(U32) if axis == 0 else np.zeros(self.count, U32)
        size = {"nctaid": grid, "ntid": (self.launch.program.threads, 1, 1)}[name][axis]
        return np.full(self.count, size, U32)

    def active(self, mask: Mask) -> np.ndarray:
        """The mask as an array."""
        return np.ones(self.count, bool) if mask is None else mask


def wide(values: Any, count: int) -> np.ndarray:
    """An operand's value for each lane."""
    return np.ascontiguousarray(np.broadcast_to(np.asarray(values), (count,)))


def reader(instruction: Instruction, operand: Any, kind: str, bits: int) -> Read:
    """How to read an operand: a function of the threads that gives an array, or a scalar for all.

    Args:
        kind: "b", "u", "s", "f", "p" for a predicate, or "B" for bf16, which is read as float32.
    """
    if isinstance(operand, Constant):
        value = _constant(operand.value, kind, bits)
        return lambda threads: value
    if isinstance(operand, Negated):
        positive = reader(instruction, operand.register, "p", 1)
        return lambda threads: ~positive(threads)
    dtype = UNSIGNED[bits] if kind == "B" else dtype_of(kind, bits) if kind != "p" else np.bool_
    if isinstance(operand, Special):
        return lambda threads: threads.special(*operand).astype(UNSIGNED[bits]).view(dtype)
    if isinstance(operand, Symbol):
        name = operand.name

        def address(threads: Threads) -> Any:
            constant = threads.launch.program.constants.get(name)
            return UNSIGNED[bits](BASE if constant is None else constant.ctypes.data)

        return address
    if not isinstance(operand, Register) or operand.bits < bits:
        raise instruction.unsupported(f"{operand} read as {bits} bits")
    number, narrows = operand.number, operand.bits != bits
    if kind == "B":
        return lambda threads: from_bf16(threads.registers[number])
    if narrows:
        return lambda threads: threads.registers[number].astype(UNSIGNED[bits]).view(dtype)
    return lambda threads: threads.registers[number].view(dtype)


def _constant(value: int | float, kind: str, bits: int) -> Any:
    if kind == "p":
        return np.bool_(value != 0)
    if isinstance(value, float):
        return dtype_of(kind, bits)(value)
    raw = np.array([value & ((1 << bits) - 1)], UNSIGNED[bits])
    return from_bf16(raw)[0] if kind == "B" else raw.view(dtype_of(kind, bits))[0]


def write(threads: Threads, mask: Mask, operand: Any, values: Any, kind: str = "b") -> None:
    """Write values of any dtype, by their bits, to a register; narrower signed ones by their sign."""
    if operand is SINK:
        return
    values = np.asarray(values)
    if operand.bits == 1:
        values = values.astype(bool)
    else:
        bits = values.dtype.itemsize * 8
        values = values.view(dtype_of("s" if kind == "s" else "u", bits)).astype(UNSIGNED[operand.bits])
    if values.ndim == 0:
        values = np.full(threads.count, values)
    old = threads.registers[operand.number]
    threads.registers[operand.number] = values if mask is None else np.where(mask, values, old)


def result(operand: Any, compute: Read, kind: str = "b") -> Callable[[Threads, Mask], None]:
    """An instruction that writes what ``compute`` gives to its first operand."""
    return lambda threads, mask: write(threads, mask, operand, compute(threads), kind)


def address_of(instruction: Instruction, operand: Any) -> Callable[[Threads], np.ndarray]:
    """uint64 [lanes] of a memory operand."""
    if not isinstance(operand, Address):
        raise instruction.unsupported()
    bits = operand.base.bits if isinstance(operand.base, Register) else 64
    base, offset = reader(instruction, operand.base, "u", bits), operand.offset

    def address(threads: Threads) -> np.ndarray:
        return wide(base(threads), threads.count).astype(np.int64).__add__(offset).astype(np.uint64)

    return address


def items(operand: Any) -> tuple[Any, ...]:
    """A vector's parts, or the operand alone."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def whole_warps(threads: Threads, mask: Mask, what: Any, size: int = 32) -> Any:
    """bool [warps]: those that take part, each with all of its lanes; or of warpgroups."""
    lanes = threads.active(mask).reshape(-1, size)
    if (lanes.any(1) != lanes.all(1)).any():
        raise Fault(f"lanes are missing: {what}")
    return lanes.all(1)


INSTRUCTIONS: dict[str, Build] = {}


def instruction(*names: str) -> Callable[[Build], Build]:
    """Registers what builds the closures of instructions that begin with these names."""

    def register(build: Build) -> Build:
        INSTRUCTIONS.update(dict.fromkeys(names, build))
        return build

    return register


def operand_type(one: Instruction) -> tuple[str, int]:
    """The kind and bits of the type that the name ends with."""
    return kind_of(one.parts[-1])
