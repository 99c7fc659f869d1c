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
PAUSE = "pause"  # returned by a closure after which other warps may run first


@dataclass(frozen=True)
class Options:
    """A launch's options.

    Args:
        schedule: "together": all threads of all programs, the least advanced first, so that branches meet again;
            "programs" or "warps": each program, or warp (of kernels with wgmma each warpgroup), alone until a barrier
            or an atomic, in a random order, of some programs.
        seed: of that order and of the order of the lanes in an atomic.
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
    """Everything that the threads of a launch share: memory, parameters, counts and products under way."""

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
        program: [lanes] the program of each lane, ``thread`` [lanes] its number there.
        one, mask: the instruction that they execute, and the lanes that do.
        begun: asynchronous work, by "cp.async" and "wgmma": groups of (what ends it, registers that it will write), the
            last of them not committed yet.
        under_way: registers that a product will write; nobody may use them before a wait.
        waits: lanes that found an mbarrier's phase not over, and try again after all others.
    """

    def __init__(self, launch: Launch, program: np.ndarray, thread: np.ndarray) -> None:
        self.launch, self.program, self.thread, self.count = launch, program, thread, thread.size
        unset = {bits: np.full(self.count, 0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1), UNSIGNED[bits]) for bits in UNSIGNED}
        self.registers: list[Any] = [unset[bits] for bits in launch.program.registers]
        special_values = {"tid.x": thread, "ctaid.x": program, "nctaid.x": np.full(self.count, launch.programs)}
        for name, number in launch.program.special.items():
            self.registers[number] = special_values[name].astype(U32)
        self.lane = thread % 32
        self.warp = program * (launch.program.threads // 32) + thread // 32
        self.one, self.mask = launch.program.instructions[0], None
        self.begun: dict[str, list[list[tuple[Callable[[], None], frozenset[int]]]]] = {"cp.async": [[]], "wgmma": [[]]}
        self.under_way: frozenset[int] = frozenset()
        self.waits: set[int] = set()

    def active(self) -> np.ndarray:
        """Return the mask as an array."""
        return np.ones(self.count, bool) if self.mask is None else self.mask

    def lanes(self) -> np.ndarray:
        """Return the numbers of the lanes that take part."""
        return np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask)

    def warps(self, members: Any = None, size: int = 32) -> np.ndarray:
        """Return lanes [warps, 32] of the warps, or warpgroups, that take part, whole; ``members`` have to name all."""
        taking_part = self.active().reshape(-1, size)
        if (taking_part.any(1) != taking_part.all(1)).any():
            raise Fault(f"lanes are missing: {self.one}")
        lanes = np.flatnonzero(taking_part.all(1))[:, None] * size + np.arange(size)
        if members is not None and (members[lanes] != U32(0xFFFFFFFF)).any():
            raise self.one.unsupported("some of a warp's lanes:")
        return lanes


# --- operands ---------------------------------------------------------------------------------------------------------


def wide(values: Any, count: int) -> np.ndarray:
    """Return an operand's value for each lane."""
    return values if np.ndim(values) and len(values) == count else np.full(count, values)


def reader(one: Instruction, operand: Any, kind: str) -> Read:
    """Return a function of the threads that reads an operand as a type: an array, or a scalar for all lanes.

    A packed type's array has all elements, each lane's in order; bf16 comes as float32; a vector is [lanes, parts];
    ``[]`` is addresses, int64.
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

    Values are for all lanes, for those of the mask, or one for all; for a vector each lane's parts are in order.
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
    """Return a vector's parts, or the operand alone."""
    return operand if isinstance(operand, list) else [operand]


# --- instructions -----------------------------------------------------------------------------------------------------

AS_IT_IS = ("int", "=")  # types of operands that are not read
_BUILDERS: list[tuple[re.Pattern[str], Callable[..., Read]]] = []


def register(names: str, build: Callable[..., Read]) -> None:
    """Let ``build`` make the closures of instructions whose whole names match a pattern.

    A pattern is a regular expression in which a point is a point. ``build`` takes the instruction and the pattern's
    groups. A modifier that no pattern has is unsupported.
    """
    _BUILDERS.append((re.compile(re.sub(r"\.(?![*+])", r"\\.", names)), build))


