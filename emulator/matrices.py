"""Products of the tensor cores: mma.sync of a warp, wgmma of a warpgroup, tcgen05 with tensor memory and mbarriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.accesses import PAUSE, store
from emulator.machine import (
    Launch,
    Mask,
    Run,
    Threads,
    check_target,
    constant,
    instruction,
    reader,
    whole_warps,
    wide,
    write,
)
from emulator.memory import GROUP, NOBODY
from emulator.parse import Fault, Instruction, Program
from emulator.tensor_cores import multiply_add, rule_of
from emulator.values import FP8, U32

CHUNK = 16  # bytes of a matrix in shared memory that stay together


def values_of(raw: np.ndarray, element: str) -> np.ndarray:
    """float64 of bytes [..., n]: n codes of FP8, or n / 2 of float16."""
    return FP8[element][raw] if element in FP8 else raw.view(np.float16).astype(np.float64)


class SharedOperand:
    """A product's operand in one program's shared memory, which nobody may write before the product ends.

    After that the ``reader`` may, a warpgroup, or nobody in particular. Its descriptor says where it begins, and the
    strides between 16-byte columns and between 8 rows. Rows, of 32 bytes, lie along K, in ``swizzle`` bytes, 128, 64 or
    32, where three (two, one) of an address's bits are added to others, or by columns.
    """

    def __init__(
        self,
        threads: Threads,
        lane: int,
        descriptor: int,
        rows: int,
        swizzle: int,
        one: Instruction,
        reader: int = NOBODY,
    ) -> None:
        if descriptor >> 49 & 7:
            raise one.unsupported("a descriptor's base offset:")
        start, column_stride, row_stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        row, column = np.arange(rows)[:, None], np.arange(2) * (CHUNK if swizzle else column_stride)
        address = start + row // 8 * row_stride + row % 8 * (swizzle or CHUNK) + column
        address ^= (address >> 7 & max(swizzle // CHUNK - 1, 0)) << 4
        shared, lanes = threads.launch.shared, np.full(address.size, lane)
        units, warps = shared.places(address.reshape(-1), threads.program[lanes], CHUNK, one), threads.warp[lanes]
        self._codes, self._one = shared.load(units, CHUNK, warps, one, reader).view(np.uint8), one
        self._again = lambda: shared.load(units, CHUNK, warps, one, NOBODY).view(np.uint8)

    def end(self) -> np.ndarray:
        """The codes, uint8 [rows, 32]."""
        if (self._again() != self._codes).any():
            raise Fault(f"race: shared memory that a product under way reads was written: {self._one}")
        return self._codes.reshape(-1, 2 * CHUNK)


def accumulator(threads: int, registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns [threads, registers] of a result [16 a warp, 2 a register]."""
    thread, number = np.arange(threads)[:, None], np.arange(registers)
    row = 16 * (thread // 32) + (thread % 32 >> 2) + 8 * (number >> 1 & 1)
    return row, 8 * (number >> 2) + thread % 4 * 2 + (number & 1)


@instruction(
    "mma.sync.aligned.m16n8k(16).row.col.f32.(f16).(f16).f32",
    "mma.sync.aligned.m16n8k(32).row.col.f32.(e4m3|e5m2).(e4m3|e5m2).f32",
)
def warp_product(program: Program, one: Instruction, k: str, a_element: str, b_element: str) -> Run:
    """d = a . b + c of a warp: each lane holds parts of a, b, c and d in registers."""
    depth, rule = int(k), rule_of(program.target, "mma", a_element, b_element)
    if [len(part) for part in one.operands] != [4, 4, 2, 4]:
        raise one.unsupported()
    target, *given = one.operands
    reads = [reader(one, part, kind) for part, kind in zip(given, ("b32", "b32", "f32"), strict=True)]
    check_target(one, target, "f32")
    lane, number, each = np.arange(32)[:, None, None], np.arange(4)[:, None], depth // 8  # elements of a register
    row, place = lane >> 2, (lane & 3) * each + np.arange(each)
    a_at = slice(None), row + 8 * (number & 1), place + depth // 2 * (number >> 1)  # [lanes, registers, elements]
    b_at, c_at = (slice(None), row, place + depth // 2 * number[:2]), (slice(None), *accumulator(32, 4))

    def run(threads: Threads, mask: Mask) -> None:
        lanes = whole_warps(threads, mask, one)
        a, b, c = (read(threads)[lanes] for read in reads)
        a_values, b_values = np.empty((len(a), 16, depth)), np.empty((len(a), 8, depth))
        c_values = np.empty((len(a), 16, 8), np.float32)
        a_values[a_at] = values_of(a[..., None].view(np.uint8), a_element)
        b_values[b_at] = values_of(b[..., None].view(np.uint8), b_element)
        c_values[c_at] = c
        write(threads, mask, target, multiply_add(a_values, b_values, c_values, rule)[c_at])

    return run


THREADS = 128  # of a warpgroup


@instruction("wgmma.mma_async.sync.aligned.m64n(64|128|256)k32.f32.(e4m3|e5m2).(e4m3|e5m2)")
def warpgroup_product(program: Program, one: Instruction, n: str, a_element: str, b_element: str) -> Run:
    """d = a . b, plus d where its predicate says so, of a warpgroup; a and b in shared memory, d after a wait."""
    columns, rule = int(n), rule_of(program.target, "wgmma", a_element, b_element)
    d, a, b, keeps, *signs = one.operands
    if any(constant(one, sign) != 1 for sign in signs) or len(d) != columns // 2:
        raise one.unsupported()
    read_a, read_b, read_keeps = reader(one, a, "u64"), reader(one, b, "u64"), reader(one, keeps, "pred")
    read_d, targets = reader(one, d, "f32"), frozenset(item.number for item in d)
    at = slice(None), *accumulator(THREADS, columns // 2)

    def operands(threads: Threads, read: Any, lanes: np.ndarray, rows: int) -> list[SharedOperand]:
        given = wide(read(threads), threads.count)[lanes]
        if (given != given[:, :1]).any():
            raise Fault(f"a descriptor differs in a warpgroup: {one}")
        group = GROUP - threads.warp[lanes[:, 0]] // 4
        each = zip(lanes[:, 0], given[:, 0].tolist(), group, strict=True)
        return [SharedOperand(threads, *of[:2], rows, (0, 128, 64, 32)[of[1] >> 62], one, of[2]) for of in each]

    def run(threads: Threads, mask: Mask) -> None:
        lanes = whole_warps(threads, mask, one, THREADS)
        left, right = operands(threads, read_a, lanes, 64), operands(threads, read_b, lanes, columns)
        adds = wide(read_keeps(threads), threads.count)[lanes[:, :1, None]]

        def end() -> None:
            a_codes, b_codes = (np.stack([operand.end() for operand in side]) for side in (left, right))
            c_values = np.empty((len(lanes), 64, columns), np.float32)
            c_values[at] = np.where(adds, read_d(threads)[lanes], np.float32(0))
            out = multiply_add(values_of(a_codes, a_element), values_of(b_codes, b_element), c_values, rule)
            write(threads, mask, d, out[at])

        threads.under_way |= targets
        threads.products[-1].append((end, targets))

    run.writes = targets  # type: ignore[attr-defined]
    return run


# --- tensor memory ----------------------------------------------------------------------------------------------------

LANES = 128
WRITTEN, PROMISED = 1, 2  # of a cell: somebody wrote it; a product under way will


@dataclass
class TensorMemory:
    """Of all programs: 32-bit cells [programs, 128, columns], their states, and products that have not ended."""

    cells: np.ndarray
    states: np.ndarray
    products: dict[int, list[Callable[[], None]]] = field(default_factory=dict)


def _memory(launch: Launch, one: Instruction) -> TensorMemory:
    if launch.tensor_memory is None:
        raise Fault(f"no tensor memory was allocated: {one}")
    return launch.tensor_memory


@instruction("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32")
def allocate(program: Program, one: Instruction) -> Run:
    """Columns of tensor memory, whose address, 0, it writes to shared memory; once a program."""
    address, columns = reader(one, one.operands[0], "[]"), constant(one, one.operands[1])

    def run(threads: Threads, mask: Mask) -> None:
        launch, lanes, shape = threads.launch, threads.lanes(mask), (threads.launch.programs, LANES, columns)
        if launch.tensor_memory is None:
            launch.tensor_memory = TensorMemory(np.full(shape, 0xFFC0FFEE, U32), np.zeros(shape, np.uint8))
        if launch.tensor_memory.cells.shape != shape:
            raise one.unsupported("allocations of different sizes:")
        store(threads, "shared", lanes, address(threads), np.zeros((lanes.size, 1), U32), one)

    return run


@instruction("tcgen05.(ld|st).sync.aligned.32x32b.x(?:1|2|4|8|16|32|64|128).b32")
def access(program: Program, one: Instruction, name: str) -> Run:
    """Between registers and the 32 lanes of tensor memory that are a warp's own."""
    memory, values = one.operands if name == "st" else one.operands[::-1]
    address, read, count = reader(one, memory, "[]"), reader(one, values, "b32"), len(values)

    def run(threads: Threads, mask: Mask) -> None:
        held, at, lanes = _memory(threads.launch, one), address(threads), threads.lanes(mask)
        first, column = at[lanes] >> 16, at[lanes] & 0xFFFF
        if (first != threads.thread[lanes] // 32 % 4 * 32).any():
            raise Fault(f"a warp reaches for another's lanes of tensor memory: {one}")
        if (column + count > held.cells.shape[2]).any():
            raise Fault(f"out of bounds: column {column.max() + count - 1} of tensor memory: {one}")
        row = first + threads.lane[lanes]
        cells = threads.program[lanes, None], row[:, None], column[:, None] + np.arange(count)
        if name == "ld":
            if (held.states[cells] != WRITTEN).any():
                raise Fault(f"nobody wrote this tensor memory, or a product under way does: {one}")
            write(threads, mask, values, held.cells[cells])
        else:
            held.cells[cells], held.states[cells] = read(threads)[lanes], WRITTEN

    return run


@instruction("tcgen05.mma.cta_group::1.kind::f8f6f4")
def multiply(program: Program, one: Instruction) -> Run:
    """d [128, N] in tensor memory = a . b^T, plus d where its predicate says so; a and b are FP8 in shared memory."""
    to, read_keeps = reader(one, one.operands[0], "[]"), reader(one, one.operands[4], "pred")
    reads = [reader(one, item, kind) for item, kind in zip(one.operands[1:4], ("u64", "u64", "u32"), strict=True)]
    swizzles = {0: 0, 2: 128, 4: 64, 6: 32}

    def begin(threads: Threads, lane: int, into: int, given: list[int], keeps: bool) -> Callable[[], None]:
        a, b, shape = given
        owner, rows, columns = int(threads.program[lane]), (shape >> 24 & 31) << 4, (shape >> 17 & 63) << 3
        elements = [("e4m3", "e5m2")[shape >> first & 7] for first in (7, 10)]
        if rows != LANES or shape >> 4 & 3 != 1 or shape >> 13 & 15 or shape & 15 or into >> 16:
            raise one.unsupported(f"instruction descriptor {shape:#x}:")
        rule, memory = rule_of(program.target, "tcgen05", *elements), _memory(threads.launch, one)
        left, right = (
            SharedOperand(threads, lane, given, size, swizzles[given >> 61], one)
            for given, size in ((a, rows), (b, columns))
        )
        cells, states = (every[owner, :, into : into + columns] for every in (memory.cells, memory.states))
        if cells.shape[1] != columns or (keeps and not states.all()):
            raise Fault(f"out of bounds, or nobody wrote the tensor memory that a product adds to: {one}")
        states[:] = PROMISED

        def end() -> None:
            old = cells.view(np.float32) if keeps else np.zeros(cells.shape, np.float32)
            a_values, b_values = values_of(left.end(), elements[0])[None], values_of(right.end(), elements[1])[None]
            cells[:] = multiply_add(a_values, b_values, old[None], rule)[0].view(U32)
            states[:] = WRITTEN

        return end

    def run(threads: Threads, mask: Mask) -> None:
        at, keeps = to(threads), wide(read_keeps(threads), threads.count)
        given = [wide(read(threads), threads.count) for read in reads]
        for lane in threads.lanes(mask).tolist():
            end = begin(threads, lane, int(at[lane]), [int(values[lane]) for values in given], bool(keeps[lane]))
            _memory(threads.launch, one).products.setdefault(int(threads.program[lane]), []).append(end)

    return run


@dataclass
class Barrier:
    """An mbarrier of one arrival a phase, and the work that arrives when it ends."""

    phase: int = 0
    work: list[list[Callable[[], None]]] = field(default_factory=list)

    def passed(self, parity: int) -> bool:
        """Whether the phase of a parity is over; what it waits for ends now."""
        while self.work and self.phase & 1 == parity:
            for end in self.work.pop(0):
                end()
            self.phase += 1
        return self.phase & 1 != parity


@instruction(
    "mbarrier.(init|inval|try_wait.parity).shared(?:::cta)?.b64",
    "(tcgen05.commit).cta_group::1.mbarrier::arrive::one(?:.shared::cluster)?.b64",
)
def barrier(program: Program, one: Instruction, name: str) -> Run:
    """Made, taken away, waited for, or told to arrive when all products so far have ended."""
    target = one.operands[0] if name.startswith("try_wait") else None
    memory, *given = one.operands[target is not None :]
    address, read = reader(one, memory, "[]"), reader(one, given[0] if given else 0, "u32")
    if name == "init" and given != [1]:
        raise one.unsupported()

    def run(threads: Threads, mask: Mask) -> Any:
        launch, at, lanes, values = threads.launch, address(threads), threads.lanes(mask), read(threads)
        launch.shared.places(at[lanes], threads.program[lanes], 8, one)
        found = np.zeros(threads.count, bool)
        for lane in lanes:
            key = int(threads.program[lane]), int(at[lane])
            if name == "init":
                launch.barriers[key] = Barrier()
            elif key not in launch.barriers:
                raise Fault(f"no mbarrier was made at {key[1]}: {one}")
            elif name == "inval":
                del launch.barriers[key]
            elif target is None:
                launch.barriers[key].work.append(_memory(launch, one).products.pop(key[0], []))
            else:
                found[lane] = launch.barriers[key].passed(int(wide(values, threads.count)[lane]) & 1)
        if target is not None:
            write(threads, mask, target, found)
        return PAUSE

    return run
