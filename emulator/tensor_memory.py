"""Blackwell's tensor memory, the products that work in it (tcgen05), and the mbarriers that say when they ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.accesses import PAUSE, store
from emulator.machine import Launch, Mask, Run, Threads, address_of, constant, instruction, items, reader, wide, write
from emulator.matrices import SharedOperand, matrix_chunks, values_of
from emulator.parse import Fault, Instruction, Program
from emulator.tensor_cores import multiply_add, rule_of
from emulator.values import U32

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
    address, columns = address_of(one, one.operands[0]), constant(one, one.operands[1])

    def run(threads: Threads, mask: Mask) -> None:
        launch, lanes, shape = threads.launch, threads.lanes(mask), (threads.launch.programs, LANES, columns)
        if launch.tensor_memory is None:
            launch.tensor_memory = TensorMemory(np.full(shape, 0xFFC0FFEE, U32), np.zeros(shape, np.uint8))
        if launch.tensor_memory.cells.shape != shape:
            raise one.unsupported("allocations of different sizes:")
        store(threads, "shared", lanes, address(threads), np.zeros((lanes.size, 1), U32), one)

    return run


@instruction(
    "tcgen05.(?:dealloc.cta_group::1.sync.aligned.b32|relinquish_alloc_permit.cta_group::1.sync.aligned)",
    "tcgen05.wait::(?:ld|st).sync.aligned",
)
def nothing(program: Program, one: Instruction) -> Run:
    """Stores are there at once; and Triton 3.9 uses what a load reads before wait::ld."""
    return lambda threads, mask: None


@instruction("tcgen05.(ld|st).sync.aligned.32x32b.x(?:1|2|4|8|16|32|64|128).b32")
def access(program: Program, one: Instruction, name: str) -> Run:
    """Between registers and the 32 lanes of tensor memory that are a warp's own."""
    memory, values = one.operands if name == "st" else one.operands[::-1]
    address, values = address_of(one, memory), items(values)
    reads = [reader(one, item, "b32") for item in values] if name == "st" else []

    def run(threads: Threads, mask: Mask) -> None:
        held, at, lanes = _memory(threads.launch, one), address(threads), threads.lanes(mask)
        owner, first, column = threads.program[lanes], at[lanes] >> 16, at[lanes] & 0xFFFF
        if (first != threads.thread[lanes] // 32 % 4 * 32).any():
            raise Fault(f"a warp reaches for another's lanes of tensor memory: {one}")
        if (column + len(values) > held.cells.shape[2]).any():
            raise Fault(f"out of bounds: column {column.max() + len(values) - 1} of tensor memory: {one}")
        cells = owner[:, None], (first + threads.lane[lanes])[:, None], column[:, None] + np.arange(len(values))
        if name == "ld":
            if (held.states[cells] != WRITTEN).any():
                raise Fault(f"nobody wrote this tensor memory, or a product under way does: {one}")
            for value, part in zip(values, held.cells[cells].T, strict=True):
                write(threads, mask, value, part)
        else:
            held.cells[cells] = np.stack([wide(read(threads), threads.count)[lanes] for read in reads], 1)
            held.states[cells] = WRITTEN

    return run


@instruction("tcgen05.mma.cta_group::1.kind::f8f6f4")
def multiply(program: Program, one: Instruction) -> Run:
    """d [128, N] in tensor memory = a . b^T, plus d where its predicate says so; a and b are FP8 in shared memory."""
    to, read_keeps = address_of(one, one.operands[0]), reader(one, one.operands[4], "pred")
    reads = [reader(one, item, kind) for item, kind in zip(one.operands[1:4], ("u64", "u64", "u32"), strict=True)]
    swizzles = {0: 0, 2: 128, 4: 64, 6: 32}

    def begin(threads: Threads, lane: int, into: int, given: list[int], keeps: bool) -> Callable[[], None]:
        a, b, shape = given
        owner, rows, columns = int(threads.program[lane]), (shape >> 24 & 31) << 4, (shape >> 17 & 63) << 3
        elements = [("e4m3", "e5m2")[shape >> first & 7] for first in (7, 10)]
        if rows != LANES or shape >> 4 & 3 != 1 or shape >> 13 & 15 or shape & 15 or into >> 16:
            raise one.unsupported(f"instruction descriptor {shape:#x}:")
        if a >> 49 & 15 or b >> 49 & 15:
            raise one.unsupported("a descriptor's base offset:")
        rule, memory = rule_of(program.target, "tcgen05", *elements), _memory(threads.launch, one)
        left, right = (
            SharedOperand(threads, lane, matrix_chunks(given, size, swizzles[given >> 61]), one)
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


# --- mbarriers --------------------------------------------------------------------------------------------------------


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
    address, read = address_of(one, memory), reader(one, given[0] if given else 0, "u32")
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