def _operands(one: Instruction, types: str) -> list[tuple[Any, str]]:
    """Return an instruction's target, or SINK, and its operands, each with its type by ``types`` of ``instruction``."""
    kinds, typed_operands = types.split(), list[tuple[Any, str]]()
    operands = one.operands if kinds[0] != "-" else [SINK, *one.operands]
    if not sum(kind[-1] != "?" for kind in kinds) <= len(operands) <= len(kinds):
        raise one.unsupported()
    for operand, optional in zip(operands, kinds, strict=False):
        kind, packing, count = re.fullmatch(r"([^?]+?)(?:([*/])(\d*))?\??", optional).groups("")  # type: ignore[union-attr]
        parts = kind.split("|") * int(count or 1)
        if packing == "/":
            parts = [f"b{int(kind[1:]) // len(items(operand))}"] * len(items(operand))
        is_known = operand == int(kind) if kind.isdigit() else kind != "int" or isinstance(operand, int)
        if not is_known or (kind != "=" and len(items(operand)) != len(parts)):
            raise one.unsupported()
        for part, part_kind in zip(items(operand), parts, strict=True) if not typed_operands and kind != "-" else ():
            bits, register_bits = BITS[part_kind], getattr(part, "bits", 0)
            if part != SINK and not (register_bits >= bits > 1 or register_bits == bits):
                raise one.unsupported(f".{part_kind} into {part}:")
        if not kind.isdigit():
            typed_operands.append((operand, parts[0]))
    return typed_operands


def instruction(names: str, types: str = "-", pauses: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that executes instructions: of the threads, the pattern's groups and the operands.

    Args:
        names: a pattern, as of ``register``.
        types: of the result, or "-" without one, and the operands, with the pattern's groups as {0}, {1}, ... A type is
            one of PTX, of a vector with * and how many parts, with | between theirs, or with / for bits that its parts
            share; [] for an address; a number for this number; "int" for any; "=" for an operand as it is. The last
            ones may be left out if they end with "?".
        pauses: other warps may run after it.

    The function gets operands of "int" and "=" first, as they are, then an array with an element a lane for each other.
    It returns the result's elements, for all lanes or those of the mask. Without a result it returns None, or PAUSE,
    END, BARRIER or a jump's places for the schedule.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def build(one: Instruction, *groups: str) -> Read:
            (target, _), *operands = _operands(one, types.format(*groups))
            arguments = [*groups, *(operand for operand, kind in operands if kind in AS_IT_IS)]
            reads = [reader(one, *operand) for operand in operands if operand[1] not in AS_IT_IS]

            def run(threads: Threads) -> Any:
                try:
                    result = function(threads, *arguments, *[wide(read(threads), threads.count) for read in reads])
                except NotImplementedError as error:  # no rule of tensor cores
                    raise one.unsupported(f"{error}:") from error
                if target != SINK:
                    write(threads, threads.mask, items(target), result)
                    result = None
                return PAUSE if pauses else result

            return run

        register(names, build)
        return function

    return decorate


def elementwise(names: str, types: str, function_of: Callable[..., Any]) -> None:
    """Register instructions that compute each lane's result from its operands.

    ``function_of`` makes from the pattern's groups a function of arrays, or of scalars where an operand is a number.
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
    """Return the function that makes an instruction's closure, and the groups that its name gives; None without one."""
    matches = ((build, pattern.fullmatch(name)) for pattern, build in _BUILDERS)
    return next(((build, match.groups("")) for build, match in matches if match), None)


def prepare(program: Program) -> None:
    """Make each instruction's closure, once."""
    for one in program.instructions:
        if one.run is None:
            if (builder_and_groups := _builder(one.name)) is None:
                raise one.unsupported()
            try:
                one.run = builder_and_groups[0](one, *builder_and_groups[1])
            except (ValueError, KeyError, AttributeError) as error:  # other operands
                raise one.unsupported(f"{error}:") from error
