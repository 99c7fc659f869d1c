"""Matrices of tensor cores: ldmatrix, mma.sync of a warp, wgmma of a warpgroup, tcgen05 with its memory, mbarriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.accesses import PAUSE, load, store
from emulator.machine import Mask, Run, Threads, check_target, constant, instruction, reader, whole_warps, wide, write
from emulator.memory import GROUP, NOBODY
from emulator.parse import Fault, Instruction, Program
from emulator.tensor_cores import Rule, multiply_add, rule_of
from emulator.values import FP8, U32

CHUNK = 16  # bytes of a matrix in shared memory that stay together


def values_of(raw: np.ndarray, element: str) -> np.ndarray:
    """float64 of bytes [..., n]: n codes of FP8, or n / 2 of float16."""
    return FP8[element][raw] if element in FP8 else raw.view(np.float16).astype(np.float64)


@instruction("(ldmatrix|stmatrix).sync.aligned.m8n8.x([124])(.trans)?.shared.b16")
def matrix(program: Program, one: Instruction, name: str, count: str, transposes: str | None) -> Run:
    """8 x 8 matrices of 16 bits, each row at the address of one lane; a lane has two neighbours of a row."""
    memory, values = one.operands if name == "stmatrix" else one.operands[::-1]
    if not isinstance(values, list) or len(values) != int(count):
        raise one.unsupported()
    address, read = reader(one, memory, "[]"), reader(one, values, "b32")

    def turned(halves: np.ndarray) -> np.ndarray:
        matrices = halves.view(np.uint16).reshape(-1, len(values), 8, 8)
        return np.ascontiguousarray(matrices.swapaxes(2, 3) if transposes else matrices)

    def run(threads: Threads, mask: Mask) -> None:
        lanes = whole_warps(threads, mask, one)
        rows, at = lanes[:, : 8 * len(values)].reshape(-1), address(threads)
        if name == "ldmatrix":
            found = turned(load(threads, "shared", rows, at, 16, one)).view(np.uint32).reshape(-1, len(values), 32)
            write(threads, mask, values, found.swapaxes(1, 2))
        else:
            given = np.ascontiguousarray(read(threads)[lanes].swapaxes(1, 2))
            store(threads, "shared", rows, at, turned(given).reshape(rows.size, 8), one)

    return run


WGMMA, TCGEN05 = {1: 128, 2: 64, 3: 32}, {2: 128, 4: 64, 6: 32}  # bytes that are swizzled, by a descriptor's last bits


def begin(
    threads: Threads, lane: int, descriptors: list[tuple[int, int]], rule: Rule, one: Instruction, reader: int = NOBODY
) -> Callable[[np.ndarray], np.ndarray]:
    """A product of operands, (descriptor, rows), in a program's shared memory, which nobody may write before it ends.

    After that the ``reader`` may, a warpgroup, or nobody in particular. A descriptor says where an operand begins, and
    how far 8 rows are from the next 8. Rows, of 32 bytes, lie along K, in 128, 64 or 32 bytes that are swizzled: three,
    two or one of an address's bits are added to others. What is returned ends
    the product: of an accumulator it gives the sum.
    """
    shared, begun = threads.launch.shared, []
    for descriptor, rows in descriptors:
        swizzle = TCGEN05.get(descriptor >> 61) if one.name.startswith("tcgen05") else WGMMA.get(descriptor >> 62)
        if swizzle is None or descriptor >> 49 & 15:
            raise one.unsupported("a descriptor's swizzle or base offset:")
        start, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 32))
        row = np.arange(rows)[:, None]
        address = start + row // 8 * stride + row % 8 * swizzle + np.arange(2) * CHUNK
        address ^= (address >> 7 & swizzle // CHUNK - 1) << 4
        lanes = np.full(address.size, lane)
        at = shared.places(address.reshape(-1), threads.program[lanes], CHUNK, one), CHUNK, threads.warp[lanes], one
        begun.append((at, shared.load(*at, reader)))

    def end(c: np.ndarray) -> np.ndarray:
        values = []
        for (at, codes), element in zip(begun, rule.formats, strict=True):
            if (shared.load(*at, NOBODY) != codes).any():
                raise Fault(f"race: shared memory that a product under way reads was written: {one}")
            values.append(values_of(codes.view(np.uint8).reshape(1, -1, 2 * CHUNK), element))
        return multiply_add(values[0], values[1], c[None], rule)[0]

    return end


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
    reads = [reader(one, operand, kind) for operand, kind in ((a, "u64"), (b, "u64"), (keeps, "pred"))]
    read_d, targets = reader(one, d, "f32"), frozenset(item.number for item in d)
    at = slice(None), *accumulator(THREADS, columns // 2)

    def run(threads: Threads, mask: Mask) -> None:
        lanes = whole_warps(threads, mask, one, THREADS)
        left, right, adds = (wide(read(threads), threads.count)[lanes] for read in reads)
        if (left != left[:, :1]).any() or (right != right[:, :1]).any():
            raise Fault(f"a descriptor differs in a warpgroup: {one}")
        ends = [
            begin(threads, lane, [(a, 64), (b, columns)], rule, one, GROUP - threads.warp[lane] // 4)
            for lane, a, b in zip(lanes[:, 0], left[:, 0].tolist(), right[:, 0].tolist(), strict=True)
        ]

        def end() -> None:
            c = np.zeros((len(lanes), 64, columns), np.float32)
            c[at] = np.where(adds[:, :1, None], read_d(threads)[lanes], c[at])
            write(threads, mask, d, np.stack([of(each) for of, each in zip(ends, c, strict=True)])[at])

        threads.under_way |= targets
        threads.products[-1].append((end, targets))

    run.writes = targets  # type: ignore[attr-defined]
    return run


# --- tensor memory ----------------------------------------------------------------------------------------------------

LANES = 128
WRITTEN, PROMISED = 1, 2  # of a cell: somebody wrote it; a product under way will


@instruction("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32")
def allocate(program: Program, one: Instruction) -> Run:
    """Columns of tensor memory, whose address, 0, it writes to shared memory; once a program."""
    address, columns = reader(one, one.operands[0], "[]"), constant(one, one.operands[1])

    def run(threads: Threads, mask: Mask) -> None:
        launch, lanes = threads.launch, threads.lanes(mask)
        if not launch.cells.size:
            launch.cells = np.full((launch.programs, LANES, columns), 0xFFC0FFEE, U32)
            launch.states = np.zeros(launch.cells.shape, np.uint8)
        if launch.cells.shape[2] != columns:
            raise one.unsupported("allocations of different sizes:")
        store(threads, "shared", lanes, address(threads), np.zeros((lanes.size, 1), U32), one)

    return run


@instruction("tcgen05.(ld|st).sync.aligned.32x32b.x(?:1|2|4|8|16|32|64|128).b32")
def access(program: Program, one: Instruction, name: str) -> Run:
    """Between registers and the 32 lanes of tensor memory that are a warp's own."""
    memory, values = one.operands if name == "st" else one.operands[::-1]
    address, read, count = reader(one, memory, "[]"), reader(one, values, "b32"), len(values)

    def run(threads: Threads, mask: Mask) -> None:
        held, at, lanes = threads.launch, address(threads), threads.lanes(mask)
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

    def promise(threads: Threads, lane: int, into: int, given: list[int], keeps: bool) -> Callable[[], None]:
        a, b, shape = given
        owner, rows, columns = int(threads.program[lane]), (shape >> 24 & 31) << 4, (shape >> 17 & 63) << 3
        is_known = rows == LANES and shape >> 4 & 3 == 1 and not (shape & 0x1B0F or shape >> 13 & 15 or into >> 16)
        if not is_known:
            raise one.unsupported(f"instruction descriptor {shape:#x}:")
        launch, elements = threads.launch, [("e4m3", "e5m2")[shape >> first & 7] for first in (7, 10)]
        finish = begin(threads, lane, [(a, rows), (b, columns)], rule_of(program.target, "tcgen05", *elements), one)
        cells, states = (every[owner, :, into : into + columns] for every in (launch.cells, launch.states))
        if cells.shape[1] != columns or (keeps and not states.all()):
            raise Fault(f"out of bounds, or nobody wrote the tensor memory that a product adds to: {one}")
        states[:] = PROMISED

        def end() -> None:
            cells[:] = finish(cells.view(np.float32) if keeps else np.zeros(cells.shape, np.float32)).view(U32)
            states[:] = WRITTEN

        return end

    def run(threads: Threads, mask: Mask) -> None:
        at, keeps = to(threads), wide(read_keeps(threads), threads.count)
        given = [wide(read(threads), threads.count) for read in reads]
        for lane in threads.lanes(mask).tolist():
            end = promise(threads, lane, int(at[lane]), [int(values[lane]) for values in given], bool(keeps[lane]))
            threads.launch.products.setdefault(int(threads.program[lane]), []).append(end)

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
                launch.barriers[key].work.append(launch.products.pop(key[0], []))
            else:
                found[lane] = launch.barriers[key].passed(int(wide(values, threads.count)[lane]) & 1)
                threads.waits[lane] = not found[lane]
        if target is not None:
            write(threads, mask, target, found)
        return PAUSE

    return run
