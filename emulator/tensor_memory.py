"""Blackwell's tensor memory, the products that work in it (tcgen05), and the mbarriers that say when they ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.accesses import lanes_of, shared_places
from emulator.machine import Launch, Mask, Threads, address_of, instruction, items, reader, wide, write
from emulator.matrices import descriptor_places, matrix_places, rule_for, values_of
from emulator.parse import Fault, Instruction, Program
from emulator.tensor_cores import multiply_add
from emulator.values import U32

LANES, COLUMNS = 128, 512
WRITTEN, PROMISED = 1, 2  # of a cell: somebody wrote it; a product under way will


@dataclass
class TensorMemory:
    """Of all programs: 32-bit cells [programs, 128, 512], their states, and products that have not ended."""

    cells: np.ndarray
    states: np.ndarray
    products: dict[int, list[Callable[[], None]]] = field(default_factory=dict)


def tensor_memory(launch: Launch) -> TensorMemory:
    """A launch's, made at its first use."""
    if launch.tensor_memory is None:
        shape = launch.programs, LANES, COLUMNS
        launch.tensor_memory = TensorMemory(np.full(shape, 0xFFC0FFEE, U32), np.zeros(shape, np.uint8))
    return launch.tensor_memory


@dataclass
class Barrier:
    """An mbarrier: arrivals that its phase still waits for, of how many, and work that arrives when it ends."""

    expected: int
    missing: int
    phase: int = 0
    work: list[list[Callable[[], None]]] = field(default_factory=list)

    def arrive(self) -> None:
        """One of the expected; the last ends the phase."""
        self.missing -= 1
        if self.missing == 0:
            self.phase, self.missing = self.phase + 1, self.expected


@instruction("mbarrier")
def barrier(program: Program, one: Instruction) -> Any:
    """init, inval, arrive and try_wait of a phase's parity; what it waits for ends when somebody waits."""
    one.allow("init", "inval", "arrive", "try_wait", "parity", "shared", "shared::cta", "acquire", "release", "cta")
    what = one.parts[1]
    target = one.operands[0] if what in ("try_wait", "arrive") and not hasattr(one.operands[0], "base") else None
    memory, *given = one.operands[target is not None :]
    address = address_of(one, memory)
    read = reader(one, given[0], "u", 32) if given else None

    def run(threads: Threads, mask: Mask) -> None:
        barriers, at = threads.launch.barriers, address(threads)
        values = None if read is None else wide(read(threads), threads.count)
        found = np.zeros(threads.count, bool)
        for lane in lanes_of(threads, mask):
            key = int(threads.program[lane]), int(at[lane])
            if what == "init":
                shared_places(threads, np.array([lane]), at, 8, one)
                barriers[key] = Barrier(int(values[lane]), int(values[lane]))  # type: ignore[index]
            elif key not in barriers:
                raise Fault(f"no mbarrier was made at {key[1]}: {one}")
            elif what == "inval":
                del barriers[key]
            elif what == "arrive":
                barriers[key].arrive()
            else:
                held = barriers[key]
                while held.work and held.phase & 1 == int(values[lane]) & 1:  # type: ignore[index]
                    for end in held.work.pop(0):
                        end()
                    held.arrive()
                found[lane] = held.phase & 1 != int(values[lane]) & 1  # type: ignore[index]
        if what == "try_wait":
            write(threads, mask, target, found)

    return run


@instruction("tcgen05")
def tensor(program: Program, one: Instruction) -> Any:
    """alloc, dealloc, ld, st, wait, commit and mma of one thread block."""
    kind = one.parts[1].split("::")[0]
    if one.has("cta_group::2"):
        raise one.unsupported()
    if kind in ("relinquish_alloc_permit", "dealloc", "fence", "wait"):  # Triton 3.9 uses what ld reads before wait::ld
        return lambda threads, mask: None
    build = {"alloc": _allocate, "commit": _commit, "ld": _move, "st": _move, "mma": _multiply}.get(kind)
    if build is None:
        raise one.unsupported()
    return build(program, one)


def _allocate(program: Program, one: Instruction) -> Any:
    address = address_of(one, one.operands[0])

    def run(threads: Threads, mask: Mask) -> None:
        lanes = lanes_of(threads, mask)
        places = shared_places(threads, lanes, address(threads), 4, one)
        threads.launch.shared.write(places, np.zeros((lanes.size, 4), np.uint8), threads.warp[lanes], one)

    return run


def _commit(program: Program, one: Instruction) -> Any:
    one.allow("commit", "cta_group::1", "mbarrier::arrive::one", "shared::cluster", "shared::cta")
    address = address_of(one, one.operands[0])

    def run(threads: Threads, mask: Mask) -> None:
        at, memory = address(threads), tensor_memory(threads.launch)
        for lane in lanes_of(threads, mask):
            owner = int(threads.program[lane])
            held = threads.launch.barriers.get((owner, int(at[lane])))
            if held is None:
                raise Fault(f"no mbarrier was made at {at[lane]}: {one}")
            held.work.append(memory.products.pop(owner, []))

    return run


