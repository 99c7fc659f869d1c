"""Threads that run together: their registers, and how instructions read operands and write results."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.memory import Count, GlobalMemory, SharedMemory
from emulator.parse import SINK, Address, Fault, Instruction, Program, Register
from emulator.values import BITS, TYPES, U32, UNSIGNED, from_bf16

Mask = Any  # bool [lanes], or None for all
Read = Callable[["Threads"], Any]
PAUSE = "pause"  # what a closure returns where other warps may run first


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
        one, mask: the instruction that they execute, and who does.
        begun: asynchronous work, by "cp.async" and "wgmma": groups of (what ends it, registers that it will write), the
            last of them not committed yet.
        under_way: registers that a product will write; nobody may use them before a wait.
        waits: lanes that found an mbarrier's phase not over, and try again after all others.
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
        self.one, self.mask = launch.program.instructions[0], None
        self.begun: dict[str, list[list[tuple[Callable[[], None], frozenset[int]]]]] = {"cp.async": [[]], "wgmma": [[]]}
        self.under_way: frozenset[int] = frozenset()
        self.waits: set[int] = set()

    def active(self) -> np.ndarray:
        """The mask as an array."""
        return np.ones(self.count, bool) if self.mask is None else self.mask

    def lanes(self) -> np.ndarray:
        """The numbers of those that take part."""
        return np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask)

    def warps(self, members: Any = None, size: int = 32) -> np.ndarray:
        """Lanes [warps, 32] of the warps, or warpgroups, that take part, all of each; ``members`` have to name them."""
        there = self.active().reshape(-1, size)
        if (there.any(1) != there.all(1)).any():
            raise Fault(f"lanes are missing: {self.one}")
        lanes = np.flatnonzero(there.all(1))[:, None] * size + np.arange(size)
        if members is not None and (members[lanes] != U32(0xFFFFFFFF)).any():
            raise self.one.unsupported("some of a warp's lanes:")
        return lanes


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
    if values.size != threads.count:
        part, values = values, np.empty(threads.count, stored)
        values[mask if part.size > 1 else slice(None)] = part
    if mask is not None:
        values = np.where(mask, values, threads.registers[target.number])
    threads.registers[target.number] = np.ascontiguousarray(values)  # a column of several would not be read by halves


def items(operand: Any) -> list[Any]:
    """A vector's parts, or the operand alone."""
    return operand if isinstance(operand, list) else [operand]


# --- instructions -----------------------------------------------------------------------------------------------------

AS_IT_IS = ("int", "=")  # types of operands that are not read
_BUILDERS: list[tuple[re.Pattern[str], Callable[..., Read]]] = []


def register(names: str, build: Callable[..., Read]) -> None:
    """Let ``build`` make the closures of instructions whose whole names match a pattern.

    A pattern is a regular expression in which a point is a point. What makes a closure takes the instruction and the
    pattern's groups. A modifier that no pattern has is unsupported.
    """
    _BUILDERS.append((re.compile(re.sub(r"\.(?![*+])", r"\\.", names)), build))


def _operands(one: Instruction, types: str) -> list[tuple[Any, str]]:
    """An instruction's target, or SINK, and its operands, each with its type, by ``types`` as of ``instruction``."""
    kinds, found = types.split(), list[tuple[Any, str]]()
    operands = one.operands if kinds[0] != "-" else [SINK, *one.operands]
    if not sum(kind[-1] != "?" for kind in kinds) <= len(operands) <= len(kinds):
        raise one.unsupported()
    for operand, optional in zip(operands, kinds, strict=False):
        kind, how, count = re.fullmatch(r"([^?]+?)(?:([*/])(\d*))?\??", optional).groups("")  # type: ignore[union-attr]
        parts = kind.split("|") * int(count or 1)
        if how == "/":
            parts = [f"b{int(kind[1:]) // len(items(operand))}"] * len(items(operand))
        is_known = operand == int(kind) if kind.isdigit() else kind != "int" or isinstance(operand, int)
        if not is_known or (kind != "=" and len(items(operand)) != len(parts)):
            raise one.unsupported()
        for part, each in zip(items(operand), parts, strict=True) if not found and kind != "-" else ():
            bits, held = BITS[each], getattr(part, "bits", 0)
            if part != SINK and not (held >= bits > 1 or held == bits):
                raise one.unsupported(f".{each} into {part}:")
        if not kind.isdigit():
            found.append((operand, parts[0]))
    return found


def instruction(names: str, types: str = "-", pauses: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Registers what executes instructions: a function of the threads, the pattern's groups and the operands.

    Args:
        names: a pattern, as of ``register``.
        types: of the result, or "-" without one, and the operands, with the pattern's groups as {0}, {1}, ... A type is
            one of PTX, of a vector with * and how many parts, with | between theirs, or with / for bits that its parts
            share; [] for an address; a number for this number; "int" for any; "=" for an operand as it is. The last
            ones may be left out if they end with "?".
        pauses: other warps may run after it.

    The function gets operands as they are first, of others an element for each lane; it returns the result's, or those
    of the mask. Without a result it returns nothing, or what tells the schedule how to go on.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def build(one: Instruction, *groups: str) -> Read:
            (target, _), *operands = _operands(one, types.format(*groups))
            given = [*groups, *(operand for operand, kind in operands if kind in AS_IT_IS)]
            reads = [reader(one, *operand) for operand in operands if operand[1] not in AS_IT_IS]

            def run(threads: Threads) -> Any:
                try:
                    found = function(threads, *given, *[wide(read(threads), threads.count) for read in reads])
                except NotImplementedError as error:  # no rule of tensor cores
                    raise one.unsupported(f"{error}:") from error
                if target != SINK:
                    write(threads, threads.mask, items(target), found)
                    found = None
                return PAUSE if pauses else found

            return run

        register(names, build)
        return function

    return decorate


def elementwise(names: str, types: str, function_of: Callable[..., Any]) -> None:
    """Registers instructions that compute each lane's result from its operands.

    ``function_of`` gives, of the pattern's groups, the function of arrays, or of scalars where an operand is a number.
    """

    def build(one: Instruction, *groups: str) -> Read:
        ((target, result), *operands), function = _operands(one, types.format(*groups)), function_of(*groups)
        reads, bits = [reader(one, *operand) for operand in operands], BITS[result]
        dtype = f"{'i' if result[0] == 's' else 'u'}{bits // 8}" if bits > 1 else "?"
        return lambda threads: write(
            threads, threads.mask, target, np.asarray(function(*[read(threads) for read in reads])).view(dtype)
        )

    register(names, build)


@functools.cache
def _builder(name: str) -> tuple[Callable[..., Read], tuple[str, ...]] | None:
    """What makes an instruction's closure, and the groups that its name gives."""
    found = ((build, pattern.fullmatch(name)) for pattern, build in _BUILDERS)
    return next(((build, match.groups("")) for build, match in found if match), None)


def prepare(program: Program) -> None:
    """Make each instruction's closure, once."""
    for one in program.instructions:
        if one.run is None:
            if (found := _builder(one.name)) is None:
                raise one.unsupported()
            try:
                one.run = found[0](one, *found[1])
            except (ValueError, KeyError, AttributeError) as error:  # other operands
                raise one.unsupported(f"{error}:") from error
