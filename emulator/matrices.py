"""Multiply matrices by tensor cores: ldmatrix, mma.sync of a warp, wgmma of a warpgroup, tcgen05, mbarriers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.accesses import load, store
from emulator.machine import Threads, instruction, write
from emulator.memory import GROUP, NOBODY
from emulator.parse import Fault, Register
from emulator.tensor_cores import Rule, multiply_add, rule_of
from emulator.values import E8M0, FP8, U32

CHUNK = 16  # bytes of a matrix in shared memory that stay together
WGMMA, TCGEN05 = {1: 128, 2: 64, 3: 32}, {2: 128, 4: 64, 6: 32}  # bytes that are swizzled, by a descriptor's last bits
WARPGROUP = 128  # threads
MATRICES = "sync.aligned.m8n8.x([124])(.trans)?.shared.b16"  # 8 x 8 of 16 bits; a lane has two neighbours of a row


def values_of(raw: np.ndarray, element: str) -> np.ndarray:
    """Return float64 of bytes [..., n]: n codes of FP8, or n / 2 of float16."""
    return FP8[element][raw] if element in FP8 else raw.view(np.float16).astype(np.float64)


@instruction(f"ldmatrix.{MATRICES}", "b32*{0} []")
@instruction(f"stmatrix.{MATRICES}", "- [] b32*{0}")
def move_matrices(threads: Threads, count: str, transposes: str, address: np.ndarray, values: Any = None) -> Any:
    """Move shared memory to registers, or values of registers to it; each row at the address of one lane."""
    lanes, number, one = threads.warps(), int(count), threads.one
    rows = lanes[:, : 8 * number].reshape(-1)
    raw = load(threads, "shared", rows, address, 16, one) if values is None else values[lanes].swapaxes(1, 2)
    matrices = np.ascontiguousarray(raw).view(np.uint16).reshape(-1, number, 8, 8)
    matrices = np.ascontiguousarray(matrices.swapaxes(2, 3) if transposes else matrices)
    if values is None:
        return matrices.view(U32).reshape(-1, number, 32).swapaxes(1, 2)
    store(threads, "shared", rows, address, matrices.reshape(rows.size, 8), one)
    return None


def begin(
    threads: Threads, lane: int, descriptors: list[tuple[int, int]], rule: Rule, reader: int, *scales: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Begin a product of operands, (descriptor, rows), in shared memory, which nobody may write before it ends.

    After that the ``reader``, a warpgroup, may, or NOBODY in particular. A descriptor says where an operand begins, and
    how far 8 rows are from the next 8. Rows, of 32 bytes, lie along K, in 128, 64 or 32 bytes that are swizzled: three,
    two or one of an address's bits are added to others. The returned function ends the product: it takes the
    accumulator and returns the sum.
    """
    shared, one, begun = threads.launch.shared, threads.one, []
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
        factors = (E8M0[scale][None, :, None] for scale in scales)
        return multiply_add(values[0], values[1], c[None], rule, *factors)[0]

    return end