def _move(program: Program, one: Instruction) -> Any:
    """Between registers and the 32 lanes of tensor memory that are a warp's own."""
    is_load = one.parts[1] == "ld"
    if one.parts[4] != "32x32b" or one.has("pack::16b", "unpack::16b"):
        raise one.unsupported()
    memory, values = one.operands if not is_load else one.operands[::-1]
    address, values = address_of(one, memory), items(values)
    reads = [] if is_load else [reader(one, item, "b", 32) for item in values]

    def run(threads: Threads, mask: Mask) -> None:
        held, at = tensor_memory(threads.launch), address(threads).astype(np.int64)
        lanes = lanes_of(threads, mask)
        if (at[lanes] >> 16 != threads.thread[lanes] // 32 % 4 * 32).any():
            raise Fault(f"a warp reaches for another's lanes of tensor memory: {one}")
        owner, row, column = threads.program[lanes], (at[lanes] >> 16) + threads.lane[lanes], at[lanes] & 0xFFFF
        if (column + len(values) > COLUMNS).any():
            raise Fault(f"out of bounds: column {column.max() + len(values) - 1} of tensor memory: {one}")
        for place, value in enumerate(values):
            cell = owner, row, column + place
            if is_load:
                if (held.states[cell] != WRITTEN).any():
                    raise Fault(
                        f"nobody wrote column {column[0] + place} of tensor memory, or a product under way does: {one}"
                    )
                found = np.zeros(threads.count, U32)
                found[lanes] = held.cells[cell]
                write(threads, mask, value, found)
            else:
                held.cells[cell] = wide(reads[place](threads), threads.count)[lanes]
                held.states[cell] = WRITTEN

    return run


def _multiply(program: Program, one: Instruction) -> Any:
    """d [128, N] in tensor memory = a . b^T, plus d where its predicate says so; a and b are FP8 in shared memory."""
    one.allow("mma", "cta_group::1", "kind::f8f6f4")
    if not one.has("kind::f8f6f4") or len(one.operands) != 5:
        raise one.unsupported()
    to = address_of(one, one.operands[0])
    reads = [reader(one, item, "u", bits) for item, bits in zip(one.operands[1:4], (64, 64, 32), strict=True)]
    read_keeps = reader(one, one.operands[4], "p", 1)

    def operand(threads: Threads, owner: int, descriptor: int, rows: int, warp: Any) -> tuple[Any, Any]:
        if descriptor >> 49 & 15:
            raise one.unsupported("a descriptor's base offset")
        swizzle = {0: 0, 2: 128, 4: 64, 6: 32}[descriptor >> 61]
        places = matrix_places(threads, owner, descriptor_places(descriptor, rows, swizzle), one)
        codes = threads.launch.shared.read(places.reshape(1, -1), warp, one).reshape(places.shape)
        return codes, (places, threads.launch.shared.snapshot(places))

    def begin(threads: Threads, lane: int, into: int, given: list[int], keeps: bool) -> Callable[[], None]:
        a, b, shape = given
        owner, rows, columns = int(threads.program[lane]), (shape >> 24 & 31) << 4, (shape >> 17 & 63) << 3
        elements = [("e4m3", "e5m2")[shape >> first & 7] for first in (7, 10)]
        if rows != LANES or shape >> 4 & 3 != 1 or shape >> 13 & 15 or shape & 15 or into >> 16:
            raise one.unsupported(f"instruction descriptor {shape:#x}")
        warp, rule = threads.warp[lane : lane + 1], rule_for(program, one, *elements)
        (left, left_read), (right, right_read) = (
            operand(threads, owner, a, rows, warp),
            operand(threads, owner, b, columns, warp),
        )
        memory = tensor_memory(threads.launch)
        cells, states = (every[owner, :, into : into + columns] for every in (memory.cells, memory.states))
        if keeps and not states.all():
            raise Fault(f"nobody wrote the tensor memory that a product adds to: {one}")
        states[:] = PROMISED

        def end() -> None:
            for places, snapshot in (left_read, right_read):
                threads.launch.shared.end_read(places, snapshot, one)
            old = cells.view(np.float32) if keeps else np.zeros(cells.shape, np.float32)
            a_values, b_values = values_of(left, elements[0])[None], values_of(right, elements[1])[None]
            cells[:] = multiply_add(a_values, b_values, old[None], rule)[0].view(U32)
            states[:] = WRITTEN

        return end

    def run(threads: Threads, mask: Mask) -> None:
        at, keeps = to(threads), wide(read_keeps(threads), threads.count)
        given = [wide(read(threads), threads.count) for read in reads]
        for lane in lanes_of(threads, mask):
            end = begin(threads, lane, int(at[lane]), [int(values[lane]) for values in given], bool(keeps[lane]))
            if threads.launch.options.late:
                tensor_memory(threads.launch).products.setdefault(int(threads.program[lane]), []).append(end)
            else:
                end()

    return run
