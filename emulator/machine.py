"""Threads that run together: their registers, and how instructions read operands and write results."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.counters import Count
from emulator.memory import GlobalMemory, SharedMemory
from emulator.parse import SINK, Address, Fault, Instruction, Program, Register
from emulator.values import BITS, TYPES, U32, UNSIGNED, from_bf16

Mask = Any  # bool [lanes], or None for all
Read = Callable[["Threads"], Any]
Run = Callable[["Threads", Mask], Any]


@dataclass(frozen=True)
class Options:
    """How a launch runs.

    Args:
        schedule: "together": all threads of all programs, the least advanced first, so that branches meet again;
            "programs" or "warps": each program, or warp (of kernels with wgmma each warpgroup), alone until a barrier
            or an atomic, in a random order, of some programs.
        seed: of that order and of the order in which lanes of one atomic come.
        counts: count sectors, wavefronts and instructions.
        approximation: where approximate functions land, from -1 to 1 times their largest error from the exact value.
        most: instructions of a launch, or of a warp, before it counts as one that does not end.
    """

    schedule: str = "together"
    seed: int = 0
    counts: bool = False
    approximation: float = 0.0
    most: int = 300_000


class Launch:
    """What all threads of a launch share, and what was counted."""

    def __init__(
        self, program: Program, programs: int, values: list[bytes], shared: int, memory: GlobalMemory, options: Options
    ) -> None:
        self.program, self.programs, self.memory, self.options = program, programs, memory, options
        self.parameters = dict(zip(program.parameters, values, strict=True))
        self.shared = SharedMemory(programs, shared)
        self.counts: defaultdict[Any, Count] = defaultdict(Count)  # by (instruction, "global" or "shared")
        self.executed = [0] * len(program.instructions)  # lanes that ran each instruction
        self.random = np.random.default_rng(options.seed)
        # tensor memory: 32-bit cells [programs, 128, columns] and their states; by program products that have not ended
        self.cells, self.states = np.zeros((programs, 128, 0), U32), np.zeros((programs, 128, 0), np.uint8)
        self.products: dict[int, list[Callable[[], None]]] = {}
        self.barriers: dict[tuple[int, int], Any] = {}  # mbarriers, by program and address


class Threads:
    """Lanes that execute one instruction at a time, each an element of every register.

    Attributes:
        program: [lanes] which of the grid each lane is of, ``thread`` [lanes] its number there.
        copies, products: asynchronous work: groups of (what ends it, registers that it will write), the last of them
            not committed yet.
        under_way: registers that a product will write; nobody may use them before a wait.
        waits: [lanes] who found an mbarrier's phase not over, and tries again after all others.
    """

    def __init__(self, launch: Launch, program: np.ndarray, thread: np.ndarray) -> None:
        self.launch, self.program, self.thread, self.count = launch, program, thread, thread.size
        unset = {bits: np.full(self.count, 0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1), UNSIGNED[bits]) for bits in UNSIGNED}
        self.registers: list[Any] = [unset[bits] for bits in launch.program.registers]
        known = {"tid.x": thread, "ctaid.x": program, "nctaid.x": np.full(self.count, launch.programs)}
        for name, number in launch.program.special.items():
            self.registers[number] = known[name].astype(U32)
        self.lane = thread % 32
        self.warp = program * (launch.program.threads // 32) + thread // 32
        self.copies: list[list[tuple[Callable[[], None], frozenset[int]]]] = [[]]
        self.products: list[list[tuple[Callable[[], None], frozenset[int]]]] = [[]]
        self.under_way: frozenset[int] = frozenset()
        self.waits = np.zeros(self.count, bool)

    def active(self, mask: Mask) -> np.ndarray:
        """The mask as an array."""
        return np.ones(self.count, bool) if mask is None else mask

    def lanes(self, mask: Mask) -> np.ndarray:
        """The numbers of those that take part."""
        return np.arange(self.count) if mask is None else np.flatnonzero(mask)


# --- operands ---------------------------------------------------------------------------------------------------------


def wide(values: Any, count: int) -> np.ndarray:
    """An operand's value for each lane."""
    return values if np.ndim(values) and len(values) == count else np.full(count, values)


def reader(one: Instruction, operand: Any, kind: str) -> Read:
    """How to read an operand as a type: a function of the threads that gives an array, or a scalar for all lanes.

    A packed type's array has all elements, a lane's in order; bf16 comes as float32; a vector's is [lanes, parts];
    of ``[]`` it has addresses, int64.
    """
    if kind == "[]":
        if not isinstance(operand, Address):
            raise one.unsupported()
        base, offset = reader(one, operand.base, f"u{getattr(operand.base, 'bits', 64)}"), operand.offset
        return lambda threads: wide(base(threads), threads.count).astype(np.int64) + offset
    if isinstance(operand, list):
        reads = [reader(one, part, kind) for part in operand]
        return lambda threads: np.stack([wide(read(threads), threads.count) for read in reads], 1)
    dtype, bits, stored = TYPES[kind], BITS[kind], UNSIGNED[BITS[kind]]
    if isinstance(operand, int) and "x2" not in kind and kind != "bf16":
        value = np.array(operand & ((1 << bits) - 1), stored).view(dtype)[()] if bits > 1 else np.bool_(operand)
        return lambda threads: value
    must_fit = bits == 1 or "x2" in kind or kind == "bf16"
    if not isinstance(operand, Register) or operand.bits < bits or (must_fit and operand.bits > bits):
        raise one.unsupported(f"{operand} read as .{kind}:")
    number = operand.number
    if kind.startswith("bf16"):
        return lambda threads: from_bf16(threads.registers[number].view(dtype))
    if operand.bits > bits:
        return lambda threads: threads.registers[number].astype(stored).view(dtype)
    if dtype is stored:
        return lambda threads: threads.registers[number]
    return lambda threads: threads.registers[number].view(dtype)