@functools.cache
def accumulator(threads: int, registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns [threads, registers] of a result [16 a warp, 2 a register]."""
    thread, number = np.arange(threads)[:, None], np.arange(registers)
    row = 16 * (thread // 32) + (thread % 32 >> 2) + 8 * (number >> 1 & 1)
    return row, 8 * (number >> 2) + thread % 4 * 2 + (number & 1)


def fragment(registers: np.ndarray, element: str, rows: int, depth: int) -> np.ndarray:
    """Return mma.sync's a or b, [warps, rows, K], of which each lane holds registers [warps, 32, registers]."""
    row, k, half, size = np.arange(rows)[:, None], np.arange(depth), depth // 2, depth // 8  # elements of a register
    place = row % 8 * 4 + k % half // size, row // 8 + k // half * (rows // 8), k % size
    return values_of(registers[..., None].view(np.uint8), element)[:, *place]


@instruction("mma.sync.aligned.m16n8k(16).row.col.f32.(f16).(f16).f32", "f32*4 b32*4 b32*2 f32*4")
@instruction("mma.sync.aligned.m16n8k(32).row.col.f32.(e4m3|e5m2).(e4m3|e5m2).f32", "f32*4 b32*4 b32*2 f32*4")
@instruction(
    "mma.sync.aligned.m16n8k(32).row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
    ".f32.(e4m3|e5m2).(e4m3|e5m2).f32.ue8m0",
    "f32*4 b32*4 b32*2 f32*4 b32 u16*2 b32 u16*2",
)
def warp_product(threads: Threads, k: str, *operands: Any) -> np.ndarray:
    """Compute d = a . b + c of a warp: each lane holds parts of a, b, c and d in registers.

    Scales of blocks are the low bytes of the first lanes of four: of a's rows i and i + 8 in two, of b's i in one.
    """
    elements, lanes, at = operands[:2], threads.warps(), (slice(None), *accumulator(32, 4))
    rule, sums = rule_of(threads.launch.program.target, "mma", *elements), np.empty((len(lanes), 16, 8), np.float32)
    a, b = (fragment(operands[2 + n][lanes], elements[n], rows, int(k)) for n, rows in enumerate((16, 8)))
    sums[at], scales = operands[4][lanes], []
    if operands[5:]:
        if operands[6].any() or operands[8].any():
            raise threads.one.unsupported("scales in other bytes or lanes:")
        of_a, of_b = (E8M0[operands[n][lanes].reshape(-1, 8, 4) & 255] for n in (5, 7))
        scales = [of_a[..., :2].swapaxes(1, 2).reshape(-1, 16, 1), of_b[..., :1]]
    return multiply_add(a, b, sums, rule, *scales)[at]


@instruction("wgmma.mma_async.sync.aligned.m64n(64|128|256)k32.f32.(e4m3|e5m2).(e4m3|e5m2)", "- = u64 u64 pred 1 1 1?")
def warpgroup_product(threads: Threads, n: str, a: str, b: str, d: list[Register], *operands: np.ndarray) -> None:
    """Begin d = a . b, plus d by its predicate, of a warpgroup; a and b in shared memory, d after a wait."""
    columns, rule = int(n), rule_of(threads.launch.program.target, "wgmma", a, b)
    lanes, one, mask = threads.warps(size=WARPGROUP), threads.one, threads.mask
    targets = frozenset(item.number for item in d)
    left, right, adds = (values[lanes] for values in operands)
    if len(d) != columns // 2:
        raise one.unsupported()
    if (left != left[:, :1]).any() or (right != right[:, :1]).any():
        raise Fault(f"a descriptor differs in a warpgroup: {one}")
    ends = [
        begin(threads, lane, [(first, 64), (second, columns)], rule, GROUP - threads.warp[lane] // 4)
        for lane, first, second in zip(lanes[:, 0], left[:, 0].tolist(), right[:, 0].tolist(), strict=True)
    ]
    at = slice(None), *accumulator(WARPGROUP, len(d))

    def end() -> None:
        c = np.zeros((len(lanes), 64, columns), np.float32)
        held = np.stack([threads.registers[item.number] for item in d], 1).view(np.float32)
        c[at] = np.where(adds[:, :1, None], held[lanes], c[at])
        write(threads, mask, d, np.stack([of(each) for of, each in zip(ends, c, strict=True)])[at])

    threads.under_way |= targets
    threads.begun["wgmma"][-1].append((end, targets))


# --- tensor memory ----------------------------------------------------------------------------------------------------

LANES = 128
WRITTEN, PROMISED = 1, 2  # of a cell: somebody wrote it; a product under way will
COUNT = "sync.aligned.32x32b.x(1|2|4|8|16|32|64|128).b32"
SCALED = "kind::mxf8f6f4.block_scale.(?:scale_vec::1X|block32)"
# (which bits of an instruction's descriptor are looked at, what they must be): 128 rows, float32 or scales in E8M0
PLAIN, BLOCKS = (0x1F01FB3F, 0x08000010), (0x9F81FB4F, 0x08800000)


@instruction("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", "- [] int")
def allocate(threads: Threads, columns: int, address: np.ndarray) -> None:
    """Allocate columns of tensor memory, whose address, 0, it writes to shared memory; once a program."""
    launch, lanes = threads.launch, threads.lanes()
    if not launch.cells.size:
        launch.cells = np.full((launch.programs, LANES, columns), 0xFFC0FFEE, U32)
        launch.states = np.zeros(launch.cells.shape, np.uint8)
    if launch.cells.shape[2] != columns:
        raise threads.one.unsupported("allocations of different sizes:")
    store(threads, "shared", lanes, address, np.zeros((lanes.size, 1), U32), threads.one)


@instruction(f"tcgen05.ld.{COUNT}", "b32*{0} []")
@instruction(f"tcgen05.st.{COUNT}", "- [] b32*{0}")
def move_cells(threads: Threads, count: str, address: np.ndarray, values: Any = None) -> Any:
    """Move tensor memory to registers, or values of registers to it; a warp has 32 of its 128 lanes."""
    launch, lanes, one = threads.launch, threads.lanes(), threads.one
    first, columns = address[lanes] >> 16, (address[lanes, None] & 0xFFFF) + np.arange(int(count))
    if (first != threads.thread[lanes] // 32 % 4 * 32).any():
        raise Fault(f"a warp reaches for another's lanes of tensor memory: {one}")
    if (columns >= launch.cells.shape[2]).any():
        raise Fault(f"out of bounds: column {columns.max()} of tensor memory: {one}")
    at = threads.program[lanes, None], (first + threads.lane[lanes])[:, None], columns
    if values is not None:
        launch.cells[at], launch.states[at] = values[lanes], WRITTEN
    elif (launch.states[at] != WRITTEN).any():
        raise Fault(f"nobody wrote this tensor memory, or a product under way does: {one}")
    return launch.cells[at] if values is None else None


@instruction("tcgen05.mma.cta_group::1.kind::f8f6f4", "- [] u64 u64 u32 pred")
@instruction(f"tcgen05.mma.cta_group::1.{SCALED}", "- [] u64 u64 u32 [] [] pred")
def multiply(threads: Threads, *operands: np.ndarray) -> None:
    """Begin d [128, N] = a . b^T, or plus d by its predicate; d and scales in tensor memory, a and b in shared."""
    for lane in threads.lanes().tolist():
        end = _promised(threads, lane, *(values[lane].item() for values in operands))
        threads.launch.products.setdefault(int(threads.program[lane]), []).append(end)


def _scale_codes(threads: Threads, owner: int, address: int, rows: int, number: int) -> np.ndarray:
    """Return a byte of each row's cell: a column has those of 32 rows, which each warp's 32 lanes must hold alike."""
    launch, first, columns = threads.launch, address & 0xFFFF, -(-rows // 32)
    cells, states = (every[owner, :, first : first + columns] for every in (launch.cells, launch.states))
    if address >> 16 or cells.shape[1] != columns or (states != WRITTEN).any():
        raise Fault(f"out of bounds, or nobody wrote the tensor memory that has scales: {threads.one}")
    codes = (cells >> (8 * number) & 255).reshape(4, 32, columns)
    if (codes != codes[0]).any():
        raise Fault(f"four warps' lanes hold different scales: {threads.one}")
    return codes[0].T.reshape(-1)[:rows]


def _promised(
    threads: Threads, lane: int, into: int, a: int, b: int, shape: int, *scales_and_predicate: int
) -> Callable[[], None]:
    launch, one, owner, (*scales, keeps) = threads.launch, threads.one, int(threads.program[lane]), scales_and_predicate
    (looked_at, wanted), rows, columns = BLOCKS if scales else PLAIN, LANES, (shape >> 17 & 63) << 3
    if shape & looked_at != wanted or into >> 16:
        raise one.unsupported(f"instruction descriptor {shape:#x}:")
    rule = rule_of(launch.program.target, "tcgen05", *(("e4m3", "e5m2")[shape >> first & 7] for first in (7, 10)))
    held = list(zip(scales, (rows, columns), (shape >> 29 & 3, shape >> 4 & 3), strict=False))
    codes = [_scale_codes(threads, owner, *each) for each in held]
    finish = begin(threads, lane, [(a, rows), (b, columns)], rule, NOBODY, *codes)
    cells, states = (every[owner, :, into : into + columns] for every in (launch.cells, launch.states))
    if cells.shape[1] != columns or (keeps and not states.all()):
        raise Fault(f"out of bounds, or nobody wrote the tensor memory that a product adds to: {one}")
    states[:] = PROMISED

    def end() -> None:
        if any((_scale_codes(threads, owner, *each) != old).any() for each, old in zip(held, codes, strict=True)):
            raise Fault(f"race: scales that a product under way reads were written: {one}")
        cells[:] = finish(cells.view(np.float32) if keeps else np.zeros(cells.shape, np.float32)).view(U32)
        states[:] = WRITTEN

    return end


@dataclass
class Barrier:
    """An mbarrier of one arrival a phase, and the work that arrives when it ends."""

    phase: int = 0
    work: list[list[Callable[[], None]]] = field(default_factory=list)

    def passed(self, parity: int) -> bool:
        """Whether the phase of a parity is over; the work that it waits for ends now."""
        while self.work and self.phase & 1 == parity:
            for end in self.work.pop(0):
                end()
            self.phase += 1
        return self.phase & 1 != parity


@instruction("mbarrier.(init).shared(?:::cta)?.b64", "- [] 1", pauses=True)
@instruction("mbarrier.(inval).shared(?:::cta)?.b64", "- []", pauses=True)
@instruction("(tcgen05.commit).cta_group::1.mbarrier::arrive::one(?:.shared::cluster)?.b64", "- []", pauses=True)
@instruction("mbarrier.(try_wait).parity.shared(?:::cta)?.b64", "pred [] u32", pauses=True)
def barrier(threads: Threads, name: str, address: np.ndarray, parity: Any = None) -> np.ndarray:
    """Make a barrier, remove it, have it arrive when all products so far have ended, or wait for it."""
    launch, lanes, has_passed = threads.launch, threads.lanes(), np.zeros(threads.count, bool)
    launch.shared.places(address[lanes], threads.program[lanes], 8, threads.one)
    for lane in lanes:
        key = int(threads.program[lane]), int(address[lane])
        if name == "init":
            launch.barriers[key] = Barrier()
        elif key not in launch.barriers:
            raise Fault(f"no mbarrier was made at {key[1]}: {threads.one}")
        elif name == "inval":
            del launch.barriers[key]
        elif name == "try_wait":
            has_passed[lane] = launch.barriers[key].passed(int(parity[lane]) & 1)
            (threads.waits.discard if has_passed[lane] else threads.waits.add)(lane)
        else:
            launch.barriers[key].work.append(launch.products.pop(key[0], []))
    return has_passed