def check_target(one: Instruction, target: Any, kind: str) -> None:
    """Raise Unsupported for a result that its register does not hold."""
    bits = BITS[kind]
    for part in items(target):
        if part != SINK and not (isinstance(part, Register) and (part.bits >= bits > 1 or part.bits == bits)):
            raise one.unsupported(f".{kind} into {part}:")


def write(threads: Threads, mask: Mask, target: Any, values: Any) -> None:
    """Write values of any dtype, by their bits, to a register; narrower signed ones by their sign.

    They are of all lanes, or of those of the mask, or one for all; a vector takes them a lane's parts in order.
    """
    if target == SINK:
        return
    if isinstance(target, list):
        for part, column in zip(target, values.reshape(-1, len(target)).T, strict=True):
            write(threads, mask, part, column)
        return
    stored = UNSIGNED[target.bits]
    if values.dtype != stored:
        if values.dtype.itemsize * 8 == target.bits:
            values = values.view(stored)
        else:
            kind = "i" if values.dtype.kind == "i" else "u"
            values = values.view(f"{kind}{values.dtype.itemsize}").astype(stored)
    if values.size == 1:
        values = np.full(threads.count, values)
    if values.size != threads.count:
        part, values = values, np.empty(threads.count, stored)
        values[mask] = part
    if mask is not None:
        values = np.where(mask, values, threads.registers[target.number])
    threads.registers[target.number] = np.ascontiguousarray(values)  # a column of several would not be read by halves


def constant(one: Instruction, operand: Any) -> int:
    """An operand that must be a number."""
    if not isinstance(operand, int):
        raise one.unsupported()
    return operand


def items(operand: Any) -> list[Any]:
    """A vector's parts, or the operand alone."""
    return operand if isinstance(operand, list) else [operand]


def whole_warps(threads: Threads, mask: Mask, one: Instruction, size: int = 32) -> np.ndarray:
    """Lanes [warps, 32] of the warps that take part, each with all of its lanes; or of warpgroups."""
    there = threads.active(mask).reshape(-1, size)
    if (there.any(1) != there.all(1)).any():
        raise Fault(f"lanes are missing: {one}")
    return np.flatnonzero(there.all(1))[:, None] * size + np.arange(size)


# --- instructions -----------------------------------------------------------------------------------------------------

_BUILDERS: list[tuple[re.Pattern[str], Callable[..., Run]]] = []


def instruction(*names: str) -> Callable[[Callable[..., Run]], Callable[..., Run]]:
    """Registers what makes the closures of instructions whose whole names match one of these patterns.

    A pattern is a regular expression in which a point is a point. What is decorated takes the program, the instruction
    and the pattern's groups. A modifier that no pattern has is unsupported.
    """

    def register(build: Callable[..., Run]) -> Callable[..., Run]:
        for name in names:
            _BUILDERS.append((re.compile(re.sub(r"\.(?![*+])", r"\\.", name)), build))
        return build

    return register


def elementwise(names: str, types: str, function_of: Callable[..., Callable[..., Any]], fewest: int = 99) -> None:
    """Registers instructions that compute each lane's result from its operands.

    Args:
        names: a pattern, as of ``instruction``.
        types: of the result (of two with | between) and the operands, with the pattern's groups as {0}, {1}, ...
        function_of: gives, of the groups, the function of arrays.
        fewest: operands with the result, if the last ones may be left out.
    """

    def build(program: Program, one: Instruction, *groups: str) -> Run:
        kinds, function = types.format(*groups).split(), function_of(*groups)
        target, *operands = one.operands
        results = kinds[0].split("|")
        fits = min(fewest, len(kinds)) <= len(one.operands) <= len(kinds)
        if not fits or (len(target) if isinstance(target, list) else 1) != len(results):
            raise one.unsupported()
        reads = [reader(one, operand, kind) for operand, kind in zip(operands, kinds[1:], strict=False)]
        check_target(one, target, results[0])
        bits = BITS[results[0]]
        dtype = f"{'i' if kinds[0][0] == 's' else 'u'}{bits // 8}" if bits > 1 else "?"
        return lambda threads, mask: write(
            threads, mask, target, np.asarray(function(*[read(threads) for read in reads])).view(dtype)
        )

    instruction(names)(build)


@functools.cache
def _builder(name: str) -> tuple[Callable[..., Run], tuple[str, ...]] | None:
    """What makes an instruction's closure, and the groups that its name gives."""
    found = ((build, pattern.fullmatch(name)) for pattern, build in _BUILDERS)
    return next(((build, match.groups()) for build, match in found if match), None)


def prepare(program: Program) -> None:
    """Make each instruction's closure, once."""
    for one in program.instructions:
        if one.run is None:
            if (found := _builder(one.name)) is None:
                raise one.unsupported()
            try:
                one.run = found[0](program, one, *found[1])
            except (NotImplementedError, ValueError, KeyError, AttributeError) as error:
                raise one.unsupported(f"{error}:") from error  # no rule of tensor cores; other operands
